//! Learning-rate schedules that match DeepSpeed's and Hugging Face transformers' at every step.
//!
//! DeepSpeed's schedulers count *iterations*: the counter starts at −1, and the engine advances it after each optimizer
//! step. So optimizer step k (the first is 1) runs at iteration k − 2, which has two consequences:
//!
//! - Step 1 runs before the schedule has started: at `min_lr`, or at 0 with [`Schedule::WarmupCosineLr`] whatever
//!   `warmup_min_ratio` is.
//! - Step 2 runs at iteration 0, where both kinds of warmup are still at their minimum.
//!
//! The schedules of transformers ([`hugging_face`]) are factors of the optimizer's rate. Step k runs at the factor for
//! k − 1 completed steps, so step 1 of a warm-up runs at a rate of 0, and step `num_warmup_steps + 1` at the full rate.
//!
//! A skipped step (after a loss-scale overflow) does not advance the counter: the caller counts the steps that were
//! taken.

pub mod hugging_face;
mod one_cycle;
#[cfg(test)]
mod tests;

pub use hugging_face::HuggingFace;
pub use one_cycle::{CycledMomentum, Half, LrRangeTest, OneCycle};

/// The values that a schedule sets for one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// The learning rate.
    pub lr: f64,
    /// Replaces the optimizer's betas, if it has any; see [`Optimizer::with_betas`](crate::Optimizer::with_betas).
    pub betas: Option<(f64, f64)>,
}

/// The learning rate as a function of the optimizer step. "The optimizer's rate" is the `base_lr` of [`Schedule::lr`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Schedule {
    /// The optimizer's rate at every step.
    Constant,
    /// Rises linearly for this number of steps, reaches the optimizer's rate at the last of them, then stays. This is
    /// the warmup of the package `schedulefree`.
    Ramp(u64),
    /// Rises from `min_lr` to `max_lr`, then stays.
    WarmupLr {
        /// The rate at the start of the warmup. DeepSpeed's default is 0.
        min_lr: f64,
        /// The rate after the warmup. DeepSpeed's default is the optimizer's rate, which the caller fills in.
        max_lr: f64,
        /// Iterations of warmup; fewer than 2 count as 2. DeepSpeed's default is 1000.
        num_steps: u64,
        /// The shape of the warmup.
        kind: Warmup,
    },
    /// Rises like [`Schedule::WarmupLr`], then falls linearly from `max_lr` to `min_lr` at iteration `total_num_steps`.
    WarmupDecayLr {
        /// The rate at the start of the warmup and at the end of the decay. DeepSpeed's default is 0.
        min_lr: f64,
        /// The rate at the end of the warmup. DeepSpeed's default is 0.001, *not* the optimizer's rate.
        max_lr: f64,
        /// Iterations of warmup; fewer than 2 count as 2. DeepSpeed's default is 1000.
        num_steps: u64,
        /// The shape of the warmup.
        kind: Warmup,
        /// The iteration that reaches `min_lr`. It is step `total_num_steps + 2`, so a run of `total_num_steps` steps
        /// ends above `min_lr`. DeepSpeed has no default.
        total_num_steps: u64,
    },
    /// Scales the optimizer's rate: the ratio rises to 1, then falls along half a cosine to `cos_min_ratio`.
    WarmupCosineLr {
        /// The cosine ends at iteration `total_num_steps − 1`, which is step `total_num_steps + 1`. DeepSpeed has no
        /// default.
        total_num_steps: u64,
        /// The ratio at the start of the warmup. DeepSpeed's default is 0.
        warmup_min_ratio: f64,
        /// Iterations of warmup; fewer than 2 count as 2. DeepSpeed's default is 1000.
        warmup_num_steps: u64,
        /// The ratio at the end of the cosine. DeepSpeed's default is 0.0001.
        cos_min_ratio: f64,
        /// The shape of the warmup.
        warmup_type: Warmup,
    },
    /// A sweep over learning rates that rise without end.
    LrRangeTest(LrRangeTest),
    /// One cycle of learning rate and momentum, then a decay.
    OneCycle(OneCycle),
    /// A schedule of Hugging Face transformers.
    HuggingFace(HuggingFace),
}

/// The shape of a warmup over n iterations, as the fraction completed at iteration i < n.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Warmup {
    /// ln(i + 1) / ln(n), DeepSpeed's default. It reaches 1 at iteration n − 1.
    #[default]
    Log,
    /// i / n.
    Linear,
}

impl Schedule {
    /// Returns the learning rate of optimizer step `step` (the first is 1); `base_lr` is the optimizer's own rate.
    pub fn lr(&self, base_lr: f64, step: u64) -> f64 {
        let iteration = step.checked_sub(2);
        match *self {
            Schedule::Constant => base_lr,
            Schedule::Ramp(steps) => base_lr * (step as f64 / steps.max(1) as f64).min(1.0),
            Schedule::WarmupLr { min_lr, max_lr, num_steps, kind } => {
                let fraction = iteration.map_or(0.0, |i| kind.fraction(i, num_steps).unwrap_or(1.0));
                min_lr + (max_lr - min_lr) * fraction
            }
            Schedule::WarmupDecayLr { min_lr, max_lr, num_steps, kind, total_num_steps } => {
                let fraction = iteration.map_or(0.0, |i| {
                    kind.fraction(i, num_steps).unwrap_or_else(|| {
                        let left = total_num_steps as f64 - i as f64;
                        let whole = total_num_steps as f64 - at_least_two(num_steps);
                        (left / whole.max(1.0)).max(0.0)
                    })
                });
                min_lr + (max_lr - min_lr) * fraction
            }
            Schedule::WarmupCosineLr {
                total_num_steps,
                warmup_min_ratio,
                warmup_num_steps,
                cos_min_ratio,
                warmup_type,
            } => {
                let ratio = iteration.map_or(0.0, |i| match warmup_type.fraction(i, warmup_num_steps) {
                    Some(fraction) => warmup_min_ratio + fraction * (1.0 - warmup_min_ratio),
                    None => {
                        let warmup = at_least_two(warmup_num_steps);
                        let whole = (total_num_steps as f64 - warmup).max(1.0);
                        // Clamped, so that the schedule stays at the minimum past its end instead of rising again.
                        let progress = ((i as f64 - warmup + 1.0) / whole).min(1.0);
                        let cosine = (1.0 + libm::cos(std::f64::consts::PI * progress)) / 2.0;
                        (cos_min_ratio + (1.0 - cos_min_ratio) * cosine).max(0.0)
                    }
                });
                base_lr * ratio
            }
            Schedule::LrRangeTest(test) => test.lr(step),
            Schedule::OneCycle(cycle) => cycle.lr(step),
            Schedule::HuggingFace(schedule) => schedule.lr(base_lr, step),
        }
    }

    /// Returns the learning rate of optimizer step `step`, as [`Schedule::lr`] does, and the betas that the schedule
    /// sets, if any.
    pub fn rate(&self, base_lr: f64, step: u64) -> Rate {
        let betas = match self {
            Schedule::OneCycle(cycle) => cycle.betas(step),
            _ => None,
        };
        Rate { lr: self.lr(base_lr, step), betas }
    }
}

impl Warmup {
    /// Returns the fraction of the warmup completed at this iteration, or `None` once the warmup is over.
    fn fraction(self, iteration: u64, num_steps: u64) -> Option<f64> {
        let n = at_least_two(num_steps);
        let i = iteration as f64;
        (i < n).then(|| match self {
            Warmup::Log => 1.0 / libm::log(n) * libm::log(i + 1.0),
            Warmup::Linear => i / n,
        })
    }
}

/// Avoids dividing by ln 1 = 0, as DeepSpeed does.
fn at_least_two(num_steps: u64) -> f64 {
    num_steps.max(2) as f64
}

//! Learning-rate schedules that match DeepSpeed's at every step.
//!
//! DeepSpeed's schedulers count *iterations*: the counter starts at −1, and the engine advances it after each optimizer
//! step. So optimizer step k (the first is 1) runs at iteration k − 2, which has two consequences:
//!
//! - Step 1 runs before the schedule has started: at `min_lr`, or at 0 with [`Schedule::WarmupCosineLr`] whatever
//!   `warmup_min_ratio` is.
//! - Step 2 runs at iteration 0, where both kinds of warmup are still at their minimum.
//!
//! A skipped step (after a loss-scale overflow) does not advance the counter: the caller counts the steps that were
//! taken.

/// The learning rate as a function of the optimizer step. "The optimizer's rate" is the `base_lr` of [`Schedule::lr`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Schedule {
    /// The optimizer's rate at every step.
    Constant,
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
                        // Clamped: past its end the schedule stays at the minimum instead of rising again.
                        let progress = ((i as f64 - warmup + 1.0) / whole).min(1.0);
                        let cosine = (1.0 + libm::cos(std::f64::consts::PI * progress)) / 2.0;
                        (cos_min_ratio + (1.0 - cos_min_ratio) * cosine).max(0.0)
                    }
                });
                base_lr * ratio
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: f64 = 6e-4;

    /// Compares a schedule with a table recorded from DeepSpeed's own scheduler classes (commit edaa7221, August 2026),
    /// which lists the rate of the first, second, … optimizer step. The tolerance is four units in the last place:
    /// logarithm and cosine come from libm here and from the C library there.
    fn check(schedule: Schedule, table: &[f64]) {
        for (i, &expected) in table.iter().enumerate() {
            let lr = schedule.lr(BASE, i as u64 + 1);
            assert!(
                (lr - expected).abs() <= 4.0 * f64::EPSILON * expected,
                "{schedule:?} step {}: {lr} {expected}",
                i + 1
            );
        }
    }

    #[test]
    fn constant_is_the_optimizers_rate() {
        check(Schedule::Constant, &[BASE; 5]);
    }

    #[test]
    #[rustfmt::skip]
    fn warmup_lr() {
        check(Schedule::WarmupLr { min_lr: 1e-5, max_lr: BASE, num_steps: 6, kind: Warmup::Log },
            &[1e-5, 1e-5, 0.00023824315626837946, 0.00037175684373162043, 0.00046648631253675896, 0.0005399641970053169,
              0.0005999999999999998, 0.0006, 0.0006]);
        check(Schedule::WarmupLr { min_lr: 1e-5, max_lr: 1e-3, num_steps: 6, kind: Warmup::Linear },
            &[1e-5, 1e-5, 0.000175, 0.00034, 0.000505, 0.00067, 0.000835, 0.001, 0.001]);
        check(Schedule::WarmupLr { min_lr: 0.0, max_lr: 1e-3, num_steps: 1, kind: Warmup::Log },
            &[0.0, 0.0, 0.001, 0.001, 0.001]);
    }

    #[test]
    #[rustfmt::skip]
    fn warmup_decay_lr() {
        check(Schedule::WarmupDecayLr { min_lr: 1e-5, max_lr: 1e-3, num_steps: 4, kind: Warmup::Log,
            total_num_steps: 10 },
            &[1e-5, 1e-5, 0.000505, 0.0007945564378569724, 0.001, 0.001, 0.000835, 0.00067, 0.000505, 0.00034, 0.000175,
              1e-5, 1e-5]);
        check(Schedule::WarmupDecayLr { min_lr: 0.0, max_lr: 1e-3, num_steps: 4, kind: Warmup::Linear,
            total_num_steps: 10 },
            &[0.0, 0.0, 0.00025, 0.0005, 0.00075, 0.001, 0.0008333333333333334, 0.0006666666666666666, 0.0005,
              0.0003333333333333333, 0.00016666666666666666, 0.0, 0.0]);
        check(Schedule::WarmupDecayLr { min_lr: 0.0, max_lr: 1e-3, num_steps: 4, kind: Warmup::Linear,
            total_num_steps: 2 },
            &[0.0, 0.0, 0.00025, 0.0005, 0.00075, 0.0]);
    }

    #[test]
    #[rustfmt::skip]
    fn warmup_cosine_lr() {
        check(Schedule::WarmupCosineLr { total_num_steps: 10, warmup_min_ratio: 0.1, warmup_num_steps: 4,
            cos_min_ratio: 0.05, warmup_type: Warmup::Log },
            &[0.0, 5.9999999999999995e-05, 0.00033, 0.0004879398751947121, 0.0006, 0.000561817240078565,
              0.00045749999999999995, 0.00031499999999999996, 0.00017250000000000005, 6.818275992143496e-05,
              2.9999999999999997e-05, 2.9999999999999997e-05, 2.9999999999999997e-05]);
        check(Schedule::WarmupCosineLr { total_num_steps: 10, warmup_min_ratio: 0.0, warmup_num_steps: 4,
            cos_min_ratio: 1e-4, warmup_type: Warmup::Linear },
            &[0.0, 0.0, 0.00015, 0.0003, 0.00045, 0.000559811640373218, 0.0004500149999999999, 0.00030002999999999996,
              0.00015004500000000004, 4.024835962678192e-05, 6e-08, 6e-08, 6e-08]);
        check(Schedule::WarmupCosineLr { total_num_steps: 3, warmup_min_ratio: 0.0, warmup_num_steps: 3,
            cos_min_ratio: 1e-4, warmup_type: Warmup::Log },
            &[0.0, 0.0, 0.00037855785214287434, 0.0006, 6e-08, 6e-08]);
    }

    #[test]
    fn is_finite_everywhere() {
        for steps in [0, 1, u64::MAX] {
            for kind in [Warmup::Log, Warmup::Linear] {
                let decay =
                    Schedule::WarmupDecayLr { min_lr: 0.0, max_lr: 1.0, num_steps: steps, kind, total_num_steps: 0 };
                let cosine = Schedule::WarmupCosineLr {
                    total_num_steps: 0,
                    warmup_min_ratio: 0.0,
                    warmup_num_steps: steps,
                    cos_min_ratio: 0.0,
                    warmup_type: kind,
                };
                for step in [0, 1, 2, 3, 4, u64::MAX] {
                    assert!((0.0..=1.0).contains(&decay.lr(1.0, step)) && (0.0..=1.0).contains(&cosine.lr(1.0, step)));
                }
            }
        }
    }
}

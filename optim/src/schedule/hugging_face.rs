//! The schedules of Hugging Face transformers 5 (`transformers/optimization.py`), with its expressions and its order
//! of operations.
//!
//! Each has a linear warm-up over `warmup` steps, followed by a [`Shape`]. The learning rate is the optimizer's rate
//! times a factor.

use std::f64::consts::PI;

/// A schedule of transformers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HuggingFace {
    /// Number of steps of the warm-up (`num_warmup_steps`).
    pub warmup: u64,
    /// The schedule after the warm-up.
    pub shape: Shape,
}

/// The factor of the optimizer's rate after the warm-up. `total` is `num_training_steps`, warm-up included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// 1: `constant_with_warmup`.
    Constant,
    /// Falls to 0: `linear`.
    Linear {
        /// The step count at which the factor is 0.
        total: u64,
    },
    /// A cosine, 1 at its start: `cosine`, `cosine_with_min_lr` and `cosine_warmup_with_min_lr`. As in transformers,
    /// the cosine continues after `total`: if `cycles` is a half, it rises again.
    Cosine {
        /// The step count at which `cycles` waves are complete.
        total: u64,
        /// Number of waves; half a wave falls once.
        cycles: f64,
        /// The factor at the lowest point.
        min: f64,
        /// `Some` for `cosine_warmup_with_min_lr`: its warm-up does not start at 0, and its decay is one step ahead of
        /// `cosine_with_min_lr`.
        ahead: Option<Ahead>,
    },
    /// Several half waves, each from 1 to 0: `cosine_with_restarts`. The factor is 0 after `total`.
    Restarts {
        /// The step count at which the last half wave ends.
        total: u64,
        /// Number of half waves.
        cycles: u64,
    },
    /// Falls to the rate `end` as (1 − progress)^`power`: `polynomial`.
    Polynomial {
        /// The step count at which the rate is `end`.
        total: u64,
        /// The final learning rate, which is not a factor.
        end: f64,
        /// The exponent.
        power: f64,
    },
    /// 1/√(1 + steps after the warm-up / timescale): `inverse_sqrt`.
    InverseSqrt {
        /// At least 1. Transformers' default is the number of warm-up steps, or 10,000 without a warm-up.
        timescale: u64,
    },
    /// Stays at 1, then falls to `min`: `warmup_stable_decay`.
    StableDecay {
        /// Number of steps at 1. It is negative if warm-up and decay are longer than the whole schedule; the decay then
        /// skips its beginning.
        stable: i64,
        /// Number of steps of the decay.
        decay: u64,
        /// The shape of the warm-up.
        rise: Curve,
        /// The shape of the decay.
        fall: Curve,
        /// The factor at the start of the warm-up and after the decay.
        min: f64,
        /// Number of waves of a decay along a cosine; half a wave falls once.
        cycles: f64,
    },
}

/// The warm-up of `cosine_warmup_with_min_lr`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ahead {
    /// Step k of w warm-up steps runs at the factor k / w.
    Whole,
    /// Rises from this factor at the first step to 1 at the last step of the warm-up.
    From(f64),
}

/// The shape of a stage of `warmup_stable_decay`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Curve {
    /// A line.
    #[default]
    Linear,
    /// Half a cosine.
    Cosine,
    /// 1 − √progress, and its mirror image for a warm-up.
    OneMinusSqrt,
}

impl HuggingFace {
    pub(super) fn lr(&self, base_lr: f64, step: u64) -> f64 {
        base_lr * self.factor(base_lr, step.saturating_sub(1) as f64)
    }

    /// Returns the factor after `k` steps.
    fn factor(&self, base_lr: f64, k: f64) -> f64 {
        let warmup = self.warmup as f64;
        if k < warmup {
            return self.warming_up(k, warmup);
        }
        let progress = |total: u64| (k - warmup) / (total as f64 - warmup).max(1.0);
        let wave = |cycles: f64, progress: f64| 0.5 * (1.0 + libm::cos(PI * cycles * 2.0 * progress));
        match self.shape {
            Shape::Constant => 1.0,
            Shape::Linear { total } => ((total as f64 - k) / (total as f64 - warmup).max(1.0)).max(0.0),
            Shape::Cosine { total, cycles, min, ahead } => {
                let progress = match ahead {
                    None => progress(total),
                    Some(_) => (k - warmup + 1.0) / (total as f64 - warmup).max(1.0),
                };
                (wave(cycles, progress) * (1.0 - min) + min).max(0.0)
            }
            Shape::Restarts { total, cycles } => match progress(total) {
                progress if progress >= 1.0 => 0.0,
                progress => (0.5 * (1.0 + libm::cos(PI * ((cycles as f64 * progress) % 1.0)))).max(0.0),
            },
            Shape::Polynomial { total, end, .. } if k > total as f64 => end / base_lr,
            Shape::Polynomial { total, end, power } => {
                // If the warm-up takes all steps, transformers divides by 0; here the last step runs at the optimizer's
                // rate.
                let left = 1.0 - (k - warmup) / (total as f64 - warmup).max(1.0);
                ((base_lr - end) * libm::pow(left, power) + end) / base_lr
            }
            Shape::InverseSqrt { timescale } => {
                let timescale = timescale.max(1) as f64;
                1.0 / ((k - warmup + timescale) / timescale).sqrt()
            }
            Shape::StableDecay { stable, decay, fall, min, cycles, .. } => {
                let (begin, decay) = (warmup + stable as f64, decay as f64);
                if k < begin {
                    return 1.0;
                }
                if k >= begin + decay {
                    return min;
                }
                let progress = (k - warmup - stable as f64) / decay.max(1.0);
                let factor = match fall {
                    Curve::Linear => 1.0 - progress,
                    Curve::Cosine => wave(cycles, progress),
                    Curve::OneMinusSqrt => 1.0 - progress.sqrt(),
                };
                (factor * (1.0 - min) + min).max(0.0)
            }
        }
    }

    fn warming_up(&self, k: f64, warmup: f64) -> f64 {
        let progress = k / warmup;
        match self.shape {
            Shape::StableDecay { rise, min, .. } => {
                let factor = match rise {
                    Curve::Linear => progress,
                    Curve::Cosine => 0.5 * (1.0 - libm::cos(PI * progress)),
                    Curve::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
                };
                (factor * (1.0 - min) + min).max(0.0)
            }
            Shape::Cosine { ahead: Some(Ahead::Whole), .. } => (k + 1.0) / warmup,
            Shape::Cosine { ahead: Some(Ahead::From(start)), .. } => {
                start + (1.0 - start) * k / (warmup - 1.0).max(1.0)
            }
            _ => progress,
        }
    }
}

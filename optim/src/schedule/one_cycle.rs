//! DeepSpeed's `LRRangeTest`, which serves to find the largest learning rate at which the loss still falls, and its
//! `OneCycle`, whose peak is this rate (Smith, 2018).

/// A sweep over learning rates: at step k the rate is `min_lr · (1 + step_rate · (k − 1) / step_size)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrRangeTest {
    /// The rate of the first step. DeepSpeed's default is 0.001.
    pub min_lr: f64,
    /// Number of steps per increase, at least 1. DeepSpeed's default is 2000.
    pub step_size: u64,
    /// The increase, as a multiple of `min_lr`. DeepSpeed's default is 1.
    pub step_rate: f64,
    /// Whether the rate stays constant between increases.
    pub staircase: bool,
}

impl LrRangeTest {
    pub(super) fn lr(&self, step: u64) -> f64 {
        let interval = step.saturating_sub(1) as f64 / self.step_size.max(1) as f64;
        let interval = if self.staircase { interval.floor() } else { interval };
        self.min_lr * (1.0 + self.step_rate * interval)
    }
}

/// A cycle: the rate rises linearly and falls again, and β₁ does the opposite. After the cycle, the rate decays from
/// `min_lr` as `1 / (1 + decay_lr_rate · time)`, and β₁ grows from its maximum.
///
/// The first step runs before the schedule has started: at `min_lr`, but with the *smallest* β₁. DeepSpeed does the
/// same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneCycle {
    /// The rate at both ends of the cycle.
    pub min_lr: f64,
    /// The rate at the top of the cycle.
    pub max_lr: f64,
    /// The rise and the fall. The rise has at least 1 step.
    pub halves: [Half; 2],
    /// Number of steps in one unit of the decay's time; 0 means no decay.
    pub decay_step_size: u64,
    /// The decay of the rate per unit of time.
    pub decay_lr_rate: f64,
    /// The cycle of β₁; `None` keeps the optimizer's betas.
    pub momentum: Option<CycledMomentum>,
}

/// One half of a cycle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Half {
    /// Number of steps of this half.
    pub steps: u64,
    /// Number of stairs in which the rate and β₁ change; 0 means that they change continuously.
    pub stairs: u64,
}

/// The cycle of β₁.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CycledMomentum {
    /// β₁ at the top of the cycle. DeepSpeed's default is 0.8.
    pub min: f64,
    /// β₁ at both ends of the cycle. DeepSpeed's default is 0.9.
    pub max: f64,
    /// The growth of β₁ per unit of the decay's time.
    pub decay_rate: f64,
}

/// β₂ while β₁ cycles, as in DeepSpeed. It replaces the optimizer's own β₂.
const BETA2: f64 = 0.99;

/// β₁ grows to at most this value, or to `max` if that is larger. DeepSpeed lets it grow beyond 1, where Adam diverges.
const LARGEST_BETA1: f64 = 0.9999;

impl OneCycle {
    pub(super) fn lr(&self, step: u64) -> f64 {
        match self.position(step) {
            None => self.min_lr,
            Some(Position::Cycle(height)) => self.min_lr + (self.max_lr - self.min_lr) * height,
            Some(Position::Decay(time)) => self.min_lr / (1.0 + self.decay_lr_rate * time),
        }
    }

    pub(super) fn betas(&self, step: u64) -> Option<(f64, f64)> {
        let CycledMomentum { min, max, decay_rate } = self.momentum?;
        let beta1 = match self.position(step) {
            None => min,
            Some(Position::Cycle(height)) => max - (max - min) * height,
            Some(Position::Decay(time)) => (max * (1.0 + decay_rate * time)).min(max.max(LARGEST_BETA1)),
        };
        Some((beta1, BETA2))
    }

    /// Returns the position of a step, or `None` before the schedule starts. The expressions are DeepSpeed's, because
    /// a different order rounds differently.
    fn position(&self, step: u64) -> Option<Position> {
        let iteration = step.checked_sub(2)? as f64;
        let [first, second] = self.halves;
        let (rise, fall) = (first.steps.max(1) as f64, second.steps as f64);
        let total = rise + fall;
        if iteration >= total {
            let time = match self.decay_step_size {
                0 => 0.0,
                size => (iteration - total + 1.0) / size as f64,
            };
            return Some(Position::Decay(time));
        }
        let batch = iteration + 1.0;
        let x = 1.0 + batch / total - (1.0 + batch / total).floor();
        let ratio = rise / total;
        let (scale, stairs) =
            if x <= ratio { (x / ratio, first.stairs) } else { ((x - 1.0) / (ratio - 1.0), second.stairs) };
        if stairs == 0 {
            return Some(Position::Cycle(scale));
        }
        let (at, stairs) = (batch % total, stairs as f64);
        let stair = if at <= rise { at * stairs / rise } else { (total - at) * stairs / fall };
        Some(Position::Cycle(stair.floor() / stairs))
    }
}

enum Position {
    /// In the cycle, at this height: 0 at its ends, 1 at the top.
    Cycle(f64),
    /// After the cycle, in units of the decay's time.
    Decay(f64),
}

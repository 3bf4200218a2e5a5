//! `scheduler`: DeepSpeed's learning-rate schedules, names and defaults.

use serde::Serialize;

use crate::choice::choice;

/// Learning rate as a function of the optimizer step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", content = "params")]
pub enum Scheduler {
    /// The optimizer's `lr` at every step (no `scheduler` section).
    Constant,
    /// From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then constant.
    WarmupLR {
        /// Learning rate at the start.
        warmup_min_lr: f64,
        /// Learning rate after the warm-up.
        warmup_max_lr: f64,
        /// Steps of the warm-up.
        warmup_num_steps: usize,
        /// Shape of the warm-up.
        warmup_type: WarmupType,
    },
    /// As [`WarmupLR`](Self::WarmupLR), then linearly to 0 at `total_num_steps`.
    WarmupDecayLR {
        /// Steps of the whole schedule; `None` is `auto` of a run that is counted in epochs: the number of steps that
        /// these epochs have, known once the data is.
        #[serde(serialize_with = "crate::yaml_out::auto")]
        total_num_steps: Option<usize>,
        /// Learning rate at the start.
        warmup_min_lr: f64,
        /// Learning rate after the warm-up. DeepSpeed's default is 0.001, not the optimizer's `lr`.
        warmup_max_lr: f64,
        /// Steps of the warm-up.
        warmup_num_steps: usize,
        /// Shape of the warm-up.
        warmup_type: WarmupType,
    },
    /// Warm-up, then a half cosine. Ratios are of the optimizer's `lr`.
    WarmupCosineLR {
        /// As in [`WarmupDecayLR`](Self::WarmupDecayLR).
        #[serde(serialize_with = "crate::yaml_out::auto")]
        total_num_steps: Option<usize>,
        /// Ratio at the start of the warm-up.
        warmup_min_ratio: f64,
        /// Steps of the warm-up.
        warmup_num_steps: usize,
        /// Ratio at the end of the cosine.
        cos_min_ratio: f64,
        /// Shape of the warm-up.
        warmup_type: WarmupType,
    },
}

choice! {
    /// Shape of a warm-up of `n` steps.
    pub enum WarmupType {
        /// ln(step + 1) / ln(max(n, 2)). DeepSpeed's default.
        Log = "log",
        /// step / n.
        Linear = "linear",
    }
}

//! `scheduler`: DeepSpeed's learning-rate schedules, with its names and defaults.

use serde::Serialize;

use crate::choice::choice;
use crate::reader::{Reader, Resolver};

/// Learning rate as a function of the optimizer step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", content = "params")]
pub enum Scheduler {
    /// The optimizer's `lr` at every step (no `scheduler` section).
    Constant,
    /// Rises from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` steps, then stays constant.
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
    /// Like [`WarmupLR`](Self::WarmupLR), then decays linearly to 0 at `total_num_steps`.
    WarmupDecayLR {
        /// Steps of the whole schedule. `None` is `auto` in a run that is counted in epochs: the number of steps in
        /// these epochs, which depends on the data.
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
    /// Warm-up, then half a cosine. Ratios are relative to the optimizer's `lr`.
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

impl Scheduler {
    /// Reads the section for an optimizer with learning rate `lr`. `max_steps` is `None` for a run that is counted
    /// in epochs.
    pub(crate) fn read(resolver: &mut Resolver<'_>, lr: f64, max_steps: Option<usize>) -> Self {
        let (kind, mut keys) = resolver.variant("scheduler", "Constant");
        let scheduler = match kind {
            "WarmupLR" => Self::WarmupLR {
                warmup_min_lr: keys.float("warmup_min_lr"),
                warmup_max_lr: keys.optional_float("warmup_max_lr").unwrap_or(lr),
                warmup_num_steps: steps(&mut keys),
                warmup_type: shape(&mut keys),
            },
            "WarmupDecayLR" => Self::WarmupDecayLR {
                total_num_steps: keys.optional_int("total_num_steps").or(max_steps),
                warmup_min_lr: keys.float("warmup_min_lr"),
                warmup_max_lr: keys.optional_float("warmup_max_lr").unwrap_or(lr),
                warmup_num_steps: steps(&mut keys),
                warmup_type: shape(&mut keys),
            },
            "WarmupCosineLR" => Self::WarmupCosineLR {
                total_num_steps: keys.optional_int("total_num_steps").or(max_steps),
                warmup_min_ratio: keys.float("warmup_min_ratio"),
                warmup_num_steps: steps(&mut keys),
                cos_min_ratio: keys.float("cos_min_ratio"),
                warmup_type: shape(&mut keys),
            },
            _ => Self::Constant,
        };
        scheduler.warn(resolver, max_steps);
        scheduler
    }

    /// Warns if the warm-up is longer than the run, as with DeepSpeed's default of 1000 steps in a short run.
    fn warn(&self, resolver: &mut Resolver<'_>, max_steps: Option<usize>) {
        let (warmup, total) = match *self {
            Self::Constant => return,
            Self::WarmupLR { warmup_num_steps, .. } => (warmup_num_steps, max_steps),
            Self::WarmupDecayLR { warmup_num_steps, total_num_steps, .. }
            | Self::WarmupCosineLR { warmup_num_steps, total_num_steps, .. } => (warmup_num_steps, total_num_steps),
        };
        if let Some(total) = total.filter(|total| *total < warmup) {
            let message = format!("the warm-up of {warmup} steps is longer than the schedule of {total}");
            resolver.warn("scheduler.params.warmup_num_steps", message);
        }
    }
}

fn shape(keys: &mut Reader<'_, '_>) -> WarmupType {
    keys.choice("warmup_type", WarmupType::Log)
}

/// Hugging Face's Trainer replaces `auto` by no warm-up, unless its own arguments request one.
fn steps(keys: &mut Reader<'_, '_>) -> usize {
    keys.optional_int("warmup_num_steps").unwrap_or(0)
}

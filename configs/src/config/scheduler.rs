//! `scheduler`: DeepSpeed's learning-rate schedules, with its names and defaults.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::Config;
use crate::reader::{Read, Reader, Resolver};
use crate::schema::*;
use crate::table::{path, section};

/// Learning rate as a function of the optimizer step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", content = "params")]
pub enum Scheduler {
    /// The optimizer's `lr` at every step (no `scheduler` section).
    Constant,
    /// Rises from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` steps, then stays constant.
    WarmupLR(WarmupLr),
    /// Like [`WarmupLR`](Self::WarmupLR), then decays linearly to 0 at `total_num_steps`.
    WarmupDecayLR(WarmupDecayLr),
    /// Warm-up, then half a cosine. Ratios are relative to the optimizer's `lr`.
    WarmupCosineLR(WarmupCosineLr),
}

section! {
    /// Parameters of [`Scheduler::WarmupLR`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct WarmupLr(keys) in Scheduler::PARAMS {
        /// Learning rate at the start.
        pub warmup_min_lr: f64 = now(NON_NEGATIVE, "0.0", "Learning rate at the start");
        /// Learning rate after the warm-up.
        pub warmup_max_lr: f64 = now(NON_NEGATIVE, "= the optimizer's lr", "Learning rate after the warm-up") [else keys.facts().lr];
        /// Steps of the warm-up.
        pub warmup_num_steps: usize = engine(COUNT_OR_0, "1000", WARMUP_STEPS) [else 0];
        /// Shape of the warm-up.
        #[serde(serialize_with = "crate::choice::word")]
        pub warmup_type: Warmup = now(Warmup::KIND, "log", "Shape of the warm-up");
    }
}

section! {
    /// Parameters of [`Scheduler::WarmupDecayLR`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct WarmupDecayLr(keys) in Scheduler::PARAMS {
        /// Steps of the whole schedule. `None` is `auto` in a run that is counted in epochs: the number of steps in these
        /// epochs, which depends on the data.
        #[serde(serialize_with = "crate::yaml_out::auto")]
        pub total_num_steps: Option<usize> = engine(COUNT, REQUIRED, "Steps of the whole schedule; auto: those of the run") [or keys.facts().max_steps];
        /// Learning rate at the start.
        pub warmup_min_lr: f64 = now(NON_NEGATIVE, "0.0", "Learning rate at the start");
        /// Learning rate after the warm-up. DeepSpeed's default is 0.001, not the optimizer's `lr`.
        pub warmup_max_lr: f64 = engine(NON_NEGATIVE, "0.001", "Learning rate after the warm-up; not the optimizer's lr, but for auto") [else keys.facts().lr];
        /// Steps of the warm-up.
        pub warmup_num_steps: usize = engine(COUNT_OR_0, "1000", WARMUP_STEPS) [else 0];
        /// Shape of the warm-up.
        #[serde(serialize_with = "crate::choice::word")]
        pub warmup_type: Warmup = now(Warmup::KIND, "log", "Shape of the warm-up");
    }
}

section! {
    /// Parameters of [`Scheduler::WarmupCosineLR`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct WarmupCosineLr(keys) in Scheduler::PARAMS {
        /// As in [`WarmupDecayLr`].
        #[serde(serialize_with = "crate::yaml_out::auto")]
        pub total_num_steps: Option<usize> = engine(COUNT, REQUIRED, "Steps of the whole schedule; auto: those of the run") [or keys.facts().max_steps];
        /// Ratio at the start of the warm-up.
        pub warmup_min_ratio: f64 = now(RATIO, "0.0", "Part of the optimizer's lr at the start");
        /// Steps of the warm-up.
        pub warmup_num_steps: usize = engine(COUNT_OR_0, "1000", WARMUP_STEPS) [else 0];
        /// Ratio at the end of the cosine.
        pub cos_min_ratio: f64 = now(RATIO, "0.0001", "Part of the optimizer's lr at the end");
        /// Shape of the warm-up.
        #[serde(serialize_with = "crate::choice::word")]
        pub warmup_type: Warmup = now(Warmup::KIND, "log", "Shape of the warm-up");
    }
}

pub use zero_optim::Warmup;

choice! {
    enum Warmup {
        Log = "log",
        Linear = "linear",
    }
}

/// Hugging Face's Trainer replaces `auto` by no warm-up, unless its own arguments request one.
const WARMUP_STEPS: &str = "Steps of the warm-up; fewer than 2 count as 2; auto: 0, as Hugging Face's Trainer";

impl Scheduler {
    const PARAMS: &'static str = path!(Config::scheduler, PARAMS);

    #[rustfmt::skip]
    pub(crate) const VARIANTS: Variants = Variants {
        params: Some(PARAMS),
        shared: &[],
        list: &[
            variant("Constant", "The optimizer's `lr` at every step", &[]),
            variant("WarmupLR", "Warm-up, then constant", WarmupLr::SECTION.keys),
            variant("WarmupDecayLR", "Warm-up, then linearly to 0", WarmupDecayLr::SECTION.keys),
            variant("WarmupCosineLR", "Warm-up, then half a cosine", WarmupCosineLr::SECTION.keys),
            Variant { status: Status::Later { off: &[] }, ..variant("LRRangeTest", "Sweep over learning rates", LR_RANGE_TEST) },
            Variant { status: Status::Later { off: &[] }, ..variant("OneCycle", "One cycle of learning rate and momentum", ONE_CYCLE) },
        ],
    };

    /// Warns if the warm-up is longer than the run, as with DeepSpeed's default of 1000 steps in a short run.
    /// `max_steps` is `None` for a run that is counted in epochs.
    pub(crate) fn check(&self, max_steps: Option<usize>, resolver: &mut Resolver<'_>) {
        let (warmup, total) = match *self {
            Self::Constant => return,
            Self::WarmupLR(WarmupLr { warmup_num_steps, .. }) => (warmup_num_steps, max_steps),
            Self::WarmupDecayLR(WarmupDecayLr { warmup_num_steps, total_num_steps, .. })
            | Self::WarmupCosineLR(WarmupCosineLr { warmup_num_steps, total_num_steps, .. }) => {
                (warmup_num_steps, total_num_steps)
            }
        };
        if let Some(total) = total.filter(|total| *total < warmup) {
            let message = format!("the warm-up of {warmup} steps is longer than the schedule of {total}");
            resolver.warn(WarmupLr::warmup_num_steps, message);
        }
    }
}

impl Read for Scheduler {
    fn read(keys: &mut Reader<'_, '_>, name: &'static str) -> Self {
        let (kind, mut keys) = keys.variant(name, "Constant");
        match kind {
            "WarmupLR" => Self::WarmupLR(WarmupLr::of(&mut keys)),
            "WarmupDecayLR" => Self::WarmupDecayLR(WarmupDecayLr::of(&mut keys)),
            "WarmupCosineLR" => Self::WarmupCosineLR(WarmupCosineLr::of(&mut keys)),
            _ => Self::Constant,
        }
    }
}

#[rustfmt::skip]
static LR_RANGE_TEST: &[Key] = &[
    later("lr_range_test_min_lr", "1e-3", "Smallest learning rate"),
    later("lr_range_test_step_size", "2000", "Steps per increase"),
    later("lr_range_test_step_rate", "1.0", "Increase"),
    later("lr_range_test_staircase", "false", "Increase in stairs"),
];

#[rustfmt::skip]
static ONE_CYCLE: &[Key] = &[
    later("cycle_min_lr", "null", "Learning rate at the start and the end of the cycle"),
    later("cycle_max_lr", "null", "Learning rate at the top of the cycle"),
    later("decay_lr_rate", "0", "Decay after the cycle"),
    later("cycle_first_step_size", "2000", "Steps up"),
    later("cycle_second_step_size", "null", "Steps down"),
    later("cycle_first_stair_count", "0", "Stairs up"),
    later("cycle_second_stair_count", "null", "Stairs down"),
    later("decay_step_size", "0", "Steps per decay"),
    later("cycle_momentum", "true", "Cycle the momentum as well"),
    later("cycle_min_mom", "0.8", "Smallest momentum"),
    later("cycle_max_mom", "0.9", "Largest momentum"),
    later("decay_mom_rate", "0", "Decay of the momentum after the cycle"),
];

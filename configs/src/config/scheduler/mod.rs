//! `scheduler`: the learning-rate schedules of DeepSpeed and of Hugging Face transformers, with their names and
//! defaults.

pub(super) mod transformers_schedules;

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::scheduler::transformers_schedules::{
    ConstantWithWarmup, CosineDecay, CosineMinLr, CosineRestarts, CosineWarmupMinLr, InverseSqrt, LinearDecay,
    PolynomialDecay, WarmupStableDecay,
};
use crate::read::reader::{Read, Reader};
use crate::schema::*;
use crate::table::section;

/// Declares [`Scheduler`]: for each schedule its parameters, its name in `ds.yaml` and its description. The description
/// is also the documentation of a schedule without a doc comment.
macro_rules! schedules {
    ($( $(#$doc:tt)* $schedule:ident($params:ident) = $name:literal, $description:literal; )+) => {
        /// Learning rate as a function of the optimizer step.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(tag = "type", content = "params")]
        pub enum Scheduler {
            /// The optimizer's `lr` at every step (no `scheduler` section).
            Constant,
            $( $(#$doc)* #[doc = section!(@doc [$(#$doc)*] ($description))] #[serde(rename = $name)] $schedule($params), )+
        }

        impl Scheduler {
            pub(crate) const VARIANTS: Variants = Variants {
                params: Some(PARAMS),
                shared: &[],
                list: &[
                    variant("Constant", "The optimizer's `lr` at every step", &[]),
                    $( variant($name, $description, $params::SECTION.keys), )+
                ],
            };
        }

        impl Read for Scheduler {
            fn read(keys: &mut Reader<'_, '_>, name: &'static str) -> Self {
                let (kind, mut keys) = keys.variant(name, "Constant");
                match kind {
                    $( $name => Self::$schedule($params::of(&mut keys)), )+
                    _ => Self::Constant,
                }
            }
        }
    };
}

schedules! {
    /// The rate rises from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` steps, then stays constant.
    WarmupLR(WarmupLr) = "WarmupLR", "Warm-up, then constant";
    /// Like [`WarmupLR`](Self::WarmupLR), then decays linearly to 0 at `total_num_steps`.
    WarmupDecayLR(WarmupDecayLr) = "WarmupDecayLR", "Warm-up, then a linear decay to 0";
    /// Warm-up, then half a cosine. Ratios are relative to the optimizer's `lr`.
    WarmupCosineLR(WarmupCosineLr) = "WarmupCosineLR", "Warm-up, then a cosine decay";
    /// A sweep: the learning rate rises without limit.
    LRRangeTest(LrRangeTest) = "LRRangeTest", "Learning rate range test; `zero-train report` plots the loss against the learning rate";
    OneCycle(OneCycle) = "OneCycle", "One cycle of learning rate and momentum, then a decay";
    ConstantWithWarmup(ConstantWithWarmup) = "constant_with_warmup", "As in Transformers: warm-up, then constant";
    Linear(LinearDecay) = "linear", "As in Transformers: warm-up, then a linear decay to 0";
    Cosine(CosineDecay) = "cosine", "As in Transformers: warm-up, then a cosine decay to 0";
    CosineWithRestarts(CosineRestarts) = "cosine_with_restarts", "As in Transformers: warm-up, then several cosine decays with restarts";
    CosineWithMinLr(CosineMinLr) = "cosine_with_min_lr", "As in Transformers: warm-up, then a cosine decay to a minimum learning rate";
    CosineWarmupWithMinLr(CosineWarmupMinLr) = "cosine_warmup_with_min_lr", "Like cosine_with_min_lr, but the learning rate of the first step is not 0";
    Polynomial(PolynomialDecay) = "polynomial", "As in Transformers: warm-up, then a polynomial decay";
    InverseSqrt(InverseSqrt) = "inverse_sqrt", "As in Transformers: warm-up, then the inverse square root of the step";
    WarmupStableDecay(WarmupStableDecay) = "warmup_stable_decay", "As in Transformers: warm-up, constant, then a decay";
}

section! {
    /// Parameters of [`Scheduler::WarmupLR`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct WarmupLr(keys) in "scheduler.params" {
        pub warmup_min_lr: f64 = now(NON_NEGATIVE, "0.0", "Learning rate at the start");
        pub warmup_max_lr: f64 = now(NON_NEGATIVE, "= the optimizer's lr", "Learning rate after the warm-up") [else keys.facts().lr];
        /// Number of steps of the warm-up.
        pub warmup_num_steps: usize = engine(COUNT_OR_0, "1000", WARMUP_STEPS) [else 0];
        #[serde(serialize_with = "crate::choice::word")]
        pub warmup_type: Warmup = now(Warmup::KIND, "log", "Shape of the warm-up");
    }
}

section! {
    /// Parameters of [`Scheduler::WarmupDecayLR`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct WarmupDecayLr(keys) in "scheduler.params" {
        /// Steps of the whole schedule. `None` stands for `auto` in a run whose length is given in epochs: the steps of
        /// the whole run, which depend on the data.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub total_num_steps: Option<usize> = engine(COUNT, REQUIRED, "Total steps of the schedule; auto: the steps of the run") [or keys.facts().max_steps];
        pub warmup_min_lr: f64 = now(NON_NEGATIVE, "0.0", "Learning rate at the start");
        pub warmup_max_lr: f64 = engine(NON_NEGATIVE, "0.001", "Learning rate after the warm-up, which replaces the optimizer's lr; auto: the optimizer's lr") [else keys.facts().lr];
        /// Number of steps of the warm-up.
        pub warmup_num_steps: usize = engine(COUNT_OR_0, "1000", WARMUP_STEPS) [else 0];
        #[serde(serialize_with = "crate::choice::word")]
        pub warmup_type: Warmup = now(Warmup::KIND, "log", "Shape of the warm-up");
    }
}

section! {
    /// Parameters of [`Scheduler::WarmupCosineLR`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct WarmupCosineLr(keys) in "scheduler.params" {
        /// As in [`WarmupDecayLr`].
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub total_num_steps: Option<usize> = engine(COUNT, REQUIRED, "Total steps of the schedule; auto: the steps of the run") [or keys.facts().max_steps];
        pub warmup_min_ratio: f64 = now(RATIO, "0.0", "Learning rate at the start, as a fraction of the optimizer's lr");
        /// Number of steps of the warm-up.
        pub warmup_num_steps: usize = engine(COUNT_OR_0, "1000", WARMUP_STEPS) [else 0];
        pub cos_min_ratio: f64 = now(RATIO, "0.0001", "Learning rate at the end, as a fraction of the optimizer's lr");
        #[serde(serialize_with = "crate::choice::word")]
        pub warmup_type: Warmup = now(Warmup::KIND, "log", "Shape of the warm-up");
    }
}

section! {
    /// Parameters of [`Scheduler::LRRangeTest`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct LrRangeTest(keys) in "scheduler.params" {
        pub lr_range_test_min_lr: f64 = now(NON_NEGATIVE, "0.001", "Learning rate of the first step");
        pub lr_range_test_step_size: usize = now(COUNT, "2000", "Steps per increase");
        pub lr_range_test_step_rate: f64 = now(NON_NEGATIVE, "1.0", "Increase of the learning rate in `lr_range_test_step_size` steps, as a multiple of the first learning rate");
        pub lr_range_test_staircase: bool = now(Kind::Bool, "false", "Increase the learning rate in stairs instead of continuously");
    }
}

section! {
    /// Parameters of [`Scheduler::OneCycle`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct OneCycle(keys) in "scheduler.params" {
        pub cycle_min_lr: f64 = now(NON_NEGATIVE, REQUIRED, "Learning rate at the start and the end of the cycle");
        pub cycle_max_lr: f64 = now(NON_NEGATIVE, REQUIRED, "Learning rate at the peak of the cycle");
        pub decay_lr_rate: f64 = now(NON_NEGATIVE, "0.0", "Decay of the learning rate after the cycle: after t × `decay_step_size` steps, the rate is `cycle_min_lr` / (1 + t × this value)");
        pub cycle_first_step_size: usize = now(COUNT, "2000", "Steps of the rising phase");
        pub cycle_second_step_size: usize = now(COUNT_OR_0, "= cycle_first_step_size", "Steps of the falling phase") [else cycle_first_step_size];
        pub cycle_first_stair_count: usize = now(COUNT_OR_0, "0", "Number of stairs in the rising phase; 0: continuous");
        pub cycle_second_stair_count: usize = now(COUNT_OR_0, "= cycle_first_stair_count", "Number of stairs in the falling phase; 0: continuous") [else cycle_first_stair_count];
        pub decay_step_size: usize = now(COUNT_OR_0, "0", "Number of steps that `decay_lr_rate` and `decay_mom_rate` refer to; 0: no decay");
        pub cycle_momentum: bool = now(Kind::Bool, "true", "Also cycle β₁, in the opposite direction to the learning rate, with β₂ = 0.99; no effect on an optimizer without betas");
        pub cycle_min_mom: f64 = now(Kind::Float(FRACTION), "0.8", "β₁ at the peak of the cycle");
        pub cycle_max_mom: f64 = now(Kind::Float(FRACTION), "0.9", "β₁ at the start and the end of the cycle");
        pub decay_mom_rate: f64 = now(NON_NEGATIVE, "0.0", "Growth of β₁ after the cycle: after t × `decay_step_size` steps, β₁ is `cycle_max_mom` × (1 + t × this value), at most 0.9999");
    }
}

pub use zero_optim::Warmup;

choice! {
    enum Warmup {
        Log = "log",
        Linear = "linear",
    }
}

/// In Hugging Face's Trainer, `auto` means no warm-up, unless the Trainer's own arguments request a warm-up.
const WARMUP_STEPS: &str = "Warm-up steps; fewer than 2 count as 2; auto: 0, as in Hugging Face's Trainer";

impl Scheduler {
    /// Returns the number of steps of the warm-up.
    pub(crate) fn warmup(&self) -> Option<usize> {
        match *self {
            Self::Constant | Self::LRRangeTest(_) | Self::OneCycle(_) => None,
            Self::WarmupLR(WarmupLr { warmup_num_steps, .. })
            | Self::WarmupDecayLR(WarmupDecayLr { warmup_num_steps, .. })
            | Self::WarmupCosineLR(WarmupCosineLr { warmup_num_steps, .. }) => Some(warmup_num_steps),
            Self::ConstantWithWarmup(ConstantWithWarmup { num_warmup_steps })
            | Self::Linear(LinearDecay { num_warmup_steps, .. })
            | Self::Cosine(CosineDecay { num_warmup_steps, .. })
            | Self::CosineWithRestarts(CosineRestarts { num_warmup_steps, .. })
            | Self::CosineWithMinLr(CosineMinLr { num_warmup_steps, .. })
            | Self::CosineWarmupWithMinLr(CosineWarmupMinLr { num_warmup_steps, .. })
            | Self::Polynomial(PolynomialDecay { num_warmup_steps, .. })
            | Self::InverseSqrt(InverseSqrt { num_warmup_steps, .. })
            | Self::WarmupStableDecay(WarmupStableDecay { num_warmup_steps, .. }) => Some(num_warmup_steps),
        }
    }

    /// Returns the value of the key for the steps of the whole schedule, if the schedule has one. The value is `None`
    /// in a run whose length is given in epochs.
    pub fn total_steps_mut(&mut self) -> Option<&mut Option<usize>> {
        match self {
            Self::Constant
            | Self::WarmupLR(_)
            | Self::LRRangeTest(_)
            | Self::OneCycle(_)
            | Self::ConstantWithWarmup(_)
            | Self::InverseSqrt(_) => None,
            Self::WarmupDecayLR(WarmupDecayLr { total_num_steps, .. })
            | Self::WarmupCosineLR(WarmupCosineLr { total_num_steps, .. }) => Some(total_num_steps),
            Self::Linear(LinearDecay { num_training_steps, .. })
            | Self::Cosine(CosineDecay { num_training_steps, .. })
            | Self::CosineWithRestarts(CosineRestarts { num_training_steps, .. })
            | Self::CosineWithMinLr(CosineMinLr { num_training_steps, .. })
            | Self::CosineWarmupWithMinLr(CosineWarmupMinLr { num_training_steps, .. })
            | Self::Polynomial(PolynomialDecay { num_training_steps, .. })
            | Self::WarmupStableDecay(WarmupStableDecay { num_training_steps, .. }) => Some(num_training_steps),
        }
    }

    /// Returns the maximum learning rate of a schedule that sets rates itself, or infinity if its rates have no limit.
    /// Returns `None` for a schedule that scales the optimizer's learning rate.
    pub(crate) fn peak(&self) -> Option<f64> {
        match self {
            Self::WarmupLR(WarmupLr { warmup_max_lr, .. })
            | Self::WarmupDecayLR(WarmupDecayLr { warmup_max_lr, .. }) => Some(*warmup_max_lr),
            Self::OneCycle(cycle) => Some(cycle.cycle_max_lr),
            Self::LRRangeTest(_) => Some(f64::INFINITY),
            _ => None,
        }
    }
}

//! The learning-rate schedules of Hugging Face transformers. `type` takes the values of transformers'
//! `lr_scheduler_type`; the keys are the parameters of the schedule's function in transformers.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::{AdamParams, Scheduler};
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

const WARMUP_STEPS: &str = "Warm-up steps, starting from a learning rate of 0";
const TRAINING_STEPS: &str = "Total steps of the schedule, including the warm-up; auto: the steps of the run";

section! {
    /// Parameters of [`Scheduler::ConstantWithWarmup`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct ConstantWithWarmup(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
    }
}

section! {
    /// Parameters of [`Scheduler::Linear`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct LinearDecay(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
        /// Steps of the whole schedule. `None` stands for the steps of the whole run, if its length is given in epochs.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub num_training_steps: Option<usize> = engine(COUNT, "= training.max_steps", TRAINING_STEPS) [or keys.facts().max_steps];
    }
}

section! {
    /// Parameters of [`Scheduler::Cosine`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct CosineDecay(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
        /// Steps of the whole schedule. `None` stands for the steps of the whole run, if its length is given in epochs.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub num_training_steps: Option<usize> = engine(COUNT, "= training.max_steps", TRAINING_STEPS) [or keys.facts().max_steps];
        pub num_cycles: f64 = key(NON_NEGATIVE, "0.5", "Number of cosine periods after the warm-up; 0.5: one decrease");
    }
}

section! {
    /// Parameters of [`Scheduler::CosineWithRestarts`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct CosineRestarts(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
        /// Steps of the whole schedule. `None` stands for the steps of the whole run, if its length is given in epochs.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub num_training_steps: Option<usize> = engine(COUNT, "= training.max_steps", TRAINING_STEPS) [or keys.facts().max_steps];
        pub num_cycles: usize = key(COUNT, "1", "Number of cosine decays, each from the optimizer's `lr` to 0");
    }
}

section! {
    /// Parameters of [`Scheduler::CosineWithMinLr`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct CosineMinLr(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
        /// Steps of the whole schedule. `None` stands for the steps of the whole run, if its length is given in epochs.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub num_training_steps: Option<usize> = engine(COUNT, "= training.max_steps", TRAINING_STEPS) [or keys.facts().max_steps];
        pub num_cycles: f64 = key(NON_NEGATIVE, "0.5", "Number of cosine periods after the warm-up; 0.5: one decrease");
        pub min_lr: Option<f64> = key(NON_NEGATIVE, "null", "Smallest learning rate; set either this key or `min_lr_rate`");
        pub min_lr_rate: Option<f64> = key(RATIO, "null", "Smallest learning rate, as a fraction of the optimizer's `lr`");
    }
}

section! {
    /// Parameters of [`Scheduler::CosineWarmupWithMinLr`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct CosineWarmupMinLr(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
        /// Steps of the whole schedule. `None` stands for the steps of the whole run, if its length is given in epochs.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub num_training_steps: Option<usize> = engine(COUNT, "= training.max_steps", TRAINING_STEPS) [or keys.facts().max_steps];
        pub num_cycles: f64 = key(NON_NEGATIVE, "0.5", "Number of cosine periods after the warm-up; 0.5: one decrease");
        pub min_lr: Option<f64> = key(NON_NEGATIVE, "null", "Smallest learning rate; set either this key or `min_lr_rate`");
        pub min_lr_rate: Option<f64> = key(RATIO, "null", "Smallest learning rate, as a fraction of the optimizer's `lr`");
        pub warmup_lr_rate: Option<f64> = key(RATIO, "null", "First learning rate, as a fraction of the optimizer's `lr`; null: 1 / num_warmup_steps");
    }
}

section! {
    /// Parameters of [`Scheduler::Polynomial`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct PolynomialDecay(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
        /// Steps of the whole schedule. `None` stands for the steps of the whole run, if its length is given in epochs.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub num_training_steps: Option<usize> = engine(COUNT, "= training.max_steps", TRAINING_STEPS) [or keys.facts().max_steps];
        pub lr_end: f64 = key(NON_NEGATIVE, "1.0e-7", "Final learning rate");
        pub power: f64 = key(NON_NEGATIVE, "1.0", "Exponent of the decay; 1: linear");
    }
}

section! {
    /// Parameters of [`Scheduler::InverseSqrt`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct InverseSqrt(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
        pub timescale: usize = key(COUNT, "= num_warmup_steps, or 10000 without a warm-up", "Steps after the warm-up until the learning rate falls to 1/√2 of the optimizer's `lr`") [else if num_warmup_steps > 0 { num_warmup_steps } else { 10_000 }];
    }
}

section! {
    /// Parameters of [`Scheduler::WarmupStableDecay`].
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct WarmupStableDecay(keys) in "scheduler.params" {
        /// Number of steps of the warm-up.
        pub num_warmup_steps: usize = key(COUNT_OR_0, "0", WARMUP_STEPS);
        pub num_decay_steps: usize = key(COUNT_OR_0, REQUIRED, "Decay steps");
        /// Steps of the whole schedule. `None` stands for the steps of the whole run, if its length is given in epochs.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub num_training_steps: Option<usize> = engine(COUNT, "= training.max_steps", TRAINING_STEPS) [or keys.facts().max_steps];
        pub num_stable_steps: Option<usize> = key(COUNT_OR_0, "null", "Steps between warm-up and decay; null: the rest of `num_training_steps`");
        #[serde(serialize_with = "crate::choice::word")]
        pub warmup_type: Curve = key(Curve::KIND, "linear", "Shape of the warm-up");
        #[serde(serialize_with = "crate::choice::word")]
        pub decay_type: Curve = key(Curve::KIND, "cosine", "Shape of the decay");
        pub min_lr_ratio: f64 = key(RATIO, "0.0", "Learning rate at the start and after the decay, as a fraction of the optimizer's `lr`");
        pub num_cycles: f64 = key(NON_NEGATIVE, "0.5", "Number of cosine periods of a cosine decay; 0.5: one decrease");
    }
}

pub use zero_optim::schedule::hugging_face::Curve;

choice! {
    enum Curve {
        Linear = "linear",
        Cosine = "cosine",
        OneMinusSqrt = "1-sqrt",
    }
}

impl Scheduler {
    /// Checks the schedules of transformers; `lr` is the optimizer's learning rate.
    pub(crate) fn check_transformers(&self, lr: f64, max_steps: Option<usize>, resolver: &mut Resolver<'_>) {
        let end = match *self {
            Self::Linear(LinearDecay { num_training_steps, .. })
            | Self::Cosine(CosineDecay { num_training_steps, .. })
            | Self::CosineWithRestarts(CosineRestarts { num_training_steps, .. }) => num_training_steps,
            Self::CosineWithMinLr(CosineMinLr { num_training_steps, min_lr, min_lr_rate, .. })
            | Self::CosineWarmupWithMinLr(CosineWarmupMinLr { num_training_steps, min_lr, min_lr_rate, .. }) => {
                let (rate, help) =
                    ([CosineMinLr::min_lr, CosineMinLr::min_lr_rate], "set one of `min_lr` and `min_lr_rate`");
                match (min_lr, min_lr_rate) {
                    (Some(min), None) if min >= lr => {
                        let message = format!("the smallest learning rate {min} is not below the optimizer's {lr}");
                        resolver.contradiction(&[CosineMinLr::min_lr, AdamParams::lr], message, None);
                    }
                    (Some(_), None) | (None, Some(_)) => {}
                    (Some(_), Some(_)) => {
                        let message = "`min_lr` and `min_lr_rate` both set the smallest learning rate".to_string();
                        resolver.contradiction(&rate, message, Some(help.to_string()));
                    }
                    (None, None) => {
                        let message = "this schedule needs a smallest learning rate".to_string();
                        resolver.contradiction(&rate, message, Some(help.to_string()));
                    }
                }
                num_training_steps
            }
            Self::Polynomial(PolynomialDecay { num_training_steps, lr_end, .. }) => {
                if lr_end >= lr {
                    let message = format!("the last learning rate {lr_end} is not below the optimizer's {lr}");
                    resolver.contradiction(&[PolynomialDecay::lr_end, AdamParams::lr], message, None);
                }
                num_training_steps
            }
            Self::WarmupStableDecay(schedule) => schedule.end(resolver),
            _ => return,
        };
        if let (Some(end), Some(max)) = (end, max_steps)
            && end < max
        {
            let message = format!("the schedule ends after {end} steps, but the run has {max} steps");
            resolver.warn(LinearDecay::num_training_steps, message);
        }
    }
}

impl WarmupStableDecay {
    /// Checks that warm-up and decay fit into the schedule, and returns the step at which the decay ends.
    fn end(&self, resolver: &mut Resolver<'_>) -> Option<usize> {
        let moving = self.num_warmup_steps + self.num_decay_steps;
        match (self.num_stable_steps, self.num_training_steps) {
            (Some(stable), _) => Some(moving + stable),
            (None, Some(total)) if total < moving => {
                let message = format!("warm-up and decay take {moving} steps, but the schedule has {total}");
                let keys = [Self::num_decay_steps, Self::num_warmup_steps];
                resolver.contradiction(&keys, message, Some("make one of them shorter".to_string()));
                None
            }
            (None, total) => total,
        }
    }
}

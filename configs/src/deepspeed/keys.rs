//! Every key of DeepSpeed 0.19.8 and those it removed recently, with DeepSpeed's default and an example value.

mod absent;
mod optimizer;
mod run;
mod zero;

use super::{Group, Key};

/// In the order of DeepSpeed's reference.
#[rustfmt::skip]
pub(super) static GROUPS: &[&Group] = &[
    &run::TOP, &optimizer::OPTIMIZER, &optimizer::ADAM, &optimizer::LION, &optimizer::ADAGRAD, &optimizer::SGD,
    &optimizer::LAMB, &optimizer::MUON, &optimizer::ONE_BIT, &optimizer::SCHEDULER, &optimizer::WARMUP,
    &optimizer::WARMUP_DECAY, &optimizer::WARMUP_COSINE, &optimizer::LR_RANGE_TEST, &optimizer::ONE_CYCLE, &run::FP16,
    &run::BF16, &zero::ZERO, &zero::OFFLOAD_PARAM, &zero::OFFLOAD_OPTIMIZER, &zero::LEAF_MODULE, &zero::ZENFLOW,
    &run::ACTIVATIONS, &run::PIPELINE, &run::AIO, &run::CHECKPOINT, &run::TENSORBOARD, &run::CSV_MONITOR,
    &absent::WANDB, &absent::COMET, &run::COMMS_LOGGER, &absent::FLOPS_PROFILER, &run::TIMERS, &run::AUTOTUNING,
    &absent::DATA_EFFICIENCY, &absent::TENSOR_PARALLEL, &absent::EXPERT_PARALLEL, &absent::COMPILE,
    &absent::HYBRID_ENGINE, &absent::GONE,
];

const fn key(name: &'static str, default: &'static str, example: &'static str) -> Key {
    Key { name, default, example, with: &[], difference: "" }
}

impl Key {
    const fn with(self, with: &'static [&'static str]) -> Self {
        Self { with, ..self }
    }

    const fn differs(self, difference: &'static str) -> Self {
        Self { difference, ..self }
    }
}

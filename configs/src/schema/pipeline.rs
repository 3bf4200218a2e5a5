//! Keys of `pipeline`. DeepSpeed's users pass most of these in Python, as arguments of `PipelineModule`.

use super::*;
use crate::choice::Choice as _;
use crate::config::PipelineSchedule;

#[rustfmt::skip]
pub(super) static PIPELINE: Section = Section { switch: Switch::Keys, keys: &[
    now("stages", RANKS, "1", "Number of stages; the number of ranks is a multiple of it"),
    now("partition_method", Kind::Partition, "parameters", "What is balanced between stages: parameters, layers (`uniform`), measured time, or layers whose name matches a regular expression, upper or lower case; `best`, DeepSpeed's word, is `parameters`"),
    alias("partition", "partition_method"),
    now("schedule", Kind::Choice { names: PipelineSchedule::NAMES, later: &[] }, "1f1b", "In what order micro-batches go through the stages"),
    now("virtual_stages", Kind::Int { min: 1, max: 1 << 14 }, "= 2 for interleaved_1f1b, else 1", "Chunks of layers that each stage has; more than 1 for interleaved_1f1b and only there"),
    engine("keep_gathered", Kind::Bool, "auto", "ZeRO-3: gather a stage's parameters once a step; false: for each micro-batch; auto: once a step where `stage3_max_live_parameters` allows it"),
    ignored("seed_layers", Kind::Bool, "false", "initialisation never depends on the layout"),
    rejected("activation_checkpoint_interval", "0", "`activation_checkpointing.interval` says it, with a pipeline and without"),
    ignored("pipe_partitioned", Kind::Bool, "true", "there are no tensor-parallel ranks to slice activations over"),
    ignored("grad_partitioned", Kind::Bool, "true", "there are no tensor-parallel ranks to slice gradients over"),
] };

//! `pipeline`: how layers are assigned to stages, and the order in which micro-batches pass through them.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::PartitionMethod;
use crate::read::reader::{Resolver, read_as};
use crate::schema::*;
use crate::table::section;
use crate::value::Leaf;

section! {
    /// `pipeline`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Pipeline(keys) in "pipeline" {
        pub stages: usize = now(RANKS, "1", "Number of stages; must divide the number of ranks");
        pub partition_method: PartitionMethod = now(Kind::Partition, "parameters", "What is balanced across stages: `parameters`; `uniform`, the number of layers; `time`, the measured time; `type:REGEX`, the number of layers whose name matches a case-insensitive regular expression. DeepSpeed's `best` means `parameters`");
        = alias("partition", Pipeline::partition_method);
        #[serde(serialize_with = "crate::choice::word")]
        pub schedule: PipelineSchedule = now(PipelineSchedule::KIND, "1f1b", "Order in which micro-batches go through the stages");
        pub virtual_stages: usize = now(Kind::Int { min: 1, max: 1 << 14 }, "= 2 for interleaved_1f1b, else 1", "Layer chunks per stage; must be more than 1 with interleaved_1f1b, and 1 otherwise") [else if schedule == PipelineSchedule::Interleaved { 2 } else { 1 }];
        /// ZeRO-3: gather a stage's parameters once per step (`true`) or for each micro-batch. `None` is `auto`: once
        /// per step if `stage3_max_live_parameters` allows it.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub keep_gathered: Option<bool> = engine(Kind::Bool, "auto", "ZeRO-3: gather a stage's parameters once per step; false: for each micro-batch; auto: once per step if `stage3_max_live_parameters` allows it");
        = ignored("seed_layers", Kind::Bool, "false", "initialisation never depends on the layout");
        = rejected("activation_checkpoint_interval", "0", "`activation_checkpointing.interval` sets the interval, with and without pipeline parallelism");
        = ignored("pipe_partitioned", Kind::Bool, "true", "between layers, tensor-parallel ranks always hold only slices of the activations");
        = ignored("grad_partitioned", Kind::Bool, "true", "between layers, tensor-parallel ranks always hold only slices of the gradients");
    }
}

pub use zero_pipeline::Schedule as PipelineSchedule;

choice! {
    enum PipelineSchedule {
        OneFOneB = "1f1b",
        GPipe = "gpipe",
        Interleaved = "interleaved_1f1b",
        ZeroBubble = "zb_h1",
    }
}

read_as! {
    PartitionMethod: Leaf::Text(text) => Self::parse(&text).ok()?, else Self::Parameters;
}

impl Pipeline {
    /// Checks that only the interleaved schedule has several chunks per stage.
    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        let (schedule, chunks) = (self.schedule, self.virtual_stages);
        let is_interleaved = schedule == PipelineSchedule::Interleaved;
        if is_interleaved != (chunks > 1) {
            let (message, help) = match is_interleaved {
                true => (
                    format!("`{schedule}` needs several chunks per stage, but `virtual_stages` is {chunks}"),
                    "set `virtual_stages: 2` or more, or `schedule: 1f1b`",
                ),
                false => (
                    format!("`{schedule}` runs the layers of a stage as one chunk, not as {chunks}"),
                    "set `schedule: interleaved_1f1b`, or remove `virtual_stages`",
                ),
            };
            resolver.contradiction(&[Self::virtual_stages, Self::schedule], message, Some(help.to_string()));
        } else if self.stages == 1 && schedule != PipelineSchedule::OneFOneB {
            resolver.warn(Self::schedule, format!("`{}` {NO_EFFECT}: `{}` is 1", Self::schedule, Self::stages));
        }
    }
}

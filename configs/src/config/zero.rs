//! `zero_optimization`: what is sharded over the ranks, and the sizes of gathers and reductions.

use serde::Serialize;

use crate::config::offload::{self, OffloadOptimizer, OffloadParam};
use crate::reader::Resolver;

/// What is sharded over the data-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(into = "u8")]
pub enum ZeroStage {
    /// Nothing: plain data parallelism.
    Zero = 0,
    /// Optimizer state.
    One = 1,
    /// Optimizer state and gradients.
    Two = 2,
    /// Optimizer state, gradients and parameters.
    Three = 3,
}

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> u8 {
        stage as u8
    }
}

/// `zero_optimization`. Sizes are in elements, as in DeepSpeed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Zero {
    /// What is sharded.
    pub stage: ZeroStage,
    /// Overlap communication with compute. If not given, it is on for stage 3 and off for lower stages, as in
    /// DeepSpeed. `None` is `auto` with a cost table, which then decides.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub overlap_comm: Option<bool>,
    /// Reduce gradients by reduce-scatter. `false` uses an all-reduce, of which each rank keeps its own part.
    pub reduce_scatter: bool,
    /// Elements per reduction of gradients; `None` is `auto`: one reduction per layer.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub reduce_bucket_size: Option<usize>,
    /// Elements per gather of updated parameters (stages 1 and 2); `None` is `auto`: one gather per layer.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub allgather_bucket_size: Option<usize>,
    /// Elements prefetched ahead of their use (stage 3).
    pub stage3_prefetch_bucket_size: usize,
    /// Parameters with fewer elements than this stay gathered (stage 3).
    pub stage3_param_persistence_threshold: usize,
    /// Maximum number of elements of small parameters that stay gathered.
    pub stage3_model_persistence_threshold: usize,
    /// Maximum number of gathered elements; further gathers wait for a release.
    pub stage3_max_live_parameters: usize,
    /// Keep parameters gathered that are used again within this number of elements.
    pub stage3_max_reuse_distance: usize,
    /// Accept a parameter without a gradient. The default is `false`, unlike DeepSpeed's: a parameter without a
    /// gradient is an error that names it.
    pub ignore_unused_parameters: bool,
    /// Elements per tile, the unit of optimizer updates and of offload reads and writes. `None` is `auto`.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub sub_group_size: Option<usize>,
    /// Where a rank keeps its parameter shards.
    pub offload_param: OffloadParam,
    /// Where a rank keeps its optimizer state and master weights.
    pub offload_optimizer: OffloadOptimizer,
}

impl Zero {
    /// Reads the section for a model of that width, if the width is known.
    pub(crate) fn read(resolver: &mut Resolver<'_>, width: Option<usize>) -> Self {
        let is_measured = resolver.section("training").optional_path("cost_table").is_some();
        let mut keys = resolver.section("zero_optimization");
        let stage = match keys.u64("stage") {
            0 => ZeroStage::Zero,
            1 => ZeroStage::One,
            2 => ZeroStage::Two,
            _ => ZeroStage::Three,
        };
        let zero = Self {
            stage,
            overlap_comm: keys.optional_bool("overlap_comm").or((!is_measured).then_some(stage == ZeroStage::Three)),
            reduce_scatter: keys.bool("reduce_scatter"),
            reduce_bucket_size: keys.optional_int("reduce_bucket_size"),
            allgather_bucket_size: keys.optional_int("allgather_bucket_size"),
            stage3_prefetch_bucket_size: keys
                .optional_int("stage3_prefetch_bucket_size")
                .unwrap_or_else(|| trainer(width, 50_000_000, |width| width * width * 9 / 10)),
            stage3_param_persistence_threshold: keys
                .optional_int("stage3_param_persistence_threshold")
                .unwrap_or_else(|| trainer(width, 100_000, |width| 10 * width)),
            stage3_model_persistence_threshold: keys.int("stage3_model_persistence_threshold"),
            stage3_max_live_parameters: keys.int("stage3_max_live_parameters"),
            stage3_max_reuse_distance: keys.int("stage3_max_reuse_distance"),
            ignore_unused_parameters: keys.bool("ignore_unused_parameters"),
            sub_group_size: keys.optional_int("sub_group_size"),
            offload_param: OffloadParam::read(&mut keys.section("offload_param")),
            offload_optimizer: OffloadOptimizer::read(&mut keys.section("offload_optimizer")),
        };
        offload::check(&zero, resolver);
        zero
    }
}

/// Returns the value that Hugging Face's Trainer computes for an `auto` that depends on the model's width, or
/// DeepSpeed's default if the width is unknown.
fn trainer(width: Option<usize>, otherwise: usize, of: impl Fn(usize) -> usize) -> usize {
    width.map_or(otherwise, of)
}

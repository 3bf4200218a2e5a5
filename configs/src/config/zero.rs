//! `zero_optimization`: what is sharded over the ranks, and the sizes of gathers and reductions.

use serde::{Serialize, Serializer};

use crate::config::offload::{self, OffloadOptimizer, OffloadParam, PINNED};
use crate::path::last;
use crate::read::reader::{Resolver, read_as};
use crate::schema::*;
use crate::table::section;
use crate::value::Leaf;

pub use zero_pipeline::ZeroStage;

section! {
    /// `zero_optimization`. Sizes are in elements, as in DeepSpeed.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Zero(keys) in "zero_optimization" {
        #[serde(serialize_with = "number")]
        pub stage: ZeroStage = key(Kind::Int { min: 0, max: 3 }, "0", "What is sharded across ranks: 0, nothing; 1, the optimizer state; 2, also the gradients; 3, also the parameters");
        /// Overlap communication with compute. The default is on for stage 3 and off for lower stages, as in DeepSpeed.
        /// `None` lets the cost table decide, if `training.cost_table` names one.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub overlap_comm: Option<bool> = engine(Kind::Bool, "= true at stage 3, else false", "Overlap communication with computation. With training.cost_table, the default and auto choose the value that makes the simulated step shorter") [or (!keys.facts().is_measured).then_some(stage == ZeroStage::Three)];
        pub reduce_scatter: bool = now(Kind::Bool, "true", "Reduce gradients with reduce-scatter; false: with all-reduce, after which each rank keeps only its own part");
        /// Number of elements per reduction of gradients; `None` is `auto`: one reduction per layer.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub reduce_bucket_size: Option<usize> = engine(SIZE, "auto", "Elements per gradient reduction; 0: one reduction per flat parameter; auto: one per layer (DeepSpeed's default is 5e8)");
        /// Elements per gather of updated parameters (stages 1 and 2); `None` is `auto`: one gather per layer.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub allgather_bucket_size: Option<usize> = engine(SIZE, "auto", "Elements per all-gather of updated parameters at stages 1 and 2; 0: one all-gather per flat parameter; auto: one per layer (DeepSpeed's default is 5e8)");
        pub stage3_prefetch_bucket_size: usize = engine(SIZE, "50000000", "Maximum number of elements to prefetch; the next layer alone may exceed it; 0: no prefetch; auto: 0.9 × the square of the model's width, as in Hugging Face's Trainer") [else keys.facts().width.map_or(50_000_000, |width| width * width * 9 / 10)];
        pub stage3_param_persistence_threshold: usize = engine(SIZE, "100000", "Parameters with fewer elements stay gathered on every rank; auto: 10 × the model's width, as in Hugging Face's Trainer") [else keys.facts().width.map_or(100_000, |width| 10 * width)];
        pub stage3_model_persistence_threshold: usize = now(SIZE, "18446744073709551615", "Maximum total number of elements of small parameters that stay gathered");
        pub stage3_max_live_parameters: usize = now(SIZE, "1000000000", "Maximum number of elements gathered at a time");
        pub stage3_max_reuse_distance: usize = now(SIZE, "1000000000", "Keep parameters gathered if they are used again within this number of elements");
        pub zero_hpz_partition_size: usize = now(PARTITION, "1", "ZeRO++ hpZ: number of consecutive ranks, such as the ranks of a host, that together hold a second copy of the sharded parameters. Later all-gathers of a step read this copy. Must divide the number of ranks across which ZeRO shards; 0, 1 or that number: no copy");
        pub zero_quantized_weights: bool = now(Kind::Bool, "false", "ZeRO++ qwZ: all-gather sharded parameters as int8, in blocks of 512 elements with one scale each; stage 3 only. Changes the results");
        pub zero_quantized_nontrainable_weights: bool = now(Kind::Bool, "false", "All-gather frozen parameters as int8; stage 3 only. Each rank keeps its shard in the working data type (DeepSpeed keeps int8); `quantization_config` uses less memory");
        pub zero_quantized_gradients: bool = now(Kind::Bool, "false", "ZeRO++ qgZ: reduce sharded gradients as int8, and between hosts (or groups of `zero_hpz_partition_size` ranks) as 4-bit floats (E2M1), in blocks of 512 and 256 elements, respectively, with one scale each; sums are in f32. Stages 2 and 3 only. `communication_data_type` then applies to sums between shard groups. Changes the results");
        pub ignore_unused_parameters: bool = now(Kind::Bool, "false", "Accept parameters that receive no gradient; false: report them as an error (DeepSpeed's default is true)");
        /// Elements per tile, the unit of optimizer updates and of offload reads and writes. `None` is `auto`.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub sub_group_size: Option<usize> = engine(SIZE, "auto", "Elements per optimizer update, and per read or write of an offloaded state, rounded up to whole disk pages; 0: the size of a rank's shard of the largest parameter; auto: 1,048,576 (DeepSpeed's default is 1e9)");
        pub offload_param: OffloadParam = section(&OffloadParam::SECTION, "Parameters in host memory or on disk");
        pub offload_optimizer: OffloadOptimizer = section(&OffloadOptimizer::SECTION, "Optimizer state in host memory or on disk");
        = later("load_from_fp32_weights", "true", "Resume from the f32 master weights; false: from the 16-bit weights").instead("checkpoints hold f32 weights only");
        = later(SEQUENTIAL, "false", "All-gather one parameter at a time").instead("a smaller `stage3_prefetch_bucket_size` uses less memory");
        = later("save_muon_momentum_buffer_in_memory", "false", "Keep Muon's momentum in memory when the optimizer state is offloaded");
        = later_section("zenflow", &ZENFLOW, "Apply important gradients immediately and the others periodically").instead("`offload_optimizer` on nvme updates one tile while it reads and writes others");
        = later_section("leaf_module", &LEAF_MODULE, "Modules gathered as a whole").instead("each layer of a model is gathered as a whole anyway");
        = ignored("contiguous_gradients", Kind::Bool, "true", "gradients are always written to one buffer as they are produced");
        = ignored("compute_grad_norm", Kind::Bool, "true", "the gradient norm is always computed and written to the metrics");
        = ignored("round_robin_gradients", Kind::Bool, "false", "each rank already offloads only its own part of the gradients");
        = ignored("parameter_alignment", Kind::Bool, "false", "flat buffers are always aligned");
        = ignored("log_trace_cache_warnings", Kind::Bool, "false", "the order of fetches is planned, not traced");
        = ignored("enable_sanity_checks", Kind::Bool, "false", "a step is always validated before it runs");
        = ignored("use_multi_rank_bucket_allreduce", Kind::Bool, "true", "buckets are reduced to all owners in one collective");
        = ignored("allgather_partitions", Kind::Bool, "true", "updated parameters are always all-gathered");
        = ignored(GATHER_16BIT, Kind::Bool, "false", "checkpoints stream shards and load into any layout");
        = ignored(GRANULARITY, SIZE, "0", "parameters are always fetched layer by layer");
        = ignored(ALL_REDUCE, Kind::Bool, "false", "parameters are always all-gathered");
        = ignored("memory_efficient_linear", Kind::Bool, "true", "parameters are always gathered again for the backward pass");
        = ignored("pipeline_loading_checkpoint", Kind::Bool, "false", "shards are always loaded one by one");
        = rejected("override_module_apply", "true", "the key patches PyTorch's Module.apply");
        = alias("prefetch_bucket_size", Zero::stage3_prefetch_bucket_size);
        = alias("param_persistence_threshold", Zero::stage3_param_persistence_threshold);
        = alias("model_persistence_threshold", Zero::stage3_model_persistence_threshold);
        = alias("max_live_parameters", Zero::stage3_max_live_parameters);
        = alias("max_reuse_distance", Zero::stage3_max_reuse_distance);
        = alias("gather_16bit_weights_on_model_save", GATHER_16BIT);
        = alias("module_granularity_threshold", GRANULARITY);
        = alias("use_all_reduce_for_fetch_params", ALL_REDUCE);
        = alias("allgather_sequential", SEQUENTIAL);
        = old("stage3_gather_fp16_weights_on_model_save", GATHER_16BIT, &[], "Deprecated name of stage3_gather_16bit_weights_on_model_save");
        = old("cpu_offload", Zero::offload_optimizer, CPU, "Deprecated form of offload_optimizer: {device: cpu}");
        = old("cpu_offload_param", Zero::offload_param, CPU, "Deprecated form of offload_param: {device: cpu}");
        = old("cpu_offload_params", Zero::offload_param, CPU, "Deprecated form of offload_param: {device: cpu}");
        = ignored("cpu_offload_use_pin_memory", Kind::Bool, "= unset", PINNED);
        = ignored("elastic_checkpoint", Kind::Bool, "false", "every checkpoint loads at any number of ranks");
        = rejected("legacy_stage1", "false", "stage 1 has only one implementation");
        = removed_unless("mics_shard_size", "-1", "use `mesh.data_parallel_shard_degree`");
        = removed("mics_hierarchical_params_gather", "delete the key: MiCS was removed");
        = removed("zeropp_loco_param", "delete the key: LoCo was removed");
    }
}

impl Zero {
    /// Returns whether collectives send weights or gradients as 8-bit or 4-bit codes.
    #[must_use]
    pub fn sends_codes(&self) -> bool {
        self.zero_quantized_weights || self.zero_quantized_nontrainable_weights || self.zero_quantized_gradients
    }

    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        offload::check(self, resolver);
        let weights = "all-gathers sharded parameters";
        for (path, is_on, does, lowest) in [
            (Self::zero_quantized_weights, self.zero_quantized_weights, weights, ZeroStage::Three),
            (
                Self::zero_quantized_nontrainable_weights,
                self.zero_quantized_nontrainable_weights,
                weights,
                ZeroStage::Three,
            ),
            (
                Self::zero_quantized_gradients,
                self.zero_quantized_gradients,
                "reduces sharded gradients",
                ZeroStage::Two,
            ),
        ] {
            if is_on && self.stage < lowest {
                let message = format!("`{path}` {does}, but ZeRO stage {} has none", self.stage.number());
                let help = format!("set `{}: {}`, or remove `{}`", Self::stage, lowest.number(), last(path));
                resolver.contradiction(&[path, Self::stage], message, Some(help));
            }
        }
        if self.zero_quantized_gradients && !self.reduce_scatter {
            let message = format!(
                "`{}` needs reduce-scatter, but `{}: false` all-reduces the gradients",
                Self::zero_quantized_gradients,
                Self::reduce_scatter
            );
            let help = "remove one of the two".to_string();
            resolver.contradiction(&[Self::zero_quantized_gradients, Self::reduce_scatter], message, Some(help));
        }
    }
}

/// Number of ranks of a secondary shard group; 0 and 1 disable secondary shards.
const PARTITION: Kind = Kind::Int { min: 0, max: 65_536 };

/// Names of keys that may also be written without `stage3_`.
const GATHER_16BIT: &str = "stage3_gather_16bit_weights_on_model_save";
const GRANULARITY: &str = "stage3_module_granularity_threshold";
const ALL_REDUCE: &str = "stage3_use_all_reduce_for_fetch_params";
const SEQUENTIAL: &str = "stage3_allgather_sequential";

/// The key that an older form of offload stands for, with its value.
const CPU: &[(&str, &str)] = &[(last(OffloadOptimizer::device), "cpu")];

read_as! {
    ZeroStage: Leaf::Int(stage) => u8::try_from(stage).ok().and_then(Self::from_number)?, else Self::Zero;
}

fn number<S: Serializer>(stage: &ZeroStage, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u8(stage.number())
}

#[rustfmt::skip]
static ZENFLOW: Section = Section { switch: Switch::Presence, keys: &[
    later("topk_ratio", "0.1", "Fraction of the gradient columns updated in each step"),
    later("select_strategy", "auto", "auto, step or epoch"),
    later("select_interval", "auto", "Steps between selections"),
    later("update_interval", "auto", "Steps between updates of the other columns"),
    later("overlap_step", "false", "Overlap updates with computation"),
    later("offload", "false", "Keep the selected state on the host"),
    later("auto_ratio", "0.99", "Threshold of the automatic interval"),
    later("full_warm_up_rounds", "0", "Number of initial full updates"),
    rejected("pt_reserved_cores_perc", "0.5", "zero-train does not use PyTorch"),
    rejected("steps_per_epoch", "null", "DeepSpeed sets the key internally"),
] };

#[rustfmt::skip]
static LEAF_MODULE: Section = Section { switch: Switch::Presence, keys: &[
    rejected("classes", "null", "the values are names of Python classes"),
    later("names", "[]", "Module names"),
    later("name_suffixes", "[]", "Suffixes of module names"),
] };

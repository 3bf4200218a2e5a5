//! Keys of `zero_optimization`. Sizes are in elements.

use super::offload::{OFFLOAD_OPTIMIZER, OFFLOAD_PARAM};
use super::*;

#[rustfmt::skip]
pub(super) static ZERO: Section = Section { switch: Switch::Keys, keys: &[
    key("stage", Kind::Int { min: 0, max: 3 }, "0", "What is sharded over the ranks: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters"),
    engine("overlap_comm", Kind::Bool, "= true at stage 3, else false", "Communicate while computing; not given or auto, where training.cost_table names a table: as a simulated step is shorter"),
    now("reduce_scatter", Kind::Bool, "true", "Reduce gradients by reduce-scatter; false: all-reduce, then keep one's own part"),
    engine("reduce_bucket_size", SIZE_1, "auto", "Elements per reduction of gradients; auto: one per layer (DeepSpeed's default is 5e8)"),
    engine("allgather_bucket_size", SIZE_1, "auto", "Elements per gather of updated parameters at stages 1 and 2; auto: one per layer (DeepSpeed's default is 5e8)"),
    engine("stage3_prefetch_bucket_size", SIZE, "50000000", "Elements fetched ahead of use; auto: 0.9 × the square of the model's width, as Hugging Face's Trainer"),
    engine("stage3_param_persistence_threshold", SIZE, "100000", "Parameters with fewer elements stay gathered on every rank; auto: 10 × the model's width, as Hugging Face's Trainer"),
    now("stage3_model_persistence_threshold", SIZE, "18446744073709551615", "Most elements that stay gathered because they are small"),
    now("stage3_max_live_parameters", SIZE, "1000000000", "Most elements gathered at a time"),
    now("stage3_max_reuse_distance", SIZE, "1000000000", "Do not release what is used again within so many elements"),
    now("ignore_unused_parameters", Kind::Bool, "false", "Accept a parameter that gets no gradient; false: an error that names it (DeepSpeed's default is true)"),
    engine("sub_group_size", Kind::Int { min: 1024, max: u64::MAX }, "auto", "Elements that the optimizer updates at a time, which is also what offload reads and writes at a time; auto: derived from the sizes of the model (DeepSpeed's default is 1e9)"),
    section("offload_param", &OFFLOAD_PARAM, "Parameters in host memory or on disk"),
    section("offload_optimizer", &OFFLOAD_OPTIMIZER, "Optimizer state in host memory or on disk"),
    later("load_from_fp32_weights", "true", "Resume from the f32 master weights; false: from the 16-bit ones"),
    later("stage3_allgather_sequential", "false", "Gather parameter by parameter"),
    later_unless("zero_hpz_partition_size", &["1"], "ZeRO++ hpZ: ranks of the secondary shard group"),
    later("zero_quantized_weights", "false", "ZeRO++ qwZ: gather weights as int8"),
    later("zero_quantized_nontrainable_weights", "false", "Keep frozen weights quantized"),
    later("zero_quantized_gradients", "false", "ZeRO++ qgZ: reduce gradients as int8 and int4"),
    later("save_muon_momentum_buffer_in_memory", "false", "Keep Muon's momentum out of the swap"),
    later_section("zenflow", &ZENFLOW, "Update important gradients at once, the others now and then"),
    later_section("leaf_module", &LEAF_MODULE, "Modules gathered as a whole"),
    ignored("contiguous_gradients", Kind::Bool, "true", "gradients always go to one buffer as they are produced"),
    ignored("compute_grad_norm", Kind::Bool, "true", "the norm of the gradient is always computed and written to the metrics"),
    ignored("round_robin_gradients", Kind::Bool, "false", "each rank offloads its own part only; there are no copies to take turns"),
    ignored("parameter_alignment", Kind::Bool, "false", "flat buffers are always aligned"),
    ignored("log_trace_cache_warnings", Kind::Bool, "false", "the order of fetches is planned, not traced"),
    ignored("enable_sanity_checks", Kind::Bool, "false", "a step is always validated before it runs"),
    ignored("use_multi_rank_bucket_allreduce", Kind::Bool, "true", "buckets are reduced to all owners in one collective"),
    ignored("allgather_partitions", Kind::Bool, "true", "updated parameters are always all-gathered"),
    ignored("stage3_gather_16bit_weights_on_model_save", Kind::Bool, "false", "checkpoints stream shards and load into any layout"),
    ignored("stage3_module_granularity_threshold", SIZE, "0", "layers are the unit of fetching"),
    ignored("stage3_use_all_reduce_for_fetch_params", Kind::Bool, "false", "parameters are always all-gathered"),
    ignored("memory_efficient_linear", Kind::Bool, "true", "parameters are always gathered again for the backward"),
    ignored("pipeline_loading_checkpoint", Kind::Bool, "false", "shards are always loaded one by one"),
    rejected("override_module_apply", "true", "it patches PyTorch's Module.apply"),
    removed("elastic_checkpoint", "checkpoints load at any world size; delete the key"),
    removed("legacy_stage1", "the old implementation is gone; delete the key"),
    removed("cpu_offload", "write `offload_optimizer: {device: cpu}`"),
    removed("cpu_offload_param", "write `offload_param: {device: cpu}`"),
    removed("cpu_offload_params", "write `offload_param: {device: cpu}`"),
    removed("cpu_offload_use_pin_memory", "write `pin_memory` in `offload_param` and `offload_optimizer`"),
    removed("stage3_gather_fp16_weights_on_model_save", "write `stage3_gather_16bit_weights_on_model_save`"),
    removed("mics_shard_size", "MiCS is gone; delete the key"),
    removed("mics_hierarchical_params_gather", "MiCS is gone; delete the key"),
    removed("zeropp_loco_param", "LoCo is gone; delete the key"),
] };

#[rustfmt::skip]
static ZENFLOW: Section = Section { switch: Switch::Presence, keys: &[
    later("topk_ratio", "0.1", "Part of the gradient's columns updated each step"),
    later("select_strategy", "auto", "auto, step or epoch"),
    later("select_interval", "auto", "Steps between selections"),
    later("update_interval", "auto", "Steps between updates of the rest"),
    later("overlap_step", "false", "Update while computing"),
    later("offload", "false", "Selected state on the host"),
    later("auto_ratio", "0.99", "Threshold of the automatic interval"),
    later("full_warm_up_rounds", "0", "Full updates at first"),
    rejected("pt_reserved_cores_perc", "0.5", "there is no PyTorch"),
    rejected("steps_per_epoch", "null", "it is set internally"),
] };

#[rustfmt::skip]
static LEAF_MODULE: Section = Section { switch: Switch::Presence, keys: &[
    rejected("classes", "null", "they are names of Python classes"),
    later("names", "[]", "Names of modules"),
    later("name_suffixes", "[]", "Ends of names of modules"),
] };

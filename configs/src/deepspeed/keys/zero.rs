//! DeepSpeed's keys of `zero_optimization`.

use super::*;

#[rustfmt::skip]
pub(super) static ZERO: Group = Group { title: "`zero_optimization`", path: "zero_optimization.", with: &["zero_optimization.stage=3"], keys: &[
    key("stage", "0", "2").differs("2 and 3 work with pipelines, which DeepSpeed refuses").with(&["zero_optimization.stage=0"]),
    key("contiguous_gradients", "true", "false"),
    key("reduce_scatter", "true", "false"),
    key("reduce_bucket_size", "500000000", "5e7").differs("`auto` is one reduction for each layer"),
    key("use_multi_rank_bucket_allreduce", "true", "false"),
    key("allgather_partitions", "true", "false"),
    key("allgather_bucket_size", "500000000", "5e7").differs("`auto` is one gather for each layer"),
    key("overlap_comm", "null", "false"),
    key("compute_grad_norm", "true", "false"),
    key("load_from_fp32_weights", "true", "false"),
    key("elastic_checkpoint", "false", "true"),
    key("sub_group_size", "1000000000", "1e8").differs("`auto` follows from the sizes of the model"),
    key("cpu_offload_param", "null", "true"),
    key("cpu_offload_use_pin_memory", "null", "true"),
    key("cpu_offload", "null", "true"),
    key("stage3_prefetch_bucket_size", "50000000", "5e6"),
    key("stage3_param_persistence_threshold", "100000", "1e4"),
    key("stage3_model_persistence_threshold", "9223372036854775807", "1e6").differs("both mean no limit"),
    key("stage3_max_live_parameters", "1000000000", "1e6"),
    key("stage3_max_reuse_distance", "1000000000", "1e6"),
    key("stage3_gather_16bit_weights_on_model_save", "false", "true"),
    key("stage3_module_granularity_threshold", "0", "100"),
    key("stage3_use_all_reduce_for_fetch_params", "false", "true"),
    key("stage3_allgather_sequential", "false", "true"),
    key("stage3_gather_fp16_weights_on_model_save", "false", "true"),
    key("ignore_unused_parameters", "true", "true").differs("a parameter without a gradient is an error that names it; `true` accepts it, at every stage"),
    key("legacy_stage1", "false", "true"),
    key("round_robin_gradients", "false", "true"),
    key("parameter_alignment", "false", "true"),
    key("zero_hpz_partition_size", "1", "8"),
    key("zero_quantized_weights", "false", "true"),
    key("zero_quantized_nontrainable_weights", "false", "true"),
    key("zero_quantized_gradients", "false", "true"),
    key("memory_efficient_linear", "true", "false"),
    key("pipeline_loading_checkpoint", "false", "true"),
    key("override_module_apply", "true", "false"),
    key("log_trace_cache_warnings", "false", "true"),
    key("enable_sanity_checks", "false", "true"),
    key("save_muon_momentum_buffer_in_memory", "false", "true"),
    key("mics_shard_size", "-1", "8"),
    key("mics_hierarchical_params_gather", "false", "true"),
    key("zeropp_loco_param", "null", "{err_beta: 0.8, reset_T: 1024}"),
] };

#[rustfmt::skip]
pub(super) static OFFLOAD_PARAM: Group = Group { title: "`zero_optimization.offload_param`", path: "zero_optimization.offload_param.", with: &["zero_optimization.stage=3", "zero_optimization.offload_param.device=nvme", "zero_optimization.offload_param.nvme_path=/tmp"], keys: &[
    key("device", "none", "cpu").differs("below stage 3 it is an error; DeepSpeed ignores it there. The memory of a machine without a GPU is the host's: `cpu` changes nothing on it"),
    key("nvme_path", "null", "/mnt/nvme"),
    key("buffer_count", "5", "8"),
    key("buffer_size", "100000000", "2e8"),
    key("max_in_cpu", "1000000000", "1e6"),
    key("pin_memory", "true", "false"),
] };

#[rustfmt::skip]
pub(super) static OFFLOAD_OPTIMIZER: Group = Group { title: "`zero_optimization.offload_optimizer`", path: "zero_optimization.offload_optimizer.", with: &["zero_optimization.stage=3", "zero_optimization.offload_optimizer.device=nvme", "zero_optimization.offload_optimizer.nvme_path=/tmp"], keys: &[
    key("device", "none", "cpu").differs("The memory of a machine without a GPU is the host's: `cpu` changes nothing on it"),
    key("nvme_path", "null", "/mnt/nvme"),
    key("buffer_count", "4", "8"),
    key("pin_memory", "true", "false"),
    key("pipeline_read", "false", "false"),
    key("pipeline_write", "false", "false"),
    key("fast_init", "false", "true"),
    key("ratio", "1.0", "0.5").differs("With a GPU and `device: cpu`, at every stage: state of the first layers goes to the host. Elsewhere a run refuses it"),
    key("super_offload", "false", "true"),
    key("cpuadam_cores_perc", "0.8", "0.5"),
] };

#[rustfmt::skip]
pub(super) static LEAF_MODULE: Group = Group { title: "`zero_optimization.leaf_module`", path: "zero_optimization.leaf_module.", with: &["zero_optimization.stage=3"], keys: &[
    key("classes", "[transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock]", "[my.Block]"),
    key("names", "[]", "[mlp]"),
    key("name_suffixes", "[]", "[experts]"),
] };

#[rustfmt::skip]
pub(super) static ZENFLOW: Group = Group { title: "`zero_optimization.zenflow`", path: "zero_optimization.zenflow.", with: &["zero_optimization.stage=3"], keys: &[
    key("topk_ratio", "0.1", "0.2"),
    key("select_strategy", "auto", "epoch"),
    key("select_interval", "auto", "4"),
    key("update_interval", "auto", "4"),
    key("overlap_step", "false", "true"),
    key("offload", "false", "true"),
    key("auto_ratio", "0.99", "0.9"),
    key("full_warm_up_rounds", "0", "3"),
    key("pt_reserved_cores_perc", "0.5", "0.25"),
    key("steps_per_epoch", "null", "100"),
] };

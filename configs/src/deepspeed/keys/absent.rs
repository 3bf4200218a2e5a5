//! Keys of DeepSpeed sections that were not, or only partly, implemented when this list was written. The generated
//! page shows the current support.

use super::*;

#[rustfmt::skip]
pub(super) static WANDB: Group = Group { title: "`wandb`", path: "wandb.", with: &["wandb.enabled=true"], keys: &[
    key("enabled", "false", "true"),
    key("group", "null", "mine"),
    key("team", "null", "mine"),
    key("project", "deepspeed", "mine"),
] };

#[rustfmt::skip]
pub(super) static COMET: Group = Group { title: "`comet`", path: "comet.", with: &["comet.enabled=true"], keys: &[
    key("enabled", "false", "true"),
    key("samples_log_interval", "100", "10"),
    key("project", "null", "mine"),
    key("workspace", "null", "mine"),
    key("api_key", "null", "mine"),
    key("experiment_name", "null", "mine"),
    key("experiment_key", "null", "mine"),
    key("online", "null", "true"),
    key("mode", "null", "get"),
] };

#[rustfmt::skip]
pub(super) static FLOPS_PROFILER: Group = Group { title: "`flops_profiler`", path: "flops_profiler.", with: &["flops_profiler.enabled=true"], keys: &[
    key("enabled", "false", "true"),
    key("recompute_fwd_factor", "0.0", "1.0"),
    key("profile_step", "1", "5"),
    key("module_depth", "-1", "2"),
    key("top_modules", "1", "3"),
    key("detailed", "true", "false"),
    key("output_file", "null", "flops.txt"),
] };

#[rustfmt::skip]
pub(super) static DATA_EFFICIENCY: Group = Group { title: "`data_efficiency`", path: "data_efficiency.", with: &["data_efficiency.enabled=true"], keys: &[
    key("enabled", "false", "true"),
    key("seed", "1234", "1"),
    key("data_sampling.enabled", "false", "true"),
    key("data_sampling.num_epochs", "1000", "1"),
    key("data_sampling.num_workers", "0", "2"),
    key("data_sampling.pin_memory", "false", "true"),
    key("data_sampling.curriculum_learning.enabled", "false", "true"),
    key("data_sampling.curriculum_learning.data_cluster_path", "", "clusters"),
    key("data_sampling.curriculum_learning.curriculum_metrics", "", "{seqlen: {index_to_sample_path: a, index_to_metric_path: b, difficulty_type: value, clustering_type: single_cluster, min_difficulty: 8, max_difficulty: 512, schedule_type: fixed_linear, schedule_config: {total_curriculum_step: 100, difficulty_step: 8}}}"),
    key("data_sampling.dynamic_batching.enabled", "false", "true"),
    key("data_sampling.dynamic_batching.metrics_path", "", "lengths"),
    key("data_sampling.dynamic_batching.lr_scaling_method", "linear", "sqrt"),
    key("data_sampling.dynamic_batching.min_batch_size", "1", "2"),
    key("data_sampling.dynamic_batching.max_batch_size", "null", "64"),
    key("data_sampling.dynamic_batching.sequence_picking_order", "dataloader", "random"),
    key("data_sampling.dynamic_batching.max_tokens", "", "4096"),
    key("data_sampling.dynamic_batching.verbose", "false", "true"),
    key("data_routing.enabled", "false", "true"),
    key("data_routing.random_ltd", "{}", "{enabled: true, total_layer_num: 24, random_ltd_layer_num: 22}"),
] };

#[rustfmt::skip]
pub(super) static TENSOR_PARALLEL: Group = Group { title: "`tensor_parallel`", path: "tensor_parallel.", with: &[], keys: &[
    key("autotp_size", "0", "2"),
    key("dtype", "torch.float16", "torch.bfloat16"),
    key("tp_overlap_comm", "false", "true"),
    key("vocab_parallel_lm_head", "null", "true"),
    key("vocab_parallel_ce_backend", "torch", "liger"),
    key("tp.tp_size", "1", "2"),
    key("tp.tp_grain_size", "1", "64"),
    key("tp.mpu", "null", "mpu"),
    key("tp.tp_group", "null", "group"),
    key("injection_policy_tuple", "null", "[a]"),
    key("partition_config", "null", "{use_default_specs: false}"),
    key("preset_model", "null", "llama"),
    key("keep_module_on_host", "false", "true"),
    key("kernel_inject", "false", "true"),
] };

#[rustfmt::skip]
pub(super) static EXPERT_PARALLEL: Group = Group { title: "`expert_parallel`", path: "expert_parallel.", with: &["expert_parallel.enabled=true"], keys: &[
    key("enabled", "false", "true"),
    key("autoep_size", "1", "2"),
    key("expert_tensor_parallel_size", "", "2"),
    key("validate_folding_routing", "", "true"),
    key("async_split_plan", "", "true"),
    key("preset_model", "", "mixtral"),
    key("moe_layer_pattern", "", "name"),
    key("expert_pattern", "", "name"),
    key("router_pattern", "", "name"),
    key("use_grouped_mm", "", "true"),
    key("disable_triton_grouped_mm", "", "true"),
    key("route_norm", "", "true"),
    key("route_scale", "", "2.5"),
    key("score_apply", "", "name"),
    key("combine_impl", "", "name"),
    key("row_weighting_impl", "", "name"),
    key("gate_up_impl", "", "name"),
    key("comm_backend", "", "name"),
    key("comm_num_sm", "", "20"),
    key("comm_qp_margin", "", "2"),
    key("comm_max_tokens_per_rank", "", "4096"),
    key("num_expert_groups", "", "8"),
    key("num_limited_groups", "", "4"),
    key("score_func", "", "name"),
    key("top_k", "", "2"),
    key("load_balance_coeff", "", "0.01"),
    key("routed_scaling_factor", "", "2.5"),
    key("expert_w1", "", "name"),
    key("expert_w2", "", "name"),
    key("expert_w3", "", "name"),
    key("num_experts_attr", "", "name"),
    key("top_k_attr", "", "name"),
    key("has_shared_experts", "", "true"),
    key("shared_experts_pattern", "", "name"),
    key("shared_experts_gate_pattern", "", "name"),
    key("expert_activation", "", "name"),
] };

#[rustfmt::skip]
pub(super) static COMPILE: Group = Group { title: "`compile`", path: "compile.", with: &[], keys: &[
    key("enabled", "false", "true"),
    key("disable", "null", "false"),
    key("backend", "null", "inductor"),
    key("deepcompile", "false", "true"),
    key("autoep_non_moe", "false", "true"),
    key("free_activation", "false", "true"),
    key("free_activation_threshold", "10485760", "1024"),
    key("offload_activation", "false", "true"),
    key("offload_activation_pin_memory", "true", "false"),
    key("offload_opt_states", "false", "true"),
    key("double_buffer", "true", "false"),
    key("symmetric_memory", "false", "true"),
    key("debug_log", "false", "true"),
    key("offload_parameters", "false", "true"),
    key("sync_before_reduce", "false", "true"),
    key("sync_after_reduce", "false", "true"),
    key("sync_before_allgather", "false", "true"),
    key("sync_after_allgather", "false", "true"),
    key("keep_int_input_tensors", "true", "false"),
    key("keep_all_input_tensors", "false", "true"),
    key("passes", "null", "[prefetch]"),
] };

#[rustfmt::skip]
pub(super) static HYBRID_ENGINE: Group = Group { title: "`hybrid_engine`", path: "hybrid_engine.", with: &["hybrid_engine.enabled=true"], keys: &[
    key("enabled", "false", "true"),
    key("max_out_tokens", "512", "1024"),
    key("inference_tp_size", "1", "2"),
    key("release_inference_cache", "false", "true"),
    key("pin_parameters", "true", "false"),
    key("tp_gather_partition_size", "8", "4"),
    key("enable_cuda_graph", "false", "true"),
] };

#[rustfmt::skip]
pub(super) static GONE: Group = Group { title: "Removed from DeepSpeed by 0.19.8", path: "", with: &[], keys: &[
    key("elasticity", "null", "{enabled: true, max_train_batch_size: 2000, micro_batch_sizes: [2, 4, 6]}"),
    key("compression_training", "null", "{weight_quantization: {shared_parameters: {enabled: true}}}"),
    key("quantize_training", "null", "{enabled: true}"),
    key("eigenvalue", "null", "{enabled: true}"),
    key("sparse_gradients", "null", "true"),
    key("sparse_attention", "null", "{mode: fixed, block: 16}"),
    key("amp", "null", "{enabled: true, opt_level: O1}"),
    key("nebula", "null", "{enabled: true, persistent_storage_path: /nebula}"),
    key("progressive_layer_drop", "null", "{enabled: true, theta: 0.5, gamma: 0.001}"),
    key("curriculum_learning", "null", "{enabled: true, curriculum_type: seqlen}"),
    key("graph_harvesting", "null", "true"),
] };

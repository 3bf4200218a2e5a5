//! DeepSpeed's keys at the top of the file and in sections that have a counterpart here.

use super::*;

#[rustfmt::skip]
pub(super) static TOP: Group = Group { title: "At the top of the file", path: "", with: &[], keys: &[
    key("train_batch_size", "null", "16"),
    key("train_micro_batch_size_per_gpu", "null", "4"),
    key("gradient_accumulation_steps", "null", "4"),
    key("managed_gradient_accumulation", "true", "false"),
    key("steps_per_print", "null", "5"),
    key("gradient_clipping", "1.0", "0.5"),
    key("prescale_gradients", "false", "true"),
    key("gradient_predivide_factor", "1.0", "2.0"),
    key("gradient_allreduce_op", "mean", "sum"),
    key("communication_data_type", "null", "fp32"),
    key("seq_parallel_communication_data_type", "fp32", "bf16"),
    key("disable_allgather", "false", "true"),
    key("dump_state", "false", "true").differs("prints the program of a step and what is sharded how"),
    key("disable_python_gc", "false", "true"),
    key("dataloader_drop_last", "false", "true"),
    key("vocabulary_size", "null", "50257"),
    key("wall_clock_breakdown", "false", "true").differs("writes `trace.json` as well, the timeline of the first 20 steps"),
    key("memory_breakdown", "false", "true"),
    key("log_level", "null", "debug"),
    key("zero_allow_untested_optimizer", "false", "true"),
    key("zero_force_ds_cpu_optimizer", "true", "false"),
    key("use_data_before_expert_parallelism", "false", "true"),
    key("sequence_parallel_size", "null", "2"),
    key("data_parallel_size", "null", "2"),
    key("data_types.grad_accum_dtype", "null", "fp32"),
    key("data_types.param_dtype", "null", "bf16"),
    key("data_types.buffer_dtype", "null", "bf16"),
    key("data_types.keep_in_fp32_modules", "auto", "[router]"),
    key("torch_autocast.enabled", "false", "true"),
    key("torch_autocast.dtype", "null", "bfloat16").with(&["torch_autocast.enabled=true"]),
    key("torch_autocast.lower_precision_safe_modules", "null", "[torch.nn.Linear]").with(&["torch_autocast.enabled=true"]),
    key("weight_quantization", "null", "{post_init_quant: {fc: {num_bits: 4}}}"),
    key("zero_optimization", "{}", "true").differs("the old form: it is stage 1, with a warning"),
] };

#[rustfmt::skip]
pub(super) static FP16: Group = Group { title: "`fp16`", path: "fp16.", with: &["fp16.enabled=true"], keys: &[
    key("enabled", "false", "true").differs("without a GPU parameters are stored as f16 and computed with in f32: it saves memory and no time"),
    key("auto_cast", "false", "true"),
    key("loss_scale", "0", "128"),
    key("initial_scale_power", "16", "12"),
    key("loss_scale_window", "1000", "500"),
    key("hysteresis", "2", "4"),
    key("consecutive_hysteresis", "false", "true"),
    key("min_loss_scale", "1", "8").differs("an overflow there ends the run with exit status 5"),
    key("fp16_master_weights_and_grads", "false", "true"),
] };

#[rustfmt::skip]
pub(super) static BF16: Group = Group { title: "`bf16`, or `bfloat16`", path: "bf16.", with: &[], keys: &[
    key("enabled", "false", "true"),
    key("immediate_grad_update", "false", "true"),
    key("check_grad_overflow", "true", "false"),
    key("bf16_master_weights_and_grads", "false", "true"),
    key("bf16_optimizer_states", "false", "true"),
] };

#[rustfmt::skip]
pub(super) static ACTIVATIONS: Group = Group { title: "`activation_checkpointing`", path: "activation_checkpointing.", with: &["activation_checkpointing.enabled=true"], keys: &[
    key("partition_activations", "false", "true"),
    key("cpu_checkpointing", "false", "true").differs("the section switches recomputation on, without a call in the program; it is `device: cpu`"),
    key("contiguous_memory_optimization", "false", "true"),
    key("number_checkpoints", "null", "4").differs("the section switches recomputation on, without a call in the program; how many inputs are kept, at equal distances"),
    key("synchronize_checkpoint_boundary", "false", "true"),
    key("profile", "false", "true"),
] };

#[rustfmt::skip]
pub(super) static PIPELINE: Group = Group { title: "`pipeline`", path: "pipeline.", with: &[], keys: &[
    key("stages", "auto", "2").differs("it says the number of stages, which is an argument of PipelineModule in DeepSpeed"),
    key("partition", "best", "uniform").differs("it says how layers are dealt out, which is an argument of PipelineModule in DeepSpeed"),
    key("seed_layers", "false", "true"),
    key("activation_checkpoint_interval", "0", "2"),
    key("pipe_partitioned", "true", "false"),
    key("grad_partitioned", "true", "false"),
] };

#[rustfmt::skip]
pub(super) static AIO: Group = Group { title: "`aio`", path: "aio.", with: &[], keys: &[
    key("block_size", "1048576", "262144"),
    key("queue_depth", "8", "32"),
    key("intra_op_parallelism", "1", "4"),
    key("single_submit", "false", "false"),
    key("overlap_events", "true", "false"),
    key("use_gds", "false", "true"),
    key("thread_count", "1", "4"),
] };

#[rustfmt::skip]
pub(super) static CHECKPOINT: Group = Group { title: "`checkpoint`", path: "checkpoint.", with: &[], keys: &[
    key("tag_validation", "WARN", "FAIL"),
    key("load_universal", "false", "true"),
    key("use_node_local_storage", "false", "true"),
    key("parallel_write.pipeline_stage", "false", "true"),
    key("checkpoint_serialization", "true", "false"),
    key("writer.type", "FAST", "PYTHON"),
    key("writer.decoupled", "false", "true"),
    key("writer.io_buffer_size", "67108864", "1048576"),
    key("writer.io_buffer_double", "true", "false"),
    key("writer.io_multiplier", "1", "2"),
    key("writer.show_statistics", "false", "true"),
    key("writer.data_parallel", "null", "SOCKET"),
    key("datastates_ckpt", "null", "{host_cache_size: 16}"),
] };

#[rustfmt::skip]
pub(super) static TENSORBOARD: Group = Group { title: "`tensorboard`", path: "tensorboard.", with: &[], keys: &[
    key("enabled", "false", "true"),
    key("output_path", "\"\"", "logs").differs("empty is a folder of the run"),
    key("job_name", "DeepSpeedJobName", "mine"),
] };

#[rustfmt::skip]
pub(super) static CSV_MONITOR: Group = Group { title: "`csv_monitor`", path: "csv_monitor.", with: &[], keys: &[
    key("enabled", "false", "true"),
    key("output_path", "\"\"", "logs").differs("empty is a folder of the run"),
    key("job_name", "DeepSpeedJobName", "mine"),
] };

#[rustfmt::skip]
pub(super) static COMMS_LOGGER: Group = Group { title: "`comms_logger`", path: "comms_logger.", with: &[], keys: &[
    key("enabled", "false", "true").differs("what was recorded is in `report.json` too"),
    key("prof_all", "true", "false"),
    key("prof_ops", "[]", "[all_gather]"),
    key("verbose", "false", "true"),
    key("debug", "false", "true"),
] };

#[rustfmt::skip]
pub(super) static TIMERS: Group = Group { title: "`timers.throughput`", path: "timers.throughput.", with: &[], keys: &[
    key("enabled", "true", "false"),
    key("synchronized", "true", "false"),
] };

#[rustfmt::skip]
pub(super) static AUTOTUNING: Group = Group { title: "`autotuning`", path: "autotuning.", with: &[], keys: &[
    key("enabled", "false", "true").differs("only `zero-train autotune` tunes, whatever this says"),
    key("fast", "true", "true").differs("tunes the ZeRO stage and the micro-batch only"),
    key("results_dir", "autotuning_results", "tuned"),
    key("exps_dir", "autotuning_exps", "tuned"),
    key("overwrite", "true", "false"),
    key("start_profile_step", "3", "2"),
    key("end_profile_step", "5", "9"),
    key("metric", "throughput", "latency").differs("`latency` finds the least; DeepSpeed finds the most"),
    key("metric_path", "null", "metric.json"),
    key("model_info_path", "null", "info.json"),
    key("tuner_type", "gridsearch", "random"),
    key("tuner_early_stopping", "5", "3"),
    key("tuner_num_trials", "50", "20"),
    key("arg_mappings", "null", "{train_micro_batch_size_per_gpu: --batch}"),
    key("model_info.profile", "false", "true"),
    key("model_info.num_params", "null", "1000000"),
    key("model_info.hidden_size", "null", "64"),
    key("model_info.num_layers", "null", "4"),
    key("mp_size", "1", "2"),
    key("max_train_batch_size", "null", "64"),
    key("min_train_batch_size", "1", "8"),
    key("max_train_micro_batch_size_per_gpu", "1024", "64"),
    key("min_train_micro_batch_size_per_gpu", "1", "2"),
    key("num_tuning_micro_batch_sizes", "3", "5"),
] };

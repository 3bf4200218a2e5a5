//! Keys at the top of the file, and DeepSpeed's implemented sections.

use super::autotuning::AUTOTUNING;
use super::inactive::*;
use super::offload::{ACTIVATION_CHECKPOINTING, AIO};
use super::optimizer::{OPTIMIZER, SCHEDULER};
use super::own::{DATA, LAUNCHER, MODEL, TRAINING};
use super::pipeline::PIPELINE;
use super::zero::ZERO;
use super::*;
use crate::choice::Choice as _;
use crate::config::{Dtype, LogLevel, ReduceOp};

const DTYPE: Kind = Kind::Choice { names: Dtype::NAMES, later: &[] };

#[rustfmt::skip]
pub(super) static TOP: &[Key] = &[
    engine("train_batch_size", COUNT, "= micro-batch × accumulation × data-parallel ranks", "Samples per optimizer step over all ranks"),
    engine("train_micro_batch_size_per_gpu", COUNT, "= from the other two", "Samples of one forward and backward on one rank; auto, where train_batch_size does not say it: 8, as Hugging Face's Trainer"),
    engine("gradient_accumulation_steps", COUNT, "= from the other two, else 1", "Micro-batches of one rank, or of one pipeline, per optimizer step"),
    now("steps_per_print", COUNT_OR_0, "10", "A line of progress every so many steps; 0 none"),
    now("gradient_clipping", NON_NEGATIVE, "1.0", "Largest global L2 norm of the gradient; 0 disables"),
    now("gradient_allreduce_op", Kind::Choice { names: ReduceOp::NAMES, later: &[] }, "mean", "How gradients of the ranks become one"),
    now("communication_data_type", DTYPE, "null", "Type in which gradients travel; null: that of the parameters"),
    section("data_types", &DATA_TYPES, "Types of buffers"),
    section("bf16", &BF16, "bfloat16 parameters and activations over f32 master weights"),
    alias("bfloat16", "bf16"),
    section("fp16", &FP16, "f16 parameters and activations over f32 master weights, and a loss scale"),
    key("optimizer", Kind::Variants(&OPTIMIZER), "null", "Optimizer; AdamW with its defaults when not given"),
    key("scheduler", Kind::Variants(&SCHEDULER), "null", "Learning rate over time; constant when not given"),
    section("zero_optimization", &ZERO, "ZeRO: what is sharded, and how it is fetched. `true` is stage 1"),
    section("pipeline", &PIPELINE, "Pipeline parallelism: layers in stages on different ranks"),
    now("wall_clock_breakdown", Kind::Bool, "false", "Print what the parts of a step take, tell it to monitors, and write the timeline"),
    now("memory_breakdown", Kind::Bool, "false", "Print what each rank held in each part of a step, at the steps of steps_per_print"),
    now("dump_state", Kind::Bool, "false", "Print the state of engine and optimizer at the start"),
    now("dataloader_drop_last", Kind::Bool, "false", "Leave out the last batch of an epoch when it is not full"),
    now("log_level", Kind::Choice { names: LogLevel::NAMES, later: &[] }, "info", "What is logged"),
    section("activation_checkpointing", &ACTIVATION_CHECKPOINTING, "Keep the inputs of some layers only, and compute the rest again in the backward: less memory, more time"),
    section("aio", &AIO, "Reads and writes of offload to NVMe"),
    section("csv_monitor", &MONITOR, "One CSV file per metric"),
    section("tensorboard", &MONITOR, "TensorBoard event files"),
    section("mlflow", &MLFLOW, "A run of an MLflow tracking server"),
    section("prometheus", &PROMETHEUS, "A page of the newest values, for Prometheus"),
    section("machine_monitor", &MACHINE_MONITOR, "What rank 0's machine does meanwhile, for all monitors"),
    section("comms_logger", &COMMS_LOGGER, "Count, bytes and seconds of each collective"),
    section("flops_profiler", &FLOPS_PROFILER, "Parameters, multiply-accumulates and times of each layer in one step"),
    key("model", Kind::Variants(&MODEL), "null", "The model to build; a program may bring its own instead"),
    section("data", &DATA, "What to train on; a program may feed its own batches instead"),
    section("training", &TRAINING, "How long to train, when to evaluate and save"),
    section("launcher", &LAUNCHER, "How ranks are started and how they talk"),
    section("autotuning", &AUTOTUNING, "What `zero-train autotune` searches; it does without the section, too. Training ignores it"),
    section("checkpoint", &CHECKPOINT, "How checkpoints are written"),
    section("timers", &TIMERS, "Timers"),
    later_section("data_efficiency", &DATA_EFFICIENCY, "Curriculum and dynamic batches"),
    later_section("wandb", &WANDB, "Weights & Biases"),
    section("tensor_parallel", &TENSOR_PARALLEL, "Tensor parallelism"),
    later("managed_gradient_accumulation", "true", "false: the program decides when the optimizer steps"),
    later("prescale_gradients", "false", "Divide gradients before the reduction"),
    later("gradient_predivide_factor", "1.0", "Divide gradients by this before the reduction"),
    later("seq_parallel_communication_data_type", "fp32", "Type of the sequence-parallel reduction"),
    later("use_data_before_expert_parallelism", "false", "Order of ranks for experts"),
    later_unless("sequence_parallel_size", &["1"], "Ranks that share a sequence"),
    later("data_parallel_size", "null", "Ranks of the data axis, with sequence_parallel_size"),
    ignored("vocabulary_size", SIZE_1, "= not given", "DeepSpeed only checks that it is a multiple of 8"),
    ignored("zero_allow_untested_optimizer", Kind::Bool, "false", "every optimizer works at every stage"),
    ignored("zero_force_ds_cpu_optimizer", Kind::Bool, "true", "there is one implementation of each optimizer"),
    rejected_section("comet", &COMET, "there is no client of it in Rust"),
    rejected_section("torch_autocast", &TORCH_AUTOCAST, "candle has no autocast; use `bf16`"),
    rejected_section("expert_parallel", &EXPERT_PARALLEL, "it rewrites Python classes of Hugging Face's models"),
    rejected_section("hybrid_engine", &HYBRID_ENGINE, "there is no inference engine to switch to"),
    section("compile", &COMPILE, "torch.compile; there is nothing to compile here"),
    rejected("weight_quantization", "null", "it is for inference"),
    ignored("disable_allgather", Kind::Bool, "false", "updated parameters are always all-gathered, as in DeepSpeed, which reads the key and does not use it"),
    rejected("disable_python_gc", "false", "there is no Python"),
    removed("nebula", "it was a service of Azure; delete the section"),
    removed("compression_training", "quantization-aware training and pruning are gone; delete the section"),
    removed("amp", "Apex is gone; use `bf16`"),
    removed("quantize_training", "MoQ is gone; delete the section"),
    removed("eigenvalue", "MoQ is gone; delete the section"),
    removed("sparse_gradients", "sparse reduction of embeddings is gone; delete the key"),
    removed("sparse_attention", "its kernels are gone; delete the section"),
    removed("elasticity", "checkpoints load at any world size; delete the section"),
    removed("graph_harvesting", "CUDA graphs are gone; delete the key"),
    removed("curriculum_learning", "the legacy curriculum is gone; delete the section"),
    removed("progressive_layer_drop", "it is gone; delete the section"),
];

#[rustfmt::skip]
static DATA_TYPES: Section = Section { switch: Switch::Keys, keys: &[
    now("grad_accum_dtype", DTYPE, "null", "Type in which gradients of micro-batches are added up; null: that of the parameters"),
    later("param_dtype", "null", "Type that parameters are cast to"),
    later("buffer_dtype", "null", "Type that buffers are cast to"),
    later_unless("keep_in_fp32_modules", &["auto", "[]"], "Modules that stay in f32"),
] };

#[rustfmt::skip]
static BF16: Section = Section { switch: Switch::Keys, keys: &[
    now("enabled", Kind::Bool, "false", "Compute in bfloat16"),
    now("check_grad_overflow", Kind::Bool, "true", "Skip a step whose gradient has an infinity or a NaN"),
    ignored("immediate_grad_update", Kind::Bool, "false", "gradients always go to their buffer as they are produced"),
    later("bf16_master_weights_and_grads", "false", "No f32 master weights"),
    later("bf16_optimizer_states", "false", "Optimizer state in bfloat16"),
] };

#[rustfmt::skip]
static FP16: Section = Section { switch: Switch::Key("enabled", &["false", "auto"]), keys: &[
    now("enabled", Kind::Bool, "false", "Compute in f16"),
    now("loss_scale", NON_NEGATIVE, "0", "What the loss is multiplied by before the backward; 0 is a scale that follows the gradients"),
    now("initial_scale_power", Kind::Int { min: 0, max: 127 }, "16", "The first scale, as a power of 2"),
    now("loss_scale_window", COUNT, "1000", "Steps without overflow before the scale is doubled"),
    now("hysteresis", COUNT, "2", "Which overflow halves the scale; those before it only skip the step"),
    now("consecutive_hysteresis", Kind::Bool, "false", "Count overflows anew after each step that goes well, and not only after the scale is doubled"),
    now("min_loss_scale", COUNT, "1", "The smallest scale; an overflow there ends training, with exit status 5"),
    later("auto_cast", "false", "Cast the model's inputs to f16"),
    rejected("fp16_master_weights_and_grads", "false", "it costs accuracy"),
] };

#[rustfmt::skip]
static MONITOR: Section = Section { switch: Switch::Keys, keys: &[
    now("enabled", Kind::Bool, "false", "Write at all"),
    key("output_path", Kind::Text, "", "Folder; empty is the run's own"),
    key("job_name", Kind::Text, "DeepSpeedJobName", "Folder inside output_path"),
] };

#[rustfmt::skip]
static MLFLOW: Section = Section { switch: Switch::Keys, keys: &[
    key("enabled", Kind::Bool, "false", "Write at all"),
    key("tracking_uri", Kind::Path, "null", "Address of the server, as in `http://host:5000`; null: the variable MLFLOW_TRACKING_URI. A token is taken from MLFLOW_TRACKING_TOKEN alone"),
    key("experiment_name", Kind::Path, "zero-train", "Experiment that the run belongs to; made if there is none"),
    key("run_name", Kind::Path, "null", "Name of the run; null: the server finds one"),
] };

#[rustfmt::skip]
static MACHINE_MONITOR: Section = Section { switch: Switch::Keys, keys: &[
    key("enabled", Kind::Bool, "false", "Sample processor, memory, disk, network and GPUs"),
    key("interval_seconds", Kind::Float(Range { min: 0.0, max: 86_400.0, above: true, below: false }), "5.0", "How often"),
] };

#[rustfmt::skip]
static PROMETHEUS: Section = Section { switch: Switch::Keys, keys: &[
    key("enabled", Kind::Bool, "false", "Serve it, from rank 0, at /metrics"),
    key("host", Kind::Path, "127.0.0.1", "Address to listen at; 0.0.0.0 is every interface of the machine"),
    key("port", Kind::Int { min: 0, max: 65_535 }, "9464", "Port to listen at; 0 is a free one, which is printed"),
] };

#[rustfmt::skip]
static COMMS_LOGGER: Section = Section { switch: Switch::Keys, keys: &[
    now("enabled", Kind::Bool, "false", "Record at all"),
    now("verbose", Kind::Bool, "false", "Print what the operations of each step did"),
    now("prof_all", Kind::Bool, "true", "Show every kind of operation"),
    key("prof_ops", Kind::Texts, "[]", "With prof_all off: the kinds of operations to show"),
    later_unless("debug", &["false"], "The place in the program of each operation; `training.trace` shows it"),
] };

#[rustfmt::skip]
static FLOPS_PROFILER: Section = Section { switch: Switch::Key("enabled", &["false", "auto"]), keys: &[
    now("enabled", Kind::Bool, "false", "Profile one step"),
    now("profile_step", COUNT, "1", "Which step; the first one takes longer than others"),
    now("module_depth", Kind::Float(Range { min: -1.0, max: 1e6, above: false, below: false }), "-1", "How deep in the names of layers to print; -1 all"),
    now("top_modules", COUNT, "1", "How many to name as the first of each depth"),
    now("detailed", Kind::Bool, "true", "Print every layer"),
    key("output_file", Kind::Path, "null", "File to write it to; null prints it"),
    ignored("recompute_fwd_factor", NON_NEGATIVE, "0.0", "forwards that are computed again are counted, not estimated"),
] };

//! The resolved configuration of a run, with every default and every `auto` filled in.
//!
//! The fields are plain data. A field is an `Option` only if `None` has a meaning for the engine: an `auto` that
//! depends on the model or the data, or a feature that is off. `None` never stands for an unresolved default. A
//! serialised [`Config`] has the shape of `ds.yaml`: the same keys in the same sections.

mod activations;
mod adapter;
mod autotuning;
mod batch_sizes;
mod data;
pub(crate) mod derived;
mod dimension;
mod inactive;
mod launcher;
mod layers;
mod model;
mod monitor;
mod offload;
pub(crate) mod optimizer;
mod parallel;
mod precision;
mod quantization;
mod scheduler;
mod training;
mod zero;

use std::sync::Arc;

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::inactive::*;
use crate::errors::Warning;
use crate::origin::Origins;
use crate::schema::*;
use crate::table::section;
use crate::typed::Typed;

pub use activations::{ActivationCheckpointing, CheckpointSpacing};
pub use adapter::{ALL_LINEAR, Adapter, AdapterType, LoraInit, TrainedBias};
pub use autotuning::{Autotuning, Metric, Sweep, SweepMethod, TunerType};
pub use batch_sizes::{BatchSizes, RampUp};
pub use data::chat::{Chat, ChatType, ExcessLength, MessageProperties, Roles, TrainOnEos, Untrained};
pub use data::data_efficiency::{
    Curriculum, CurriculumConfig, CurriculumLearning, CurriculumMetrics, CurriculumSchedule, DataEfficiency,
    DataSampling,
};
pub use data::datasets::{MixedDataset, Share};
pub use data::preference::{DpoLoss, Preference, PreferenceType};
pub use data::split::SplitPart;
pub use data::{Data, DataFormat, TokenDtype, Tokenizer};
pub use dimension::{Dimension, Interval};
pub use launcher::{GpuTransport, InstructionSet, Launcher, Transport};
pub use layers::LayerPattern;
pub(crate) use model::MAX_LAYERS;
pub use model::mup::{BaseWidths, Mup};
pub use model::rope::RopeScaling;
pub(crate) use model::rope::{ORIGINAL as ROPE_ORIGINAL, TYPE as ROPE_TYPE, keys_of as rope_keys_of};
pub use model::{Activation, FULL_ATTENTION, Gpt2, Llama, Mlp, Model, SLIDING_ATTENTION};
pub use monitor::{CommsLogger, FlopsProfiler, MachineMonitor, Mlflow, Monitor, Prometheus, Wandb};
pub use offload::{Aio, OffloadDevice, OffloadOptimizer, OffloadParam};
pub(crate) use optimizer::ADAMW;
pub use optimizer::Optimizer;
pub use optimizer::optimizer_params::{
    AdafactorParams, AdagradParams, AdamParams, CustomParams, LambParams, LionParams, MuAdamParams, MuonParams,
    NAdamParams, RAdamParams, RmsPropParams, ScheduleFreeParams, SgdParams,
};
pub use optimizer::parameter_groups::{ParameterGroup, ParameterKind};
pub use parallel::local_steps::LocalSteps;
pub use parallel::mesh::{Mesh, RotateMethod};
pub use parallel::partition_method::PartitionMethod;
pub use parallel::pipeline::{Pipeline, PipelineSchedule};
pub use parallel::tensor_parallel::TensorParallel;
pub use precision::{Bf16, DataTypes, Dtype, Fp16};
pub use quantization::{FourBit, QuantStorage, Quantization, QuantizationMethod};
pub use scheduler::transformers_schedules::*;
pub use scheduler::{LrRangeTest, OneCycle, Scheduler, Warmup, WarmupCosineLr, WarmupDecayLr, WarmupLr};
pub use training::{
    Compute, EarlyStopping, Ema, GradientNoiseScale, KeepBest, Nonfinite, OnSpike, Sample, Spikes, StopMode, Training,
    WeightDecayOn,
};
pub use zero::{Zero, ZeroStage};

section! {
    /// The resolved configuration of one run. [`Typed::resolve`](crate::Typed::resolve) creates it; `from_path`,
    /// `parse` and `with_world_size` are shortcuts for that.
    #[derive(Debug, Clone, Serialize)]
    pub struct Config(keys) in "" {
        /// Number of samples per optimizer step over all ranks: micro-batch × accumulation ×
        /// [`data_parallel_size`](Self::data_parallel_size).
        pub train_batch_size: usize = engine(COUNT, "= micro-batch × accumulation × data-parallel ranks", "Samples per optimizer step, across all ranks") [is keys.facts().batch.train];
        pub train_micro_batch_size_per_gpu: usize = engine(COUNT, "= from the other two", "Samples per forward and backward pass on one rank; auto: derived from train_batch_size if it is set, else 8, as in Hugging Face's Trainer") [is keys.facts().batch.micro];
        pub gradient_accumulation_steps: usize = engine(COUNT, "= from the other two, else 1", "Micro-batches per optimizer step on one rank, or in one pipeline") [is keys.facts().batch.accumulation];
        pub sequence_parallel_size: usize = key(RANKS, "1", "Number of consecutive ranks that share each sequence (DeepSpeed-Ulysses). Each rank computes a slice of the positions; in attention, it computes some of the heads for all positions. ZeRO also shards across these ranks; for batch sizes they count as one rank");
        pub steps_per_print: usize = now(COUNT_OR_0, "10", "Steps between progress lines; 0: no progress lines");
        pub gradient_clipping_value: Option<f64> = key(POSITIVE, "null", "Clip each element of the gradient to this absolute value, instead of clipping its norm with `gradient_clipping`");
        pub gradient_clipping: f64 = now(NON_NEGATIVE, "= 1.0, or 0 with gradient_clipping_value", "Clip the global L2 norm of the gradient to this value; 0 disables clipping") [else if gradient_clipping_value.is_some() { 0.0 } else { 1.0 }];
        pub gradient_allreduce_op: GradientReduceOp = now(GradientReduceOp::KIND, "mean", "How gradients are reduced across ranks");
        pub communication_data_type: Option<Dtype> = now(Dtype::KIND, "null", "Data type in which gradients are communicated; null: the data type of the parameters, or fp32 with training.reproducible");
        pub wall_clock_breakdown: bool = now(Kind::Bool, "false", "Print the time of each part of a step, send it to the monitors, and write the timeline");
        pub memory_breakdown: bool = now(Kind::Bool, "false", "Print the memory held by each rank in each part of a step, every steps_per_print steps");
        pub dump_state: bool = now(Kind::Bool, "false", "Print the planned operations of a step when the run starts");
        pub dataloader_drop_last: bool = now(Kind::Bool, "false", "Drop the last batch of an epoch if it is incomplete");
        pub log_level: LogLevel = now(LogLevel::KIND, "info", "Which log messages are printed");
        pub data_types: DataTypes = section(&DataTypes::SECTION, "Data types of buffers");
        pub bf16: Bf16 = section(&Bf16::SECTION, "bfloat16 parameters and activations with f32 master weights");
        = alias("bfloat16", Config::bf16);
        pub fp16: Fp16 = section(&Fp16::SECTION, "f16 parameters and activations with f32 master weights and loss scaling");
        pub optimizer: Optimizer = key(Kind::Variants(&Optimizer::VARIANTS), "null", "Optimizer; AdamW with its defaults if omitted");
        pub scheduler: Scheduler = key(Kind::Variants(&Scheduler::VARIANTS), "null", "Learning rate schedule; constant if omitted");
        pub zero as "zero_optimization": Zero = section(&Zero::SECTION, "ZeRO: which state is sharded, and how shards are fetched. `true` means stage 1");
        pub pipeline: Pipeline = section(&Pipeline::SECTION, "Pipeline parallelism: the layers are divided into stages on different ranks");
        pub mesh: Mesh = section(&Mesh::SECTION, "Hybrid sharding (HSDP): groups of ranks that hold the same ZeRO shards");
        pub tensor_parallel: TensorParallel = section(&TensorParallel::SECTION, "Tensor parallelism: several ranks split each layer");
        pub activation_checkpointing: Option<ActivationCheckpointing> = section(&activations::Written::SECTION, "Keep only the inputs of some layers and recompute the other activations in the backward pass: uses less memory and more time");
        pub aio: Aio = section(&Aio::SECTION, "How NVMe offload reads and writes files");
        pub csv_monitor: Monitor = section(&Monitor::SECTION, "One CSV file per metric");
        pub tensorboard: Monitor = section(&Monitor::SECTION, "TensorBoard event files");
        pub mlflow: Mlflow = section(&Mlflow::SECTION, "Log metrics to a run on an MLflow tracking server");
        pub wandb: Wandb = section(&Wandb::SECTION, "Log metrics to a run on Weights & Biases");
        pub prometheus: Prometheus = section(&Prometheus::SECTION, "Serve the latest metrics over HTTP for Prometheus");
        pub machine_monitor: MachineMonitor = section(&MachineMonitor::SECTION, "Sample the load of rank 0's machine during training and send it to all monitors");
        pub comms_logger: CommsLogger = section(&CommsLogger::SECTION, "Record the count, bytes and duration of each collective");
        pub flops_profiler: FlopsProfiler = section(&FlopsProfiler::SECTION, "Profile the parameters, multiply-accumulates and time of each layer in one step");
        pub model: Option<Model> = key(Kind::Variants(&Model::VARIANTS), "null", "The model to build; a program may provide its own instead");
        pub mup: Option<Mup> = section(&Mup::SECTION, "Maximal update parametrization (µP): the base model for which `optimizer.params.lr` was tuned. Used with the optimizers MuAdam, MuAdamW and MuSGD");
        pub adapter: Option<Adapter> = section(&Adapter::SECTION, "LoRA: train small matrices alongside the linear layers of a frozen model. Without this section, the model itself is trained");
        pub quantization_config: Option<Quantization> = section(&Quantization::SECTION, "Store frozen weights in 4 or 8 bits (QLoRA, with `adapter`)");
        pub preference: Option<Preference> = section(&Preference::SECTION, "Preference training on pairs of a chosen and a rejected answer; requires `data.format: chat`. Without this section, conversations are used for supervised fine-tuning");
        pub data: Option<Data> = section(&Data::SECTION, "Training data; a program may provide its own batches instead");
        pub data_efficiency: DataEfficiency = section(&DataEfficiency::SECTION, "Curriculum learning: short sequences first");
        pub training: Training = section(&Training::SECTION, "How long to train, and when to evaluate and save");
        pub launcher: Launcher = section(&Launcher::SECTION, "How ranks are started and how they communicate");
        pub autotuning: Autotuning = section(&Autotuning::SECTION, "Search space and limits of `zero-train autotune`. The section is optional; training ignores it");
        = section("checkpoint", &CHECKPOINT, "How checkpoints are written");
        = section("timers", &TIMERS, "Timers");
        = later("managed_gradient_accumulation", "true", "false: the program decides when the optimizer steps").instead("`gradient_accumulation_steps` sets the number of micro-batches before each optimizer step");
        = ignored("prescale_gradients", Kind::Bool, "false", PRESCALED);
        = ignored("gradient_predivide_factor", POSITIVE, "1.0", PRESCALED);
        = later("seq_parallel_communication_data_type", "fp32", "Data type in which sequence-parallel ranks reduce gradients").instead("`communication_data_type` applies to this reduction too");
        = later("use_data_before_expert_parallelism", "false", "Rank order for expert parallelism").instead("mixture-of-experts layers are not supported");
        = later("data_parallel_size", "null", "Number of data-parallel ranks, if sequence_parallel_size is set").instead("zero-train computes it as the number of ranks / (`pipeline.stages` × `sequence_parallel_size` × `mesh.context_parallel_degree` × `tensor_parallel.autotp_size`)");
        = ignored("vocabulary_size", SIZE_1, "= unset", "DeepSpeed only checks that the value is a multiple of 8");
        = ignored("zero_allow_untested_optimizer", Kind::Bool, "false", "every optimizer works at every ZeRO stage");
        = ignored("zero_force_ds_cpu_optimizer", Kind::Bool, "true", "each optimizer has only one implementation");
        = rejected_section("comet", &COMET, "Comet has no client for Rust");
        = rejected_section("torch_autocast", &TORCH_AUTOCAST, "candle has no autocast; use `bf16`");
        = rejected_section("expert_parallel", &EXPERT_PARALLEL, "AutoEP rewrites the Python classes of Hugging Face models");
        = rejected_section("hybrid_engine", &HYBRID_ENGINE, "zero-train has no inference engine to switch to");
        = section("compile", &COMPILE, "torch.compile settings; zero-train compiles no graph");
        = rejected("weight_quantization", "null", "the key is for inference, not for training");
        = ignored("disable_allgather", Kind::Bool, "false", "updated parameters are always all-gathered; DeepSpeed does not use the key either");
        = rejected("disable_python_gc", "false", "zero-train does not run Python");
        = removed("nebula", "delete the section: Nebula was an Azure service");
        = removed("compression_training", "delete the section: quantization-aware training and pruning were removed");
        = removed("amp", "use `bf16` instead of Apex");
        = removed("quantize_training", "delete the section: MoQ was removed");
        = removed("eigenvalue", "delete the section: MoQ was removed");
        = removed("sparse_gradients", "delete the key: sparse reduction of embeddings was removed");
        = removed("sparse_attention", "delete the section: the sparse attention kernels were removed");
        = removed("elasticity", "delete the section: checkpoints load at any world size");
        = removed("graph_harvesting", "delete the key: CUDA graphs were removed");
        = removed("curriculum_learning", "use `data_efficiency.data_sampling.curriculum_learning`");
        = removed("progressive_layer_drop", "delete the section");
    }
    and {
        /// Number of ranks this configuration was resolved for: pipeline stages × data-parallel ranks × ranks that
        /// share a sequence × tensor-parallel ranks. Written out as `launcher.num_processes`.
        #[serde(skip)]
        pub world_size: usize = keys.facts().ranks,
        /// Name of the file that the configuration was read from, for messages.
        #[serde(skip)]
        pub name: String = keys.file().to_string(),
        /// Warnings about accepted keys that have no effect, each with the reason.
        #[serde(skip)]
        pub warnings: Vec<Warning> = Vec::new(),
        /// Origin of each value.
        #[serde(skip)]
        pub origins: Origins = Origins::default(),
        /// The configuration as written, kept to resolve it for a different number of ranks.
        #[serde(skip)]
        pub(crate) typed: Arc<Typed> = keys.typed(),
    }
}

/// The reason why two of DeepSpeed's keys about dividing gradients have no effect.
const PRESCALED: &str = "gradients need no scaling in the reduction: before the backward pass, the loss is divided by the number of micro-batches × ranks, or with `gradient_allreduce_op: sum` by the number of micro-batches";

choice! {
    /// How gradients are reduced across ranks.
    pub enum GradientReduceOp {
        /// Their mean, which is the gradient of the global batch's mean loss.
        Mean = "mean",
        /// Their sum.
        Sum = "sum",
    }
}

choice! {
    /// Which log messages are printed.
    pub enum LogLevel {
        /// Errors only.
        Error = "error",
        /// Errors and warnings.
        Warning = "warning" | "warn",
        /// Errors, warnings and information for users.
        Info = "info",
        /// Errors, warnings, and information for users and for developers.
        Debug = "debug",
        /// Everything.
        Trace = "trace",
    }
}

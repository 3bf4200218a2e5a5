//! The resolved configuration of a run, with every default and every `auto` filled in.
//!
//! The fields are plain data. A field is an `Option` only if `None` has a meaning for the engine: an `auto` that
//! depends on the model or the data, or a feature that is off. `None` never stands for an unresolved default. A
//! serialised [`Config`] has the shape of `ds.yaml`: the same keys in the same sections.

mod activations;
mod autotuning;
mod data;
mod launcher;
mod layers;
mod model;
mod monitor;
mod offload;
mod optimizer;
mod pipeline;
mod precision;
mod rope;
mod scheduler;
mod training;
mod zero;

use std::sync::Arc;

use serde::Serialize;

use crate::choice::choice;
use crate::errors::Warning;
use crate::origin::Origins;
use crate::typed::Typed;
use crate::yaml_out;

pub use activations::{ActivationCheckpointing, CheckpointSpacing};
pub use autotuning::{Autotuning, Dimension, Interval, Metric, Sweep, SweepMethod, TunerType};
pub use data::{Data, DataFormat, TokenDtype, Tokenizer};
pub use launcher::{GpuTransport, InstructionSet, Launcher, Transport};
pub use layers::LayerPattern;
pub use model::{Activation, Gpt2, Llama, Mlp, Model};
pub use monitor::{CommsLogger, FlopsProfiler, MachineMonitor, Mlflow, Monitor, Prometheus};
pub use offload::{Aio, OffloadDevice, OffloadOptimizer, OffloadParam};
pub use optimizer::Optimizer;
pub use pipeline::{PartitionMethod, Pipeline, PipelineSchedule};
pub use precision::{Bf16, DataTypes, Dtype, Fp16};
pub use rope::RopeScaling;
pub use scheduler::{Scheduler, WarmupType};
pub use training::{Compute, EarlyStopping, Nonfinite, OnSpike, Sample, Spikes, StopMode, Training, WeightDecayOn};
pub use zero::{Zero, ZeroStage};

/// The resolved configuration of one run. Created by [`Typed::resolve`](crate::Typed::resolve) or by one of the
/// shortcuts here.
#[derive(Debug, Clone, Serialize)]
pub struct Config {
    /// Samples per optimizer step over all ranks: micro-batch × accumulation ×
    /// [`data_parallel_size`](Self::data_parallel_size).
    pub train_batch_size: usize,
    /// Samples of one forward and backward on one rank.
    pub train_micro_batch_size_per_gpu: usize,
    /// Micro-batches per optimizer step, on one rank or through one pipeline.
    pub gradient_accumulation_steps: usize,
    /// Number of ranks this configuration was resolved for: pipeline stages × data-parallel ranks. Written out as
    /// `launcher.num_processes`.
    #[serde(skip)]
    pub world_size: usize,
    /// Steps between two progress lines; 0 prints none.
    pub steps_per_print: usize,
    /// Maximum global L2 norm of the gradient; gradients with a larger norm are scaled down to it. 0 disables
    /// clipping.
    pub gradient_clipping: f64,
    /// How the gradients of the ranks are reduced.
    pub gradient_allreduce_op: ReduceOp,
    /// Data type in which gradients are communicated; `None` uses the data type of the parameters.
    pub communication_data_type: Option<Dtype>,
    /// Print the time spent in the parts of a step, send it to the monitors, and write the timeline.
    pub wall_clock_breakdown: bool,
    /// Print the memory held by each rank in each part of a step.
    pub memory_breakdown: bool,
    /// Print the state of the engine and the optimizer at the start.
    pub dump_state: bool,
    /// Drop the last batch of an epoch if it is incomplete.
    pub dataloader_drop_last: bool,
    /// Which log messages are printed.
    pub log_level: LogLevel,
    /// Data types of buffers.
    pub data_types: DataTypes,
    /// bfloat16 parameters and activations over f32 master weights.
    pub bf16: Bf16,
    /// f16 parameters and activations over f32 master weights, with a loss scale.
    pub fp16: Fp16,
    /// Optimizer and its parameters.
    pub optimizer: Optimizer,
    /// Learning rate schedule.
    pub scheduler: Scheduler,
    /// ZeRO: what is sharded, and how shards are fetched.
    #[serde(rename = "zero_optimization")]
    pub zero: Zero,
    /// Pipeline parallelism: layers in stages on different ranks.
    pub pipeline: Pipeline,
    /// Which activations are recomputed in the backward; `None` keeps all of them.
    pub activation_checkpointing: Option<ActivationCheckpointing>,
    /// How offload to NVMe reads and writes files.
    pub aio: Aio,
    /// One CSV file per metric.
    pub csv_monitor: Monitor,
    /// TensorBoard event files.
    pub tensorboard: Monitor,
    /// A run on an MLflow tracking server.
    pub mlflow: Mlflow,
    /// An HTTP page with the newest values, for Prometheus.
    pub prometheus: Prometheus,
    /// Usage of rank 0's machine, sampled during training.
    pub machine_monitor: MachineMonitor,
    /// Counts and times of collectives.
    pub comms_logger: CommsLogger,
    /// A profile of one step, layer by layer.
    pub flops_profiler: FlopsProfiler,
    /// The model to build; `None` if the program provides its own.
    pub model: Option<Model>,
    /// The training data; `None` if the program provides its own batches.
    pub data: Option<Data>,
    /// Duration of training, evaluation and checkpoints.
    pub training: Training,
    /// How ranks are started and how they communicate.
    pub launcher: Launcher,
    /// The search of `zero-train autotune`. Training ignores it.
    pub autotuning: Autotuning,
    /// Name of the file that the configuration was read from, for messages.
    #[serde(skip)]
    pub name: String,
    /// Keys that were accepted and have no effect, each with the reason.
    #[serde(skip)]
    pub warnings: Vec<Warning>,
    /// Origin of each value.
    #[serde(skip)]
    pub origins: Origins,
    /// The configuration as written, kept to resolve it for another number of ranks.
    #[serde(skip)]
    pub(crate) typed: Arc<Typed>,
}

impl Config {
    /// Number of ranks that train on different data: the world size divided by the number of pipeline stages.
    pub fn data_parallel_size(&self) -> usize {
        // The field is public, so a program may have set it to 0.
        self.world_size / self.pipeline.stages.max(1)
    }

    /// Data type of parameters and activations.
    pub fn working_dtype(&self) -> Dtype {
        match (self.bf16.enabled, self.fp16.enabled) {
            (true, _) => Dtype::Bf16,
            (false, true) => Dtype::F16,
            (false, false) => Dtype::F32,
        }
    }
}

choice! {
    /// How the gradients of the ranks are reduced.
    pub enum ReduceOp {
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
        /// The above, and information for developers.
        Debug = "debug",
        /// Everything.
        Trace = "trace",
    }
}

/// Two configurations are equal if they describe the same run. The origins of values are not compared.
impl PartialEq for Config {
    fn eq(&self, other: &Self) -> bool {
        self.world_size == other.world_size && yaml_out::tree(self) == yaml_out::tree(other)
    }
}

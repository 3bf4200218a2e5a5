//! What a run is asked to do, with every default and every `auto` filled in.
//!
//! The fields are plain data. An `Option` stands only where "nothing" is itself a meaning that the engine gives (`auto`
//! that needs the model or the data to be known, a feature that is off), never for a default not yet filled in.
//! Serialised, a [`Config`] has the shape of `ds.yaml`: the same keys in the same sections.

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

/// One run, resolved. Made by [`Typed::resolve`](crate::Typed::resolve) or one of the shortcuts here.
#[derive(Debug, Clone, Serialize)]
pub struct Config {
    /// Samples per optimizer step over all ranks: micro-batch × accumulation ×
    /// [`data_parallel_size`](Self::data_parallel_size).
    pub train_batch_size: usize,
    /// Samples of one forward and backward on one rank.
    pub train_micro_batch_size_per_gpu: usize,
    /// Micro-batches of one rank, or of one pipeline, per optimizer step.
    pub gradient_accumulation_steps: usize,
    /// Number of ranks this configuration was resolved for: stages × data-parallel ranks. Written out as `launcher.num_processes`.
    #[serde(skip)]
    pub world_size: usize,
    /// A line of progress every so many steps; 0 prints none.
    pub steps_per_print: usize,
    /// Largest global L2 norm of the gradient; larger ones are scaled down to it. 0 disables.
    pub gradient_clipping: f64,
    /// How gradients of the ranks become one.
    pub gradient_allreduce_op: ReduceOp,
    /// Type in which gradients travel; `None` is the type of the parameters.
    pub communication_data_type: Option<Dtype>,
    /// Print what the parts of a step take, tell it to monitors, and write the timeline.
    pub wall_clock_breakdown: bool,
    /// Print what each rank held in each part of a step.
    pub memory_breakdown: bool,
    /// Print the state of engine and optimizer at the start.
    pub dump_state: bool,
    /// Leave out the last batch of an epoch when it is not full.
    pub dataloader_drop_last: bool,
    /// What is logged.
    pub log_level: LogLevel,
    /// Types of buffers.
    pub data_types: DataTypes,
    /// bfloat16 parameters and activations over f32 master weights.
    pub bf16: Bf16,
    /// f16 parameters and activations over f32 master weights, with a loss scale.
    pub fp16: Fp16,
    /// Optimizer and its parameters.
    pub optimizer: Optimizer,
    /// Learning rate over time.
    pub scheduler: Scheduler,
    /// ZeRO: what is sharded, and how it is fetched.
    #[serde(rename = "zero_optimization")]
    pub zero: Zero,
    /// Layers in stages on different ranks.
    pub pipeline: Pipeline,
    /// What is computed again in the backward instead of kept; `None` when everything is kept.
    pub activation_checkpointing: Option<ActivationCheckpointing>,
    /// Reads and writes of offload to NVMe.
    pub aio: Aio,
    /// One CSV file per metric.
    pub csv_monitor: Monitor,
    /// TensorBoard event files.
    pub tensorboard: Monitor,
    /// A run of an MLflow tracking server.
    pub mlflow: Mlflow,
    /// A page of the newest values.
    pub prometheus: Prometheus,
    /// What rank 0's machine does meanwhile.
    pub machine_monitor: MachineMonitor,
    /// Counts and times of collectives.
    pub comms_logger: CommsLogger,
    /// One step, layer by layer.
    pub flops_profiler: FlopsProfiler,
    /// The model to build; `None` when the program brings its own.
    pub model: Option<Model>,
    /// What to train on; `None` when the program feeds its own batches.
    pub data: Option<Data>,
    /// How long to train, when to evaluate and save.
    pub training: Training,
    /// How ranks are started and how they talk.
    pub launcher: Launcher,
    /// What `zero-train autotune` searches. Training ignores it.
    pub autotuning: Autotuning,
    /// Name of the file it was read from, for messages.
    #[serde(skip)]
    pub name: String,
    /// Keys that were accepted and have no effect, each with the reason.
    #[serde(skip)]
    pub warnings: Vec<Warning>,
    /// Where each value comes from.
    #[serde(skip)]
    pub origins: Origins,
    /// What was written, to be resolved for another number of ranks.
    #[serde(skip)]
    pub(crate) typed: Option<Arc<Typed>>,
}

impl Config {
    /// Ranks that train on different data: the world size divided by the stages of a pipeline.
    pub fn data_parallel_size(&self) -> usize {
        // The program may have written a 0 there.
        self.world_size / self.pipeline.stages.max(1)
    }

    /// Type of parameters and activations.
    pub fn working_dtype(&self) -> Dtype {
        match (self.bf16.enabled, self.fp16.enabled) {
            (true, _) => Dtype::Bf16,
            (false, true) => Dtype::F16,
            (false, false) => Dtype::F32,
        }
    }
}

choice! {
    /// How gradients of the ranks become one.
    pub enum ReduceOp {
        /// Their mean: the gradient of the global batch's mean loss.
        Mean = "mean",
        /// Their sum.
        Sum = "sum",
    }
}

choice! {
    /// How much is logged.
    pub enum LogLevel {
        /// Errors only.
        Error = "error",
        /// Errors and warnings.
        Warning = "warning" | "warn",
        /// What a user wants to know.
        Info = "info",
        /// What a developer wants to know.
        Debug = "debug",
        /// Everything.
        Trace = "trace",
    }
}

/// Equal when they ask for the same run; where the values came from does not count.
impl PartialEq for Config {
    fn eq(&self, other: &Self) -> bool {
        self.world_size == other.world_size && yaml_out::tree(self) == yaml_out::tree(other)
    }
}

//! `training`: duration, seed, evaluation, checkpoints and stopping.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::{Data, LocalSteps, ParameterGroup, RampUp};
use crate::path::last;
use crate::read::node::At;
use crate::read::reader::{Read as _, Resolver};
use crate::schema::*;
use crate::table::section;

section! {
    /// `training`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Training(keys) in "training" {
        /// Optimizer steps to train. Exactly one of `max_steps` and `epochs` is set.
        pub max_steps: Option<usize> = key(COUNT, "= 100, unless epochs is given", "Optimizer steps to train") [or Option::<f64>::read(keys, last(Training::epochs)).is_none().then_some(DEFAULT_STEPS)];
        pub epochs: Option<f64> = key(POSITIVE, "null", "Number of passes over the training data, instead of max_steps");
        pub device: Compute = key(Compute::KIND, "cpu", "Device that layers run on: cpu, or cuda with one NVIDIA GPU per rank");
        pub seed: u64 = key(SIZE, "1234", "Seed for initialisation, shuffling and dropout");
        pub initial_weights: Option<Vec<String>> = key(Kind::Paths, "null", "Safetensors files with the model's parameters by name: file, glob, or list of them; null: parameters are initialised from the seed");
        pub trainable: Option<Vec<String>> = key(Kind::Texts, "null", "Globs over parameter names, such as `*.ln_f.*`: only parameters that match one of them are trained, and the others are frozen; null: all are trained");
        /// Globs over the names of parameters that are not trained, even if `trainable` selects them.
        pub frozen: Vec<String> = key(Kind::Texts, "[]", "Globs over the names of parameters to freeze: frozen parameters have no gradients, no optimizer state and no 32-bit copy");
        /// Make the results bit-identical for every power-of-two number of ranks, by adding the gradients of all
        /// micro-batches of the global batch in one binary tree.
        pub reproducible: bool = key(Kind::Bool, "false", "Bit-identical results for every number of ranks that is a power of two");
        pub eval_every: usize = key(COUNT_OR_0, "0", "Steps between evaluations; 0: no evaluation");
        pub eval_batches: usize = key(COUNT, "8", "Maximum number of micro-batches that each rank evaluates per data set; unlimited if a program provides its own evaluation data and this key is not set");
        pub dataloader_num_workers: usize = key(COUNT_OR_0, "1", "Threads per rank that load training data while the rank computes; 0: the rank loads the data itself");
        pub dataloader_prefetch_factor: usize = key(COUNT, "2", "Micro-batches that each data loading thread prefetches");
        pub save_every: usize = key(COUNT_OR_0, "0", "Steps between checkpoints; 0: no checkpoint before the end");
        pub save_last: bool = key(Kind::Bool, "true", "Save a checkpoint at the end of training; a run that is stopped by a signal always saves one");
        pub save_async: bool = key(Kind::Bool, "false", "Write the checkpoints of save_every in the background, from a copy of the state, which uses additional memory");
        pub keep_last: usize = key(COUNT_OR_0, "2", "Number of newest checkpoints to keep; 0: all");
        pub keep_every: usize = key(COUNT_OR_0, "0", "Always keep the checkpoints of steps that are multiples of this number; 0: off");
        pub keep_best: Option<KeepBest> = section(&KeepBest::SECTION, "Save a checkpoint after each evaluation that is better than all earlier ones, and keep it until a better one is saved. An empty section (`{}`) uses the evaluation loss as the metric");
        pub checkpoint_store: Option<String> = key(Kind::Text, "null", "Store URL, such as `s3://bucket/run`, to which checkpoints are copied during training");
        pub output_dir: String = key(Kind::Text, "= runs/<name of the file>", "Folder of the run") [else format!("runs/{}", stem(keys.file()))];
        pub nonfinite: Nonfinite = key(Nonfinite::KIND, "skip", "What to do if a gradient or the loss is not finite: skip the update, or stop the run");
        pub max_skipped_steps: usize = key(COUNT, "20", "Stop the run after this number of consecutive skipped steps");
        pub spikes: Option<Spikes> = section(&Spikes::SECTION, "What to do about a gradient norm far above the norms of earlier steps");
        pub compare_replicas_every: usize = key(COUNT_OR_0, "100", "Steps between comparisons of checksums of values that must be equal across ranks; 0: no comparison");
        pub early_stopping: Option<EarlyStopping> = section(&EarlyStopping::SECTION, "Stop when evaluations no longer improve");
        pub weight_decay_on: WeightDecayOn = key(WeightDecayOn::KIND, "matrices", "Parameters with weight decay: matrices (without biases and norms) or all");
        pub param_groups: Option<Vec<ParameterGroup>> = sections(&ParameterGroup::SECTION, "Parameter groups with their own optimizer, learning rate, weight decay or betas; a parameter belongs to the first group that selects it");
        pub gradient_noise_scale: Option<GradientNoiseScale> = section(&GradientNoiseScale::SECTION, "Measure the gradient noise scale, from the gradients of individual micro-batches and of the whole step");
        /// A batch size that grows.
        pub rampup_batch_size: Option<RampUp> = section(&RampUp::SECTION, "A batch size that grows to train_batch_size, as with Megatron-LM's --rampup-batch-size");
        pub local_steps: Option<LocalSteps> = section(&LocalSteps::SECTION, "Local steps (DiLoCo): the replicates of the mesh train independently; every few steps an outer optimizer moves their common starting point toward their average");
        pub ema: Option<Ema> = section(&Ema::SECTION, "Exponential moving average of the trained weights, with 4 bytes per parameter, sharded like the optimizer state");
        pub layerwise_lr_decay: f64 = key(SHRINKING, "1.0", "Learning rate of each block as a fraction of the next block's, and for the last block as a fraction of the full learning rate; 1: off. The head and all layers after the last block have the full learning rate");
        pub z_loss: f64 = key(NON_NEGATIVE, "0.0", "Coefficient of the mean of ln²Z, which is added to the loss of a language model; Z is the normalizer of its softmax. PaLM uses 1e-4; 0: off");
        /// Memory limit per rank, in bytes; `None` is the limit of the cgroup, or the memory of the machine.
        pub memory_limit: Option<u64> = key(Kind::Bytes { min: 1 << 20 }, "= the memory of the cgroup or machine", "Memory limit of each rank: a number of bytes, or a size such as `6GiB` or `800 MB`");
        pub cost_table: Option<PathBuf> = key(Kind::Path, "null", "Cost table written by `zero-train bench costs`, relative to the working directory; used to predict the step time and to decide overlap_comm");
        pub sample: Option<Sample> = section(&Sample::SECTION, "Text to generate after training");
        pub trace: bool = key(Kind::Bool, "false", "Write the measured timeline of the run");
    }
}

section! {
    /// `training.spikes`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Spikes(keys) in "training.spikes" {
        pub window: usize = key(COUNT, "32", "Number of earlier steps whose median norm is the reference; before that many steps, no norm counts as a spike");
        pub factor: f64 = key(Kind::Float(Range { min: 1.0, max: f64::MAX, above: true, below: false }), "10.0", "A norm above the median times this factor is a spike");
        pub action: OnSpike = key(OnSpike::KIND, "skip", "What to do on a spike: warn, skip the update, or stop the run");
    }
}

section! {
    /// `training.gradient_noise_scale`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct GradientNoiseScale(keys) in "training.gradient_noise_scale" {
        pub smoothing: f64 = key(Kind::Float(FRACTION), "0.99", "Decay rate of the moving averages of signal and noise");
    }
}

section! {
    /// `training.ema`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct Ema(keys) in "training.ema" {
        pub decay: f64 = key(Kind::Float(FRACTION), "0.999", "Decay rate: share of the old average at each step; the new weights contribute the rest");
        pub start_step: u64 = key(COUNT_OR_0, "0", "Number of steps before the average begins; until then it equals the weights");
        pub evaluate: bool = key(Kind::Bool, "true", "Evaluate, and generate training.sample, with the averages instead of the weights");
    }
}

section! {
    /// `training.early_stopping`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct EarlyStopping(keys) in "training.early_stopping" {
        pub patience: usize = key(COUNT, REQUIRED, "Evaluations without improvement before training stops");
        pub min_delta: f64 = key(NON_NEGATIVE, "0.0", "An evaluation counts as an improvement if it is better than the best one by more than this amount");
        /// Metric to compare: `loss`, `loss_<name>` of a data set, or a metric of the program.
        pub metric: String = key(Kind::Text, "loss", METRIC);
        /// Whether lower or higher values are better.
        pub mode: StopMode = key(StopMode::KIND, "min", MODE);
    }
}

section! {
    /// `training.keep_best`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct KeepBest(keys) in "training.keep_best" {
        /// Metric to compare: `loss`, `loss_<name>` of a data set, or a metric of the program.
        pub metric: String = key(Kind::Text, "loss", METRIC);
        /// Whether lower or higher values are better.
        pub mode: StopMode = key(StopMode::KIND, "min", MODE);
    }
}

section! {
    /// `training.sample`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Sample(keys) in "training.sample" {
        pub prompt: String = key(Kind::Text, REQUIRED, "Prompt");
        pub tokens: usize = key(COUNT, "200", "Tokens to generate");
        pub temperature: f64 = key(NON_NEGATIVE, "0.8", "Sampling temperature, which divides the logits; 0: always the most likely token");
        pub top_k: Option<usize> = key(COUNT, "null", "Sample only from this number of most likely tokens");
    }
}

choice! {
    /// Device that layers run on.
    pub enum Compute {
        /// The CPU.
        Cpu = "cpu",
        /// NVIDIA GPUs, one for each rank of a machine.
        Cuda = "cuda",
    }
}

choice! {
    /// Whether lower or higher values of a metric are better.
    pub enum StopMode {
        /// Lower values.
        Min = "min",
        /// Higher values.
        Max = "max",
    }
}

choice! {
    /// Reaction to a gradient or loss that is not finite.
    pub enum Nonfinite {
        /// Skip the update and continue training.
        Skip = "skip",
        /// Stop the run.
        Stop = "stop",
    }
}

choice! {
    /// Reaction to a gradient norm far above the norms of preceding steps.
    pub enum OnSpike {
        /// Log a warning.
        Warn = "warn",
        /// Skip the update and continue training.
        Skip = "skip",
        /// Stop the run.
        Stop = "stop",
    }
}

choice! {
    /// Parameters that weight decay applies to.
    pub enum WeightDecayOn {
        /// Parameters with two or more dimensions, which excludes biases and norms.
        Matrices = "matrices",
        /// All parameters, the default of PyTorch and DeepSpeed.
        All = "all",
    }
}

/// 0 < x ≤ 1.
const SHRINKING: Kind = Kind::Float(Range { min: 0.0, max: 1.0, above: true, below: false });

/// Descriptions of the keys `metric` and `mode`, which two sections have.
const METRIC: &str = "Metric by which evaluations are compared: loss, the evaluation loss; loss_<name>, the evaluation loss of the data set `<name>`; or a metric that the program defines";
const MODE: &str = "Whether lower (min) or higher (max) values of the metric are better";

/// Number of steps of a run with neither `max_steps` nor `epochs`.
const DEFAULT_STEPS: usize = 100;

impl Training {
    /// Checks the keys against each other.
    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        if resolver.at(Self::max_steps) != At::Default && self.epochs.is_some() {
            let message = format!("`{}` and `{}` both set how long to train", Self::max_steps, Self::epochs);
            let help = Some("keep one of the two".to_string());
            resolver.contradiction(&[Self::max_steps, Self::epochs], message, help);
        }
        let reads_evaluations = [
            (Self::early_stopping, self.early_stopping.is_some(), "early stopping"),
            (Self::keep_best, self.keep_best.is_some(), "the choice of the best checkpoint"),
        ];
        for (key, is_set, reader) in reads_evaluations {
            if is_set && self.eval_every == 0 {
                let message = format!("{reader} compares evaluations, but the run has none");
                let help = Some(format!("set `eval_every`, and `{}` or `{}`", Data::eval, Data::eval_fraction));
                resolver.contradiction(&[key, Self::eval_every], message, help);
            }
        }
    }
}

/// Returns the name of a configuration without folder and extension. The angle brackets of names like `<stdin>` are
/// removed.
fn stem(name: &str) -> String {
    let stem = std::path::Path::new(name).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let stem = stem.trim_matches(['<', '>']);
    if stem.is_empty() { "run".to_string() } else { stem.to_string() }
}

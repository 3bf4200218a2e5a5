//! `training`: duration, seed, evaluation, checkpoints and stopping.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::choice;
use crate::reader::Resolver;

/// `training`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Training {
    /// Optimizer steps to train. Exactly one of this and `epochs` is set.
    pub max_steps: Option<usize>,
    /// Passes over the data to train.
    pub epochs: Option<f64>,
    /// Device that layers run on.
    pub device: Compute,
    /// Seed for initialisation, shuffling and dropout.
    pub seed: u64,
    /// Files and globs with the initial parameters, relative to the working directory; `None` draws them from the
    /// seed.
    pub initial_weights: Option<Vec<String>>,
    /// Make the results bit-identical for every power-of-two number of ranks, by adding the gradients of all
    /// micro-batches of the global batch in one binary tree.
    pub reproducible: bool,
    /// Steps between evaluations; 0 never evaluates.
    pub eval_every: usize,
    /// Micro-batches per evaluation and rank.
    pub eval_batches: usize,
    /// Steps between checkpoints; 0 saves none during training.
    pub save_every: usize,
    /// Save a checkpoint at the end of training. A run stopped by a signal always saves one.
    pub save_last: bool,
    /// Write the checkpoints during training in the background, from a copy of the state.
    pub save_async: bool,
    /// Number of checkpoints to keep; 0 keeps all.
    pub keep_last: usize,
    /// Always keep checkpoints whose step is a multiple of this; 0 disables the rule.
    pub keep_every: usize,
    /// Folder of the run.
    pub output_dir: String,
    /// Reaction to a gradient or loss that is not finite.
    pub nonfinite: Nonfinite,
    /// Stop the run after this many skipped steps in a row.
    pub max_skipped_steps: usize,
    /// Reaction to a gradient norm far above the preceding ones.
    pub spikes: Option<Spikes>,
    /// Steps between comparisons of replicated state across ranks; 0 never compares.
    pub compare_replicas_every: usize,
    /// Stop once evaluations no longer improve.
    pub early_stopping: Option<EarlyStopping>,
    /// Parameters that weight decay applies to.
    pub weight_decay_on: WeightDecayOn,
    /// Memory limit per rank, in bytes; `None` is the limit of the cgroup, or the memory of the machine.
    pub memory_limit: Option<u64>,
    /// File with the measured costs of this machine, written by `zero-train bench costs`.
    pub cost_table: Option<PathBuf>,
    /// Text to generate at the end of training.
    pub sample: Option<Sample>,
    /// Write the measured timeline of the run.
    pub trace: bool,
}

/// `training.spikes`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spikes {
    /// Number of steps whose median norm is the reference.
    pub window: usize,
    /// A norm above this multiple of the median is a spike.
    pub factor: f64,
    /// Reaction to a spike.
    pub action: OnSpike,
}

/// `training.early_stopping`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EarlyStopping {
    /// Evaluations without improvement before training stops.
    pub patience: usize,
    /// Minimum improvement over the best value.
    pub min_delta: f64,
    /// Metric to compare: `loss`, or a metric of the program.
    pub metric: String,
    /// Whether lower or higher values are better.
    pub mode: StopMode,
}

/// `training.sample`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// Text to continue.
    pub prompt: String,
    /// Tokens to generate.
    pub tokens: usize,
    /// Sampling temperature: divides the logits. 0 takes the most likely token.
    pub temperature: f64,
    /// Draw only from this many most likely tokens.
    pub top_k: Option<usize>,
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
    /// Reaction to a gradient norm far above the preceding ones.
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

/// Steps of a run with neither `max_steps` nor `epochs`.
const DEFAULT_STEPS: usize = 100;

impl Training {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let stem = stem(&resolver.report.source().name);
        let mut keys = resolver.section("training");
        let (steps, epochs) = (keys.optional_int("max_steps"), keys.optional_float("epochs"));
        let training = Self {
            max_steps: steps.or(epochs.is_none().then_some(DEFAULT_STEPS)),
            epochs,
            device: keys.choice("device", Compute::Cpu),
            seed: keys.u64("seed"),
            initial_weights: keys.texts("initial_weights"),
            reproducible: keys.bool("reproducible"),
            eval_every: keys.int("eval_every"),
            eval_batches: keys.int("eval_batches"),
            save_every: keys.int("save_every"),
            save_last: keys.bool("save_last"),
            save_async: keys.bool("save_async"),
            keep_last: keys.int("keep_last"),
            keep_every: keys.int("keep_every"),
            output_dir: keys.optional_text("output_dir").unwrap_or_else(|| format!("runs/{stem}")),
            nonfinite: keys.choice("nonfinite", Nonfinite::Skip),
            max_skipped_steps: keys.int("max_skipped_steps"),
            spikes: keys.inner("spikes").map(|mut keys| Spikes {
                window: keys.int("window"),
                factor: keys.float("factor"),
                action: keys.choice("action", OnSpike::Skip),
            }),
            compare_replicas_every: keys.int("compare_replicas_every"),
            early_stopping: keys.inner("early_stopping").map(|mut keys| EarlyStopping {
                patience: keys.int("patience"),
                min_delta: keys.float("min_delta"),
                metric: keys.text("metric"),
                mode: keys.choice("mode", StopMode::Min),
            }),
            weight_decay_on: keys.choice("weight_decay_on", WeightDecayOn::Matrices),
            memory_limit: keys.optional_u64("memory_limit"),
            cost_table: keys.optional_path("cost_table"),
            sample: keys.inner("sample").map(|mut keys| Sample {
                prompt: keys.text("prompt"),
                tokens: keys.int("tokens"),
                temperature: keys.float("temperature"),
                top_k: keys.optional_int("top_k"),
            }),
            trace: keys.bool("trace"),
        };
        if steps.is_some() && epochs.is_some() {
            let message = "`training.max_steps` and `training.epochs` both say how long to train".to_string();
            let help = Some("keep one of the two".to_string());
            resolver.contradiction(&["training.max_steps", "training.epochs"], message, help);
        }
        if training.early_stopping.is_some() && training.eval_every == 0 {
            let message = "early stopping looks at evaluations, and there are none".to_string();
            let help = Some("write `eval_every`, and `data.eval` or `data.eval_fraction`".to_string());
            resolver.contradiction(&["training.early_stopping", "training.eval_every"], message, help);
        }
        training
    }
}

/// Returns the name of a configuration without folder and extension. The angle brackets of names like `<stdin>` are
/// removed.
fn stem(name: &str) -> String {
    let stem = std::path::Path::new(name).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let stem = stem.trim_matches(['<', '>']);
    if stem.is_empty() { "run".to_string() } else { stem.to_string() }
}

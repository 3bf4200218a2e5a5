//! `training`: how long, from which seed, when to evaluate, save and stop.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::choice;
use crate::reader::Resolver;

/// `training`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Training {
    /// Optimizer steps to train. Exactly one of this and `epochs` is given.
    pub max_steps: Option<usize>,
    /// Passes over the data to train.
    pub epochs: Option<f64>,
    /// What layers run on.
    pub device: Compute,
    /// Seed of initialisation, shuffling and dropout.
    pub seed: u64,
    /// Files and globs with the model's parameters, relative to the working directory; drawn from the seed when not given.
    pub initial_weights: Option<Vec<String>>,
    /// Same bits at every number of ranks that is a power of two: gradients of all micro-batches of the global batch are added
    /// over one binary tree.
    pub reproducible: bool,
    /// Evaluate every so many steps; 0 never.
    pub eval_every: usize,
    /// Micro-batches per evaluation and rank.
    pub eval_batches: usize,
    /// Save a checkpoint every so many steps; 0 never on the way.
    pub save_every: usize,
    /// Save a checkpoint when training is over. A run that a signal stops saves one in any case.
    pub save_last: bool,
    /// Write those on the way while training goes on, from a copy of the state.
    pub save_async: bool,
    /// Checkpoints kept; 0 keeps all.
    pub keep_last: usize,
    /// Checkpoints of every so many steps are kept in any case; 0 none.
    pub keep_every: usize,
    /// Folder of the run.
    pub output_dir: String,
    /// What a gradient or loss that is not finite does.
    pub nonfinite: Nonfinite,
    /// So many skipped steps in a row stop the run.
    pub max_skipped_steps: usize,
    /// What to do about a gradient norm far above those before it.
    pub spikes: Option<Spikes>,
    /// Compare what ranks hold alike every so many steps; 0 never.
    pub compare_replicas_every: usize,
    /// Stop when evaluations no longer improve.
    pub early_stopping: Option<EarlyStopping>,
    /// Which parameters are decayed.
    pub weight_decay_on: WeightDecayOn,
    /// Bytes that a rank may hold; `None` is what the cgroup allows, or what the machine has.
    pub memory_limit: Option<u64>,
    /// What things take on this machine, as `zero-train bench costs` has written it.
    pub cost_table: Option<PathBuf>,
    /// Text to generate when training is over.
    pub sample: Option<Sample>,
    /// Write the measured timeline of the run.
    pub trace: bool,
}

/// `training.spikes`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spikes {
    /// Steps whose median a norm is compared with.
    pub window: usize,
    /// What is more than so many times the median is a spike.
    pub factor: f64,
    /// What is done about one.
    pub action: OnSpike,
}

/// `training.early_stopping`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EarlyStopping {
    /// Evaluations without improvement before training stops.
    pub patience: usize,
    /// What counts as improvement: a value better than the best by more than this.
    pub min_delta: f64,
    /// What is compared: `loss`, or a metric of the program's own.
    pub metric: String,
    /// Which value of it is better.
    pub mode: StopMode,
}

/// `training.sample`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// Text to continue.
    pub prompt: String,
    /// Tokens to generate.
    pub tokens: usize,
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Draw from the likeliest so many tokens only.
    pub top_k: Option<usize>,
}

choice! {
    /// What layers run on.
    pub enum Compute {
        /// The processor.
        Cpu = "cpu",
        /// GPUs of NVIDIA's, one for each rank of a machine.
        Cuda = "cuda",
    }
}

choice! {
    /// Which value of a metric is better.
    pub enum StopMode {
        /// The lower.
        Min = "min",
        /// The higher.
        Max = "max",
    }
}

choice! {
    /// What a gradient or loss that is not finite does.
    pub enum Nonfinite {
        /// Nothing is updated, and training goes on.
        Skip = "skip",
        /// The run ends.
        Stop = "stop",
    }
}

choice! {
    /// What is done about a gradient norm far above those before it.
    pub enum OnSpike {
        /// It is said.
        Warn = "warn",
        /// Nothing is updated, and training goes on.
        Skip = "skip",
        /// The run ends.
        Stop = "stop",
    }
}

choice! {
    /// Which parameters are decayed.
    pub enum WeightDecayOn {
        /// Those with two dimensions or more: not biases, not norms.
        Matrices = "matrices",
        /// Every parameter, as PyTorch and DeepSpeed do by themselves.
        All = "all",
    }
}

/// Steps of a run that says neither `max_steps` nor `epochs`.
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

/// The name of a configuration without folder and ending; `stdin` and the like without their marks.
fn stem(name: &str) -> String {
    let stem = std::path::Path::new(name).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let stem = stem.trim_matches(['<', '>']);
    if stem.is_empty() { "run".to_string() } else { stem.to_string() }
}

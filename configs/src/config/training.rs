//! `training`: how long, from which seed, when to evaluate, save and stop.

use serde::Serialize;

use crate::choice::choice;

/// `training`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Training {
    /// Optimizer steps to train. Exactly one of this and `epochs` is given.
    pub max_steps: Option<usize>,
    /// Passes over the data to train.
    pub epochs: Option<f64>,
    /// Seed of initialisation, shuffling and dropout.
    pub seed: u64,
    /// Same bits at every number of ranks that is a power of two: gradients of all micro-batches of the global batch are added
    /// over one binary tree.
    pub reproducible: bool,
    /// Evaluate every so many steps; 0 never.
    pub eval_every: usize,
    /// Micro-batches per evaluation and rank.
    pub eval_batches: usize,
    /// Save a checkpoint every so many steps; 0 only at the end.
    pub save_every: usize,
    /// Checkpoints kept; 0 keeps all.
    pub keep_last: usize,
    /// Folder of the run.
    pub output_dir: String,
    /// Stop when the evaluation loss no longer falls.
    pub early_stopping: Option<EarlyStopping>,
    /// Which parameters are decayed.
    pub weight_decay_on: WeightDecayOn,
    /// Text to generate when training is over.
    pub sample: Option<Sample>,
    /// Write the measured timeline of the run.
    pub trace: bool,
}

/// `training.early_stopping`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EarlyStopping {
    /// Evaluations without improvement before training stops.
    pub patience: usize,
    /// What counts as improvement: a loss lower than the best by more than this.
    pub min_delta: f64,
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
    /// Which parameters are decayed.
    pub enum WeightDecayOn {
        /// Those with two dimensions or more: not biases, not norms.
        Matrices = "matrices",
        /// Every parameter, as PyTorch and DeepSpeed do by themselves.
        All = "all",
    }
}

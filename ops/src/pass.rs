//! What an operation may know about the pass that it is part of.

/// What a layer may know about the pass that it is part of; all that dropout's masks depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Training, or evaluation.
    pub training: bool,
    /// `training.seed`.
    pub seed: u64,
    /// Optimizer step, from 1.
    pub step: u64,
    /// Index, in the whole run, of the first sample of this micro-batch.
    pub sample: u64,
    /// Index of the layer in the model.
    pub layer: u32,
}

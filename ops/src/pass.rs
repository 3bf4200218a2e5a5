//! The context of a pass, as operations see it.

/// The context of a forward or backward pass, as a layer sees it: everything that dropout's masks depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Whether this is training rather than evaluation.
    pub training: bool,
    /// `training.seed`.
    pub seed: u64,
    /// Optimizer step, counted from 1.
    pub step: u64,
    /// Index of the first sample of this micro-batch in the whole run.
    pub sample: u64,
    /// Index of the layer in the model.
    pub layer: u32,
}

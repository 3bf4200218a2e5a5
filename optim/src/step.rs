//! The inputs of an update that are not part of an optimizer.

/// The inputs that change from one step, or from one slice, to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Number of this optimizer step, counted from 1. Bias corrections depend on it.
    pub step: u64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Factor by which every gradient is multiplied before the update: the clip coefficient divided by the loss scale.
    pub grad_scale: f32,
    /// Largest absolute value of a gradient before it is scaled. Larger gradients are clipped to it. Infinity disables
    /// clipping.
    pub grad_limit: f32,
    /// Whether weight decay applies to this slice; biases and norms are usually excluded.
    pub decay: bool,
}

//! Settings of a single parameter's update.

/// How the update of a parameter differs from the settings of the run's optimizer and schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Multiplies the learning rate.
    pub lr_factor: f64,
    /// Weight decay that replaces the optimizer's. It applies to a parameter of any shape.
    pub weight_decay: Option<f64>,
    /// Decay rates (betas) of the first and second moment, which replace the optimizer's.
    pub betas: Option<(f64, f64)>,
    /// Whether the optimizer states are stored in 8 bits.
    pub eight_bit: bool,
    /// Whether the optimizer (LAMB or Adafactor) needs a norm of the whole parameter and therefore takes two passes
    /// over it.
    pub two_passes: bool,
    /// Index of the optimizer that updates the parameter, among the run's optimizers.
    pub optimizer: usize,
    /// 0 if the gradient is clipped together with the run's other parameters. Otherwise the number, from 1, of the
    /// parameter group that clips its gradients separately.
    pub clipping: usize,
}

impl Default for Tuning {
    /// Returns the tuning that changes nothing.
    fn default() -> Self {
        Self {
            lr_factor: 1.0,
            weight_decay: None,
            betas: None,
            eight_bit: false,
            two_passes: false,
            optimizer: 0,
            clipping: 0,
        }
    }
}

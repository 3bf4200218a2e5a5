//! What is special about the update of a parameter.

/// How the update of a parameter differs from what the optimizer and the schedule of the run say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Multiplies the learning rate.
    pub lr_factor: f64,
    /// Weight decay in place of the optimizer's, for a parameter of any shape.
    pub weight_decay: Option<f64>,
    /// Decay of the first and the second moment in place of the optimizer's.
    pub betas: Option<(f64, f64)>,
    /// Whether the optimizer's states have 8 bits.
    pub eight_bit: bool,
    /// Whether its optimizer needs a norm of the whole parameter, and takes two passes over it: LAMB and Adafactor.
    pub two_passes: bool,
    /// Which of the run's optimizers updates the parameter.
    pub optimizer: usize,
    /// How its gradient is clipped: 0 as most are, and otherwise by the norm of a group of parameters.
    pub clipping: usize,
}

impl Default for Tuning {
    /// No difference.
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

//! RAdam (Liu et al., 2020) as `torch.optim.RAdam` defines it: Adam that ignores the second moment in the first steps,
//! and later corrects for the moment's variance.
//!
//! ```text
//! ρ∞ = 2/(1−β₂) − 1        ρ = ρ∞ − 2tβ₂ᵗ/(1−β₂ᵗ)        r = √((ρ−4)(ρ−2)ρ∞ / ((ρ∞−4)(ρ∞−2)ρ))
//! θ ← θ − lr·m/(1−β₁ᵗ) · r√(1−β₂ᵗ)/(√v + ε)        if ρ > 5
//! θ ← θ − lr·m/(1−β₁ᵗ)                             otherwise
//! ```
//! Both steps are Adam's step with other factors, so they use Adam's rule and kernel.

use crate::Step;
use crate::rules::adamw::{AdamFactors, AdamW};

/// Hyperparameters of RAdam; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RAdam {
    /// Decay rates of the first and the second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// λ, the weight decay.
    pub weight_decay: f64,
    /// Whether the decay is decoupled, as in AdamW.
    pub decoupled: bool,
}

impl Default for RAdam {
    fn default() -> Self {
        RAdam { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, decoupled: false }
    }
}

impl RAdam {
    /// Computes the factors of Adam's rule for this step.
    pub(crate) fn factors(&self, step: &Step) -> AdamFactors {
        let Self { betas: (beta1, beta2), eps, weight_decay, decoupled } = *self;
        let adam = AdamW { betas: self.betas, eps, weight_decay, bias_correction: true, decoupled }.factors(step);
        let t = step.step as f64;
        let (correction1, power2) = (1.0 - libm::pow(beta1, t), libm::pow(beta2, t));
        let correction2 = 1.0 - power2;
        let whole = 2.0 / (1.0 - beta2) - 1.0;
        let length = whole - 2.0 * t * power2 / correction2;
        if length > 5.0 {
            let rectified = (length - 4.0) * (length - 2.0) * whole / ((whole - 4.0) * (whole - 2.0) * length);
            let size = step.lr / correction1 * correction2.sqrt() * rectified.sqrt();
            return AdamFactors { inv_root_correction2: 1.0, minus_step_size: -size as f32, ..adam };
        }
        // These factors make the denominator √v · 0 + 1.
        AdamFactors { inv_root_correction2: 0.0, eps: 1.0, minus_step_size: (-step.lr / correction1) as f32, ..adam }
    }
}

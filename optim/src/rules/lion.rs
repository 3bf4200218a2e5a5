//! Lion (Chen et al., 2023): the sign of an interpolation between momentum and gradient.
//!
//! ```text
//! θ ← θ(1 − lr·λ) − lr·sign(β₁m + (1−β₁)g)        m ← β₂m + (1−β₂)g
//! ```

use crate::factors::{Factors, Formula};
use crate::{Step, rules::rule::Rule};

/// Hyperparameters of Lion; the defaults are DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion {
    /// β₁, the weight of the momentum in the interpolation whose sign is taken, and β₂, the decay rate of the momentum.
    pub betas: (f64, f64),
    /// λ, decoupled.
    pub weight_decay: f64,
}

impl Default for Lion {
    fn default() -> Self {
        Lion { betas: (0.9, 0.999), weight_decay: 0.0 }
    }
}

impl Lion {
    pub(crate) fn rule(&self, step: &Step) -> LionRule {
        let (beta1, beta2) = self.betas;
        let decay = if step.decay { self.weight_decay } else { 0.0 };
        LionRule {
            grad_scale: step.grad_scale,
            keep: (1.0 - step.lr * decay) as f32,
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            minus_lr: -step.lr as f32,
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct LionRule {
    grad_scale: f32,
    keep: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    minus_lr: f32,
}

impl LionRule {
    pub(crate) fn factors(self) -> Factors {
        let Self { grad_scale, keep, beta1, one_minus_beta1, beta2, one_minus_beta2, minus_lr } = self;
        Factors::new(Formula::Lion, [keep, grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, minus_lr])
    }
}

impl Rule<1> for LionRule {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [m]: [f32; 1]) -> (f32, [f32; 1]) {
        let grad = grad * self.grad_scale;
        let direction = self.one_minus_beta1.mul_add(grad, self.beta1 * m);
        let m = self.one_minus_beta2.mul_add(grad, self.beta2 * m);
        (self.minus_lr.mul_add(sign(direction), param * self.keep), [m])
    }
}

/// Returns −1, 0 or 1, or NaN for NaN, so that a NaN never looks like "no change".
#[inline(always)]
fn sign(x: f32) -> f32 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else {
        x
    }
}

//! Adagrad (Duchi et al., 2011) as PyTorch and DeepSpeed define it, without learning-rate decay.
//!
//! ```text
//! g ← g + λθ        s ← s + g²        θ ← θ − lr·g / (√s + ε)
//! ```

use crate::factors::{Factors, Formula};
use crate::{Step, rules::rule::Rule};

/// Hyperparameters of Adagrad; the defaults are DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adagrad {
    /// Added to the square root of the sum.
    pub eps: f64,
    /// λ, added to the gradient as λθ (not decoupled).
    pub weight_decay: f64,
}

impl Default for Adagrad {
    fn default() -> Self {
        Adagrad { eps: 1e-10, weight_decay: 0.0 }
    }
}

impl Adagrad {
    pub(crate) fn rule(&self, step: &Step) -> AdagradRule {
        let decay = if step.decay { self.weight_decay } else { 0.0 };
        AdagradRule {
            grad_scale: step.grad_scale,
            decay: decay as f32,
            eps: self.eps as f32,
            minus_lr: -step.lr as f32,
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct AdagradRule {
    grad_scale: f32,
    decay: f32,
    eps: f32,
    minus_lr: f32,
}

impl AdagradRule {
    pub(crate) fn factors(self) -> Factors {
        Factors::new(Formula::Adagrad, [self.decay, self.grad_scale, self.eps, self.minus_lr])
    }
}

impl Rule<1> for AdagradRule {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [sum]: [f32; 1]) -> (f32, [f32; 1]) {
        let grad = self.decay.mul_add(param, grad * self.grad_scale);
        let sum = grad.mul_add(grad, sum);
        (self.minus_lr.mul_add(grad / (sum.sqrt() + self.eps), param), [sum])
    }
}

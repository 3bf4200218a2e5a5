//! Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019), in PyTorch's order of operations.
//!
//! ```text
//! m ← m + (1−β₁)(g − m)        v ← β₂v + (1−β₂)g²
//! θ ← θ − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε)
//! ```
//! Decoupled decay multiplies θ by 1 − lr·λ first; the classic form adds λθ to g instead.

use crate::Step;
use crate::rules::rule::{Rule, mean_square};

/// Hyperparameters of Adam and AdamW; the defaults are DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay rates of the first and the second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the square root of the second moment, after bias correction.
    pub eps: f64,
    /// λ, the weight decay.
    pub weight_decay: f64,
    /// Whether the moments are divided by 1 − βᵗ.
    pub bias_correction: bool,
    /// True for AdamW's decoupled decay, false for classic Adam, which adds λθ to the gradient.
    pub decoupled: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, bias_correction: true, decoupled: true }
    }
}

impl AdamW {
    /// Computes the factors that a step applies to every element.
    pub(crate) fn factors(&self, step: &Step) -> AdamFactors {
        let (beta1, beta2) = self.betas;
        let (correction1, correction2) = if self.bias_correction {
            let t = step.step as f64;
            (1.0 - libm::pow(beta1, t), 1.0 - libm::pow(beta2, t))
        } else {
            (1.0, 1.0)
        };
        let decay = if step.decay { self.weight_decay } else { 0.0 };
        AdamFactors {
            decay: if self.decoupled { (1.0 - step.lr * decay) as f32 } else { decay as f32 },
            grad_scale: step.grad_scale,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            inv_root_correction2: (1.0 / correction2.sqrt()) as f32,
            eps: self.eps as f32,
            minus_step_size: (-step.lr / correction1) as f32,
        }
    }
}

/// The factors of a step, computed in f64 and rounded to f32 once. Code that applies them in the order of this file's
/// formulas, with the same fused multiply-adds, gives results that are bit-identical to this file's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AdamFactors {
    /// 1 − lr·λ for decoupled decay, λ for classic Adam.
    pub(crate) decay: f32,
    /// Factor by which every gradient is multiplied before the update.
    pub(crate) grad_scale: f32,
    /// 1 − β₁
    pub(crate) one_minus_beta1: f32,
    /// β₂
    pub(crate) beta2: f32,
    /// 1 − β₂
    pub(crate) one_minus_beta2: f32,
    /// 1/√(1 − β₂ᵗ).
    pub(crate) inv_root_correction2: f32,
    /// ε
    pub(crate) eps: f32,
    /// −lr/(1 − β₁ᵗ)
    pub(crate) minus_step_size: f32,
}

impl AdamFactors {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [m, v]: [f32; 2]) -> (f32, [f32; 2]) {
        let m = self.one_minus_beta1.mul_add(grad - m, m);
        self.apply(param, grad, m, v)
    }

    /// Takes the step along the new first moment.
    #[inline(always)]
    fn apply(self, param: f32, grad: f32, m: f32, v: f32) -> (f32, [f32; 2]) {
        let v = mean_square(v, grad, self.beta2, self.one_minus_beta2);
        let denominator = v.sqrt().mul_add(self.inv_root_correction2, self.eps);
        (self.minus_step_size.mul_add(m / denominator, param), [m, v])
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Decoupled(pub(crate) AdamFactors);

impl Rule<2> for Decoupled {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, states: [f32; 2]) -> (f32, [f32; 2]) {
        self.0.step(param * self.0.decay, grad * self.0.grad_scale, states)
    }
}

/// Decoupled decay, with the first moment computed as in bitsandbytes: β₁m + (1−β₁)g rounds differently from m +
/// (1−β₁)(g − m).
#[derive(Clone, Copy)]
pub(crate) struct Summed {
    pub(crate) factors: AdamFactors,
    pub(crate) beta1: f32,
}

impl Rule<2> for Summed {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [m, v]: [f32; 2]) -> (f32, [f32; 2]) {
        let grad = grad * self.factors.grad_scale;
        let m = self.factors.one_minus_beta1.mul_add(grad, self.beta1 * m);
        self.factors.apply(param * self.factors.decay, grad, m, v)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct L2(pub(crate) AdamFactors);

impl Rule<2> for L2 {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, states: [f32; 2]) -> (f32, [f32; 2]) {
        self.0.step(param, self.0.decay.mul_add(param, grad * self.0.grad_scale), states)
    }
}

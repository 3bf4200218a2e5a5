//! NAdam (Dozat, 2016) as `torch.optim.NAdam` defines it: Adam with Nesterov's look-ahead along the first moment.
//!
//! ```text
//! μₜ = β₁(1 − 0.96^(tψ)/2)        Mₜ = μ₁μ₂…μₜ
//! m ← m + (1−β₁)(g − m)           v ← β₂v + (1−β₂)g²
//! θ ← θ − lr·((1−μₜ)/(1−Mₜ)·g + μₜ₊₁/(1−Mₜ₊₁)·m) / (√v/√(1−β₂ᵗ) + ε)
//! ```
//! Decoupled decay multiplies θ by 1 − lr·λ first; the other form adds λθ to g instead.

use crate::Step;
use crate::factors::{Factors, Formula};
use crate::rules::rule::{Rule, mean_square};

/// Hyperparameters of NAdam; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NAdam {
    /// Decay rates of the first and the second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the square root of the second moment, after bias correction.
    pub eps: f64,
    /// λ, the weight decay.
    pub weight_decay: f64,
    /// ψ, the speed at which μ rises from β₁/2 to β₁.
    pub momentum_decay: f64,
    /// Whether the decay is decoupled, as in AdamW.
    pub decoupled: bool,
}

impl Default for NAdam {
    fn default() -> Self {
        NAdam { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, momentum_decay: 4e-3, decoupled: false }
    }
}

impl NAdam {
    pub(crate) fn rule(&self, step: &Step) -> NAdamFactors {
        let (beta1, beta2) = self.betas;
        let (t, decay) = (step.step as f64, if step.decay { self.weight_decay } else { 0.0 });
        let root_correction2 = (1.0 - libm::pow(beta2, t)).sqrt();
        let Momenta { now, next, product } = self.momenta(step.step);
        // Numerator and denominator of the step are multiplied by the root of v's bias correction, which saves a
        // factor.
        let lr = step.lr * root_correction2;
        NAdamFactors {
            decay: if self.decoupled { (1.0 - step.lr * decay) as f32 } else { decay as f32 },
            grad_scale: step.grad_scale,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            eps: (self.eps * root_correction2) as f32,
            minus_grad_size: (-lr * (1.0 - now) / (1.0 - product)) as f32,
            minus_moment_size: (-lr * next / (1.0 - product * next)) as f32,
        }
    }

    /// Computes μ of this step and the next, and the product of all μ so far. PyTorch keeps the product as state; here
    /// it is computed anew, so a checkpoint need not store it.
    fn momenta(&self, step: u64) -> Momenta {
        // Once the product is too small to change 1 − product, further factors are not needed.
        const VANISHED: f64 = f64::EPSILON / 16.0;
        let power = libm::pow(0.96, self.momentum_decay);
        let mu = |power: f64| self.betas.0 * (1.0 - 0.5 * power);
        let (mut product, mut at) = (1.0, 1.0);
        for _ in 0..step {
            at *= power;
            product *= mu(at);
            if product < VANISHED {
                break;
            }
        }
        let of = |step: f64| mu(libm::pow(0.96, step * self.momentum_decay));
        Momenta { now: of(step as f64), next: of(step as f64 + 1.0), product }
    }

    pub(crate) fn factors(&self, step: &Step) -> Factors {
        let of = self.rule(step);
        let formula = if self.decoupled { Formula::NAdamW } else { Formula::NAdam };
        Factors::new(
            formula,
            [
                of.decay,
                of.grad_scale,
                of.one_minus_beta1,
                of.beta2,
                of.one_minus_beta2,
                of.eps,
                of.minus_grad_size,
                of.minus_moment_size,
            ],
        )
    }
}

struct Momenta {
    now: f64,
    next: f64,
    product: f64,
}

#[derive(Clone, Copy)]
pub(crate) struct NAdamFactors {
    decay: f32,
    grad_scale: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    eps: f32,
    minus_grad_size: f32,
    minus_moment_size: f32,
}

impl NAdamFactors {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [m, v]: [f32; 2]) -> (f32, [f32; 2]) {
        let m = self.one_minus_beta1.mul_add(grad - m, m);
        let v = mean_square(v, grad, self.beta2, self.one_minus_beta2);
        let ahead = self.minus_moment_size.mul_add(m, self.minus_grad_size * grad);
        (param + ahead / (v.sqrt() + self.eps), [m, v])
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Decoupled(pub(crate) NAdamFactors);

impl Rule<2> for Decoupled {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, states: [f32; 2]) -> (f32, [f32; 2]) {
        self.0.step(param * self.0.decay, grad * self.0.grad_scale, states)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct L2(pub(crate) NAdamFactors);

impl Rule<2> for L2 {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, states: [f32; 2]) -> (f32, [f32; 2]) {
        self.0.step(param, self.0.decay.mul_add(param, grad * self.0.grad_scale), states)
    }
}

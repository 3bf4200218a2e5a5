//! Stochastic gradient descent with momentum as PyTorch defines it.
//!
//! ```text
//! g ← g + λθ        b ← μb + (1−τ)g, but b ← g at the first step
//! θ ← θ − lr·b      or, with Nesterov's look-ahead, θ ← θ − lr·(g + μb)
//! ```

use crate::factors::{Factors, Formula};
use crate::{Step, rules::rule::Rule};

/// Hyperparameters of stochastic gradient descent; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sgd {
    /// μ; 0 means no momentum and no state.
    pub momentum: f64,
    /// τ, the fraction of each new gradient that does not enter the momentum.
    pub dampening: f64,
    /// Whether the step uses Nesterov's look-ahead along the momentum. Without momentum it has no effect.
    pub nesterov: bool,
    /// λ, added to the gradient as λθ (not decoupled).
    pub weight_decay: f64,
}

impl Sgd {
    pub(crate) fn plain_rule(&self, step: &Step) -> Plain {
        let decay = if step.decay { self.weight_decay } else { 0.0 };
        Plain { grad_scale: step.grad_scale, decay: decay as f32, minus_lr: -step.lr as f32 }
    }

    pub(crate) fn momentum_rule(&self, step: &Step) -> Momentum {
        // The buffer starts as zeros, so μb + 1·g equals PyTorch's first b ← g.
        let dampening = if step.step <= 1 { 0.0 } else { self.dampening };
        Momentum {
            plain: self.plain_rule(step),
            momentum: self.momentum as f32,
            one_minus_dampening: (1.0 - dampening) as f32,
        }
    }

    pub(crate) fn nesterov_rule(&self, step: &Step) -> Nesterov {
        Nesterov(self.momentum_rule(step))
    }

    pub(crate) fn factors(&self, step: &Step) -> Factors {
        let Momentum { plain, momentum, one_minus_dampening } = self.momentum_rule(step);
        let Plain { grad_scale, decay, minus_lr } = plain;
        let formula = match (self.momentum != 0.0, self.nesterov) {
            (false, _) => Formula::Sgd,
            (true, false) => Formula::Momentum,
            (true, true) => Formula::Nesterov,
        };
        Factors::new(formula, [decay, grad_scale, minus_lr, momentum, one_minus_dampening])
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Plain {
    grad_scale: f32,
    decay: f32,
    minus_lr: f32,
}

impl Plain {
    #[inline(always)]
    fn decayed(self, param: f32, grad: f32) -> f32 {
        self.decay.mul_add(param, grad * self.grad_scale)
    }
}

impl Rule<0> for Plain {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, []: [f32; 0]) -> (f32, [f32; 0]) {
        (self.minus_lr.mul_add(self.decayed(param, grad), param), [])
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Momentum {
    plain: Plain,
    momentum: f32,
    one_minus_dampening: f32,
}

impl Momentum {
    #[inline(always)]
    fn buffer(self, grad: f32, buffer: f32) -> f32 {
        self.one_minus_dampening.mul_add(grad, self.momentum * buffer)
    }
}

impl Rule<1> for Momentum {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [buffer]: [f32; 1]) -> (f32, [f32; 1]) {
        let buffer = self.buffer(self.plain.decayed(param, grad), buffer);
        (self.plain.minus_lr.mul_add(buffer, param), [buffer])
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Nesterov(Momentum);

impl Rule<1> for Nesterov {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [buffer]: [f32; 1]) -> (f32, [f32; 1]) {
        let grad = self.0.plain.decayed(param, grad);
        let buffer = self.0.buffer(grad, buffer);
        let ahead = self.0.momentum.mul_add(buffer, grad);
        (self.0.plain.minus_lr.mul_add(ahead, param), [buffer])
    }
}

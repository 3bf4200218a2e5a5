//! RMSprop (Hinton, 2012) as `torch.optim.RMSprop` defines it.
//!
//! ```text
//! g ← g + λθ        v ← αv + (1−α)g²
//! d = √v + ε        or, centered, a ← a + (1−α)(g − a) and d = √(v − a²) + ε
//! θ ← θ − lr·g/d    or, with momentum, b ← μb + g/d and θ ← θ − lr·b
//! ```

use crate::Step;
use crate::factors::{Factors, Formula};
use crate::rules::rule::{Rule, mean_square};

/// Hyperparameters of RMSprop; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsProp {
    /// α, the decay of the mean of squared gradients.
    pub alpha: f64,
    /// Added to the square root.
    pub eps: f64,
    /// λ, added to the gradient as λθ (not decoupled).
    pub weight_decay: f64,
    /// The plain step, or one of its two extensions.
    pub variant: RmsPropVariant,
}

/// An extension of RMSprop. PyTorch can also combine momentum and centering.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RmsPropVariant {
    /// No extension: divides by the root of the mean square.
    Plain,
    /// Accumulates the steps with this factor μ.
    Momentum(f64),
    /// Divides by the root of the variance. If rounding makes the variance negative, PyTorch's root is NaN; here it
    /// is 0.
    Centered,
}

impl Default for RmsProp {
    fn default() -> Self {
        RmsProp { alpha: 0.99, eps: 1e-8, weight_decay: 0.0, variant: RmsPropVariant::Plain }
    }
}

impl RmsProp {
    pub(crate) fn plain_rule(&self, step: &Step) -> Plain {
        let decay = if step.decay { self.weight_decay } else { 0.0 };
        Plain {
            grad_scale: step.grad_scale,
            decay: decay as f32,
            alpha: self.alpha as f32,
            one_minus_alpha: (1.0 - self.alpha) as f32,
            eps: self.eps as f32,
            minus_lr: -step.lr as f32,
        }
    }

    pub(crate) fn momentum_rule(&self, step: &Step, momentum: f64) -> Momentum {
        Momentum { plain: self.plain_rule(step), momentum: momentum as f32 }
    }

    pub(crate) fn centered_rule(&self, step: &Step) -> Centered {
        Centered(self.plain_rule(step))
    }

    pub(crate) fn factors(&self, step: &Step) -> Factors {
        let Plain { grad_scale, decay, alpha, one_minus_alpha, eps, minus_lr } = self.plain_rule(step);
        let (formula, momentum) = match self.variant {
            RmsPropVariant::Plain => (Formula::RmsProp, 0.0),
            RmsPropVariant::Momentum(momentum) => (Formula::RmsPropMomentum, momentum),
            RmsPropVariant::Centered => (Formula::RmsPropCentered, 0.0),
        };
        Factors::new(formula, [decay, grad_scale, alpha, one_minus_alpha, eps, minus_lr, momentum as f32])
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Plain {
    grad_scale: f32,
    decay: f32,
    alpha: f32,
    one_minus_alpha: f32,
    eps: f32,
    minus_lr: f32,
}

impl Plain {
    /// Returns the decayed gradient and the new mean square.
    #[inline(always)]
    fn square(self, param: f32, grad: f32, mean: f32) -> (f32, f32) {
        let grad = self.decay.mul_add(param, grad * self.grad_scale);
        (grad, mean_square(mean, grad, self.alpha, self.one_minus_alpha))
    }
}

impl Rule<1> for Plain {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [mean]: [f32; 1]) -> (f32, [f32; 1]) {
        let (grad, mean) = self.square(param, grad, mean);
        (self.minus_lr.mul_add(grad / (mean.sqrt() + self.eps), param), [mean])
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Momentum {
    plain: Plain,
    momentum: f32,
}

impl Rule<2> for Momentum {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [mean, buffer]: [f32; 2]) -> (f32, [f32; 2]) {
        let (grad, mean) = self.plain.square(param, grad, mean);
        let buffer = self.momentum.mul_add(buffer, grad / (mean.sqrt() + self.plain.eps));
        (self.plain.minus_lr.mul_add(buffer, param), [mean, buffer])
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Centered(Plain);

impl Rule<2> for Centered {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [mean, average]: [f32; 2]) -> (f32, [f32; 2]) {
        let (grad, mean) = self.0.square(param, grad, mean);
        let average = self.0.one_minus_alpha.mul_add(grad - average, average);
        let variance = (-average).mul_add(average, mean);
        // Not `max`, which would hide a NaN.
        let variance = if variance < 0.0 { 0.0 } else { variance };
        (self.0.minus_lr.mul_add(grad / (variance.sqrt() + self.0.eps), param), [mean, average])
    }
}

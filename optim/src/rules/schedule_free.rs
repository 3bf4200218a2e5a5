//! Schedule-free AdamW (Defazio et al., 2024, "The Road Less Scheduled"): an average of the iterates replaces a
//! decaying learning rate.
//!
//! A parameter has three sequences: z takes the steps, x is the average of z and serves for evaluation, and gradients
//! are taken at y = (1−β₁)z + β₁x.
//! ```text
//! v ← β₂v + (1−β₂)g²       d = g / (√v/√(1−β₂ᵗ) + ε) + λy
//! z ← z − lr·d             x ← (1−c)x + c·z        c = w / Σw,  w = tʳ·(largest lr so far)^p
//! ```
//! These are the formulas of `schedulefree.AdamWScheduleFree`. The parameters hold y. The package stores z; this crate
//! stores x − y as the state, which starts as zeros and from which x follows without β₁. The results differ from the
//! package's only by rounding:
//! ```text
//! y ← y − cβ₁/(1−β₁)·(x−y) − lr(1−β₁(1−c))·d        (x−y) ← (1−c)·((x−y) + lr(1−β₁)·d)
//! ```

use crate::Step;
use crate::factors::{Factors, Formula};
use crate::rules::rule::{Rule, mean_square};

/// Hyperparameters of schedule-free AdamW; the defaults are those of the package `schedulefree`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleFree {
    /// β₁, the share of the average in the point at which gradients are taken, and β₂, the decay rate of the second
    /// moment; each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the square root of the second moment, after bias correction.
    pub eps: f64,
    /// λ, the weight decay, which applies to y.
    pub weight_decay: f64,
    /// r, the exponent of the step number in the weight of the step's iterate.
    pub r: f64,
    /// p, the exponent of the largest learning rate so far in the weight of an iterate.
    pub weight_lr_power: f64,
    /// c, the share of this step's iterate in the average: [`AverageSums::share`]. The caller sets it for each step.
    pub share: f64,
}

impl Default for ScheduleFree {
    fn default() -> Self {
        let (betas, eps, weight_decay) = ((0.9, 0.999), 1e-8, 0.0);
        ScheduleFree { betas, eps, weight_decay, r: 0.0, weight_lr_power: 2.0, share: 1.0 }
    }
}

/// The sum of the weights of all steps so far. All parameters share this sum, because constant factors of their
/// learning rates cancel in c.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AverageSums {
    /// Sum of the weights.
    pub weights: f64,
    /// Largest learning rate.
    pub largest_lr: f64,
}

impl AverageSums {
    /// Returns the sums after step `step` with this learning rate.
    #[must_use]
    pub fn after(self, of: &ScheduleFree, step: u64, lr: f64) -> Self {
        let largest_lr = self.largest_lr.max(lr);
        Self { weights: self.weights + of.weight(step, largest_lr), largest_lr }
    }

    /// Returns c, the share of this step's iterate in the average. It is 0 as long as all learning rates are 0.
    #[must_use]
    pub fn share(self, of: &ScheduleFree, step: u64, lr: f64) -> f64 {
        let after = self.after(of, step, lr);
        if after.weights > 0.0 { of.weight(step, after.largest_lr) / after.weights } else { 0.0 }
    }
}

impl ScheduleFree {
    /// The name of the state x − y. Adding it to the parameter gives the value for evaluation.
    pub const OFFSET: &'static str = "x_minus_y";

    fn weight(&self, step: u64, largest_lr: f64) -> f64 {
        libm::pow(step as f64, self.r) * libm::pow(largest_lr, self.weight_lr_power)
    }

    pub(crate) fn rule(&self, step: &Step) -> ScheduleFreeFactors {
        let (beta1, beta2) = self.betas;
        let (share, kept) = (self.share, 1.0 - self.share);
        ScheduleFreeFactors {
            decay: if step.decay { self.weight_decay as f32 } else { 0.0 },
            grad_scale: step.grad_scale,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            inv_root_correction2: (1.0 / (1.0 - libm::pow(beta2, step.step as f64)).sqrt()) as f32,
            eps: self.eps as f32,
            minus_pull: (-share * beta1 / (1.0 - beta1)) as f32,
            minus_step_size: (-step.lr * (1.0 - beta1 * kept)) as f32,
            kept: kept as f32,
            offset_size: (step.lr * (1.0 - beta1)) as f32,
        }
    }

    pub(crate) fn factors(&self, step: &Step) -> Factors {
        let of = self.rule(step);
        Factors::new(
            Formula::ScheduleFree,
            [
                of.decay,
                of.grad_scale,
                of.beta2,
                of.one_minus_beta2,
                of.inv_root_correction2,
                of.eps,
                of.minus_pull,
                of.minus_step_size,
                of.kept,
                of.offset_size,
            ],
        )
    }
}

#[derive(Clone, Copy)]
pub(crate) struct ScheduleFreeFactors {
    decay: f32,
    grad_scale: f32,
    beta2: f32,
    one_minus_beta2: f32,
    inv_root_correction2: f32,
    eps: f32,
    minus_pull: f32,
    minus_step_size: f32,
    kept: f32,
    offset_size: f32,
}

impl Rule<2> for ScheduleFreeFactors {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [offset, v]: [f32; 2]) -> (f32, [f32; 2]) {
        let grad = grad * self.grad_scale;
        let v = mean_square(v, grad, self.beta2, self.one_minus_beta2);
        let direction = grad / v.sqrt().mul_add(self.inv_root_correction2, self.eps);
        let direction = self.decay.mul_add(param, direction);
        let param = self.minus_step_size.mul_add(direction, self.minus_pull.mul_add(offset, param));
        (param, [self.kept * self.offset_size.mul_add(direction, offset), v])
    }
}

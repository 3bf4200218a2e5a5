//! Describes an optimizer step as a formula and its factors, for devices that cannot run this crate's loops.

use crate::rules::adamw::AdamFactors;
use crate::{Optimizer, Step};

/// The formula of one element's step. The order of the variants is the numbering that device kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Formula {
    /// Adam with decoupled weight decay. Factors: 1 − lr·λ, gradient scale, 1 − β₁, β₂, 1 − β₂, 1/√(1 − β₂ᵗ), ε, −lr/(1
    /// − β₁ᵗ).
    AdamW,
    /// Classic Adam. Factors: as `AdamW`, but the first is λ.
    Adam,
    /// Gradient descent without momentum. Factors: λ, gradient scale, −lr.
    Sgd,
    /// Gradient descent with momentum. Factors: as `Sgd`, then μ, 1 − τ.
    Momentum,
    /// Gradient descent with Nesterov's look-ahead. Factors: as `Momentum`.
    Nesterov,
    /// Lion. Factors: 1 − lr·λ, gradient scale, β₁, 1 − β₁, β₂, 1 − β₂, −lr.
    Lion,
    /// Adagrad. Factors: λ, gradient scale, ε, −lr.
    Adagrad,
    /// RMSprop. Factors: λ, gradient scale, α, 1 − α, ε, −lr.
    RmsProp,
    /// RMSprop with momentum. Factors: as `RmsProp`, then μ.
    RmsPropMomentum,
    /// RMSprop, centered. Factors: as `RmsProp`.
    RmsPropCentered,
    /// NAdam with the decay added to the gradient. Factors: λ, gradient scale, 1 − β₁, β₂, 1 − β₂, ε√(1 − β₂ᵗ), the
    /// step along the gradient and the step along the first moment. Both steps are negated and multiplied by √(1 −
    /// β₂ᵗ).
    NAdam,
    /// NAdam with decoupled decay. Factors: as `NAdam`, but the first is 1 − lr·λ.
    NAdamW,
    /// Schedule-free AdamW. Factors: λ, gradient scale, β₂, 1 − β₂, 1/√(1 − β₂ᵗ), ε, −cβ₁/(1 − β₁), −lr(1 − β₁(1 − c)),
    /// 1 − c, lr(1 − β₁).
    ScheduleFree,
}

/// The formula of a step and the factors it applies to every element. The factors are computed in f64 and rounded to
/// f32 once. A device that applies them in the order of this crate's formulas, with the same fused multiply-adds,
/// computes results that are bit-identical to this crate's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// The formula.
    pub formula: Formula,
    /// The factors, in the order given at the [`Formula`], padded with zeros.
    pub values: [f32; Factors::MAX],
    /// The limit of a gradient's absolute value, as in [`Step::grad_limit`].
    pub grad_limit: f32,
}

impl Factors {
    /// The largest number of factors of any formula.
    pub const MAX: usize = 10;

    pub(crate) fn new<const N: usize>(formula: Formula, factors: [f32; N]) -> Self {
        let mut values = [0.0; Self::MAX];
        values[..N].copy_from_slice(&factors);
        Self { formula, values, grad_limit: f32::INFINITY }
    }
}

impl Optimizer {
    /// Returns the formula and the factors of a step.
    ///
    /// # Panics
    /// Panics for Muon, LAMB, Adafactor and optimizers of the caller, which do not run on devices.
    #[must_use]
    pub fn factors(&self, step: &Step) -> Factors {
        Factors { grad_limit: step.grad_limit, ..self.unlimited(step) }
    }

    fn unlimited(&self, step: &Step) -> Factors {
        match self {
            Self::AdamW(adamw) => adam(adamw.decoupled, adamw.factors(step)),
            Self::RAdam(radam) => adam(radam.decoupled, radam.factors(step)),
            Self::NAdam(nadam) => nadam.factors(step),
            Self::RmsProp(rmsprop) => rmsprop.factors(step),
            Self::Muon(_) | Self::Lamb(_) | Self::Adafactor(_) | Self::Custom(_) => {
                unreachable!("{self:?} is not implemented on a GPU")
            }
            Self::Sgd(sgd) => sgd.factors(step),
            Self::ScheduleFree(free) => free.factors(step),
            Self::Lion(lion) => lion.rule(step).factors(),
            Self::Adagrad(adagrad) => adagrad.rule(step).factors(),
        }
    }
}

fn adam(decoupled: bool, of: AdamFactors) -> Factors {
    let formula = if decoupled { Formula::AdamW } else { Formula::Adam };
    Factors::new(
        formula,
        [
            of.decay,
            of.grad_scale,
            of.one_minus_beta1,
            of.beta2,
            of.one_minus_beta2,
            of.inv_root_correction2,
            of.eps,
            of.minus_step_size,
        ],
    )
}

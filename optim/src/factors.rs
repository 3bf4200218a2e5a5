//! An optimizer's step as a formula and its factors, for whoever carries it out elsewhere than on slices of the host.

use crate::{Optimizer, Step};

/// Which formula an element's step is; in the order in which devices number them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Formula {
    /// Adam with decoupled weight decay: 1 − lr·λ, gradient scale, 1 − β₁, β₂, 1 − β₂, 1/√(1 − β₂ᵗ), ε, −lr/(1 − β₁ᵗ).
    AdamW,
    /// Classic Adam: the same, but λ in front.
    Adam,
    /// Gradient descent without state: λ, gradient scale, −lr.
    Sgd,
    /// With momentum: the same, then μ, 1 − τ.
    Momentum,
    /// With Nesterov's look-ahead: the same.
    Nesterov,
    /// Lion: 1 − lr·λ, gradient scale, β₁, 1 − β₁, β₂, 1 − β₂, −lr.
    Lion,
    /// Adagrad: λ, gradient scale, ε, −lr.
    Adagrad,
}

/// What a step does to every element alike. The factors are computed in f64 and rounded to f32 once: whoever applies them in the order of
/// the formulas of this crate, with its fused multiply-adds, gets the same bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// Which formula.
    pub formula: Formula,
    /// Its factors, in the order that the formula says, and zeros behind them.
    pub values: [f32; 8],
}

impl Factors {
    pub(crate) fn new<const N: usize>(formula: Formula, factors: [f32; N]) -> Self {
        let mut values = [0.0; 8];
        values[..N].copy_from_slice(&factors);
        Self { formula, values }
    }
}

impl Optimizer {
    /// The formula and the factors of a step.
    #[must_use]
    pub fn factors(&self, step: &Step) -> Factors {
        match self {
            Self::AdamW(adamw) => {
                let of = adamw.factors(step);
                let formula = if adamw.decoupled { Formula::AdamW } else { Formula::Adam };
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
            Self::Sgd(sgd) => sgd.factors(step),
            Self::Lion(lion) => lion.rule(step).factors(),
            Self::Adagrad(adagrad) => adagrad.rule(step).factors(),
        }
    }
}

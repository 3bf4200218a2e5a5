//! Optimizers, learning-rate schedules, gradient norms and loss scales as functions over slices.
//!
//! This crate knows nothing about tensors, ranks or files: [`update`] takes the parameters, gradients and optimizer
//! state of any contiguous range and takes one step on it in a single pass over memory. Every element is updated
//! independently, so updating a shard is bit-identical to updating the same range of the whole parameter.
//!
//! ```
//! use zero_optim::{AdamW, Optimizer, Step, update};
//!
//! let optimizer = Optimizer::AdamW(AdamW::default());
//! let (mut params, grads) = (vec![1.0f32; 8], vec![0.5f32; 8]);
//! let (mut exp_avg, mut exp_avg_sq) = (vec![0.0f32; 8], vec![0.0f32; 8]);
//! let step = Step { step: 1, lr: 1e-3, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: true };
//! update(&optimizer, &step, &mut params, &grads, &mut [&mut exp_avg, &mut exp_avg_sq])?;
//! # Ok::<(), zero_optim::LengthError>(())
//! ```

mod average;
mod block_codes;
mod custom;
mod eight_bit;
mod factors;
mod half_float;
mod rules;
mod simd;
mod step;
mod stored;
#[cfg(test)]
mod tests;

pub mod exact_sum;
pub mod loss_scale;
pub mod norm;
pub mod schedule;

pub use average::{Average, average};
pub use block_codes::BlockCodes;
pub use custom::{Custom, CustomOptimizer, CustomStep, MatrixStates, Update};
pub use eight_bit::{BLOCK as EIGHT_BIT_BLOCK, EightBit};
pub use exact_sum::ExactSum;
pub use factors::{Factors, Formula};
pub use half_float::{HalfFloat, read_half, rounded, write_bf16_at_random, write_half};
pub use loss_scale::{DynamicLossScale, LossScaleState, LossScaler, LossScaling};
pub use rules::adafactor::{Adafactor, SecondMoment};
pub use rules::adagrad::Adagrad;
pub use rules::adamw::AdamW;
pub use rules::lamb::{Lamb, Squares};
pub use rules::lion::Lion;
pub use rules::muon::Muon;
pub use rules::nadam::NAdam;
pub use rules::radam::RAdam;
pub use rules::rmsprop::{RmsProp, RmsPropVariant};
pub use rules::rule::multiply_add;
pub use rules::schedule_free::{AverageSums, ScheduleFree};
pub use rules::sgd::Sgd;
pub use schedule::{LrRangeTest, OneCycle, Rate, Schedule, Warmup};
pub use step::Step;
pub use stored::Stored;

use rules::adamw::{Decoupled, L2, Summed};
use rules::nadam;
use rules::rule::apply;
use zero_isa::Isa;

/// An optimizer and its hyperparameters. The learning rate comes from a [`Schedule`] at each step.
#[derive(Debug, Clone, PartialEq)]
pub enum Optimizer {
    /// Adam with decoupled weight decay, or classic Adam.
    AdamW(AdamW),
    /// Stochastic gradient descent, with or without momentum.
    Sgd(Sgd),
    /// Steps along the sign of an interpolation between momentum and gradient.
    Lion(Lion),
    /// Steps divided by the square root of the sum of all squared gradients.
    Adagrad(Adagrad),
    /// Steps divided by the root of the mean of squared gradients.
    RmsProp(RmsProp),
    /// Adam with Nesterov's look-ahead.
    NAdam(NAdam),
    /// Adam with a correction for the variance of its second moment.
    RAdam(RAdam),
    /// Orthogonalized momentum of whole matrices. [`update`] does not support it: see [`Muon::direction`].
    Muon(Muon),
    /// Adam with a trust ratio for each parameter. [`update`] takes the second half of a step, after
    /// [`Lamb::accumulate`].
    Lamb(Lamb),
    /// AdamW with an average of the iterates in place of a schedule.
    ScheduleFree(ScheduleFree),
    /// Second moments with one value for each row and column. For a parameter that is not a matrix, [`update`] takes
    /// the second half of a step.
    Adafactor(Adafactor),
    /// An optimizer of the caller.
    Custom(Custom),
}

impl Optimizer {
    /// Names of the state slices that [`update`] takes, in the same order. Each slice is as long as the parameters and
    /// starts as zeros. For optimizers that PyTorch has, other than Muon, the names are PyTorch's.
    pub fn states(&self) -> &'static [&'static str] {
        match self {
            Optimizer::AdamW(_) | Optimizer::NAdam(_) | Optimizer::RAdam(_) | Optimizer::Lamb(_) => {
                &["exp_avg", "exp_avg_sq"]
            }
            Optimizer::ScheduleFree(_) => &[ScheduleFree::OFFSET, "exp_avg_sq"],
            Optimizer::Sgd(sgd) if sgd.momentum != 0.0 => &["momentum_buffer"],
            Optimizer::Sgd(_) => &[],
            Optimizer::Lion(_) | Optimizer::Muon(_) => &["exp_avg"],
            Optimizer::Adafactor(_) => &["variance"],
            Optimizer::Custom(custom) => custom.rule.states(),
            Optimizer::Adagrad(_) => &["sum"],
            Optimizer::RmsProp(RmsProp { variant, .. }) => match variant {
                RmsPropVariant::Plain => &["square_avg"],
                RmsPropVariant::Momentum(_) => &["square_avg", "momentum_buffer"],
                RmsPropVariant::Centered => &["square_avg", "grad_avg"],
            },
        }
    }

    /// Returns the optimizer with these betas, such as those of [`Rate::betas`]. Returns it unchanged if `betas` is
    /// `None` or the optimizer has no betas.
    #[must_use]
    pub fn with_betas(mut self, betas: Option<(f64, f64)>) -> Self {
        if let (Some(betas), Some(own)) = (betas, self.betas_mut()) {
            *own = betas;
        }
        self
    }

    /// Returns the optimizer with this weight decay, or unchanged if it is `None`.
    #[must_use]
    pub fn with_weight_decay(mut self, weight_decay: Option<f64>) -> Self {
        let Some(new) = weight_decay else { return self };
        match &mut self {
            Optimizer::AdamW(AdamW { weight_decay, .. })
            | Optimizer::Sgd(Sgd { weight_decay, .. })
            | Optimizer::Lion(Lion { weight_decay, .. })
            | Optimizer::Adagrad(Adagrad { weight_decay, .. })
            | Optimizer::RmsProp(RmsProp { weight_decay, .. })
            | Optimizer::NAdam(NAdam { weight_decay, .. })
            | Optimizer::RAdam(RAdam { weight_decay, .. })
            | Optimizer::Lamb(Lamb { weight_decay, .. })
            | Optimizer::ScheduleFree(ScheduleFree { weight_decay, .. })
            | Optimizer::Adafactor(Adafactor { weight_decay, .. })
            | Optimizer::Muon(Muon { weight_decay, .. })
            | Optimizer::Custom(Custom { weight_decay, .. }) => *weight_decay = new,
        }
        self
    }

    /// Returns a schedule-free optimizer with [`ScheduleFree::share`] set for a step with this number and learning
    /// rate. Returns any other optimizer unchanged.
    #[must_use]
    pub fn with_share(mut self, sums: AverageSums, step: u64, lr: f64) -> Self {
        if let Optimizer::ScheduleFree(free) = &mut self {
            free.share = sums.share(free, step, lr);
        }
        self
    }

    fn betas_mut(&mut self) -> Option<&mut (f64, f64)> {
        match self {
            Optimizer::AdamW(AdamW { betas, .. })
            | Optimizer::Lion(Lion { betas, .. })
            | Optimizer::NAdam(NAdam { betas, .. })
            | Optimizer::RAdam(RAdam { betas, .. })
            | Optimizer::Lamb(Lamb { betas, .. })
            | Optimizer::ScheduleFree(ScheduleFree { betas, .. }) => Some(betas),
            Optimizer::Sgd(_)
            | Optimizer::Adagrad(_)
            | Optimizer::RmsProp(_)
            | Optimizer::Adafactor(_)
            | Optimizer::Muon(_)
            | Optimizer::Custom(_) => None,
        }
    }
}

/// Error: a slice does not have the required length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected {expected} elements, got {found}")]
pub struct LengthError {
    /// The argument with the wrong length, such as `grads`, `dst` or the name of a state; `states` if the number of
    /// states is wrong.
    pub what: &'static str,
    /// The required length.
    pub expected: usize,
    /// The length of the argument.
    pub found: usize,
}

/// Takes one optimizer step over one contiguous range, in place, in one pass over memory.
///
/// `states` are the slices named by [`Optimizer::states`], each as long as `params`. Parameters and states are in f32
/// or bf16; the step is computed in f32, and each result is rounded once. The instruction set is chosen at run time;
/// the results are bit-identical on all of them, except for the payload of a NaN. Infinities and NaNs in the gradients
/// go into the state: to skip such a step, check the gradient norm first.
///
/// # Errors
/// Fails if a slice's length differs from that of `params`, or the number of states is wrong. In that case nothing is
/// written.
///
/// # Panics
/// Panics for Muon, which updates whole matrices.
pub fn update<P: Stored, S: Stored>(
    optimizer: &Optimizer,
    step: &Step,
    params: &mut [P],
    grads: &[f32],
    states: &mut [&mut [S]],
) -> Result<(), LengthError> {
    update_at(Isa::current(), optimizer, step, params, grads, states)
}

/// Like [`update`], for states that were stored in 8 bits and have been restored. AdamW's moments are computed in
/// bitsandbytes' order of operations, so that the states stay equal to those of bitsandbytes.
///
/// # Errors
/// See [`update`].
pub fn update_restored<P: Stored>(
    optimizer: &Optimizer,
    step: &Step,
    params: &mut [P],
    grads: &[f32],
    states: &mut [&mut [f32]],
) -> Result<(), LengthError> {
    let (Optimizer::AdamW(adamw @ AdamW { decoupled: true, .. }), [m, v]) = (optimizer, &mut *states) else {
        return update(optimizer, step, params, grads, states);
    };
    for (name, length) in [("grads", grads.len()), ("exp_avg", m.len()), ("exp_avg_sq", v.len())] {
        expect_length(name, params.len(), length)?;
    }
    let rule = Summed { factors: adamw.factors(step), beta1: adamw.betas.0 as f32 };
    apply((Isa::current(), step.grad_limit), rule, params, grads, [m, v]);
    Ok(())
}

fn update_at<P: Stored, S: Stored>(
    isa: Isa,
    optimizer: &Optimizer,
    step: &Step,
    params: &mut [P],
    grads: &[f32],
    states: &mut [&mut [S]],
) -> Result<(), LengthError> {
    let names = optimizer.states();
    expect_length("grads", params.len(), grads.len())?;
    expect_length("states", names.len(), states.len())?;
    for (name, state) in names.iter().zip(states.iter()) {
        expect_length(name, params.len(), state.len())?;
    }
    let at = (isa, step.grad_limit);
    match (optimizer, states) {
        (Optimizer::Adafactor(of), [moment]) => of.advance(step, params, grads, SecondMoment::Full(moment))?,
        (Optimizer::Custom(custom), states) => custom.advance(step, params, grads, states),
        (Optimizer::Lamb(lamb), [m, v]) => lamb.advance(isa, step, params, [m, v]),
        (Optimizer::AdamW(adamw), [m, v]) if adamw.decoupled => {
            apply(at, Decoupled(adamw.factors(step)), params, grads, [m, v])
        }
        (Optimizer::AdamW(adamw), [m, v]) => apply(at, L2(adamw.factors(step)), params, grads, [m, v]),
        (Optimizer::Sgd(sgd), [buffer]) if sgd.nesterov => apply(at, sgd.nesterov_rule(step), params, grads, [buffer]),
        (Optimizer::Sgd(sgd), [buffer]) => apply(at, sgd.momentum_rule(step), params, grads, [buffer]),
        (Optimizer::Sgd(sgd), []) => apply::<0, _, P, S>(at, sgd.plain_rule(step), params, grads, []),
        (Optimizer::ScheduleFree(free), [offset, v]) => apply(at, free.rule(step), params, grads, [offset, v]),
        (Optimizer::Lion(lion), [m]) => apply(at, lion.rule(step), params, grads, [m]),
        (Optimizer::Adagrad(adagrad), [sum]) => apply(at, adagrad.rule(step), params, grads, [sum]),
        (Optimizer::NAdam(nadam), [m, v]) if nadam.decoupled => {
            apply(at, nadam::Decoupled(nadam.rule(step)), params, grads, [m, v])
        }
        (Optimizer::NAdam(nadam), [m, v]) => apply(at, nadam::L2(nadam.rule(step)), params, grads, [m, v]),
        (Optimizer::RAdam(radam), [m, v]) if radam.decoupled => {
            apply(at, Decoupled(radam.factors(step)), params, grads, [m, v])
        }
        (Optimizer::RAdam(radam), [m, v]) => apply(at, L2(radam.factors(step)), params, grads, [m, v]),
        (Optimizer::RmsProp(rmsprop), states) => match (rmsprop.variant, states) {
            (RmsPropVariant::Plain, [mean]) => apply(at, rmsprop.plain_rule(step), params, grads, [mean]),
            (RmsPropVariant::Momentum(momentum), [mean, buffer]) => {
                apply(at, rmsprop.momentum_rule(step, momentum), params, grads, [mean, buffer])
            }
            (RmsPropVariant::Centered, [mean, average]) => {
                apply(at, rmsprop.centered_rule(step), params, grads, [mean, average])
            }
            (variant, states) => unreachable!("{variant:?} with {} states passed the length check", states.len()),
        },
        (optimizer, states) => unreachable!("{optimizer:?} with {} states passed the length check", states.len()),
    }
    Ok(())
}

pub(crate) fn expect_length(what: &'static str, expected: usize, found: usize) -> Result<(), LengthError> {
    if expected == found { Ok(()) } else { Err(LengthError { what, expected, found }) }
}

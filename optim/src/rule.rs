//! The loop over memory that all optimizers share.
//!
//! An optimizer is a [`Rule`], which updates one element; factors that do not depend on the element are computed
//! beforehand in f64. The loop reads parameter, gradient and state once and writes parameter and state once.

use zero_isa::Isa;

use crate::simd::{Kernel, LINE, prefetch, run};

/// Prefetch distance in elements: 1 KiB. The square root and the division of a line take longer than the hardware
/// prefetcher looks ahead; without this distance AdamW stays 10 % below the memory bandwidth.
const AHEAD: usize = 256;

/// The step of one element. `STATES` is the number of state slices.
pub(crate) trait Rule<const STATES: usize>: Copy {
    /// Updates one element. Implementations must be `#[inline(always)]`.
    fn step(self, param: f32, grad: f32, states: [f32; STATES]) -> (f32, [f32; STATES]);
}

/// Clips a gradient to ±`limit`. NaN stays NaN.
#[inline(always)]
pub(crate) fn clipped(grad: f32, limit: f32) -> f32 {
    // Not `clamp`, which checks the limit, and not `min`, which would hide a NaN.
    let grad = if limit < grad { limit } else { grad };
    if grad < -limit { -limit } else { grad }
}

/// Applies the rule to each element, with gradients clipped to ±`limit`. The caller has checked that all slices have the
/// same length.
pub(crate) fn apply<const STATES: usize, R: Rule<STATES>>(
    (isa, limit): (Isa, f32),
    rule: R,
    params: &mut [f32],
    grads: &[f32],
    states: [&mut [f32]; STATES],
) {
    run(isa, Apply { rule, limit, params, grads, states });
}

struct Apply<'a, const STATES: usize, R> {
    rule: R,
    limit: f32,
    params: &'a mut [f32],
    grads: &'a [f32],
    states: [&'a mut [f32]; STATES],
}

impl<const STATES: usize, R: Rule<STATES>> Kernel for Apply<'_, STATES, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Apply { rule, limit, params, grads, states } = self;
        let (params, params_rest) = params.as_chunks_mut::<LINE>();
        let (grads, grads_rest) = grads.as_chunks::<LINE>();
        let mut states = states.map(|state| state.as_chunks_mut::<LINE>());

        for (i, (params, grads)) in params.iter_mut().zip(grads).enumerate() {
            let mut old = [[0.0; LINE]; STATES];
            prefetch(params, AHEAD);
            prefetch(grads, AHEAD);
            for (old, (lines, _)) in old.iter_mut().zip(&states) {
                prefetch(&lines[i], AHEAD);
                *old = lines[i];
            }
            // Whole lines are copied into locals: nothing in the loop below can alias then, so the compiler vectorizes
            // it.
            let (mut param, mut new) = (*params, old);
            for k in 0..LINE {
                let state;
                (param[k], state) = rule.step(param[k], clipped(grads[k], limit), std::array::from_fn(|s| old[s][k]));
                for s in 0..STATES {
                    new[s][k] = state[s];
                }
            }
            *params = param;
            for ((lines, _), new) in states.iter_mut().zip(new) {
                lines[i] = new;
            }
        }

        for (i, (param, &grad)) in params_rest.iter_mut().zip(grads_rest).enumerate() {
            let state;
            (*param, state) = rule.step(*param, clipped(grad, limit), std::array::from_fn(|s| states[s].1[i]));
            for ((_, rest), new) in states.iter_mut().zip(state) {
                rest[i] = new;
            }
        }
    }
}

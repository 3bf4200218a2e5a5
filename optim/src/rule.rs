//! The one loop over memory that all optimizers share.
//!
//! An optimizer is a [`Rule`]: how one element changes, with every factor that does not depend on the element computed
//! beforehand in f64. The loop reads parameter, gradient and state once and writes parameter and state once.

use crate::simd::{Kernel, Level};

/// One element's step. `STATES` is the number of state slices.
pub(crate) trait Rule<const STATES: usize>: Copy {
    /// Must be `#[inline(always)]`.
    fn step(self, param: f32, grad: f32, states: [f32; STATES]) -> (f32, [f32; STATES]);
}

/// Applies the rule to each element. All slices are of one length, which the caller has checked.
pub(crate) fn apply<const STATES: usize, R: Rule<STATES>>(
    level: Level,
    rule: R,
    params: &mut [f32],
    grads: &[f32],
    states: [&mut [f32]; STATES],
) {
    level.run(Apply { rule, params, grads, states });
}

struct Apply<'a, const STATES: usize, R> {
    rule: R,
    params: &'a mut [f32],
    grads: &'a [f32],
    states: [&'a mut [f32]; STATES],
}

impl<const STATES: usize, R: Rule<STATES>> Kernel for Apply<'_, STATES, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Apply { rule, params, grads, states } = self;
        let n = params.len();
        // Slices of one visible length, so that the loop has no bounds checks and vectorises.
        let grads = &grads[..n];
        let states = states.map(|state| &mut state[..n]);
        for i in 0..n {
            let old = std::array::from_fn(|s| states[s][i]);
            let (param, new) = rule.step(params[i], grads[i], old);
            params[i] = param;
            for s in 0..STATES {
                states[s][i] = new[s];
            }
        }
    }
}

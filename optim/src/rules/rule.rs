//! The loop over memory that all optimizers share.
//!
//! An optimizer is a [`Rule`], which updates one element. Factors that do not depend on the element are computed
//! beforehand in f64. The loop reads parameter, gradient and state once and writes parameter and state once.

use zero_isa::Isa;

use crate::simd::{Kernel, LINE, prefetch, run};
use crate::stored::{Stored, load, load_line, store, store_line};

/// Prefetch distance in elements: 1.5 KiB of f32. The square root and the division of a line take longer than the
/// hardware prefetcher looks ahead. Without prefetching, AdamW stays 10 % below the memory bandwidth. With a shorter
/// distance, SGD has too few bytes in flight, because it reads only two arrays. With a distance of 4 KiB, AdamW is
/// slower than with 1.5 KiB.
const AHEAD: usize = 384;

/// The step of one element. `STATES` is the number of state slices.
pub(crate) trait Rule<const STATES: usize>: Copy {
    /// Updates one element. Implementations must be `#[inline(always)]`.
    fn step(self, param: f32, grad: f32, states: [f32; STATES]) -> (f32, [f32; STATES]);
}

/// Returns kept·mean + new·grad², the mean of squared gradients.
#[inline(always)]
pub(crate) fn mean_square(mean: f32, grad: f32, kept: f32, new: f32) -> f32 {
    // Multiplies by `new` before squaring: g² alone overflows f32 from 1.8e19 on.
    (new * grad).mul_add(grad, kept * mean)
}

/// Clips a gradient to ±`limit`. NaN stays NaN.
#[inline(always)]
pub(crate) fn clipped(grad: f32, limit: f32) -> f32 {
    // Not `clamp`, which checks the limit, and not `min`, which would hide a NaN.
    let grad = if limit < grad { limit } else { grad };
    if grad < -limit { -limit } else { grad }
}

/// Applies the rule to each element, with gradients clipped to ±`limit`. The caller has checked that all slices have
/// the same length.
pub(crate) fn apply<const STATES: usize, R: Rule<STATES>, P: Stored, S: Stored>(
    (isa, limit): (Isa, f32),
    rule: R,
    params: &mut [P],
    grads: &[f32],
    states: [&mut [S]; STATES],
) {
    match (P::IN_F32, S::IN_F32) {
        (true, true) => run(isa, Apply { rule, limit, params, grads, states }),
        _ => run(isa, ApplyInBlocks(Apply { rule, limit, params, grads, states })),
    }
}

/// Number of elements that are widened at a time if values are not f32. It is large enough for vectorized loops, and
/// small enough for the L1 cache.
const BLOCK: usize = 8 * LINE;

struct Apply<'a, const STATES: usize, R, P, S> {
    rule: R,
    limit: f32,
    params: &'a mut [P],
    grads: &'a [f32],
    states: [&'a mut [S]; STATES],
}

impl<const STATES: usize, R: Rule<STATES>, P: Stored, S: Stored> Kernel for Apply<'_, STATES, R, P, S> {
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
                *old = load_line(&lines[i]);
            }
            let (param, new) = step_line(rule, limit, load_line(params), grads, old);
            store_line(param, params);
            for ((lines, _), new) in states.iter_mut().zip(new) {
                store_line(new, &mut lines[i]);
            }
        }

        one_by_one(rule, limit, params_rest, grads_rest, states.map(|(_, rest)| rest));
    }
}

/// Updates the elements of a line. Copies the line into locals, so that nothing in the loop can alias and the compiler
/// vectorizes it.
#[inline(always)]
fn step_line<const STATES: usize, R: Rule<STATES>>(
    rule: R,
    limit: f32,
    mut param: [f32; LINE],
    grads: &[f32; LINE],
    old: [[f32; LINE]; STATES],
) -> ([f32; LINE], [[f32; LINE]; STATES]) {
    let mut new = old;
    for k in 0..LINE {
        let state;
        (param[k], state) = rule.step(param[k], clipped(grads[k], limit), std::array::from_fn(|s| old[s][k]));
        for s in 0..STATES {
            new[s][k] = state[s];
        }
    }
    (param, new)
}

#[inline(always)]
fn one_by_one<const STATES: usize, R: Rule<STATES>, P: Stored, S: Stored>(
    rule: R,
    limit: f32,
    params: &mut [P],
    grads: &[f32],
    mut states: [&mut [S]; STATES],
) {
    for (i, (param, &grad)) in params.iter_mut().zip(grads).enumerate() {
        let old = std::array::from_fn(|s| states[s][i].load());
        let (new_param, new) = rule.step(param.load(), clipped(grad, limit), old);
        *param = P::rounded(new_param);
        for (state, new) in states.iter_mut().zip(new) {
            state[i] = S::rounded(new);
        }
    }
}

/// The loop of `Apply`, over values that are widened block by block.
struct ApplyInBlocks<'a, const STATES: usize, R, P, S>(Apply<'a, STATES, R, P, S>);

impl<const STATES: usize, R: Rule<STATES>, P: Stored, S: Stored> Kernel for ApplyInBlocks<'_, STATES, R, P, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Apply { rule, limit, params, grads, states } = self.0;
        let (params, params_rest) = params.as_chunks_mut::<BLOCK>();
        let (grads, grads_rest) = grads.as_chunks::<BLOCK>();
        let mut states = states.map(|state| state.as_chunks_mut::<BLOCK>());
        for (i, (params, grads)) in params.iter_mut().zip(grads).enumerate() {
            prefetch_block(params);
            prefetch_block(grads);
            let (mut wide, mut wide_states) = ([0.0; BLOCK], [[0.0; BLOCK]; STATES]);
            load(params, &mut wide);
            for ((blocks, _), wide) in states.iter().zip(&mut wide_states) {
                prefetch_block(&blocks[i]);
                load(&blocks[i], wide);
            }
            let (lines, _) = wide.as_chunks_mut::<LINE>();
            for (line, (params, grads)) in lines.iter_mut().zip(grads.as_chunks::<LINE>().0).enumerate() {
                let mut old = [[0.0; LINE]; STATES];
                for (old, wide) in old.iter_mut().zip(&wide_states) {
                    *old = wide.as_chunks().0[line];
                }
                let (param, new) = step_line(rule, limit, *params, grads, old);
                *params = param;
                for (wide, new) in wide_states.iter_mut().zip(new) {
                    wide.as_chunks_mut().0[line] = new;
                }
            }
            store(&wide, params);
            for ((blocks, _), wide) in states.iter_mut().zip(&wide_states) {
                store(wide, &mut blocks[i]);
            }
        }
        one_by_one(rule, limit, params_rest, grads_rest, states.map(|(_, rest)| rest));
    }
}

/// Prefetches the block that starts [`AHEAD`] elements after this one.
#[inline(always)]
fn prefetch_block<T>(block: &[T; BLOCK]) {
    for line in block.as_chunks::<LINE>().0 {
        prefetch(line, AHEAD);
    }
}

#[derive(Clone, Copy)]
struct MultiplyAdd(f32);

impl<const STATES: usize> Rule<STATES> for MultiplyAdd {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, states: [f32; STATES]) -> (f32, [f32; STATES]) {
        (grad.mul_add(self.0, param), states.map(|state| grad.mul_add(self.0, state)))
    }
}

/// Adds `factor` × `grads` to the parameters and to each of at most two states, in one pass with the same reads and
/// writes as [`update`](crate::update).
///
/// # Panics
/// Panics if the slices differ in length.
pub fn multiply_add(factor: f32, params: &mut [f32], grads: &[f32], states: &mut [Vec<f32>]) {
    assert!(states.iter().map(Vec::len).chain([params.len()]).all(|length| length == grads.len()));
    let at = (Isa::current(), f32::INFINITY);
    match states {
        [] => apply::<0, _, f32, f32>(at, MultiplyAdd(factor), params, grads, []),
        [one] => apply(at, MultiplyAdd(factor), params, grads, [&mut one[..]]),
        [one, other, ..] => apply(at, MultiplyAdd(factor), params, grads, [&mut one[..], &mut other[..]]),
    }
}

//! Arrays that the benchmarks of optimizers update, and the floor of an update.
//!
//! AdamW reads four arrays and writes three: 28 bytes per parameter. An optimizer with one state moves 20 bytes, and an
//! optimizer without states moves 12. The floor does the same reads and writes on the same arrays with one multiply-add
//! per element and array. Runs of the update and of the floor alternate, so that a load on the machine slows both.

use std::hint::black_box;

use zero_optim::{AdamW, Optimizer, Step, multiply_add, update};

use super::figures::{Comparison, timed};

/// Returns the bytes that a step of an optimizer with this number of states reads and writes per parameter.
pub(super) const fn bytes_per_parameter(states: usize) -> usize {
    4 * (3 + 2 * states)
}

/// The arrays of one benchmark, one element per parameter.
pub(super) struct Arrays {
    params: Vec<f32>,
    grads: Vec<f32>,
    states: Vec<Vec<f32>>,
}

impl Arrays {
    /// Allocates arrays for `n` parameters and this number of states. The values are normal, because subnormal numbers
    /// take a slower path. Every page is written, so that no page fault occurs during the measurement.
    pub(super) fn new(n: usize, states: usize) -> Self {
        let states = (0..states).map(|index| state(n, index).collect()).collect();
        Arrays { params: params(n).collect(), grads: grads(n).collect(), states }
    }

    fn update(&mut self, optimizer: &Optimizer, number: u64) {
        let mut states: Vec<&mut [f32]> = self.states.iter_mut().map(Vec::as_mut_slice).collect();
        update(optimizer, &step(number), &mut self.params, &self.grads, &mut states)
            .expect("the arrays have the same length");
    }

    /// Does the same reads and writes as an update. The factor is zero, so the values do not drift.
    pub(super) fn floor(&mut self) {
        multiply_add(black_box(0.0), &mut self.params, &self.grads, &mut self.states);
    }
}

/// Alternates `repeats` steps over `n` parameters with runs of the floor, on one thread.
pub(super) fn against_floor(optimizer: &Optimizer, n: usize, repeats: usize) -> Comparison {
    let mut arrays = Arrays::new(n, optimizer.states().len());
    arrays.update(optimizer, 100);
    arrays.floor();
    (101..).take(repeats).map(|step| (timed(|| arrays.update(optimizer, step)), timed(|| arrays.floor()))).collect()
}

/// Returns the inputs of a step with this number.
pub(super) fn step(number: u64) -> Step {
    Step { step: number, lr: 1e-4, grad_scale: 0.5, grad_limit: f32::INFINITY, decay: true }
}

/// Returns the parameters of a benchmark.
pub(super) fn params(n: usize) -> impl Iterator<Item = f32> {
    spread(n, 1e-3)
}

/// Returns the gradients of a benchmark.
pub(super) fn grads(n: usize) -> impl Iterator<Item = f32> {
    spread(n, 1e-6)
}

/// Returns the state with this index: a first or a second moment.
pub(super) fn state(n: usize, index: usize) -> impl Iterator<Item = f32> {
    spread(n, if index == 0 { 1e-6 } else { 1e-3 }).map(move |x| if index == 0 { x.abs() } else { x * x * 1e-6 })
}

fn spread(n: usize, scale: f32) -> impl Iterator<Item = f32> {
    (0..n).map(move |i| ((i % 1021) as f32 - 510.0) * scale)
}

/// Returns AdamW with weight decay.
pub(super) fn adamw() -> Optimizer {
    Optimizer::AdamW(AdamW { weight_decay: 0.01, ..AdamW::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::optimizers::all;

    #[test]
    fn the_floor_writes_back_what_it_read_and_updates_do_not() {
        for (name, optimizer) in all() {
            let states = optimizer.states().len();
            let (fresh, mut arrays) = (Arrays::new(1000, states), Arrays::new(1000, states));
            arrays.floor();
            assert_eq!((&arrays.params, &arrays.states), (&fresh.params, &fresh.states), "{name}");
            arrays.update(&optimizer, 100);
            assert!(arrays.params != fresh.params, "{name}");
            assert!(arrays.states.iter().zip(&fresh.states).all(|(state, fresh)| state != fresh), "{name}");
        }
    }
}

//! Compares the speed of [`update`] with the memory bandwidth.
//!
//! AdamW reads four arrays and writes three: 28 bytes per parameter. An optimizer with one state moves 20 bytes, and an
//! optimizer without states moves 12. The floor is a loop that does the same reads and writes on the same arrays with
//! almost no arithmetic, compiled for the same instruction set. Runs of the update and of the floor alternate, so that
//! a load on the machine slows both.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use zero_isa::Isa;

use crate::rules::rule::{Rule, apply};
use crate::{Adagrad, AdamW, Lion, NAdam, Optimizer, RAdam, RmsProp, RmsPropVariant, ScheduleFree, Sgd, Step, update};

/// Returns the bytes that a step of an optimizer with this number of states reads and writes per parameter.
#[must_use]
pub const fn bytes_per_parameter(states: usize) -> usize {
    4 * (3 + 2 * states)
}

/// The arrays of one benchmark, one element per parameter.
pub struct Arrays {
    params: Vec<f32>,
    grads: Vec<f32>,
    states: Vec<Vec<f32>>,
    step: u64,
}

impl Arrays {
    /// Allocates arrays for `n` parameters and this number of states. The values are normal, because subnormal numbers
    /// take a slower path. Every page is written, so that no page fault occurs during the measurement.
    pub fn new(n: usize, states: usize) -> Self {
        let states = (0..states).map(|index| state(n, index).collect()).collect();
        Arrays { params: params(n).collect(), grads: grads(n).collect(), states, step: 100 }
    }

    /// Takes one step of an optimizer with this number of states.
    pub fn update(&mut self, optimizer: &Optimizer) {
        let step = Step { step: self.step, lr: 1e-4, grad_scale: 0.5, grad_limit: f32::INFINITY, decay: true };
        let mut states: Vec<&mut [f32]> = self.states.iter_mut().map(Vec::as_mut_slice).collect();
        update(optimizer, &step, &mut self.params, &self.grads, &mut states).expect("the arrays have the same length");
        self.step += 1;
    }

    /// Does the same reads and writes as [`Arrays::update`], with one multiply-add per array. The factor is zero, so
    /// the values do not drift.
    pub fn floor(&mut self) {
        let (isa, floor) = ((Isa::current(), f32::INFINITY), Floor(black_box(0.0)));
        match &mut self.states[..] {
            [] => apply::<0, _, f32, f32>(isa, floor, &mut self.params, &self.grads, []),
            [one] => apply(isa, floor, &mut self.params, &self.grads, [&mut one[..]]),
            [one, other, ..] => apply(isa, floor, &mut self.params, &self.grads, [&mut one[..], &mut other[..]]),
        }
    }
}

/// Alternates `repeats` steps over `n` parameters with runs of the floor, on one thread, and returns both lists of
/// times: `(subject, floor)`.
pub fn against_floor(optimizer: &Optimizer, n: usize, repeats: usize) -> (Vec<Duration>, Vec<Duration>) {
    let mut arrays = Arrays::new(n, optimizer.states().len());
    arrays.update(optimizer);
    arrays.floor();
    (0..repeats).map(|_| (timed(|| arrays.update(optimizer)), timed(|| arrays.floor()))).unzip()
}

/// Returns the parameters of a benchmark.
pub fn params(n: usize) -> impl Iterator<Item = f32> {
    spread(n, 1e-3)
}

/// Returns the gradients of a benchmark.
pub fn grads(n: usize) -> impl Iterator<Item = f32> {
    spread(n, 1e-6)
}

/// Returns the state with this index: a first or a second moment.
pub fn state(n: usize, index: usize) -> impl Iterator<Item = f32> {
    spread(n, if index == 0 { 1e-6 } else { 1e-3 }).map(move |x| if index == 0 { x.abs() } else { x * x * 1e-6 })
}

fn spread(n: usize, scale: f32) -> impl Iterator<Item = f32> {
    (0..n).map(move |i| ((i % 1021) as f32 - 510.0) * scale)
}

/// Returns AdamW with weight decay.
#[must_use]
pub fn adamw() -> Optimizer {
    Optimizer::AdamW(AdamW { weight_decay: 0.01, ..AdamW::default() })
}

/// Returns each optimizer that updates element by element, with its name.
#[must_use]
pub fn optimizers() -> Vec<(&'static str, Optimizer)> {
    let sgd = |momentum, nesterov| Optimizer::Sgd(Sgd { momentum, nesterov, weight_decay: 0.01, ..Sgd::default() });
    let rmsprop = |variant| Optimizer::RmsProp(RmsProp { variant, weight_decay: 0.01, ..RmsProp::default() });
    vec![
        ("AdamW", adamw()),
        ("Adam", Optimizer::AdamW(AdamW { weight_decay: 0.01, decoupled: false, ..AdamW::default() })),
        ("SGD", sgd(0.0, false)),
        ("SGD, momentum", sgd(0.9, false)),
        ("SGD, Nesterov", sgd(0.9, true)),
        ("Lion", Optimizer::Lion(Lion { weight_decay: 0.01, ..Lion::default() })),
        ("Adagrad", Optimizer::Adagrad(Adagrad { weight_decay: 0.01, ..Adagrad::default() })),
        ("RMSprop", rmsprop(RmsPropVariant::Plain)),
        ("RMSprop, momentum", rmsprop(RmsPropVariant::Momentum(0.9))),
        ("RMSprop, centered", rmsprop(RmsPropVariant::Centered)),
        ("NAdam", Optimizer::NAdam(NAdam { weight_decay: 0.01, ..NAdam::default() })),
        ("RAdam", Optimizer::RAdam(RAdam { weight_decay: 0.01, ..RAdam::default() })),
        (
            "AdamWScheduleFree",
            Optimizer::ScheduleFree(ScheduleFree { weight_decay: 0.01, share: 0.1, ..ScheduleFree::default() }),
        ),
    ]
}

/// Returns how long `work` takes.
pub fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

#[derive(Clone, Copy)]
struct Floor(f32);

impl<const STATES: usize> Rule<STATES> for Floor {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, states: [f32; STATES]) -> (f32, [f32; STATES]) {
        (grad.mul_add(self.0, param), states.map(|state| grad.mul_add(self.0, state)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_writes_back_what_it_read_and_updates_do_not() {
        for (name, optimizer) in optimizers() {
            let states = optimizer.states().len();
            let (fresh, mut arrays) = (Arrays::new(1000, states), Arrays::new(1000, states));
            arrays.floor();
            assert_eq!((&arrays.params, &arrays.states), (&fresh.params, &fresh.states), "{name}");
            arrays.update(&optimizer);
            assert!(arrays.params != fresh.params, "{name}");
            assert!(arrays.states.iter().zip(&fresh.states).all(|(state, fresh)| state != fresh), "{name}");
        }
    }
}

//! Compares the speed of [`update`] with the memory bandwidth.
//!
//! AdamW reads four arrays and writes three: 28 bytes per parameter. The floor is a loop that does the same reads and
//! writes on the same arrays with almost no arithmetic, compiled for the same instruction set. The two alternate, so
//! that a load on the machine slows both.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use zero_isa::Isa;

use crate::{
    AdamW, Optimizer, Step,
    rule::{Rule, apply},
    update,
};

/// Bytes that one AdamW step reads and writes per parameter.
pub const ADAMW_BYTES_PER_PARAMETER: usize = 28;

/// The arrays of one benchmark, one element per parameter.
pub struct Arrays {
    params: Vec<f32>,
    grads: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    step: u64,
}

impl Arrays {
    /// Allocates arrays for `n` parameters. The values are normal, because subnormal numbers take a slower path. Every
    /// page is written, so that no page fault occurs during the measurement.
    pub fn new(n: usize) -> Self {
        let spread = |scale: f32| (0..n).map(|i| ((i % 1021) as f32 - 510.0) * scale).collect::<Vec<f32>>();
        Arrays {
            params: spread(1e-3),
            grads: spread(1e-6),
            exp_avg: spread(1e-6),
            exp_avg_sq: spread(1e-3).into_iter().map(|x| x * x * 1e-6).collect(),
            step: 100,
        }
    }

    /// Takes one AdamW step.
    pub fn adamw(&mut self) {
        let step = Step { step: self.step, lr: 1e-4, grad_scale: 0.5, grad_limit: f32::INFINITY, decay: true };
        let optimizer = Optimizer::AdamW(AdamW { weight_decay: 0.01, ..AdamW::default() });
        let states: &mut [&mut [f32]] = &mut [&mut self.exp_avg, &mut self.exp_avg_sq];
        update(&optimizer, &step, &mut self.params, &self.grads, states).expect("the arrays have the same length");
        self.step += 1;
    }

    /// Does the same reads and writes as [`Arrays::adamw`], with one multiply-add per array. The factor is zero, so the
    /// values do not drift.
    pub fn floor(&mut self) {
        let floor = Floor(black_box(0.0));
        apply(
            (Isa::current(), f32::INFINITY),
            floor,
            &mut self.params,
            &self.grads,
            [&mut self.exp_avg, &mut self.exp_avg_sq],
        );
    }
}

/// Alternates `repeats` AdamW steps over `n` parameters with runs of the floor, on one thread, and returns both lists
/// of times: `(subject, floor)`.
pub fn adamw(n: usize, repeats: usize) -> (Vec<Duration>, Vec<Duration>) {
    let mut arrays = Arrays::new(n);
    arrays.adamw();
    arrays.floor();
    (0..repeats).map(|_| (timed(|| arrays.adamw()), timed(|| arrays.floor()))).unzip()
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

#[derive(Clone, Copy)]
struct Floor(f32);

impl Rule<2> for Floor {
    #[inline(always)]
    fn step(self, param: f32, grad: f32, [m, v]: [f32; 2]) -> (f32, [f32; 2]) {
        (grad.mul_add(self.0, param), [grad.mul_add(self.0, m), grad.mul_add(self.0, v)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_writes_back_what_it_read_and_adamw_does_not() {
        let (fresh, mut arrays) = (Arrays::new(1000), Arrays::new(1000));
        arrays.floor();
        assert_eq!(
            (&arrays.params, &arrays.exp_avg, &arrays.exp_avg_sq),
            (&fresh.params, &fresh.exp_avg, &fresh.exp_avg_sq)
        );
        arrays.adamw();
        assert!(
            arrays.params != fresh.params && arrays.exp_avg != fresh.exp_avg && arrays.exp_avg_sq != fresh.exp_avg_sq
        );
    }

    #[test]
    fn both_are_timed_repeats_times() {
        let (subject, floor) = adamw(100, 3);
        assert_eq!((subject.len(), floor.len()), (3, 3));
    }
}

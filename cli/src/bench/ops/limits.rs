//! Measures the limits of the CPU: multiply-adds that stay in registers, and copies within the cache level that holds
//! an operation's operands.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use candle_core::DType;
use zero_model::ops::{in_parallel, measure};

use crate::bench::figures::median;

/// Returns the total FLOP/s of `threads` threads that run multiply-adds in registers at the same time.
pub(super) fn peak_flops(dtype: DType, threads: usize) -> f64 {
    if threads == 1 {
        return measure::peak_flops(dtype);
    }
    let together = Barrier::new(threads);
    std::thread::scope(|scope| {
        let alone = || {
            together.wait();
            measure::peak_flops(dtype)
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(alone)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
    })
}

/// Copies as many bytes as an operation moves.
///
/// Consecutive copies cycle through buffers as large as the memory that the operation's case touches, so that copies
/// and operations find their data at the same cache level.
pub(super) struct Floor {
    from: Vec<u8>,
    to: Vec<u8>,
    /// Number of bytes of one copy.
    bytes: usize,
    next: usize,
}

impl Floor {
    /// Creates the floor of an operation that reads and writes `moved` bytes, in a case that touches `touched` bytes.
    pub(super) fn new(moved: f64, touched: f64) -> Self {
        let bytes = moved as usize / 2;
        // Rounded down: copies over more memory than the case touches could be slower, and the limit would be too low.
        let places = (touched / moved).max(1.0) as usize;
        Self { from: vec![1; bytes * places], to: vec![2; bytes * places], bytes, next: 0 }
    }

    /// Returns the bytes per second, read plus written, that `threads` threads copy.
    ///
    /// Other operations have left their data in the caches, so the whole buffer is copied once before the timed copies.
    pub(super) fn rate(&mut self, threads: usize) -> f64 {
        for _ in 0..self.from.len() / self.bytes {
            self.copy(threads);
        }
        let times: Vec<Duration> = (0..3).map(|_| self.copy(threads)).collect();
        2.0 * self.bytes as f64 / median(&times).as_secs_f64()
    }

    fn copy(&mut self, threads: usize) -> Duration {
        let place = self.next..self.next + self.bytes;
        self.next = if place.end == self.from.len() { 0 } else { place.end };
        let part = self.bytes.div_ceil(threads);
        let (from, to) = (self.from[place.clone()].chunks(part), self.to[place].chunks_mut(part));
        let mut parts: Vec<_> = from.zip(to).collect();
        let started = Instant::now();
        in_parallel(&mut parts, |(from, to)| black_box(to).copy_from_slice(black_box(from)));
        started.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_copies_all_memory_of_the_case_in_turn() {
        let mut floor = Floor::new(2000.0, 7000.0);
        assert_eq!((floor.bytes, floor.from.len()), (1000, 3000));
        for copied in 1..=3 {
            floor.copy(2);
            assert_eq!(floor.to.iter().filter(|&&byte| byte == 1).count(), copied * 1000);
        }
        assert_eq!(floor.next, 0);
        assert_eq!(Floor::new(2000.0, 500.0).from.len(), 1000);
    }
}

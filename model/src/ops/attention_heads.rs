//! The arithmetic of causal attention, head by head over slices.
//!
//! A tile is [`TILE`] query rows against the keys that they see, from the first of its first row up to its last row: two
//! products forward, five backward. Heads are independent, so threads share out (sample, key and value head) pairs; within
//! a pair the order is fixed. Tiles start at multiples of [`TILE`], and what a row does not see adds zeros to its sums, so
//! a row's bits depend on what it sees alone.

use super::kernel::{Isa, softmax as kernel};
use super::parallel::{Output, split};
use super::product::{Matrix, add_product, product};
use std::marker::PhantomData;
use std::ops::Range;

/// Query rows of a tile.
const TILE: usize = 64;

/// Sizes of an attention. `heads` is a multiple of `kv_heads`, none is 0 but perhaps `batch` and `time`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) batch: usize,
    pub(crate) time: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) size: usize,
}

impl Geometry {
    fn scale(self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }

    fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// Floats that one (sample, key and value head) pair touches.
    fn cost(self) -> usize {
        self.group() * self.time * (self.time + 4 * self.size)
    }

    fn tiles(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.time).step_by(TILE).map(move |start| start..self.time.min(start + TILE))
    }
}

/// Where a head's row lies in a buffer: element 0 of (sample b, position t, head h) is at
/// `start + (b·time + t)·row + h·size`.
#[derive(Clone, Copy, Debug)]
struct Rows {
    start: usize,
    row: usize,
    time: usize,
    size: usize,
}

impl Rows {
    fn at(self, sample: usize, position: usize, head: usize) -> usize {
        self.start + (sample * self.time + position) * self.row + head * self.size
    }

    /// Some positions of one head as a matrix of positions × size.
    fn matrix(self, data: &[f32], sample: usize, positions: Range<usize>, head: usize) -> Matrix<'_> {
        let start = self.at(sample, positions.start, head);
        Matrix::strided(&data[start..], positions.len(), self.size, self.row)
    }
}

/// How q, k and v lie in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layouts {
    q: Rows,
    k: Rows,
    v: Rows,
    out: Rows,
}

impl Layouts {
    /// Each in its own buffer of `[batch, time, its heads, size]`.
    pub(crate) fn separate(g: Geometry) -> Self {
        let rows = |heads| Rows { start: 0, row: heads * g.size, time: g.time, size: g.size };
        Self { q: rows(g.heads), k: rows(g.kv_heads), v: rows(g.kv_heads), out: rows(g.heads) }
    }

    /// All in one buffer of `[batch, time, 3·heads·size]`.
    pub(crate) fn packed(g: Geometry) -> Self {
        let width = g.heads * g.size;
        let rows = |part| Rows { start: part * width, row: 3 * width, time: g.time, size: g.size };
        Self { q: rows(0), k: rows(1), v: rows(2), out: Rows { start: 0, row: width, time: g.time, size: g.size } }
    }
}

/// (out of `[batch, time, heads, size]`, ln Σ e^score of `[batch, heads, time]`), where a position sees those from its
/// entry in `firsts`, of `[batch, time]`, up to itself. The entries of a row never decrease.
pub(crate) fn forward(g: Geometry, at: Layouts, firsts: &[usize], [q, k, v]: [&[f32]; 3]) -> (Vec<f32>, Vec<f32>) {
    let isa = Isa::best();
    let mut out = vec![0.0; g.batch * g.time * g.heads * g.size];
    let mut log_sums = vec![0.0; g.batch * g.heads * g.time];
    let shared = Shared::new(&mut out);
    let pairs = Output { data: &mut log_sums, floats: g.group() * g.time };
    split(g.batch * g.kv_heads, g.cost(), [pairs], |range, [log_sums]| {
        let mut scores = vec![0.0; TILE.min(g.time) * g.time];
        let mut tile_out = vec![0.0; TILE.min(g.time) * g.size];
        let mut sums = [0.0; TILE];
        let mut log_sums = log_sums.chunks_exact_mut(g.time.max(1));
        for (sample, kv_head, head) in range.flat_map(|pair| heads_of(g, pair)) {
            let Some(log_sums) = log_sums.next() else { return };
            for tile in g.tiles() {
                let firsts = &firsts[sample * g.time..][tile.clone()];
                let seen = firsts[0]..tile.end;
                let (rows, width) = (tile.len(), seen.len());
                let scores = &mut scores[..rows * width];
                let tile_out = &mut tile_out[..rows * g.size];
                let (keys, values) =
                    (at.k.matrix(k, sample, seen.clone(), kv_head), at.v.matrix(v, sample, seen, kv_head));
                product(scores, at.q.matrix(q, sample, tile.clone(), head), keys.t(), 1);
                let log_sums = &mut log_sums[tile.clone()];
                kernel::causal_exp(isa, scores, width, tile.start, firsts, g.scale(), &mut sums, log_sums);
                product(tile_out, Matrix::new(scores, rows, width), values, 1);
                for ((position, from), sum) in tile.zip(tile_out.chunks_exact(g.size)).zip(sums) {
                    // SAFETY: this (sample, position, head) belongs to one pair, and each pair to one thread.
                    let to = unsafe { shared.part(at.out.at(sample, position, head), g.size) };
                    for (to, from) in to.iter_mut().zip(from) {
                        *to = from / sum;
                    }
                }
            }
        }
    });
    (out, log_sums)
}

/// Writes the gradients of q, k and v. The three may be parts of one buffer, as `at` says.
pub(crate) fn backward(
    g: Geometry,
    at: Layouts,
    firsts: &[usize],
    [q, k, v]: [&[f32]; 3],
    log_sums: &[f32],
    [out, d_out]: [&[f32]; 2],
    [dq, dk, dv]: [Shared<'_>; 3],
) {
    let isa = Isa::best();
    split::<f32, 0>(g.batch * g.kv_heads, g.cost(), [], |range, []| {
        let mut scores = vec![0.0; TILE.min(g.time) * g.time];
        let mut d_scores = scores.clone();
        let mut dq_tile = vec![0.0; TILE.min(g.time) * g.size];
        let mut deltas = [0.0; TILE];
        let (mut dk_head, mut dv_head) = (vec![0.0; g.time * g.size], vec![0.0; g.time * g.size]);
        for pair in range {
            dk_head.fill(0.0);
            dv_head.fill(0.0);
            for (sample, kv_head, head) in heads_of(g, pair) {
                let log_sums = &log_sums[(sample * g.heads + head) * g.time..][..g.time];
                for tile in g.tiles() {
                    let firsts = &firsts[sample * g.time..][tile.clone()];
                    let seen = firsts[0]..tile.end;
                    let (rows, width) = (tile.len(), seen.len());
                    let (scores, d_scores) = (&mut scores[..rows * width], &mut d_scores[..rows * width]);
                    let dq_tile = &mut dq_tile[..rows * g.size];
                    let queries = at.q.matrix(q, sample, tile.clone(), head);
                    let d_tile = at.out.matrix(d_out, sample, tile.clone(), head);
                    let keys = at.k.matrix(k, sample, seen.clone(), kv_head);
                    let values = at.v.matrix(v, sample, seen.clone(), kv_head);
                    for (delta, position) in deltas.iter_mut().zip(tile.clone()) {
                        let row = at.out.at(sample, position, head);
                        *delta = kernel::dot(isa, &out[row..row + g.size], &d_out[row..row + g.size]);
                    }
                    product(scores, queries, keys.t(), 1);
                    product(d_scores, d_tile, values.t(), 1);
                    let log_sums = &log_sums[tile.clone()];
                    let (position, scale) = (tile.start, g.scale());
                    kernel::causal_backward(isa, scores, d_scores, width, position, firsts, scale, log_sums, &deltas);
                    let (probs, d_scores) = (Matrix::new(scores, rows, width), Matrix::new(d_scores, rows, width));
                    product(dq_tile, d_scores, keys, 1);
                    let seen = seen.start * g.size..seen.end * g.size;
                    add_product(&mut dk_head[seen.clone()], d_scores.t(), queries, 1);
                    add_product(&mut dv_head[seen], probs.t(), d_tile, 1);
                    for (position, from) in tile.zip(dq_tile.chunks_exact(g.size)) {
                        // SAFETY: this (sample, position, head) belongs to one pair, and each pair to one thread.
                        unsafe { dq.part(at.q.at(sample, position, head), g.size) }.copy_from_slice(from);
                    }
                }
            }
            let (sample, kv_head) = (pair / g.kv_heads, pair % g.kv_heads);
            for (position, (dk_row, dv_row)) in
                dk_head.chunks_exact(g.size).zip(dv_head.chunks_exact(g.size)).enumerate()
            {
                // SAFETY: as above; k's and v's columns of a packed buffer are not q's.
                unsafe { dk.part(at.k.at(sample, position, kv_head), g.size) }.copy_from_slice(dk_row);
                // SAFETY: as above.
                unsafe { dv.part(at.v.at(sample, position, kv_head), g.size) }.copy_from_slice(dv_row);
            }
        }
    });
}

/// The (sample, key and value head, query head) triples of a pair, in order.
fn heads_of(g: Geometry, pair: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let (sample, kv_head) = (pair / g.kv_heads, pair % g.kv_heads);
    (kv_head * g.group()..(kv_head + 1) * g.group()).map(move |head| (sample, kv_head, head))
}

/// A buffer in which threads write disjoint parts that are not contiguous, such as the columns of a head.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    start: *mut f32,
    len: usize,
    buffer: PhantomData<&'a mut [f32]>,
}

// SAFETY: access is by `part` alone, whose caller promises that no two parts overlap.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(crate) fn new(buffer: &'a mut [f32]) -> Self {
        Self { start: buffer.as_mut_ptr(), len: buffer.len(), buffer: PhantomData }
    }

    /// Elements `at..at + len`.
    ///
    /// # Safety
    /// No part that overlaps may be alive at the same time.
    // The lifetime is the buffer's: that is what `Shared` is for.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, at: usize, len: usize) -> &'a mut [f32] {
        assert!(at + len <= self.len, "part {at}..{} of {}", at + len, self.len);
        // SAFETY: inside of the buffer by the assertion, alone by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

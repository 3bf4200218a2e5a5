//! Combines results of attention to different keys.

use crate::attention::geometry::Geometry;
use crate::kernel::math::{exp, ln};
use crate::parallel::{Output, split};
use std::ops::Range;

/// The attention of a slice's queries to the keys so far.
pub(super) struct Sums {
    g: Geometry,
    /// f32 of `[batch, time, heads, size]`.
    pub(super) out: Vec<f32>,
    /// ln Σ e^score, f32 of `[batch, heads, time]`; −∞ for queries that saw no key.
    pub(super) log_sums: Vec<f32>,
}

impl Sums {
    /// `g` is the geometry of a slice.
    pub(super) fn new(g: Geometry) -> Self {
        let rows = g.batch * g.time * g.heads;
        Self { g, out: vec![0.0; rows * g.size], log_sums: vec![f32::NEG_INFINITY; rows] }
    }

    /// Adds the attention of some queries to other keys. `out` has the shape of the sums; `log_sums` is `[batch, heads,
    /// queries]`.
    pub(super) fn add(&mut self, queries: Range<usize>, out: &[f32], log_sums: &[f32]) {
        let Geometry { batch, time, heads, size, .. } = self.g;
        // The weights of the sums and of the other attention, of `[batch, queries, heads]`.
        let mut weights = vec![[0.0; 2]; batch * queries.len() * heads];
        for (pair, added) in log_sums.chunks_exact(queries.len().max(1)).enumerate() {
            let (sample, head) = (pair / heads, pair % heads);
            let sums = &mut self.log_sums[pair * time..][queries.clone()];
            for (query, (sum, &added)) in sums.iter_mut().zip(added).enumerate() {
                let both = ln_of_sum(*sum, added);
                if both != f32::NEG_INFINITY {
                    weights[(sample * queries.len() + query) * heads + head] = [exp(*sum - both), exp(added - both)];
                    *sum = both;
                }
            }
        }
        let row = heads * size;
        for (sample, weights) in weights.chunks_exact((queries.len() * heads).max(1)).enumerate() {
            let of_sample = (sample * time + queries.start) * row..(sample * time + queries.end) * row;
            let (sums, added) = (&mut self.out[of_sample.clone()], &out[of_sample]);
            split(queries.len() * heads, size, [Output { data: sums, floats: size }], |range, [sums]| {
                let added = added[range.start * size..].chunks_exact(size);
                for ((sums, added), [old, new]) in sums.chunks_exact_mut(size).zip(added).zip(&weights[range]) {
                    sums.iter_mut().zip(added).for_each(|(sum, added)| *sum = old * *sum + new * added);
                }
            });
        }
    }
}

/// Returns ln(e^a + e^b).
fn ln_of_sum(a: f32, b: f32) -> f32 {
    match (a, b) {
        (f32::NEG_INFINITY, other) | (other, f32::NEG_INFINITY) => other,
        _ => {
            let largest = a.max(b);
            largest + ln(exp(a - largest) + exp(b - largest))
        }
    }
}

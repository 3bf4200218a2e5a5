//! Exponentials of rows: cross-entropy, and the causal softmax of attention tiles.

use super::Isa;
use super::lanes::{LANES, larger, max, short_tree, sums1, sums2, tree};
use super::math::{BATCH, Exps, exp_up_to_88, ln};
use super::vectorised;

/// Returns (m, s), where m is the row's largest element and s = Σ e^(x − m).
pub(crate) fn max_and_sum(isa: Isa, row: &[f32]) -> (f32, f32) {
    if takes_batches(isa) { max_and_sum_in_batches(isa, row) } else { max_and_sum_at_once(isa, row) }
}

/// Replaces x by factor·e^(x − m)/s: softmax times a factor. m and s are the result of [`max_and_sum`], so no x is
/// above m. Results below 1e-30 become 0, because products with them would be subnormal. Subnormal products take
/// processors a hundred times as long as others.
pub(crate) fn scaled_softmax(isa: Isa, row: &mut [f32], largest: f32, sum: f32, factor: f32) {
    if takes_batches(isa) {
        scaled_softmax_in_batches(isa, row, largest, sum, factor);
    } else {
        scaled_softmax_at_once(isa, row, largest, sum, factor);
    }
}

/// Returns whether several short loops over each batch of a row are faster than a single loop over the row. With
/// AVX-512 the single loop keeps enough vectors in flight, and batches take a fifth longer for a row that is not in the
/// first-level cache.
fn takes_batches(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == zero_isa::Vectors::Avx2 {
        return true;
    }
    let _ = isa;
    false
}

vectorised! {
    fn max_and_sum_at_once(row: &[f32]) -> (f32, f32) {
        let largest = max(row);
        let [sum] = sums1([row], |_, x| exp_up_to_88(x - largest));
        (largest, sum)
    }
}

vectorised! {
    fn scaled_softmax_at_once(row: &mut [f32], largest: f32, sum: f32, factor: f32) {
        let factor = factor / sum;
        for x in row {
            let p = factor * exp_up_to_88(*x - largest);
            *x = if p.abs() < 1e-30 { 0.0 } else { p };
        }
    }
}

vectorised! {
    fn max_and_sum_in_batches(row: &[f32]) -> (f32, f32) {
        let largest = max(row);
        let mut exps = Exps::new();
        let mut lanes = [0.0; LANES];
        let (batches, rest) = row.as_chunks::<BATCH>();
        for batch in batches {
            lanes = exps.add(batch, largest, lanes);
        }
        let (vectors, rest) = rest.as_chunks::<LANES>();
        for vector in vectors {
            for lane in 0..LANES {
                lanes[lane] += exp_up_to_88(vector[lane] - largest);
            }
        }
        if !rest.is_empty() {
            let mut terms = [0.0; LANES];
            for (term, x) in terms.iter_mut().zip(rest) {
                *term = exp_up_to_88(x - largest);
            }
            for lane in 0..LANES {
                lanes[lane] += terms[lane];
            }
        }
        (largest, tree(lanes, |a, b| a + b))
    }
}

vectorised! {
    fn scaled_softmax_in_batches(row: &mut [f32], largest: f32, sum: f32, factor: f32) {
        let factor = factor / sum;
        let mut exps = Exps::new();
        for row in row.chunks_mut(BATCH) {
            let e = exps.of(row.iter().map(|x| x - largest));
            for (x, e) in row.iter_mut().zip(e) {
                let p = factor * e;
                *x = if p.abs() < 1e-30 { 0.0 } else { p };
            }
        }
    }
}

/// The layout of the scores of a few query rows, which begin `width` floats apart.
///
/// Column 0 is the position `origin`. Row `i` belongs to `position + i` and sees the positions from `firsts[i]` up to
/// its own, but none from `end` on; `firsts[i]` is at most `end`. It sees none if its own position is before
/// `firsts[i]`. Rows are processed as whole vectors, so a row has space for [`SPARE`] columns after the last column
/// that any row sees.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    pub(crate) width: usize,
    pub(crate) origin: usize,
    pub(crate) position: usize,
    pub(crate) end: usize,
    pub(crate) firsts: &'a [usize],
}

/// Extra columns of a row of scores after the last position.
pub(crate) const SPARE: usize = 2 * LANES;

/// Limit on the rows of scores that are computed at a time. With this limit, the positions of the first and the last
/// row are less than one vector apart.
pub(crate) const MOST_ROWS: usize = LANES;

/// Sixteen words whose bits are ones, then sixteen zeros. The sixteen words from index `n` on are a mask that selects
/// all lanes of a vector but the last `n`.
const USED: [u32; 2 * LANES] = {
    let mut masks = [0; 2 * LANES];
    let mut lane = 0;
    while lane < LANES {
        masks[lane] = u32::MAX;
        lane += 1;
    }
    masks
};

impl Tile<'_> {
    /// Returns the first column that row `i` sees, and the column after the last one that it sees.
    #[inline(always)]
    pub(crate) fn columns(&self, i: usize) -> (usize, usize) {
        let end = (self.position + i + 1).min(self.end).max(self.firsts[i]);
        (self.firsts[i] - self.origin, end - self.origin)
    }

    /// Returns the columns that row `i` sees, as vectors.
    #[inline(always)]
    fn vectors<'a>(&self, i: usize, row: &'a mut [f32]) -> &'a mut [[f32; LANES]] {
        let (begin, end) = self.columns(i);
        &mut row[begin..].as_chunks_mut().0[..(end - begin).div_ceil(LANES)]
    }

    /// Returns the columns that row `i` sees, as vectors. Elements of the last vector beyond these columns become
    /// `fill`. Columns before them, and later columns that other rows may see, become 0.
    #[inline(always)]
    fn seen<'a>(&self, i: usize, row: &'a mut [f32], fill: f32) -> &'a mut [[f32; LANES]] {
        let (begin, end) = self.columns(i);
        let (before, row) = row.split_at_mut(begin);
        before.fill(0.0);
        let vectors = row.as_chunks_mut::<LANES>().0;
        let (seen, after) = vectors.split_at_mut((end - begin).div_ceil(LANES));
        after[0] = [0.0; LANES];
        if let Some(last) = seen.last_mut() {
            // Uses a mask, because the compiler would turn a comparison for each lane into branches.
            let unused = LANES - 1 - (end - begin - 1) % LANES;
            let mask = USED[unused..].first_chunk::<LANES>().expect("at most 15 lanes are unused");
            let mut masked = *last;
            for lane in 0..LANES {
                masked[lane] = f32::from_bits(masked[lane].to_bits() & mask[lane] | fill.to_bits() & !mask[lane]);
            }
            *last = masked;
        }
        seen
    }
}

vectorised! {
    /// Replaces scores by the numerators of the causal softmax: e^(scale·(x − m)) where the row sees the position, and
    /// 0 elsewhere. Stores row `i`'s sum in `sums[i]`, and scale·m + ln(sum), from which the backward recomputes the
    /// probabilities, in `log_sums[i]`. For a row that sees no position, the two values are 0 and −∞. There are at most
    /// [`MOST_ROWS`] rows.
    ///
    /// Each loop over the rows ends with operations that no later row waits for, so that the processor overlaps rows.
    fn causal_exp(tile: Tile<'_>, scores: &mut [f32], scale: f32, sums: &mut [f32], log_sums: &mut [f32]) {
        let mut largest = [0.0; MOST_ROWS];
        for (i, row) in scores.chunks_exact_mut(tile.width).enumerate() {
            let mut lanes = [f32::NEG_INFINITY; LANES];
            // e^−∞ yields the required 0 after the last column.
            for &mut vector in tile.seen(i, row, f32::NEG_INFINITY) {
                for lane in 0..LANES {
                    lanes[lane] = larger(lanes[lane], vector[lane]);
                }
            }
            largest[i] = short_tree(lanes, larger);
        }
        for (i, row) in scores.chunks_exact_mut(tile.width).enumerate() {
            let (largest, mut lanes) = (largest[i], [0.0; LANES]);
            for vector in tile.vectors(i, row) {
                let mut e = *vector;
                for x in &mut e {
                    *x = exp_up_to_88(scale * (*x - largest));
                }
                *vector = e;
                for lane in 0..LANES {
                    lanes[lane] += e[lane];
                }
            }
            sums[i] = short_tree(lanes, |a, b| a + b);
        }
        for ((log_sum, &sum), largest) in log_sums.iter_mut().zip(&*sums).zip(largest) {
            *log_sum = if sum == 0.0 { f32::NEG_INFINITY } else { scale * largest + ln(sum) };
        }
    }
}

vectorised! {
    /// Divides the products of the numerators of [`causal_exp`] and the values, with `size` columns, by the rows' sums.
    /// A row that sees no position becomes 0.
    fn normalize(products: &mut [f32], size: usize, sums: &[f32]) {
        for (row, &sum) in products.chunks_exact_mut(size).zip(sums) {
            if sum == 0.0 {
                row.fill(0.0);
                continue;
            }
            // One division for each row, because a division takes as long as several multiplications.
            let factor = 1.0 / sum;
            for x in row {
                *x *= factor;
            }
        }
    }
}

vectorised! {
    /// Computes the backward of [`causal_exp`]: `scores` becomes the probabilities p = e^(scale·x − log_sum), and
    /// `d_probs` (dp) the gradient of the scores, scale·p·(dp − delta). Both are 0 where a row does not see the
    /// position.
    fn causal_backward(
        tile: Tile<'_>,
        scores: &mut [f32],
        d_probs: &mut [f32],
        scale: f32,
        log_sums: &[f32],
        deltas: &[f32],
    ) {
        let rows = scores.chunks_exact_mut(tile.width).zip(d_probs.chunks_exact_mut(tile.width));
        for (i, (scores, d_probs)) in rows.enumerate() {
            let (log_sum, delta) = (log_sums[i], deltas[i]);
            let (scores, d_probs) = (tile.seen(i, scores, f32::NEG_INFINITY), tile.seen(i, d_probs, 0.0));
            for (x, d) in scores.iter_mut().zip(d_probs) {
                for lane in 0..LANES {
                    x[lane] = exp_up_to_88(x[lane].mul_add(scale, -log_sum));
                    d[lane] = scale * x[lane] * (d[lane] - delta);
                }
            }
        }
    }
}

vectorised! {
    /// Σ a·b
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        let [sum] = sums2([a], [b], |_, a, b| a * b);
        sum
    }
}

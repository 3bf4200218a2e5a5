//! The sums of attention for one query row: each is one chain of fused multiply-adds from the first term to the last,
//! as in a product of matrices.

use super::lanes::LANES;
use super::vectorised;

/// Number of positions in a block of transposed keys.
pub(crate) const BLOCK: usize = 4 * LANES;

vectorised! {
    /// Computes the products of a query with a block of keys, `[size, BLOCK]`.
    fn scores(query: &[f32], keys: &[f32], out: &mut [f32]) {
        let mut sums = [0.0; BLOCK];
        for (&x, keys) in query.iter().zip(keys.as_chunks::<BLOCK>().0) {
            for lane in 0..BLOCK {
                sums[lane] = x.mul_add(keys[lane], sums[lane]);
            }
        }
        out.copy_from_slice(&sums);
    }
}

vectorised! {
    /// Computes Σ weight · value over rows of values, each as long as `out`.
    fn weighted_sum(weights: &[f32], values: &[f32], out: &mut [f32]) {
        let size = out.len();
        let mut start = 0;
        while start + BLOCK <= size {
            let mut sums = [0.0; BLOCK];
            for (&weight, row) in weights.iter().zip(values.chunks_exact(size)) {
                let Some(row) = row[start..].first_chunk::<BLOCK>() else { continue };
                for lane in 0..BLOCK {
                    sums[lane] = weight.mul_add(row[lane], sums[lane]);
                }
            }
            out[start..start + BLOCK].copy_from_slice(&sums);
            start += BLOCK;
        }
        while start + LANES <= size {
            let mut sums = [0.0; LANES];
            for (&weight, row) in weights.iter().zip(values.chunks_exact(size)) {
                let Some(row) = row[start..].first_chunk::<LANES>() else { continue };
                for lane in 0..LANES {
                    sums[lane] = weight.mul_add(row[lane], sums[lane]);
                }
            }
            out[start..start + LANES].copy_from_slice(&sums);
            start += LANES;
        }
        for at in start..size {
            let mut sum = 0.0f32;
            for (&weight, row) in weights.iter().zip(values.chunks_exact(size)) {
                sum = weight.mul_add(row[at], sum);
            }
            out[at] = sum;
        }
    }
}

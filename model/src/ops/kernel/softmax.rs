//! Rows of exponentials: cross-entropy, and the causal softmax of attention tiles.

use super::lanes::{max, sum1, sum2};
use super::math::exp;
use super::vectorised;

vectorised! {
    /// (m, s) with m the row's largest element and s = Σ e^(x − m).
    fn max_and_sum(row: &[f32]) -> (f32, f32) {
        let largest = max(row);
        (largest, sum1(row, |x| exp(x - largest)))
    }
}

vectorised! {
    /// x becomes factor·e^(x − m)/s: softmax times a factor, from what [`max_and_sum`] gave. What is under 1e-30 becomes
    /// 0: products with such numbers are subnormal, which processors take a hundred times as long for.
    fn scaled_softmax(row: &mut [f32], largest: f32, sum: f32, factor: f32) {
        let factor = factor / sum;
        for x in row {
            let p = factor * exp(*x - largest);
            *x = if p.abs() < 1e-30 { 0.0 } else { p };
        }
    }
}

vectorised! {
    /// Turns scores into causal softmax numerators, in place.
    ///
    /// The columns of `scores`, `width` of them, are the positions from `firsts[0]` on. Row `i` belongs to `position + i`
    /// and sees the positions from `firsts[i]` up to its own. Each becomes e^(scale·(x − m)), the other columns 0. Row
    /// `i`'s sum goes to `sums[i]` and scale·m + ln(sum), with which the backward finds the probabilities again, to
    /// `log_sums[i]`.
    fn causal_exp(
        scores: &mut [f32],
        width: usize,
        position: usize,
        firsts: &[usize],
        scale: f32,
        sums: &mut [f32],
        log_sums: &mut [f32],
    ) {
        for (i, row) in scores.chunks_exact_mut(width).enumerate() {
            let (row, after) = row.split_at_mut(position + i + 1 - firsts[0]);
            let (before, seen) = row.split_at_mut(firsts[i] - firsts[0]);
            let largest = max(seen);
            for x in seen.iter_mut() {
                *x = exp(scale * (*x - largest));
            }
            before.fill(0.0);
            after.fill(0.0);
            sums[i] = sum1(seen, |p| p);
            log_sums[i] = scale * largest + libm::logf(sums[i]);
        }
    }
}

vectorised! {
    /// The backward of a tile of causal softmax, whose rows see what they do in [`causal_exp`]: `scores` becomes the
    /// probabilities p = e^(scale·x − log_sum) and `d_probs` (dp) the gradient of the scores, scale·p·(dp − delta), both
    /// 0 in columns that the row does not see.
    fn causal_backward(
        scores: &mut [f32],
        d_probs: &mut [f32],
        width: usize,
        position: usize,
        firsts: &[usize],
        scale: f32,
        log_sums: &[f32],
        deltas: &[f32],
    ) {
        let rows = scores.chunks_exact_mut(width).zip(d_probs.chunks_exact_mut(width));
        for (i, (scores, d_probs)) in rows.enumerate() {
            let (begin, end) = (firsts[i] - firsts[0], position + i + 1 - firsts[0]);
            let (log_sum, delta) = (log_sums[i], deltas[i]);
            for (x, d) in scores[begin..end].iter_mut().zip(&mut d_probs[begin..end]) {
                let p = exp(x.mul_add(scale, -log_sum));
                *x = p;
                *d = scale * p * (*d - delta);
            }
            for row in [scores, d_probs] {
                row[..begin].fill(0.0);
                row[end..].fill(0.0);
            }
        }
    }
}

vectorised! {
    /// Σ a·b
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        sum2(a, b, |a, b| a * b)
    }
}

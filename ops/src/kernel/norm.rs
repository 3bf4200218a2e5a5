//! Layer norm and RMS norm over rows, forward and backward.
//!
//! The backward computes the row's statistics again from `x`, which is in the cache anyway, so that the forward saves
//! nothing. The slices hold whole rows; a row is as long as `weight`.

use super::lanes::{sum1, sum2, sum3};
use super::vectorised;

/// Mean and 1/√(variance + ε), the variance in a second pass over the differences.
#[inline(always)]
fn moments(x: &[f32], eps: f32) -> (f32, f32) {
    let n = x.len() as f32;
    let mean = sum1(x, |x| x) / n;
    let variance = sum1(x, |x| (x - mean) * (x - mean)) / n;
    (mean, 1.0 / (variance + eps).sqrt())
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum1(x, |x| x * x) / x.len() as f32 + eps).sqrt()
}

vectorised! {
    /// y = x̂·weight + bias, x̂ = (x − mean)/√(variance + ε)
    fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, y: &mut [f32]) {
        let n = weight.len();
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            let (mean, scale) = moments(x, eps);
            for (((y, &x), &w), &b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                *y = ((x - mean) * scale).mul_add(w, b);
            }
        }
    }
}

vectorised! {
    /// dx = (g − mean(g) − x̂·mean(g·x̂))/√(variance + ε) with g = dy·weight; adds Σ dy·x̂ to `d_weight` and Σ dy to
    /// `d_bias`.
    fn layer_norm_backward(
        x: &[f32],
        weight: &[f32],
        eps: f32,
        dy: &[f32],
        dx: &mut [f32],
        d_weight: &mut [f32],
        d_bias: &mut [f32],
    ) {
        let n = weight.len();
        for ((x, dy), dx) in x.chunks_exact(n).zip(dy.chunks_exact(n)).zip(dx.chunks_exact_mut(n)) {
            let (mean, scale) = moments(x, eps);
            let mean_g = sum2(dy, weight, |dy, w| dy * w) / n as f32;
            let mean_gx = sum3(x, dy, weight, |x, dy, w| dy * w * ((x - mean) * scale)) / n as f32;
            for (((dx, &x), &dy), &w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                let normal = (x - mean) * scale;
                *dx = scale * normal.mul_add(-mean_gx, dy * w - mean_g);
            }
            for (((dw, db), &x), &dy) in d_weight.iter_mut().zip(&mut *d_bias).zip(x).zip(dy) {
                *dw += dy * ((x - mean) * scale);
                *db += dy;
            }
        }
    }
}

vectorised! {
    /// y = x̂·weight, x̂ = x/√(mean(x²) + ε)
    fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let n = weight.len();
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            let scale = inverse_rms(x, eps);
            for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
                *y = x * scale * w;
            }
        }
    }
}

vectorised! {
    /// dx = (g − x̂·mean(g·x̂))/√(mean(x²) + ε) with g = dy·weight; adds Σ dy·x̂ to `d_weight`.
    fn rms_norm_backward(
        x: &[f32],
        weight: &[f32],
        eps: f32,
        dy: &[f32],
        dx: &mut [f32],
        d_weight: &mut [f32],
    ) {
        let n = weight.len();
        for ((x, dy), dx) in x.chunks_exact(n).zip(dy.chunks_exact(n)).zip(dx.chunks_exact_mut(n)) {
            let scale = inverse_rms(x, eps);
            let mean_gx = sum3(x, dy, weight, |x, dy, w| dy * w * (x * scale)) / n as f32;
            for (((dx, &x), &dy), &w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                *dx = scale * (x * scale).mul_add(-mean_gx, dy * w);
            }
            for ((dw, &x), &dy) in d_weight.iter_mut().zip(x).zip(dy) {
                *dw += dy * (x * scale);
            }
        }
    }
}

vectorised! {
    /// Adds the rows of `x` to `total`, in order.
    fn add_rows(x: &[f32], total: &mut [f32]) {
        for row in x.chunks_exact(total.len()) {
            for (total, &x) in total.iter_mut().zip(row) {
                *total += x;
            }
        }
    }
}

vectorised! {
    /// sums = x + y
    fn add(x: &[f32], y: &[f32], sums: &mut [f32]) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum = x + y;
        }
    }
}

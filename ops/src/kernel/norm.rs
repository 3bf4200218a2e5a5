//! Layer norm and RMS norm over rows, forward and backward.
//!
//! The backward recomputes the row's statistics from `x`, which is in the cache anyway, so the forward saves nothing.
//! The slices hold whole rows; a row is as long as `weight`.

use super::lanes::{sums1, sums2, sums3};
use super::vectorised;

/// Number of rows that are summed at the same time, if there are enough.
pub(crate) const ROWS: usize = 4;

/// Returns the mean and 1/√(variance + ε) of each row. A second pass over the differences computes the variance.
#[inline(always)]
fn moments<const R: usize>(rows: [&[f32]; R], eps: f32) -> ([f32; R], [f32; R]) {
    let n = rows[0].len() as f32;
    let means = sums1(rows, |_, x| x).map(|sum| sum / n);
    let variances = sums1(rows, |row, x| (x - means[row]) * (x - means[row])).map(|sum| sum / n);
    (means, variances.map(|variance| 1.0 / (variance + eps).sqrt()))
}

#[inline(always)]
fn inverse_rms<const R: usize>(rows: [&[f32]; R], eps: f32) -> [f32; R] {
    let n = rows[0].len() as f32;
    sums1(rows, |_, x| x * x).map(|sum| 1.0 / (sum / n + eps).sqrt())
}

/// Splits a slice into `R` consecutive rows.
#[inline(always)]
fn rows_of<const R: usize>(x: &[f32], n: usize) -> [&[f32]; R] {
    std::array::from_fn(|row| &x[row * n..(row + 1) * n])
}

#[inline(always)]
fn layer_norm_rows<const R: usize>(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, y: &mut [f32]) {
    let n = weight.len();
    let (means, scales) = moments::<R>(rows_of(x, n), eps);
    for (row, (x, y)) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)).enumerate() {
        let (mean, scale) = (means[row], scales[row]);
        for (((y, &x), &w), &b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
            *y = ((x - mean) * scale).mul_add(w, b);
        }
    }
}

vectorised! {
    /// y = x̂·weight + bias, x̂ = (x − mean)/√(variance + ε)
    fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, y: &mut [f32]) {
        let n = weight.len();
        let many = x.len() / (ROWS * n) * (ROWS * n);
        let ((x, x_rest), (y, y_rest)) = (x.split_at(many), y.split_at_mut(many));
        for (x, y) in x.chunks_exact(ROWS * n).zip(y.chunks_exact_mut(ROWS * n)) {
            layer_norm_rows::<ROWS>(x, weight, bias, eps, y);
        }
        for (x, y) in x_rest.chunks_exact(n).zip(y_rest.chunks_exact_mut(n)) {
            layer_norm_rows::<1>(x, weight, bias, eps, y);
        }
    }
}

#[inline(always)]
fn layer_norm_rows_backward<const R: usize>(
    [x, dy]: [&[f32]; 2],
    weight: &[f32],
    eps: f32,
    dx: &mut [f32],
    d_weight: &mut [f32],
    d_bias: &mut [f32],
) {
    let n = weight.len();
    let (d_weight, d_bias) = (&mut d_weight[..n], &mut d_bias[..n]);
    let (xs, dys) = (rows_of::<R>(x, n), rows_of::<R>(dy, n));
    let (means, scales) = moments(xs, eps);
    let normal = |row: usize, x: f32| (x - means[row]) * scales[row];
    let means_g = sums2(dys, [weight; R], |_, dy, w| dy * w).map(|sum| sum / n as f32);
    let means_gx = sums3(xs, dys, [weight; R], |row, x, dy, w| dy * w * normal(row, x)).map(|sum| sum / n as f32);
    for (row, dx) in dx.chunks_exact_mut(n).enumerate() {
        let (x, dy, mean_g, mean_gx, scale) = (xs[row], dys[row], means_g[row], means_gx[row], scales[row]);
        let sums = d_weight.iter_mut().zip(&mut *d_bias);
        for ((((dx, (dw, db)), &x), &dy), &w) in dx.iter_mut().zip(sums).zip(x).zip(dy).zip(weight) {
            let normal = normal(row, x);
            *dx = scale * normal.mul_add(-mean_gx, dy * w - mean_g);
            *dw += dy * normal;
            *db += dy;
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
        let many = x.len() / (ROWS * n) * (ROWS * n);
        let ((x, x_rest), (dy, dy_rest), (dx, dx_rest)) = (x.split_at(many), dy.split_at(many), dx.split_at_mut(many));
        let rows = x.chunks_exact(ROWS * n).zip(dy.chunks_exact(ROWS * n));
        for ((x, dy), dx) in rows.zip(dx.chunks_exact_mut(ROWS * n)) {
            layer_norm_rows_backward::<ROWS>([x, dy], weight, eps, dx, d_weight, d_bias);
        }
        for ((x, dy), dx) in x_rest.chunks_exact(n).zip(dy_rest.chunks_exact(n)).zip(dx_rest.chunks_exact_mut(n)) {
            layer_norm_rows_backward::<1>([x, dy], weight, eps, dx, d_weight, d_bias);
        }
    }
}

#[inline(always)]
fn rms_norm_rows<const R: usize>(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let n = weight.len();
    let scales = inverse_rms::<R>(rows_of(x, n), eps);
    for (row, (x, y)) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)).enumerate() {
        let scale = scales[row];
        for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * scale * w;
        }
    }
}

vectorised! {
    /// y = x̂·weight, x̂ = x/√(mean(x²) + ε)
    fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let n = weight.len();
        let many = x.len() / (ROWS * n) * (ROWS * n);
        let ((x, x_rest), (y, y_rest)) = (x.split_at(many), y.split_at_mut(many));
        for (x, y) in x.chunks_exact(ROWS * n).zip(y.chunks_exact_mut(ROWS * n)) {
            rms_norm_rows::<ROWS>(x, weight, eps, y);
        }
        for (x, y) in x_rest.chunks_exact(n).zip(y_rest.chunks_exact_mut(n)) {
            rms_norm_rows::<1>(x, weight, eps, y);
        }
    }
}

#[inline(always)]
fn rms_norm_rows_backward<const R: usize>(
    [x, dy]: [&[f32]; 2],
    weight: &[f32],
    eps: f32,
    dx: &mut [f32],
    d_weight: &mut [f32],
) {
    let n = weight.len();
    let d_weight = &mut d_weight[..n];
    let (xs, dys) = (rows_of::<R>(x, n), rows_of::<R>(dy, n));
    let scales = inverse_rms(xs, eps);
    let means_gx = sums3(xs, dys, [weight; R], |row, x, dy, w| dy * w * (x * scales[row])).map(|sum| sum / n as f32);
    for (row, dx) in dx.chunks_exact_mut(n).enumerate() {
        let (x, dy, mean_gx, scale) = (xs[row], dys[row], means_gx[row], scales[row]);
        for ((((dx, dw), &x), &dy), &w) in dx.iter_mut().zip(&mut *d_weight).zip(x).zip(dy).zip(weight) {
            *dx = scale * (x * scale).mul_add(-mean_gx, dy * w);
            *dw += dy * (x * scale);
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
        let many = x.len() / (ROWS * n) * (ROWS * n);
        let ((x, x_rest), (dy, dy_rest), (dx, dx_rest)) = (x.split_at(many), dy.split_at(many), dx.split_at_mut(many));
        let rows = x.chunks_exact(ROWS * n).zip(dy.chunks_exact(ROWS * n));
        for ((x, dy), dx) in rows.zip(dx.chunks_exact_mut(ROWS * n)) {
            rms_norm_rows_backward::<ROWS>([x, dy], weight, eps, dx, d_weight);
        }
        for ((x, dy), dx) in x_rest.chunks_exact(n).zip(dy_rest.chunks_exact(n)).zip(dx_rest.chunks_exact_mut(n)) {
            rms_norm_rows_backward::<1>([x, dy], weight, eps, dx, d_weight);
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

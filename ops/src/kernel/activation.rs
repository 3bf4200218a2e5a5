//! GELU in both forms, SiLU, ReLU and SwiGLU, forward and backward.
//!
//! The tanh form of GELU needs no tanh: ½(1 + tanh u) = σ(2u), which also keeps the left tail's relative accuracy.

use super::math::{exp, normal_cdf, normal_density, sigmoid};
use super::vectorised;

/// √(2/π) and the cubic term of GELU's tanh form (Hendrycks and Gimpel, 2016).
const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// x·σ(2u), u = √(2/π)·(x + 0.044715·x³)
#[inline(always)]
fn gelu(x: f32) -> f32 {
    let u = SQRT_2_OVER_PI * (CUBIC * x * x).mul_add(x, x);
    // σ(2u) as 1/(1 + e^(−2u)): the exponential saturates and the quotient goes to 0.
    x / (1.0 + exp(-2.0 * u))
}

/// s + x·s·(1 − s)·2u′, s = σ(2u)
#[inline(always)]
fn gelu_slope(x: f32) -> f32 {
    let square = x * x;
    let u = SQRT_2_OVER_PI * (CUBIC * square).mul_add(x, x);
    let twice_slope = 2.0 * SQRT_2_OVER_PI * (3.0 * CUBIC).mul_add(square, 1.0);
    let (s, rest) = sigmoid(2.0 * u);
    // The clamp keeps ∞·0 out of the far tails, where s·(1 − s) has long been 0.
    let lever = if square < 1e4 { x * twice_slope } else { 0.0 };
    (s * rest).mul_add(lever, s)
}

vectorised! {
    /// y = gelu(x), tanh form
    fn gelu_tanh(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = gelu(x);
        }
    }
}

vectorised! {
    /// dx = dy·gelu′(x), tanh form
    fn gelu_tanh_backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = dy * gelu_slope(x);
        }
    }
}

vectorised! {
    /// y = x·Φ(x)
    fn gelu_erf(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * normal_cdf(x);
        }
    }
}

vectorised! {
    /// dx = dy·(Φ(x) + x·φ(x))
    fn gelu_erf_backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = dy * x.mul_add(normal_density(x), normal_cdf(x));
        }
    }
}

vectorised! {
    /// y = x·σ(x)
    fn silu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * sigmoid(x).0;
        }
    }
}

vectorised! {
    /// dx = dy·(s + x·s·(1 − s)), s = σ(x)
    fn silu_backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            let (s, rest) = sigmoid(x);
            *dx = dy * (s * rest).mul_add(x, s);
        }
    }
}

vectorised! {
    /// y = max(x, 0), NaN where x is
    fn relu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if x < 0.0 { 0.0 } else { x };
        }
    }
}

vectorised! {
    /// dx = dy where x is not negative: at 0 as candle has it
    fn relu_backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = if x < 0.0 { 0.0 } else { dy };
        }
    }
}

vectorised! {
    /// y = gate·σ(gate)·up
    fn swiglu(gate: &[f32], up: &[f32], y: &mut [f32]) {
        for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
            *y = gate * sigmoid(gate).0 * up;
        }
    }
}

vectorised! {
    /// d_gate = dy·up·(s + gate·s·(1 − s)), d_up = dy·gate·s, s = σ(gate)
    fn swiglu_backward(gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
        for ((((d_gate, d_up), &gate), &up), &dy) in d_gate.iter_mut().zip(d_up).zip(gate).zip(up).zip(dy) {
            let (s, rest) = sigmoid(gate);
            *d_gate = dy * up * (s * rest).mul_add(gate, s);
            *d_up = dy * gate * s;
        }
    }
}

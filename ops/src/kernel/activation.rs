//! GELU in both forms, SiLU, ReLU, SwiGLU and GeGLU, forward and backward.
//!
//! The tanh form of GELU needs no tanh: ½(1 + tanh u) = σ(2u), which also keeps the left tail's relative accuracy.

use super::math::{BATCH, Exps, NormalCdfs, ONE_OVER_SQRT_TAU, at_most_88, sigmoid_from};
use super::vectorised;

/// √(2/π) and the cubic term of GELU's tanh form (Hendrycks and Gimpel, 2016).
const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// 2u, u = √(2/π)·(x + 0.044715·x³), given 0.044715·x²
#[inline(always)]
fn twice_u(x: f32, cubic: f32) -> f32 {
    2.0 * SQRT_2_OVER_PI * cubic.mul_add(x, x)
}

/// σ(2u) and gelu′(x) = s + x·s·(1 − s)·2u′ with s = σ(2u), given e^−|2u|
#[inline(always)]
fn gelu_tanh_slope(x: f32, e: f32) -> (f32, f32) {
    // 2u has the sign of x.
    let (s, rest) = sigmoid_from(x, e);
    let square = x * x;
    let twice_slope = 2.0 * SQRT_2_OVER_PI * (3.0 * CUBIC).mul_add(square, 1.0);
    // The clamp avoids ∞·0 in the far tails, where s·(1 − s) is already 0.
    let lever = if square < 1e4 { x * twice_slope } else { 0.0 };
    (s, (s * rest).mul_add(lever, s))
}

vectorised! {
    /// y = gelu(x), tanh form: x·σ(2u), within 2.6e-6 relative on [-5, 5]
    fn gelu_tanh(x: &[f32], y: &mut [f32]) {
        let mut exps = Exps::new();
        for (x, y) in x.chunks(BATCH).zip(y.chunks_mut(BATCH)) {
            let e = exps.of(x.iter().map(|&x| at_most_88(-twice_u(x, CUBIC * x * x))));
            for ((y, &x), &e) in y.iter_mut().zip(x).zip(e) {
                // σ(2u) as 1/(1 + e^(−2u)): the exponential saturates and the quotient goes to 0.
                *y = x / (1.0 + e);
            }
        }
    }
}

vectorised! {
    /// dx = dy·gelu′(x), tanh form: gelu′(x) = s + x·s·(1 − s)·2u′ with s = σ(2u), within 2.1e-7 absolute on [-10, 10]
    fn gelu_tanh_backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        let mut exps = Exps::new();
        for ((x, dy), dx) in x.chunks(BATCH).zip(dy.chunks(BATCH)).zip(dx.chunks_mut(BATCH)) {
            let e = exps.of(x.iter().map(|&x| -twice_u(x, CUBIC * (x * x)).abs()));
            for (((dx, &x), &dy), &e) in dx.iter_mut().zip(x).zip(dy).zip(e) {
                *dx = dy * gelu_tanh_slope(x, e).1;
            }
        }
    }
}

vectorised! {
    /// y = x·Φ(x), within 2e-6 relative on [-5, 5]
    fn gelu_erf(x: &[f32], y: &mut [f32]) {
        let (mut exps, mut cdfs) = (Exps::new(), NormalCdfs::new());
        for (x, y) in x.chunks(BATCH).zip(y.chunks_mut(BATCH)) {
            for ((y, &x), &cdf) in y.iter_mut().zip(x).zip(cdfs.of(x, &mut exps)) {
                *y = x * cdf;
            }
        }
    }
}

vectorised! {
    /// dx = dy·(Φ(x) + x·φ(x)), the slope within 2.1e-7 absolute on [-10, 10]
    fn gelu_erf_backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        let (mut exps, mut cdfs) = (Exps::new(), NormalCdfs::new());
        for ((x, dy), dx) in x.chunks(BATCH).zip(dy.chunks(BATCH)).zip(dx.chunks_mut(BATCH)) {
            let cdf = cdfs.of(x, &mut exps);
            let e = exps.of(x.iter().map(|x| -0.5 * x * x));
            for ((((dx, &x), &dy), &cdf), &e) in dx.iter_mut().zip(x).zip(dy).zip(cdf).zip(e) {
                *dx = dy * x.mul_add(ONE_OVER_SQRT_TAU * e, cdf);
            }
        }
    }
}

vectorised! {
    /// y = x·σ(x), within 2.4e-7 relative on [-80, 80]
    fn silu(x: &[f32], y: &mut [f32]) {
        let mut exps = Exps::new();
        for (x, y) in x.chunks(BATCH).zip(y.chunks_mut(BATCH)) {
            let e = exps.of(x.iter().map(|x| -x.abs()));
            for ((y, &x), &e) in y.iter_mut().zip(x).zip(e) {
                *y = x * sigmoid_from(x, e).0;
            }
        }
    }
}

vectorised! {
    /// dx = dy·(s + x·s·(1 − s)), s = σ(x), the slope within 1.9e-7 absolute on [-10, 10]
    fn silu_backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        let mut exps = Exps::new();
        for ((x, dy), dx) in x.chunks(BATCH).zip(dy.chunks(BATCH)).zip(dx.chunks_mut(BATCH)) {
            let e = exps.of(x.iter().map(|x| -x.abs()));
            for (((dx, &x), &dy), &e) in dx.iter_mut().zip(x).zip(dy).zip(e) {
                let (s, rest) = sigmoid_from(x, e);
                *dx = dy * (s * rest).mul_add(x, s);
            }
        }
    }
}

vectorised! {
    /// y = max(x, 0), or NaN if x is NaN
    fn relu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if x < 0.0 { 0.0 } else { x };
        }
    }
}

vectorised! {
    /// dx = dy where x is positive, or NaN; at 0 the gradient is 0, as in PyTorch
    fn relu_backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = if x <= 0.0 { 0.0 } else { dy };
        }
    }
}

vectorised! {
    /// y = gate·σ(gate)·up
    fn swiglu(gate: &[f32], up: &[f32], y: &mut [f32]) {
        let mut exps = Exps::new();
        for ((gate, up), y) in gate.chunks(BATCH).zip(up.chunks(BATCH)).zip(y.chunks_mut(BATCH)) {
            let e = exps.of(gate.iter().map(|gate| -gate.abs()));
            for (((y, &gate), &up), &e) in y.iter_mut().zip(gate).zip(up).zip(e) {
                *y = gate * sigmoid_from(gate, e).0 * up;
            }
        }
    }
}

vectorised! {
    /// d_gate = dy·up·(s + gate·s·(1 − s)), d_up = dy·gate·s, s = σ(gate)
    fn swiglu_backward(gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
        let mut exps = Exps::new();
        let inputs = gate.chunks(BATCH).zip(up.chunks(BATCH)).zip(dy.chunks(BATCH));
        for ((((gate, up), dy), d_gate), d_up) in inputs.zip(d_gate.chunks_mut(BATCH)).zip(d_up.chunks_mut(BATCH)) {
            let e = exps.of(gate.iter().map(|gate| -gate.abs()));
            let inputs = gate.iter().zip(up).zip(dy).zip(e);
            for ((d_gate, d_up), (((&gate, &up), &dy), &e)) in d_gate.iter_mut().zip(d_up).zip(inputs) {
                let (s, rest) = sigmoid_from(gate, e);
                *d_gate = dy * up * (s * rest).mul_add(gate, s);
                *d_up = dy * gate * s;
            }
        }
    }
}

vectorised! {
    /// y = gelu(gate)·up, tanh form
    fn geglu(gate: &[f32], up: &[f32], y: &mut [f32]) {
        let mut exps = Exps::new();
        for ((gate, up), y) in gate.chunks(BATCH).zip(up.chunks(BATCH)).zip(y.chunks_mut(BATCH)) {
            let e = exps.of(gate.iter().map(|&gate| at_most_88(-twice_u(gate, CUBIC * gate * gate))));
            for (((y, &gate), &up), &e) in y.iter_mut().zip(gate).zip(up).zip(e) {
                *y = gate / (1.0 + e) * up;
            }
        }
    }
}

vectorised! {
    /// d_gate = dy·up·gelu′(gate), d_up = dy·gelu(gate), tanh form
    fn geglu_backward(gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
        let mut exps = Exps::new();
        let inputs = gate.chunks(BATCH).zip(up.chunks(BATCH)).zip(dy.chunks(BATCH));
        for ((((gate, up), dy), d_gate), d_up) in inputs.zip(d_gate.chunks_mut(BATCH)).zip(d_up.chunks_mut(BATCH)) {
            let e = exps.of(gate.iter().map(|&gate| -twice_u(gate, CUBIC * (gate * gate)).abs()));
            let inputs = gate.iter().zip(up).zip(dy).zip(e);
            for ((d_gate, d_up), (((&gate, &up), &dy), &e)) in d_gate.iter_mut().zip(d_up).zip(inputs) {
                let (s, slope) = gelu_tanh_slope(gate, e);
                *d_gate = dy * up * slope;
                *d_up = dy * gate * s;
            }
        }
    }
}

//! Elementwise activations and additions, bit-identical to the CPU.

use crate::launch::{Address, Dtype, Launch, Source};

/// Matches `ActivationArgs` of `cu/activation.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Args {
    a: Address,
    b: Address,
    d: Address,
    x: Address,
    y: Address,
    count: u64,
}

/// Elementwise functions of one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// GELU in its tanh form.
    GeluTanh,
    /// GELU with the error function.
    GeluErf,
    /// x·σ(x).
    Silu,
    /// max(x, 0).
    Relu,
}

impl Function {
    /// All functions.
    pub const ALL: [Self; 4] = [Self::GeluTanh, Self::GeluErf, Self::Silu, Self::Relu];

    fn name(self) -> &'static str {
        match self {
            Self::GeluTanh => "gelu_tanh",
            Self::GeluErf => "gelu_erf",
            Self::Silu => "silu",
            Self::Relu => "relu",
        }
    }
}

/// Computes y = f(x) for `count` elements; y may be x. Returns `None` if `count` is 0.
pub fn forward(f: Function, dtype: Dtype, count: u64, x: Address, y: Address) -> Option<Launch<Args>> {
    Launch::over_packs(Source::Activation, f.name(), dtype, count, Args { a: x, y, count, ..Args::default() })
}

/// Computes dx = dy·f′(x); dx may be x or dy.
pub fn backward(f: Function, dtype: Dtype, count: u64, x: Address, dy: Address, dx: Address) -> Option<Launch<Args>> {
    let args = Args { a: x, d: dy, x: dx, count, ..Args::default() };
    Launch::over_packs(Source::Activation, &format!("{}_backward", f.name()), dtype, count, args)
}

/// Computes y = gate·σ(gate)·up; y may be gate or up.
pub fn swiglu(dtype: Dtype, count: u64, [gate, up]: [Address; 2], y: Address) -> Option<Launch<Args>> {
    let args = Args { a: gate, b: up, y, count, ..Args::default() };
    Launch::over_packs(Source::Activation, "swiglu", dtype, count, args)
}

/// Computes the gradients of gate and up; they may overwrite gate, up or dy.
pub fn swiglu_backward(
    dtype: Dtype,
    count: u64,
    [gate, up]: [Address; 2],
    dy: Address,
    [d_gate, d_up]: [Address; 2],
) -> Option<Launch<Args>> {
    let args = Args { a: gate, b: up, d: dy, x: d_gate, y: d_up, count };
    Launch::over_packs(Source::Activation, "swiglu_backward", dtype, count, args)
}

/// Computes y = a + b; y may be a or b.
pub fn add(dtype: Dtype, count: u64, [a, b]: [Address; 2], y: Address) -> Option<Launch<Args>> {
    Launch::over_packs(Source::Activation, "add", dtype, count, Args { a, b, y, count, ..Args::default() })
}

//! The 16-bit floats in which operands and results may be stored. All arithmetic is f32.

use super::{Isa, f16 as ieee};
use half::{bf16, f16};
use zero_optim::{read_half, write_half};

/// A 16-bit float.
pub(crate) trait HalfFloat: Copy + Send + Sync + 'static {
    const ZERO: Self;

    /// Converts to f32, exactly.
    fn wide(self) -> f32;

    /// y = x, exactly. The slices have the same length.
    fn widen(x: &[Self], y: &mut [f32]);

    /// y = x rounded to nearest, ties to even; NaN stays NaN. The slices have the same length.
    fn round(x: &[f32], y: &mut [Self]);
}

impl HalfFloat for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn widen(x: &[Self], y: &mut [f32]) {
        read_half(x, y).expect("slices of the same length");
    }

    fn round(x: &[f32], y: &mut [Self]) {
        write_half(x, y).expect("slices of the same length");
    }
}

/// `zero_optim` converts f16 too, but eight elements at a time, which is slower with AVX-512.
impl HalfFloat for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    fn wide(self) -> f32 {
        ieee::wide(self)
    }

    fn widen(x: &[Self], y: &mut [f32]) {
        ieee::widen(Isa::current(), x, y);
    }

    fn round(x: &[f32], y: &mut [Self]) {
        ieee::round(Isa::current(), x, y);
    }
}

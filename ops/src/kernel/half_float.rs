//! The 16-bit floats in which operands and results may be stored. All arithmetic is f32.

use super::{Isa, bf16 as brain, f16 as ieee};
use half::{bf16, f16};

/// A 16-bit float.
pub(crate) trait HalfFloat: Copy + Send + Sync + 'static {
    const ZERO: Self;

    /// Converts to f32, exactly.
    fn wide(self) -> f32;

    /// y = x, exactly.
    fn widen(isa: Isa, x: &[Self], y: &mut [f32]);

    /// y = x rounded to nearest, ties to even; NaN stays NaN.
    fn round(isa: Isa, x: &[f32], y: &mut [Self]);
}

macro_rules! half_float {
    ($type:ty, $kernel:ident) => {
        impl HalfFloat for $type {
            const ZERO: Self = <$type>::ZERO;

            #[inline(always)]
            fn wide(self) -> f32 {
                $kernel::wide(self)
            }

            fn widen(isa: Isa, x: &[Self], y: &mut [f32]) {
                $kernel::widen(isa, x, y);
            }

            fn round(isa: Isa, x: &[f32], y: &mut [Self]) {
                $kernel::round(isa, x, y);
            }
        }
    };
}
half_float!(bf16, brain);
half_float!(f16, ieee);

//! Converts between master parameters (f32) and working parameters (bf16 or f16).
//!
//! bf16 conversion is integer arithmetic on the bits: it vectorizes everywhere and does not depend on the rounding
//! mode. f16 conversion uses the processor's own instructions where available; the results are bit-identical.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use zero_isa::Isa;

use crate::simd::{Kernel, run};
use crate::stored::sealed::Convert as _;
use crate::{LengthError, expect_length};

/// A 16-bit float that parameters can be stored in: `bf16` or `f16`.
pub trait HalfFloat: Copy + sealed::Convert {
    /// Positive zero.
    const ZERO: Self;
}

impl HalfFloat for bf16 {
    const ZERO: Self = bf16::ZERO;
}

impl HalfFloat for f16 {
    const ZERO: Self = f16::ZERO;
}

mod sealed {
    /// Converts between slices of equal length.
    pub trait Convert: Sized {
        fn narrow(src: &[f32], dst: &mut [Self]);
        fn widen(src: &[Self], dst: &mut [f32]);
    }
}

/// Rounds each element to the nearest 16-bit float, ties to even. A value beyond the largest finite one becomes an
/// infinity; a NaN becomes a quiet NaN.
///
/// # Errors
/// Fails if the slices differ in length. In that case nothing is written.
pub fn write_half<H: HalfFloat>(src: &[f32], dst: &mut [H]) -> Result<(), LengthError> {
    expect_length("dst", src.len(), dst.len())?;
    H::narrow(src, dst);
    Ok(())
}

/// Like [`write_half`], but returns a new vector, whose memory is not cleared before the results are written.
#[must_use]
pub fn rounded<H: HalfFloat>(src: &[f32]) -> Vec<H> {
    let (mut all, mut part) = (Vec::with_capacity(src.len()), [H::ZERO; 2048]);
    for src in src.chunks(part.len()) {
        let dst = &mut part[..src.len()];
        H::narrow(src, dst);
        all.extend_from_slice(dst);
    }
    all
}

/// Rounds each element up or down to bf16, with probabilities such that the expected result equals the element.
/// `random` has 16 random bits for each element. Infinities and NaNs are handled as in [`write_half`].
///
/// # Errors
/// Fails if the slices differ in length. In that case nothing is written.
pub fn write_bf16_at_random(src: &[f32], random: &[u16], dst: &mut [bf16]) -> Result<(), LengthError> {
    expect_length("random", src.len(), random.len())?;
    expect_length("dst", src.len(), dst.len())?;
    run(Isa::current(), NarrowAtRandom { src, random, dst });
    Ok(())
}

/// Widens each element exactly.
///
/// # Errors
/// Fails if the slices differ in length. In that case nothing is written.
pub fn read_half<H: HalfFloat>(src: &[H], dst: &mut [f32]) -> Result<(), LengthError> {
    expect_length("dst", src.len(), dst.len())?;
    H::widen(src, dst);
    Ok(())
}

impl sealed::Convert for bf16 {
    #[inline]
    fn narrow(src: &[f32], dst: &mut [Self]) {
        run(Isa::current(), Narrow { src, dst });
    }

    #[inline]
    fn widen(src: &[Self], dst: &mut [f32]) {
        run(Isa::current(), Widen { src, dst });
    }
}

impl sealed::Convert for f16 {
    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.convert_from_f32_slice(src);
    }

    fn widen(src: &[Self], dst: &mut [f32]) {
        src.convert_to_f32_slice(dst);
    }
}

struct Narrow<'a> {
    src: &'a [f32],
    dst: &'a mut [bf16],
}

impl Kernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (dst, src) in self.dst.iter_mut().zip(self.src) {
            *dst = bf16::rounded(*src);
        }
    }
}

struct NarrowAtRandom<'a> {
    src: &'a [f32],
    random: &'a [u16],
    dst: &'a mut [bf16],
}

impl Kernel for NarrowAtRandom<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((dst, src), random) in self.dst.iter_mut().zip(self.src).zip(self.random) {
            let bits = src.to_bits();
            let rounded = bits.wrapping_add(u32::from(*random)) >> 16;
            let quiet = (bits >> 16) | if src.is_nan() { 0x0040 } else { 0 };
            *dst = bf16::from_bits(if src.is_finite() { rounded as u16 } else { quiet as u16 });
        }
    }
}

struct Widen<'a> {
    src: &'a [bf16],
    dst: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (dst, src) in self.dst.iter_mut().zip(self.src) {
            *dst = src.load();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_into_a_new_vector_gives_the_same_bits() {
        fn same<H: HalfFloat + PartialEq + std::fmt::Debug>() {
            let src: Vec<f32> = (0..5000).map(|i| (i as f32).sin() * 1e3).collect();
            let mut dst = vec![H::ZERO; src.len()];
            assert_eq!(write_half(&src, &mut dst), Ok(()));
            assert_eq!(rounded::<H>(&src), dst);
            assert_eq!(rounded::<H>(&[]), []);
        }
        same::<bf16>();
        same::<f16>();
    }

    /// Covers every bf16, the ties between two of them, numbers beside the ties, NaNs, infinities and subnormal
    /// numbers.
    #[test]
    fn rounds_as_the_half_crate_on_every_instruction_set() {
        let src: Vec<f32> = (0..=u16::MAX)
            .flat_map(|high| {
                [0x0000u32, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| (u32::from(high) << 16) | low)
            })
            .map(f32::from_bits)
            .collect();
        let expected: Vec<u16> = src.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        for isa in Isa::available() {
            let mut dst = vec![bf16::ZERO; src.len()];
            run(isa, Narrow { src: &src, dst: &mut dst });
            assert!(dst.iter().map(|x| x.to_bits()).eq(expected.iter().copied()), "{isa:?}");
        }
    }

    /// Covers every f16, values around the midpoint to the next f16, and values beyond the largest. Slices are rounded
    /// by the processor's conversion instructions, single values by integer arithmetic.
    #[test]
    fn f16_slices_round_as_single_values_do() {
        let beside = |bits: u16| {
            let bits = f16::from_bits(bits).to_f32_const().to_bits();
            [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff].map(|low| f32::from_bits(bits.wrapping_add(low)))
        };
        let beyond = [65503.9, 65504.0, 65519.99, 65520.0, 1e30, f32::MAX, 2f32.powi(-25), 1e-30];
        let src: Vec<f32> = (0..=u16::MAX).flat_map(beside).chain(beyond).collect();
        let mut dst = vec![f16::ZERO; src.len()];
        write_half(&src, &mut dst).unwrap();
        for (src, dst) in src.iter().zip(&dst) {
            assert_eq!(dst.to_bits(), f16::from_f32_const(*src).to_bits(), "{:08x}", src.to_bits());
        }
        assert!(!rounded::<f16>(&[65520.0])[0].is_finite() && rounded::<f16>(&[65519.0])[0].is_finite());
    }

    #[test]
    fn reads_back_what_was_written() {
        let src: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let mut wide = vec![0.0f32; src.len()];
        for isa in Isa::available() {
            run(isa, Widen { src: &src, dst: &mut wide });
            for (narrow, wide) in src.iter().zip(&wide) {
                assert_eq!(u32::from(narrow.to_bits()) << 16, wide.to_bits(), "{isa:?}");
            }
        }
        let src: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        read_half(&src, &mut wide).unwrap();
        let mut back = vec![f16::ZERO; src.len()];
        write_half(&wide, &mut back).unwrap();
        for ((narrow, wide), back) in src.iter().zip(&wide).zip(&back) {
            assert_eq!(narrow.to_f32_const().to_bits(), wide.to_bits());
            assert!(narrow.is_nan() || narrow.to_bits() == back.to_bits());
        }
    }

    #[test]
    fn different_lengths_are_an_error() {
        let error = LengthError { what: "dst", expected: 3, found: 2 };
        assert_eq!(write_half(&[0.0; 3], &mut [bf16::ZERO; 2]), Err(error.clone()));
        assert_eq!(write_half(&[0.0; 3], &mut [f16::ZERO; 2]), Err(error.clone()));
        assert_eq!(read_half(&[bf16::ZERO; 3], &mut [0.0; 2]), Err(error.clone()));
        assert_eq!(read_half(&[f16::ZERO; 3], &mut [0.0; 2]), Err(error));
    }
}

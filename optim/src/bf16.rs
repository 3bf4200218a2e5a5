//! Conversion between master parameters (f32) and working parameters (bf16).
//!
//! Integer arithmetic on the bits, so that it vectorises everywhere and does not depend on the rounding mode.

use half::bf16;

use crate::{
    LengthError, expect_length,
    simd::{Kernel, Level},
};

/// Rounds each element to the nearest bf16, ties to even. A value beyond the largest bf16 becomes an infinity, a NaN
/// stays a (quiet) NaN.
///
/// # Errors
/// The slices differ in length; nothing was written then.
pub fn write_bf16(src: &[f32], dst: &mut [bf16]) -> Result<(), LengthError> {
    write_bf16_at(Level::detect(), src, dst)
}

/// [`write_bf16`] to a new vector, without a pass to clear it first.
#[must_use]
pub fn rounded(src: &[f32]) -> Vec<bf16> {
    let (mut all, mut part) = (Vec::with_capacity(src.len()), [bf16::ZERO; 2048]);
    let level = Level::detect();
    for src in src.chunks(part.len()) {
        let dst = &mut part[..src.len()];
        level.run(Narrow { src, dst });
        all.extend_from_slice(dst);
    }
    all
}

/// Widens each element, exactly.
///
/// # Errors
/// The slices differ in length; nothing was written then.
pub fn read_bf16(src: &[bf16], dst: &mut [f32]) -> Result<(), LengthError> {
    expect_length("dst", src.len(), dst.len())?;
    Level::detect().run(Widen { src, dst });
    Ok(())
}

fn write_bf16_at(level: Level, src: &[f32], dst: &mut [bf16]) -> Result<(), LengthError> {
    expect_length("dst", src.len(), dst.len())?;
    level.run(Narrow { src, dst });
    Ok(())
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
            let bits = src.to_bits();
            // Half of the dropped part's unit, less one where the kept part is even: ties go to even.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let quiet = (bits >> 16) | 0x0040;
            *dst = bf16::from_bits(if src.is_nan() { quiet as u16 } else { rounded as u16 });
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
            *dst = f32::from_bits(u32::from(src.to_bits()) << 16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_vector_has_the_same_bits() {
        let src: Vec<f32> = (0..5000).map(|i| (i as f32).sin() * 1e3).collect();
        let mut dst = vec![bf16::ZERO; src.len()];
        assert_eq!(write_bf16(&src, &mut dst), Ok(()));
        assert_eq!(rounded(&src), dst);
        assert_eq!(rounded(&[]), []);
    }

    /// Every bf16, its neighbours half a unit away (ties) and just beside the ties, NaNs, infinities, subnormals.
    #[test]
    fn rounds_as_half_does_at_every_level() {
        let src: Vec<f32> = (0..=u16::MAX)
            .flat_map(|high| {
                [0x0000u32, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| (u32::from(high) << 16) | low)
            })
            .map(f32::from_bits)
            .collect();
        let expected: Vec<u16> = src.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        for level in Level::available() {
            let mut dst = vec![bf16::ZERO; src.len()];
            write_bf16_at(level, &src, &mut dst).unwrap();
            assert!(dst.iter().map(|x| x.to_bits()).eq(expected.iter().copied()), "{level:?}");
        }
    }

    #[test]
    fn reads_back_what_was_written() {
        let src: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let mut wide = vec![0.0f32; src.len()];
        read_bf16(&src, &mut wide).unwrap();
        for (narrow, wide) in src.iter().zip(&wide) {
            assert_eq!(u32::from(narrow.to_bits()) << 16, wide.to_bits());
        }
    }

    #[test]
    fn different_lengths_are_an_error() {
        let error = LengthError { what: "dst", expected: 3, found: 2 };
        assert_eq!(write_bf16(&[0.0; 3], &mut [bf16::ZERO; 2]), Err(error.clone()));
        assert_eq!(read_bf16(&[bf16::ZERO; 3], &mut [0.0; 2]), Err(error));
    }
}

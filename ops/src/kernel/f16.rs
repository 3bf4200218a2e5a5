//! Conversions between f16 and f32.

use super::vectorised;
use half::f16;

/// Converts to f32, exactly. NaN stays NaN and becomes quiet.
#[inline(always)]
pub(crate) fn wide(value: f16) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    let bits = u32::from(value.to_bits());
    let (sign, rest) = ((bits & 0x8000) << 16, (bits & 0x7FFF) << 13);
    // Subnormal f16: put the fraction into the mantissa of a power of two with the same unit, and subtract that power.
    let one = REBIAS + (1 << 23);
    let subnormal = (f32::from_bits(rest + one) - f32::from_bits(one)).to_bits();
    let quiet = if rest & 0x007F_FFFF == 0 { 0 } else { 0x0040_0000 };
    f32::from_bits(
        sign | match rest >> 23 {
            0 => subnormal,
            0x1F => rest | 0x7F80_0000 | quiet,
            _ => rest + REBIAS,
        },
    )
}

/// Rounds to nearest, ties to even. Numbers from 65520 on become infinite; NaN stays NaN. Bit-identical to
/// [`f16::from_f32`].
#[inline(always)]
fn nearest(value: f32) -> f16 {
    let bits = value.to_bits();
    let (sign, rest) = (bits >> 16 & 0x8000, bits & 0x7FFF_FFFF);
    // Adds half a unit of the last kept bit, minus one if that bit is 0, and changes the exponent's bias.
    let normal = rest.wrapping_add(0xFFF + (rest >> 13 & 1)).wrapping_sub((127 - 15) << 23) >> 13;
    // Adding 0.5 rounds: the last bit of 0.5 in f32 has the value 2⁻²⁴, the unit of subnormal f16.
    let subnormal = (f32::from_bits(rest) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let quiet = 0x7E00 | (rest >> 13 & 0x3FF);
    let magnitude = match rest {
        0x7F80_0001.. => quiet,
        // 2¹⁶ and above.
        0x4780_0000.. => 0x7C00,
        0x3880_0000.. => normal,
        _ => subnormal,
    };
    f16::from_bits((sign | magnitude) as u16)
}

/// y = x, exactly.
pub(crate) fn widen(isa: super::Isa, x: &[f16], y: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == zero_isa::Vectors::Avx512 {
        // SAFETY: an `Isa` of this level exists only after its features were detected.
        return unsafe { x86::widen(x, y) };
    }
    widen_each(isa, x, y);
}

/// y = x rounded to nearest, ties to even; NaN stays NaN.
pub(crate) fn round(isa: super::Isa, x: &[f32], y: &mut [f16]) {
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == zero_isa::Vectors::Avx512 {
        // SAFETY: as above.
        return unsafe { x86::round(x, y) };
    }
    round_each(isa, x, y);
}

vectorised! {
    fn widen_each(x: &[f16], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = wide(*x);
        }
    }
}

vectorised! {
    fn round_each(x: &[f32], y: &mut [f16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = nearest(*x);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{nearest, wide};
    use half::f16;
    use std::arch::x86_64::*;

    const LANES: usize = 16;

    #[target_feature(enable = "avx512f")]
    pub(super) fn widen(x: &[f16], y: &mut [f32]) {
        let len = x.len().min(y.len());
        let ((x, x_rest), (y, y_rest)) = (x[..len].as_chunks::<LANES>(), y[..len].as_chunks_mut::<LANES>());
        for (x, y) in x.iter().zip(y) {
            // SAFETY: both are arrays of sixteen elements.
            unsafe { _mm512_storeu_ps(y.as_mut_ptr(), _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast()))) };
        }
        for (x, y) in x_rest.iter().zip(y_rest) {
            *y = wide(*x);
        }
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn round(x: &[f32], y: &mut [f16]) {
        let len = x.len().min(y.len());
        let ((x, x_rest), (y, y_rest)) = (x[..len].as_chunks::<LANES>(), y[..len].as_chunks_mut::<LANES>());
        for (x, y) in x.iter().zip(y) {
            // SAFETY: as above.
            unsafe {
                let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(x.as_ptr()));
                _mm256_storeu_si256(y.as_mut_ptr().cast(), rounded);
            }
        }
        for (x, y) in x_rest.iter().zip(y_rest) {
            *y = nearest(*x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Isa;

    #[test]
    fn conversions_of_all_values_on_all_instruction_sets() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        // Every f16, the f32 numbers around each midpoint between two f16, and numbers out of range on both sides.
        let beside = |x: &f16| {
            let bits = x.to_f32().to_bits();
            [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF].map(|low| f32::from_bits(bits.wrapping_add(low)))
        };
        let beyond = (0..=u16::MAX).map(|high| f32::from_bits(u32::from(high) << 16 | 0x8000));
        // Ties between subnormal numbers.
        let ties = (0..4096).flat_map(|n| [1.0f32, -1.0].map(|sign| sign * n as f32 * 2f32.powi(-26)));
        let wide: Vec<f32> = all.iter().flat_map(beside).chain(beyond).chain(ties).collect();
        for isa in Isa::available() {
            let mut widened = vec![0.0; all.len()];
            widen(isa, &all, &mut widened);
            for (y, x) in widened.iter().zip(&all) {
                assert!(y.to_bits() == x.to_f32().to_bits(), "{isa:?}: {:04x} is {:08x}", x.to_bits(), y.to_bits());
            }
            let mut rounded = vec![f16::ZERO; wide.len()];
            round(isa, &wide, &mut rounded);
            for (y, &x) in rounded.iter().zip(&wide) {
                assert_eq!(y.to_bits(), f16::from_f32(x).to_bits(), "{isa:?}: {:08x}", x.to_bits());
            }
        }
    }
}

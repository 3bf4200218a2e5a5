//! Conversions between bf16 and f32.

use super::vectorised;
use half::bf16;

/// Converts to f32, exactly.
#[inline(always)]
pub(crate) fn wide(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

vectorised! {
    /// y = x, exactly.
    fn widen(x: &[bf16], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = wide(*x);
        }
    }
}

vectorised! {
    /// y = x rounded to nearest, ties to even; NaN stays NaN. Bit-identical to [`bf16::from_f32`], but without
    /// branches.
    fn round(x: &[f32], y: &mut [bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            let bits = x.to_bits();
            // Adds half a unit of the last kept bit, minus one if that bit is 0. Only NaN overflows.
            let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
            let quiet = bits >> 16 | 0x40;
            *y = bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Isa;

    #[test]
    fn conversions_of_all_values_on_all_instruction_sets() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        let wide: Vec<f32> =
            lower.iter().flat_map(|low| (0..=0xFFFF).map(move |high| f32::from_bits(high << 16 | low))).collect();
        for isa in Isa::available() {
            let mut widened = vec![0.0; all.len()];
            widen(isa, &all, &mut widened);
            assert!(
                widened.iter().zip(&all).all(|(y, x)| y.to_bits() == x.to_f32().to_bits() || x.is_nan()),
                "{isa:?}"
            );
            assert!(widened.iter().zip(&all).all(|(y, x)| y.is_nan() == x.is_nan()), "{isa:?}");
            let mut rounded = vec![bf16::ZERO; wide.len()];
            round(isa, &wide, &mut rounded);
            assert!(rounded.iter().zip(&wide).all(|(y, &x)| y.to_bits() == bf16::from_f32(x).to_bits()), "{isa:?}");
        }
    }
}

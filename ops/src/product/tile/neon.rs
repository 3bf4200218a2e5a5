//! Tiles in NEON registers: 8 × 12 sums in 24 registers, plus three for the right operand and one for an element of the
//! left operand.

use super::{COLUMNS, MOST_ROWS, Tile, prefetch};
use std::arch::aarch64::*;

tile! {
    /// # Safety
    /// The requirements of [`Tile::compute`] apply.
    compute_neon, neon, "neon", q, rows: [8, 4, 2, 1], vectors: 1 2 | 3,
    |element, row, sum| vfmaq_f32(sum, element, row)
}

/// Four f32. A part of a register is its first elements.
mod q {
    use std::arch::aarch64::*;
    pub(super) use std::arch::aarch64::{vdupq_n_f32 as splat, vld1q_f32 as load, vst1q_f32 as store};

    pub(super) const LANES: usize = 4;
    pub(super) const STEPS: usize = 1;
    pub(super) const ADDRESSED: usize = 8;
    pub(super) const AHEAD: Option<usize> = None;

    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) fn zero() -> float32x4_t {
        vdupq_n_f32(0.0)
    }

    /// # Safety
    /// `count` elements, at most four, must be readable.
    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) unsafe fn load_part(from: *const f32, count: usize) -> float32x4_t {
        let mut four = [0.0; 4];
        // SAFETY: guaranteed by the caller.
        unsafe {
            four.as_mut_ptr().copy_from_nonoverlapping(from, count);
            vld1q_f32(four.as_ptr())
        }
    }

    /// # Safety
    /// `count` elements, at most four, must be writable.
    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) unsafe fn store_part(to: *mut f32, count: usize, part: float32x4_t) {
        let mut four = [0.0; 4];
        // SAFETY: guaranteed by the caller.
        unsafe {
            vst1q_f32(four.as_mut_ptr(), part);
            to.copy_from_nonoverlapping(four.as_ptr(), count);
        }
    }
}

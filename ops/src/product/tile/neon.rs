//! Tiles in NEON registers: 8 × 12 sums in 24 registers, plus three for the right operand.

use super::{COLUMNS, Tile};
use std::arch::aarch64::*;

impl Tile {
    /// # Safety
    /// As for [`Tile::compute`].
    pub(super) unsafe fn compute_neon(self) {
        for column in (0..self.columns).step_by(12) {
            let columns = column..self.columns.min(column + 12);
            // SAFETY: guaranteed by the caller; the parts cover the tile.
            unsafe {
                match columns.len().div_ceil(4) {
                    1 => rows_by_rows!(self, neon::<1>, columns.clone(), [8, 4, 2, 1]),
                    2 => rows_by_rows!(self, neon::<2>, columns.clone(), [8, 4, 2, 1]),
                    _ => rows_by_rows!(self, neon::<3>, columns.clone(), [8, 4, 2, 1]),
                }
            }
        }
    }
}

/// Computes `R` rows and `V` registers of columns, the last of which may be partly used.
///
/// # Safety
/// As for [`Tile::compute`].
unsafe fn neon<const R: usize, const V: usize>(t: Tile) {
    let last = t.columns - 4 * (V - 1);
    // SAFETY: NEON is in the baseline of aarch64; the caller guarantees the rest.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); V]; R];
        if !t.start.is_null() {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    let start = t.start.add(r * t.start_rows + v * 4);
                    *sum = if v + 1 < V || last == 4 { vld1q_f32(start) } else { load_part(start, last) };
                }
            }
        }
        let (mut left, mut right) = (t.left, t.right);
        for _ in 0..t.depth {
            let mut row = [vdupq_n_f32(0.0); V];
            for (v, row) in row.iter_mut().enumerate() {
                *row = vld1q_f32(right.add(v * 4));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = *left.add(r * t.left_rows);
                for (sum, row) in sums.iter_mut().zip(row) {
                    *sum = vfmaq_n_f32(*sum, row, x);
                }
            }
            left = left.wrapping_add(t.left_step);
            right = right.wrapping_add(COLUMNS);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                let out = t.out.add(r * t.out_rows + v * 4);
                if v + 1 < V || last == 4 { vst1q_f32(out, *sum) } else { store_part(out, last, *sum) }
            }
        }
    }
}

/// # Safety
/// `count` elements, at most four, must be readable.
unsafe fn load_part(start: *const f32, count: usize) -> float32x4_t {
    let mut four = [0.0; 4];
    // SAFETY: guaranteed by the caller.
    unsafe {
        four.as_mut_ptr().copy_from_nonoverlapping(start, count);
        vld1q_f32(four.as_ptr())
    }
}

/// # Safety
/// `count` elements, at most four, must be writable.
unsafe fn store_part(out: *mut f32, count: usize, sums: float32x4_t) {
    let mut four = [0.0; 4];
    // SAFETY: guaranteed by the caller.
    unsafe {
        vst1q_f32(four.as_mut_ptr(), sums);
        out.copy_from_nonoverlapping(four.as_ptr(), count);
    }
}

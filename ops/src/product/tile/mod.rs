//! The innermost loop of a product: a tile of the output, held in registers while the loop runs over the inner
//! dimension.
//!
//! With AVX-512 a tile has 8 × 48 sums in 24 registers, plus three registers for the right operand and one for an
//! element of the left. With AVX2 it has 6 × 16 sums in 12 registers, plus two and one. The numbers of columns divide
//! the usual widths of transformers. Each sum is one chain of fused multiply-adds in the order of the inner
//! dimension, so all instruction sets give bit-identical results.

use super::super::kernel::Isa;
use std::ops::Range;
use zero_isa::Vectors;

/// Columns of a panel of the packed right operand.
pub(crate) const COLUMNS: usize = 48;
/// Rows of the highest tile and of the lowest.
pub(crate) const MOST_ROWS: usize = 8;
pub(super) const LEAST_ROWS: usize = 6;

/// Rows of a full tile.
pub(crate) fn rows(isa: Isa) -> usize {
    match isa.vectors() {
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => 6,
        _ => 8,
    }
}

/// Columns of a full tile, which divide those of a panel.
pub(super) fn columns(isa: Isa) -> usize {
    match isa.vectors() {
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => 16,
        #[cfg(target_arch = "aarch64")]
        Vectors::Neon => 12,
        _ => COLUMNS,
    }
}

/// Prefetches a cache line into the first level. An invalid address has no effect.
#[inline(always)]
pub(super) fn prefetch(line: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and never faults; SSE is in the baseline of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// The operands of one tile: `out[r][c] = start[r][c] + Σ left[r][k] · right[k][c]`.
///
/// Holds pointers, since the tiles of several threads are in one output. Element (r, k) of the left operand is at `r
/// · left_rows + k · left_step`, where one of the strides is 1, and element (k, c) of the right one at `k · COLUMNS + c`.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) left: *const f32,
    pub(crate) left_rows: usize,
    pub(crate) left_step: usize,
    pub(crate) right: *const f32,
    /// Null to start from zero.
    pub(crate) start: *const f32,
    pub(crate) start_rows: usize,
    pub(crate) out: *mut f32,
    pub(crate) out_rows: usize,
}

impl Tile {
    /// Computes the tile.
    ///
    /// # Safety
    /// Every element that the description names must be readable or writable, and no other code may access those of
    /// `out`. There must be at most [`MOST_ROWS`] rows and [`COLUMNS`] columns. Each row of the right operand must
    /// have [`COLUMNS`] readable elements.
    pub(crate) unsafe fn compute(self, isa: Isa) {
        debug_assert!(self.columns <= COLUMNS);
        match isa.vectors() {
            // SAFETY: guaranteed by the caller, and an `Isa` with these vectors exists only after their features were
            // detected.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { self.compute_avx2() },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => unsafe { self.compute_avx512() },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Vectors::Neon => unsafe { self.compute_neon() },
            // SAFETY: guaranteed by the caller.
            Vectors::Baseline => unsafe { self.compute_scalar() },
        }
    }

    /// Computes the tile of operands whose words are pairs of bf16: see [`super::pairs`].
    ///
    /// # Safety
    /// As for [`Tile::compute`], and [`super::pairs::available`] must hold.
    pub(crate) unsafe fn compute_pairs(self) {
        debug_assert!(self.columns <= COLUMNS && super::pairs::available());
        #[cfg(target_arch = "x86_64")]
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.compute_avx512_bf16();
        }
    }

    /// Returns the part of the tile with these columns, from a row on.
    ///
    /// # Safety
    /// The part must be inside the tile.
    unsafe fn part(self, row: usize, columns: Range<usize>) -> Self {
        let column = columns.start;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let start = if self.start.is_null() { self.start } else { self.start.add(row * self.start_rows + column) };
            Self {
                columns: columns.len(),
                left: self.left.add(row * self.left_rows),
                right: self.right.add(column),
                start,
                out: self.out.add(row * self.out_rows + column),
                ..self
            }
        }
    }

    /// # Safety
    /// As for [`Tile::compute`].
    unsafe fn compute_scalar(self) {
        for r in 0..self.rows {
            let mut sums = [0f32; COLUMNS];
            // SAFETY: guaranteed by the caller.
            unsafe {
                if !self.start.is_null() {
                    for (c, sum) in sums.iter_mut().enumerate().take(self.columns) {
                        *sum = *self.start.add(r * self.start_rows + c);
                    }
                }
                for k in 0..self.depth {
                    let left = *self.left.add(r * self.left_rows + k * self.left_step);
                    for (c, sum) in sums.iter_mut().enumerate().take(self.columns) {
                        *sum = left.mul_add(*self.right.add(k * COLUMNS + c), *sum);
                    }
                }
                for (c, sum) in sums.iter().enumerate().take(self.columns) {
                    *self.out.add(r * self.out_rows + c) = *sum;
                }
            }
        }
    }
}

/// Calls `$function::<rows, $vectors>` on the part of a tile with these columns, for the largest number of rows in
/// `$sizes` that fits, until all rows are done.
macro_rules! rows_by_rows {
    ($tile:expr, $function:ident::<$vectors:literal>, $columns:expr, [$($size:literal),*]) => {{
        let mut row = 0;
        $(
            while $tile.rows - row >= $size {
                $function::<$size, $vectors>($tile.part(row, $columns));
                row += $size;
            }
        )*
    }};
}

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

//! The innermost loop of a product: a tile of the output, held in registers while the inner dimension passes by.
//!
//! With AVX-512 a tile has 8 × 48 sums: 24 registers, with three for the right operand and one for the left one's element. With
//! AVX2 it has 6 × 16: 12 registers, two and one. The columns divide the widths that transformers have. Each sum is one chain of fused
//! multiply-adds in the order of the inner dimension, which every instruction set carries out with the same bits.

use super::super::kernel::Isa;
use std::ops::Range;
use zero_isa::Vectors;

/// Columns of a panel of the packed right operand.
pub(crate) const COLUMNS: usize = 48;
/// Rows of the highest tile, and of the lowest.
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

/// Columns of a full tile; they divide those of a panel.
pub(super) fn columns(isa: Isa) -> usize {
    match isa.vectors() {
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => 16,
        #[cfg(target_arch = "aarch64")]
        Vectors::Neon => 12,
        _ => COLUMNS,
    }
}

/// Calls a cache line into the first level. An address that is none does nothing.
#[inline(always)]
pub(super) fn prefetch(line: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and faults at no address; SSE is in x86-64's baseline.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// The operands of one tile: `out[r][c] = start[r][c] + Σ left[r][k] · right[k][c]`.
///
/// Pointers, since the tiles of several threads lie in one output. Element (r, k) of the left operand is at
/// `r · left_rows + k · left_step`, element (k, c) of the right one at `k · COLUMNS + c`.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) left: *const f32,
    pub(crate) left_rows: usize,
    pub(crate) left_step: usize,
    pub(crate) right: *const f32,
    /// Null for a start from zero.
    pub(crate) start: *const f32,
    pub(crate) start_rows: usize,
    pub(crate) out: *mut f32,
    pub(crate) out_rows: usize,
}

impl Tile {
    /// Computes the tile.
    ///
    /// # Safety
    /// Every element that the description names can be read or written, and nobody else has those of `out`. There are
    /// at most [`MOST_ROWS`] rows and [`COLUMNS`] columns; each row of the right operand has [`COLUMNS`] elements that can be
    /// read.
    pub(crate) unsafe fn compute(self, isa: Isa) {
        debug_assert!(self.columns <= COLUMNS);
        match isa.vectors() {
            // SAFETY: the caller's promise, and an `Isa` with these vectors exists only after their features were detected.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { self.compute_avx2() },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => unsafe { self.compute_avx512() },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Vectors::Neon => unsafe { self.compute_neon() },
            // SAFETY: the caller's promise.
            Vectors::Baseline => unsafe { self.compute_scalar() },
        }
    }

    /// Computes the tile of operands whose words are pairs of bf16: see [`super::pairs`].
    ///
    /// # Safety
    /// As [`Tile::compute`], and [`super::pairs::available`].
    pub(crate) unsafe fn compute_pairs(self) {
        debug_assert!(self.columns <= COLUMNS && super::pairs::available());
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        unsafe {
            self.compute_avx512_bf16();
        }
    }

    /// The part of the tile with these columns, from a row on.
    ///
    /// # Safety
    /// The part lies inside of the tile.
    unsafe fn part(self, row: usize, columns: Range<usize>) -> Self {
        let column = columns.start;
        // SAFETY: the caller's promise.
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
    /// As [`Tile::compute`].
    unsafe fn compute_scalar(self) {
        for r in 0..self.rows {
            let mut sums = [0f32; COLUMNS];
            // SAFETY: the caller's promise.
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

/// Calls `$function::<rows, $vectors>` on the part of a tile with these columns, for the largest number of rows in `$sizes` that fits,
/// until all rows are done.
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

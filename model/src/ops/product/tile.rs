//! The innermost loop of a product: a tile of the output, held in registers while the inner dimension passes by.
//!
//! With AVX-512 a tile has 8 × 48 sums: 24 registers, with three for the right operand and one for the left one's element. With
//! AVX2 it has 6 × 16: 12 registers, two and one. The columns divide the widths that transformers have. Each sum is one chain of fused
//! multiply-adds in the order of the inner dimension, which every instruction set carries out with the same bits.

use super::super::kernel::Isa;
#[cfg(target_arch = "x86_64")]
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
        _ => COLUMNS,
    }
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
        debug_assert!(self.rows <= MOST_ROWS && self.columns <= COLUMNS);
        match isa.vectors() {
            // SAFETY: the caller's promise, and an `Isa` with these vectors exists only after their features were detected.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe { self.compute_avx2() },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => unsafe { self.compute_avx512() },
            // SAFETY: the caller's promise.
            _ => unsafe { self.compute_scalar() },
        }
    }

    /// Computes the tile of operands whose words are pairs of bf16: see [`super::pairs`].
    ///
    /// # Safety
    /// As [`Tile::compute`], and [`super::pairs::available`].
    pub(crate) unsafe fn compute_pairs(self) {
        debug_assert!(self.rows <= MOST_ROWS && self.columns <= COLUMNS && super::pairs::available());
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        unsafe {
            self.compute_avx512_bf16();
        }
    }

    /// The part of the tile that begins at a row and a column.
    ///
    /// # Safety
    /// The part lies inside of the tile.
    #[cfg(target_arch = "x86_64")]
    unsafe fn part(self, row: usize, column: usize, columns: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let start = if self.start.is_null() { self.start } else { self.start.add(row * self.start_rows + column) };
            Self {
                columns,
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

/// Calls `$function::<rows, vectors>($tile)` for the largest number of rows in `$sizes` that fits, until all are done.
#[cfg(target_arch = "x86_64")]
macro_rules! rows_by_rows {
    ($tile:expr, $function:ident, $vectors:expr, $column:expr, $columns:expr, [$($size:literal),*]) => {{
        let mut row = 0;
        $(
            while $tile.rows - row >= $size {
                let part = $tile.part(row, $column, $columns);
                match $vectors {
                    1 => $function::<$size, 1>(part),
                    2 => $function::<$size, 2>(part),
                    _ => $function::<$size, 3>(part),
                }
                row += $size;
            }
        )*
    }};
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{COLUMNS, Tile};
    use std::arch::x86_64::*;

    /// How many steps ahead of its use a row of the right operand is called into the first-level cache.
    const AHEAD: usize = 8;

    impl Tile {
        /// # Safety
        /// As [`Tile::compute`].
        #[target_feature(enable = "avx512f")]
        pub(super) unsafe fn compute_avx512(self) {
            // SAFETY: the caller's promise; the parts cover the tile.
            unsafe { rows_by_rows!(self, avx512, self.columns.div_ceil(16), 0, self.columns, [8, 4, 2, 1]) };
        }

        /// # Safety
        /// As [`Tile::compute_pairs`].
        #[target_feature(enable = "avx512f,avx512bf16")]
        pub(super) unsafe fn compute_avx512_bf16(self) {
            // SAFETY: as above.
            unsafe { rows_by_rows!(self, avx512_bf16, self.columns.div_ceil(16), 0, self.columns, [8, 4, 2, 1]) };
        }

        /// # Safety
        /// As [`Tile::compute`].
        #[target_feature(enable = "avx2,fma")]
        pub(super) unsafe fn compute_avx2(self) {
            for column in (0..self.columns).step_by(16) {
                let columns = (self.columns - column).min(16);
                // SAFETY: as above.
                unsafe { rows_by_rows!(self, avx2, columns.div_ceil(8), column, columns, [6, 4, 2, 1]) };
            }
        }
    }

    /// Declares the loop of a tile in AVX-512 registers: what a word of the left operand and a row of the right one add to a sum is all
    /// that differs.
    macro_rules! tile {
        ($(#[$attr:meta])* $name:ident, $features:literal, |$word:ident, $row:ident, $sum:ident| $step:expr) => {
            $(#[$attr])*
            #[target_feature(enable = $features)]
            unsafe fn $name<const R: usize, const V: usize>(t: Tile) {
                let last: __mmask16 = 0xffff >> (V * 16 - t.columns);
                let mask = |v: usize| if v + 1 == V { last } else { 0xffff };
                let mut sums = [[_mm512_setzero_ps(); V]; R];
                // SAFETY: the caller's promise; what is outside of the tile is masked.
                unsafe {
                    if !t.start.is_null() {
                        for (r, sums) in sums.iter_mut().enumerate() {
                            for (v, sum) in sums.iter_mut().enumerate() {
                                *sum = _mm512_maskz_loadu_ps(mask(v), t.start.add(r * t.start_rows + v * 16));
                            }
                        }
                    }
                    let (mut left, mut right) = (t.left, t.right);
                    for _ in 0..t.depth {
                        let mut row = [_mm512_setzero_ps(); V];
                        for (v, row) in row.iter_mut().enumerate() {
                            *row = _mm512_loadu_ps(right.add(v * 16));
                            _mm_prefetch::<_MM_HINT_T0>(right.wrapping_add(AHEAD * COLUMNS + v * 16).cast());
                        }
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let $word = _mm512_set1_ps(*left.add(r * t.left_rows));
                            for (sum, $row) in sums.iter_mut().zip(row) {
                                let $sum = *sum;
                                *sum = $step;
                            }
                        }
                        left = left.wrapping_add(t.left_step);
                        right = right.wrapping_add(COLUMNS);
                    }
                    for (r, sums) in sums.iter().enumerate() {
                        for (v, sum) in sums.iter().enumerate() {
                            _mm512_mask_storeu_ps(t.out.add(r * t.out_rows + v * 16), mask(v), *sum);
                        }
                    }
                }
            }
        };
    }

    tile! {
        /// `R` rows and `V` registers of columns, the last of which may be partly used.
        ///
        /// # Safety
        /// As [`Tile::compute`].
        avx512, "avx512f", |word, row, sum| _mm512_fmadd_ps(word, row, sum)
    }

    tile! {
        /// [`avx512`] for words that are pairs of bf16.
        ///
        /// # Safety
        /// As [`Tile::compute_pairs`].
        avx512_bf16, "avx512f,avx512bf16", |word, row, sum| _mm512_dpbf16_ps(sum, pairs(word), pairs(row))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn pairs(words: __m512) -> __m512bh {
        // SAFETY: 512 bits either way.
        unsafe { std::mem::transmute(words) }
    }

    /// `R` rows and `V` registers of columns, the last of which may be partly used.
    ///
    /// # Safety
    /// As [`Tile::compute`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<const R: usize, const V: usize>(t: Tile) {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mask = |v: usize| _mm256_cmpgt_epi32(_mm256_set1_epi32(t.columns as i32 - (v * 8) as i32), lanes);
        let mut sums = [[_mm256_setzero_ps(); V]; R];
        // SAFETY: the caller's promise; what is outside of the tile is masked.
        unsafe {
            // Rows of a wide output lie in pages of their own, which no prefetcher of the processor's foresees.
            for r in 0..R {
                _mm_prefetch::<_MM_HINT_T0>(t.out.add(r * t.out_rows).cast());
            }
            if !t.start.is_null() {
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm256_maskload_ps(t.start.add(r * t.start_rows + v * 8), mask(v));
                    }
                }
            }
            let (mut left, mut right) = (t.left, t.right);
            for _ in 0..t.depth {
                let mut row = [_mm256_setzero_ps(); V];
                for (v, row) in row.iter_mut().enumerate() {
                    *row = _mm256_loadu_ps(right.add(v * 8));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*left.add(r * t.left_rows));
                    for (sum, row) in sums.iter_mut().zip(row) {
                        *sum = _mm256_fmadd_ps(x, row, *sum);
                    }
                }
                left = left.wrapping_add(t.left_step);
                right = right.wrapping_add(COLUMNS);
            }
            for (r, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    _mm256_maskstore_ps(t.out.add(r * t.out_rows + v * 8), mask(v), *sum);
                }
            }
        }
    }
}

//! Tiles in AVX2, AVX-512 and AVX512_BF16 registers.

use super::{COLUMNS, Tile, prefetch};
use std::arch::x86_64::*;

/// How many steps before its use a row of the right operand is prefetched into the first-level cache.
const AHEAD: usize = 8;

impl Tile {
    /// # Safety
    /// As for [`Tile::compute`].
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn compute_avx512(self) {
        // SAFETY: guaranteed by the caller; the parts cover the tile.
        unsafe {
            match self.columns.div_ceil(16) {
                1 => rows_by_rows!(self, avx512::<1>, 0..self.columns, [8, 4, 2, 1]),
                2 => rows_by_rows!(self, avx512::<2>, 0..self.columns, [8, 4, 2, 1]),
                _ => rows_by_rows!(self, avx512::<3>, 0..self.columns, [8, 4, 2, 1]),
            }
        }
    }

    /// # Safety
    /// As for [`Tile::compute_pairs`].
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn compute_avx512_bf16(self) {
        // SAFETY: as above.
        unsafe {
            match self.columns.div_ceil(16) {
                1 => rows_by_rows!(self, avx512_bf16::<1>, 0..self.columns, [8, 4, 2, 1]),
                2 => rows_by_rows!(self, avx512_bf16::<2>, 0..self.columns, [8, 4, 2, 1]),
                _ => rows_by_rows!(self, avx512_bf16::<3>, 0..self.columns, [8, 4, 2, 1]),
            }
        }
    }

    /// # Safety
    /// As for [`Tile::compute`].
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn compute_avx2(self) {
        for column in (0..self.columns).step_by(16) {
            // SAFETY: as above.
            unsafe {
                match (self.left_rows == 1, self.columns - column > 8) {
                    (true, true) => self.columns_avx2::<2, true>(column),
                    (true, false) => self.columns_avx2::<1, true>(column),
                    (false, true) => self.columns_avx2::<2, false>(column),
                    (false, false) => self.columns_avx2::<1, false>(column),
                }
            }
        }
    }

    /// Computes the columns from `column` on that `V` registers hold.
    ///
    /// # Safety
    /// As for [`avx2`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn columns_avx2<const V: usize, const TURNED: bool>(&self, column: usize) {
        let mut row = 0;
        // SAFETY: as above.
        unsafe {
            while self.rows - row >= 6 {
                avx2::<6, V, TURNED>(self, row, column);
                row += 6;
            }
            if self.rows - row >= 4 {
                avx2::<4, V, TURNED>(self, row, column);
                row += 4;
            }
            if self.rows - row >= 2 {
                avx2::<2, V, TURNED>(self, row, column);
                row += 2;
            }
            if self.rows > row {
                avx2::<1, V, TURNED>(self, row, column);
            }
        }
    }
}

/// Declares the loop of a tile in AVX-512 registers. The variants differ only in what a word of the left operand and
/// a row of the right one add to a sum.
macro_rules! tile {
    ($(#[$attr:meta])* $name:ident, $features:literal, |$word:ident, $row:ident, $sum:ident| $step:expr) => {
        $(#[$attr])*
        #[target_feature(enable = $features)]
        unsafe fn $name<const R: usize, const V: usize>(t: Tile) {
            let last: __mmask16 = 0xffff >> (V * 16 - t.columns);
            let mask = |v: usize| if v + 1 == V { last } else { 0xffff };
            let mut sums = [[_mm512_setzero_ps(); V]; R];
            // SAFETY: guaranteed by the caller; elements outside the tile are masked.
            unsafe {
                // The rows of a wide output are on separate pages, which the hardware prefetcher does not predict.
                for r in 0..R {
                    (0..V).for_each(|v| prefetch(t.out.wrapping_add(r * t.out_rows + v * 16)));
                }
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
    /// Computes `R` rows and `V` registers of columns, the last of which may be partly used.
    ///
    /// # Safety
    /// As for [`Tile::compute`].
    avx512, "avx512f", |word, row, sum| _mm512_fmadd_ps(word, row, sum)
}

tile! {
    /// [`avx512`] for words that are pairs of bf16.
    ///
    /// # Safety
    /// As for [`Tile::compute_pairs`].
    avx512_bf16, "avx512f,avx512bf16", |word, row, sum| _mm512_dpbf16_ps(sum, pairs(word), pairs(row))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn pairs(words: __m512) -> __m512bh {
    // SAFETY: both types have 512 bits, and any bits are valid.
    unsafe { std::mem::transmute(words) }
}

/// Computes `R` rows and `V` registers of columns of a tile, the last of which may be partly used. `TURNED` says that the
/// rows of the left operand are adjacent; otherwise the elements of a row are.
///
/// The six rows and sixteen columns of a full tile take twelve multiplications and eight loads in each step, and as few other
/// instructions as possible: while another program runs on the second hardware thread of a core, each slows the tile down.
///
/// # Safety
/// As for [`Tile::compute`]; the tile must contain these rows and columns.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const R: usize, const V: usize, const TURNED: bool>(t: &Tile, row: usize, column: usize) {
    // Steps of an iteration. Their addresses differ by constants.
    const STEPS: usize = 4;
    debug_assert!(if TURNED { t.left_rows == 1 } else { t.left_step == 1 });
    let columns = t.columns - column;
    let last = || {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(columns as i32 - 8 * (V as i32 - 1)), lanes)
    };
    // On some processors (AMD's Zen 2 and 3) a masked store takes as long as ten others.
    let whole = |v: usize| v + 1 < V || columns >= 8 * V;
    let mut sums = [[_mm256_setzero_ps(); V]; R];
    // SAFETY: guaranteed by the caller; elements outside the tile are masked.
    unsafe {
        let out = t.out.add(row * t.out_rows + column);
        // The rows of a wide output are on separate pages, which the hardware prefetcher does not predict.
        (0..R).for_each(|r| prefetch(out.wrapping_add(r * t.out_rows)));
        if !t.start.is_null() {
            let start = t.start.add(row * t.start_rows + column);
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    let start = start.add(r * t.start_rows + v * 8);
                    *sum = if whole(v) { _mm256_loadu_ps(start) } else { _mm256_maskload_ps(start, last()) };
                }
            }
        }
        let (mut left, mut right) = (t.left.add(row * t.left_rows), t.right.add(column));
        // An instruction can address three rows from one register: zero, one and two row strides after it.
        let mut fourth = left.wrapping_add(3 * t.left_rows);
        if !TURNED {
            // Hides how the two are related. LLVM would otherwise compute the address of each row from that of the one before.
            std::arch::asm!("/* {0} */", inout(reg) fourth, options(pure, readonly, nostack, preserves_flags));
        }
        let mut advance = |steps: usize| {
            for k in 0..steps {
                let mut row = [_mm256_setzero_ps(); V];
                for (v, row) in row.iter_mut().enumerate() {
                    *row = _mm256_loadu_ps(right.add(k * COLUMNS + v * 8));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let element = match r {
                        _ if TURNED => left.add(k * t.left_step + r),
                        0..3 => left.add(r * t.left_rows + k),
                        _ => fourth.add((r - 3) * t.left_rows + k),
                    };
                    let x = _mm256_set1_ps(*element);
                    for (sum, row) in sums.iter_mut().zip(row) {
                        *sum = _mm256_fmadd_ps(x, row, *sum);
                    }
                }
            }
            let done = if TURNED { steps * t.left_step } else { steps };
            (left, fourth) = (left.wrapping_add(done), fourth.wrapping_add(done));
            right = right.wrapping_add(steps * COLUMNS);
        };
        (0..t.depth / STEPS).for_each(|_| advance(STEPS));
        (0..t.depth % STEPS).for_each(|_| advance(1));
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                let out = out.add(r * t.out_rows + v * 8);
                if whole(v) { _mm256_storeu_ps(out, *sum) } else { _mm256_maskstore_ps(out, last(), *sum) }
            }
        }
    }
}

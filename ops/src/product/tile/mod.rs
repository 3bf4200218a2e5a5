//! The innermost loop of a product: a tile of the output, held in registers while the loop runs over the inner
//! dimension.
//!
//! With AVX-512 a tile has 8 × 48 sums in 24 registers, plus three registers for the right operand and one for an
//! element of the left. With AVX2 it has 6 × 16 sums in 12 registers, plus two registers for the right operand and one
//! for the left. The numbers of columns divide the usual widths of transformers. Each sum is one chain of fused
//! multiply-adds in the order of the inner dimension, so all instruction sets give bit-identical results.

use super::super::kernel::Isa;
use zero_isa::Vectors;

/// Number of columns of a panel of the packed right operand.
pub(crate) const COLUMNS: usize = 48;
/// The largest and the smallest number of rows of a full tile, over all instruction sets.
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

/// Columns of a full tile. The columns of a panel are a multiple of this number.
pub(super) fn columns(isa: Isa) -> usize {
    match isa.vectors() {
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => 16,
        #[cfg(target_arch = "aarch64")]
        Vectors::Neon => 12,
        _ => COLUMNS,
    }
}

/// Returns how many columns of each panel to use for a right operand with `columns` columns. With AVX-512, a tile of 8
/// × 16 has too few sums to keep both multipliers busy, and takes almost as long as one of 8 × 32. So 64 columns are
/// split into 32 and 32 rather than into 48 and 16.
pub(super) fn panel_columns(isa: Isa, columns: usize) -> usize {
    if columns == 64 && self::columns(isa) == COLUMNS { 32 } else { COLUMNS }
}

/// Returns whether the processor can multiply pairs.
pub(super) fn multiplies_pairs() -> bool {
    #[cfg(target_arch = "x86_64")]
    return Isa::current().vectors() == Vectors::Avx512 && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
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
/// · left_rows + k · left_step`, where one of the strides is 1, and element (k, c) of the right one at `k · COLUMNS +
/// c`.
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
    /// Every element that the formula of `Tile` names must be readable or, in `out`, writable. No other code may access
    /// these elements of `out`. There must be at most [`MOST_ROWS`] rows and [`COLUMNS`] columns. Each row of the right
    /// operand must have [`COLUMNS`] readable elements.
    pub(crate) unsafe fn compute(self, isa: Isa) {
        assert!(self.columns <= COLUMNS);
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
    /// The requirements of [`Tile::compute`] apply, and [`multiplies_pairs`] must hold.
    pub(crate) unsafe fn compute_pairs(self) {
        assert!(self.columns <= COLUMNS && multiplies_pairs());
        #[cfg(target_arch = "x86_64")]
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.compute_avx512_bf16();
        }
    }

    /// # Safety
    /// The requirements of [`Tile::compute`] apply.
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

/// Declares a tile and its innermost loop. The variants differ in their registers, in the numbers of rows and of column
/// registers, and in the instruction that adds an element of the left operand and a row of the right operand to a sum.
///
/// A step loads a row of the right operand and one element of each row of the left one. The loop has few other
/// instructions, because each slows the tile down while another program runs on the core's second hardware thread.
///
/// `$registers` is a module with the operations on a register and four constants. `LANES` is the number of f32 in a
/// register. `STEPS` is the number of steps in one iteration; within it, the addresses of the steps differ by
/// constants. `ADDRESSED` is the number of rows of the left operand that an instruction can address from one pointer.
/// `AHEAD` is how many steps before its use a row of the right operand is prefetched from the second-level cache.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! tile {
    (
        $(#[$attr:meta])*
        $compute:ident, $name:ident, $features:literal, $registers:ident,
        rows: $rows:tt, vectors: $($few:literal)* | $full:literal,
        |$element:ident, $row:ident, $sum:ident| $step:expr
    ) => {
        impl Tile {
            $(#[$attr])*
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $compute(self) {
                for column in (0..self.columns).step_by($full * $registers::LANES) {
                    // SAFETY: guaranteed by the caller; the parts cover the tile.
                    unsafe {
                        match ((self.columns - column).div_ceil($registers::LANES), self.left_rows == 1) {
                            $(
                                ($few, true) => rows!(&self, column, $name::<$few, true>, $rows),
                                ($few, false) => rows!(&self, column, $name::<$few, false>, $rows),
                            )*
                            (_, true) => rows!(&self, column, $name::<$full, true>, $rows),
                            (_, false) => rows!(&self, column, $name::<$full, false>, $rows),
                        }
                    }
                }
            }
        }

        /// Computes `R` rows of a tile, with columns that fill `V` registers. The last register may be partly used.
        /// With `TURNED`, the elements of a column of the left operand are adjacent in memory, otherwise the elements
        /// of a row.
        ///
        /// # Safety
        /// The requirements of [`Tile::compute`] apply, and the tile must contain these rows and columns.
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn $name<const R: usize, const V: usize, const TURNED: bool>(t: &Tile, row: usize, column: usize) {
            use $registers::{ADDRESSED, AHEAD, LANES, STEPS, load, load_part, splat, store, store_part, zero};
            assert!(if TURNED { t.left_rows == 1 } else { t.left_step == 1 });
            let columns = t.columns - column;
            let whole = |v: usize| v + 1 < V || columns >= LANES * V;
            let last = columns - LANES * (V - 1);
            let mut sums = [[zero(); V]; R];
            // SAFETY: guaranteed by the caller; elements outside the tile are masked.
            unsafe {
                let out = t.out.add(row * t.out_rows + column);
                // The rows of a wide output are on separate pages, which the hardware prefetcher does not predict.
                for r in 0..R {
                    (0..V * LANES).step_by(16).for_each(|c| prefetch(out.wrapping_add(r * t.out_rows + c)));
                }
                if !t.start.is_null() {
                    let start = t.start.add(row * t.start_rows + column);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        for (v, sum) in sums.iter_mut().enumerate() {
                            let start = start.add(r * t.start_rows + v * LANES);
                            *sum = if whole(v) { load(start) } else { load_part(start, last) };
                        }
                    }
                }
                let (left, mut right) = (t.left.add(row * t.left_rows), t.right.add(column));
                let mut lefts: [_; MOST_ROWS] = std::array::from_fn(|i| left.wrapping_add(i * ADDRESSED * t.left_rows));
                if !TURNED {
                    // Hides how the pointers are related. LLVM would otherwise compute the address of each row from the
                    // address of the previous row.
                    for left in &mut lefts[1..R.div_ceil(ADDRESSED)] {
                        std::arch::asm!("/* {0} */", inout(reg) *left, options(pure, readonly, nostack, preserves_flags));
                    }
                }
                // A macro, because the compiler does not always inline a closure that is called twice. The macro does
                // `AT_ONCE` steps.
                macro_rules! advance {
                    () => {
                        for k in 0..AT_ONCE {
                            let mut row = [zero(); V];
                            for (v, row) in row.iter_mut().enumerate() {
                                *row = load(right.add(k * COLUMNS + v * LANES));
                                if let Some(ahead) = AHEAD {
                                    prefetch(right.wrapping_add((k + ahead) * COLUMNS + v * LANES));
                                }
                            }
                            for (r, sums) in sums.iter_mut().enumerate() {
                                let $element = splat(*if TURNED {
                                    lefts[0].add(k * t.left_step + r)
                                } else {
                                    lefts[r / ADDRESSED].add(r % ADDRESSED * t.left_rows + k)
                                });
                                for (sum, $row) in sums.iter_mut().zip(row) {
                                    let $sum = *sum;
                                    *sum = $step;
                                }
                            }
                        }
                        let done = if TURNED { AT_ONCE * t.left_step } else { AT_ONCE };
                        for left in &mut lefts {
                            *left = left.wrapping_add(done);
                        }
                        right = right.wrapping_add(AT_ONCE * COLUMNS);
                    };
                }
                let iterations = t.depth / STEPS;
                for _ in 0..iterations {
                    const AT_ONCE: usize = STEPS;
                    advance!();
                }
                for _ in 0..t.depth - iterations * STEPS {
                    const AT_ONCE: usize = 1;
                    advance!();
                }
                for (r, sums) in sums.iter().enumerate() {
                    for (v, sum) in sums.iter().enumerate() {
                        let out = out.add(r * t.out_rows + v * LANES);
                        if whole(v) { store(out, *sum) } else { store_part(out, last, *sum) }
                    }
                }
            }
        }
    };
}

/// Calls `$function::<rows, $vectors, $turned>` until all rows of the tile are done, each time with the largest number
/// in `$sizes` that does not exceed the rows left.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! rows {
    ($tile:expr, $column:expr, $function:ident::<$vectors:literal, $turned:literal>, [$($size:literal),*]) => {{
        let mut row = 0;
        $(
            while $tile.rows - row >= $size {
                $function::<$size, $vectors, $turned>($tile, row, $column);
                row += $size;
            }
        )*
    }};
}

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

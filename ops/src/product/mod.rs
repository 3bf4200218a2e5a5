//! Matrix products with reproducible bits.
//!
//! Every element of a product is one chain of fused multiply-adds over the inner dimension, from the first term to the
//! last: `sum = fma(left[i][k], right[k][j], sum)`. It therefore depends only on its row, its column and the start of
//! the chain, and not on adjacent rows, threads, blocks, the layout of the operands or the instruction set. (The `gemm`
//! crate does not guarantee this: it computes products of one row, of few elements or of short sides in different ways.
//! It is also a tenth slower than this module on the layouts of a backward pass.)
//!
//! Two bf16 operands are multiplied in pairs on processors where this is faster (see [`pairs`]): the chain is the same,
//! but numbers below 2⁻¹²⁶ count as zero. On processors with AMX (see [`amx`]), a chain adds 32 terms at a time.
//!
//! Blocks of the right operand are packed into panels that stay in the second-level cache, a few rows of the left
//! operand stay in the first-level cache, and tiles of the output stay in registers (Goto and van de Geijn, *Anatomy
//! of High-Performance Matrix Multiplication*, 2008).

mod amx;
mod blocks;
mod caches;
mod few;
mod few_columns;
mod operand;
mod pack;
mod pairs;
mod panels;
mod room;
mod squares;
mod terms;
mod tile;
mod units;

use crate::kernel::Isa;
use crate::measure;
use crate::meta::footprint::floats;
use crate::parallel::team;
use crate::parallel::{Output, split};
#[cfg(target_arch = "x86_64")]
pub(crate) use amx::squares_in_registers;
use blocks::{LONGEST, Out, Rounded, To, block};
pub(crate) use operand::{Elements, Matrix, Start};
pub(crate) use panels::{FewRows, Panels, Target};
pub(crate) use room::{ROOM, make_room};
use std::mem::MaybeUninit;
use std::ops::Range;
use terms::{Pairs, Squares, Wide};
pub(crate) use tile::{COLUMNS, rows as tile_rows};
pub(crate) use units::Bf16Units;

/// Computes `out = left · right`; `out` is row-major and overwritten.
pub(crate) fn product(out: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    multiply_into(out, Start::Zero, left, right, threads);
}

/// Computes `out += left · right`: the chain of each element continues from the content of `out`.
pub(crate) fn add_product(out: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    multiply_into(out, Start::Output, left, right, threads);
}

/// Returns `start + left · right` in a new buffer, without a pass to zero the memory first.
pub(crate) fn new_product(start: Start<'_>, left: Matrix<'_>, right: Matrix<'_>, threads: usize) -> Vec<f32> {
    assert!(!matches!(start, Start::Output), "sums in a new buffer cannot start from its content");
    let len = left.rows * right.columns;
    let mut out = Vec::with_capacity(len);
    // SAFETY: there is room for `len` elements. Each of them is written, and none is read before it is written.
    unsafe {
        multiply(To::F32(out.as_mut_ptr()), start, left, right, threads);
        out.set_len(len);
    }
    out
}

fn multiply_into(out: &mut [f32], start: Start<'_>, left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    assert_eq!(out.len(), left.rows * right.columns, "the output of a {}x{} product", left.rows, right.columns);
    // SAFETY: `out` is a `&mut` of the right length, which cannot overlap the operands.
    unsafe { multiply(To::F32(out.as_mut_ptr()), start, left, right, threads) };
}

/// Returns `start + left · right`, rounded when the sums are complete.
pub(crate) fn new_product_rounded<H: Rounded>(
    start: Start<'_>,
    left: Matrix<'_>,
    right: Matrix<'_>,
    threads: usize,
) -> Vec<H> {
    assert!(!matches!(start, Start::Output), "sums in a new buffer cannot start from its content");
    let len = left.rows * right.columns;
    let mut out = Vec::with_capacity(len);
    if left.columns <= LONGEST {
        // SAFETY: as for `new_product`.
        unsafe { multiply(H::to(out.as_mut_ptr()), start, left, right, threads) };
    } else {
        let sums = new_product(start, left, right, threads);
        let spare = Output { data: &mut out.spare_capacity_mut()[..len], floats: 1 };
        split(len, 1, [spare], |range, [out]| {
            out.fill(MaybeUninit::new(H::ZERO));
            // SAFETY: all of it is written here.
            H::round(&sums[range], unsafe { out.assume_init_mut() });
        });
    }
    // SAFETY: all elements are written.
    unsafe { out.set_len(len) };
    out
}

/// Returns the bytes of the f32 sums that [`new_product_rounded`] holds in memory, for this many results of this many
/// terms each.
pub(crate) fn unrounded(terms: usize, results: usize) -> u64 {
    if terms <= LONGEST { 0 } else { floats(results) }
}

/// # Safety
/// The output must have room for the rows of `left` times the columns of `right`, and must not overlap the operands. If
/// the sums start from the output, it must be initialized.
unsafe fn multiply(to: To, start: Start<'_>, left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    assert_eq!(left.columns, right.rows, "the inner dimensions of a product");
    if let Start::Row(row) = start {
        assert_eq!(row.len(), right.columns, "the start of a product with {} columns", right.columns);
    }
    let _timed = measure::product([&left, &right].map(Matrix::is_transposed), left.rows, right.columns, left.columns);
    let units = match (left.data, right.data) {
        (Elements::Bf16(_), Elements::Bf16(_)) => Bf16Units::best(),
        _ => Bf16Units::Widened,
    };
    let grid = Grid::new(&left, right.columns, threads, units.rows());
    let out = Out { start, to, stride: right.columns };
    team::run(grid.parts(), &|part| {
        let (rows, columns) = grid.part(part);
        // SAFETY: the parts of a grid are disjoint and inside the output, which the caller owns.
        unsafe { block_on(units, out, left, right, rows, columns) }
    });
}

/// # Safety
/// The requirements of [`block`] apply, and the processor must have these units.
unsafe fn block_on(
    units: Bf16Units,
    out: Out<'_>,
    left: Matrix<'_>,
    right: Matrix<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    let isa = Isa::current();
    if let (To::F32(to), Some((from, weights))) = (out.to, few::operands(isa, &left, &right, rows.len())) {
        let operands = ((from, left.row_stride), (weights, right.row_stride));
        // SAFETY: guaranteed by the caller.
        return unsafe { few::product(isa, (out, to), operands.0, operands.1, left.columns, (rows, columns)) };
    }
    if let (To::F32(to), Some(operands)) = (out.to, few_columns::operands(isa, &left, &right, rows.len())) {
        // SAFETY: guaranteed by the caller.
        return unsafe { few_columns::product(isa, (out, to), operands, (rows, columns)) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        match units {
            Bf16Units::Widened => block::<Wide>(Isa::current(), out, left, right, rows, columns),
            Bf16Units::Pairs => block::<Pairs>(Isa::current(), out, left, right, rows, columns),
            Bf16Units::Squares => block::<Squares>(Isa::current(), out, left, right, rows, columns),
        }
    }
}

/// The partition of the output between threads.
struct Grid {
    rows: usize,
    columns: usize,
    down: usize,
    across: usize,
    unit: usize,
}

impl Grid {
    /// Work below this many multiply-adds does not justify waking a thread.
    const SMALL: usize = 1 << 18;

    /// Reading an element of the right operand costs about as much as this many multiply-adds.
    const READING: usize = 8;

    /// Packing an element costs about as much as this many multiply-adds.
    const PACKING: usize = 16;

    /// Returns the partition with the least work for the busiest thread. Each thread packs the columns of the right
    /// operand that it needs. If the left operand has to be packed too, each thread packs its rows. The cost of packing
    /// an f32 operand with contiguous rows is small and not counted. Rows are split at multiples of `unit`.
    fn new(left: &Matrix<'_>, columns: usize, threads: usize, unit: usize) -> Grid {
        let (rows, depth) = (left.rows, left.columns);
        let threads = threads.min(rows.max(Self::READING) * columns * depth / Self::SMALL).max(1);
        let packing = if left.rows_are_f32().is_some() { 0 } else { Self::PACKING };
        let cost = |down: usize, across: usize| {
            let rows = rows.div_ceil(unit).div_ceil(down) * unit;
            let columns = columns.div_ceil(COLUMNS).div_ceil(across) * COLUMNS;
            rows * columns + rows * packing + columns * Self::PACKING
        };
        let cuts = (1..=threads).map(|down| (down, threads / down));
        let (down, across) = cuts.min_by_key(|&(down, across)| cost(down, across)).unwrap_or((1, 1));
        Grid { rows, columns, down, across, unit }
    }

    fn parts(&self) -> usize {
        self.down * self.across
    }

    fn part(&self, part: usize) -> (Range<usize>, Range<usize>) {
        let (down, across) = (part / self.across, part % self.across);
        let cut = |len: usize, unit: usize, part: usize, parts: usize| {
            let units = len.div_ceil(unit);
            (units * part / parts * unit).min(len)..(units * (part + 1) / parts * unit).min(len)
        };
        (cut(self.rows, self.unit, down, self.down), cut(self.columns, COLUMNS, across, self.across))
    }
}

#[cfg(test)]
mod tests;

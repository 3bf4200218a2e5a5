//! The outer loops of a product: blocks that fit the caches, and the tiles of a block.

use super::super::kernel::{HalfFloat, Isa};
use super::amx;
use super::caches::{self, DEPTH, HEIGHT, WIDTH};
use super::pack::right_panel;
use super::room::{PACKED, Room, SUM_LINES, space};
use super::terms::{Left, Terms};
use super::tile::{COLUMNS, Tile, prefetch};
use super::{Matrix, Start};
use half::{bf16, f16};
use std::ops::Range;

/// The whole output; each thread writes a part of it.
#[derive(Clone, Copy)]
pub(super) struct Out<'a> {
    pub(super) start: Start<'a>,
    pub(super) to: To,
    /// Distance from one row to the next.
    pub(super) stride: usize,
}

/// The destination of the sums.
#[derive(Clone, Copy)]
pub(crate) enum To {
    F32(*mut f32),
    /// A block contains the whole inner dimension, of at most [`LONGEST`] words, so that its sums can be rounded once
    /// they are complete. Sums do not start from the output.
    Bf16(*mut bf16),
    /// The same applies as for `Bf16`.
    F16(*mut f16),
}

/// A dtype to which sums are rounded.
pub(crate) trait Rounded: HalfFloat {
    fn to(start: *mut Self) -> To;
}

impl Rounded for bf16 {
    fn to(start: *mut Self) -> To {
        To::Bf16(start)
    }
}

impl Rounded for f16 {
    fn to(start: *mut Self) -> To {
        To::F16(start)
    }
}

// SAFETY: every thread writes only its own part of the output and reads no other.
unsafe impl Sync for Out<'_> {}

/// Number of words of the inner dimension in a block, for products with at most the rows of one tile. The block is one
/// panel of 24 KiB.
const FEW_DEPTH: usize = 128;
/// Longest inner dimension, in words, for which sums can be rounded without a buffer for all sums. Up to this length, a
/// block of the right operand has at least two panels.
pub(super) const LONGEST: usize = DEPTH * WIDTH / (2 * COLUMNS);

/// The sizes of blocks, and the operand that stays in the first-level cache.
struct Sizes {
    depth: usize,
    width: usize,
    height: usize,
    order: Order,
}

/// The order of the tiles of a block.
#[derive(Clone, Copy)]
enum Order {
    /// A tile's rows of the left operand stay in the first-level cache while all columns of the right operand are read
    /// from the second level. Used if tiles are so wide that few such reads are needed.
    RowsFirst,
    /// A tile's columns of the right operand stay in the first-level cache while all rows of the left operand are
    /// read.
    ColumnsFirst,
}

impl Sizes {
    fn new<T: Terms>(isa: Isa, words: usize, to: To, rows: usize) -> Self {
        if let (To::F32(_), true) = (to, rows <= T::rows(isa)) {
            // Each packed block is read only once. It is small enough to stay in the first-level cache until then.
            let depth = even(words, FEW_DEPTH);
            return Self { depth, width: COLUMNS, height: HEIGHT, order: Order::RowsFirst };
        }
        let (depth, width, height, order) = match T::tile_columns(isa) {
            COLUMNS => (DEPTH, caches::width(DEPTH), HEIGHT, Order::RowsFirst),
            columns => {
                let (depth, height) = caches::blocks(words, columns);
                (depth, WIDTH, height, Order::ColumnsFirst)
            }
        };
        match to {
            To::F32(_) => Self { depth: even(words, depth), width, height, order },
            // A block takes the same amount of memory as for f32, in a different shape: it contains the whole inner
            // dimension.
            To::Bf16(_) | To::F16(_) => {
                let width = (DEPTH * WIDTH / words.max(1) / COLUMNS * COLUMNS).clamp(COLUMNS, WIDTH);
                let depth = if let Order::RowsFirst = order { words.max(1) } else { even(words, depth) };
                let height = height.min(DEPTH * HEIGHT / depth).min(16 * SUM_LINES / width);
                let rows = T::rows(isa);
                Self { depth, width, height: (height / rows * rows).clamp(rows, HEIGHT), order }
            }
        }
    }
}

/// Returns the length of equal pieces that are at most `longest` and consist of whole AMX steps.
fn even(words: usize, longest: usize) -> usize {
    words.div_ceil(words.div_ceil(longest).max(1)).next_multiple_of(amx::STEP).max(1)
}

/// Computes the part of the output with these rows and columns.
///
/// # Safety
/// The part must be in the output, and no other code may access it.
pub(super) unsafe fn block<T: Terms>(
    isa: Isa,
    out: Out<'_>,
    left: Matrix<'_>,
    right: Matrix<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    let sizes = Sizes::new::<T>(isa, T::words(left.columns), out.to, rows.len());
    let work = Block { isa, out, left, right, rows, sizes };
    T::running(|| {
        PACKED.with_borrow_mut(|room| {
            for columns in pieces(columns, work.sizes.width) {
                match out.to {
                    // SAFETY: guaranteed by the caller.
                    To::F32(to) => unsafe { work.sums::<T>(to, columns, room) },
                    // SAFETY: as above.
                    To::Bf16(to) => unsafe { work.rounded::<T, _>(to, columns, room) },
                    // SAFETY: as above.
                    To::F16(to) => unsafe { work.rounded::<T, _>(to, columns, room) },
                }
            }
        })
    });
}

/// The part of a product that one thread computes.
struct Block<'a> {
    isa: Isa,
    out: Out<'a>,
    left: Matrix<'a>,
    right: Matrix<'a>,
    rows: Range<usize>,
    sizes: Sizes,
}

impl Block<'_> {
    /// Splits the inner dimension into pieces. Yields one empty piece if the inner dimension has no terms.
    fn depths<T: Terms>(&self) -> impl Iterator<Item = Range<usize>> {
        let (terms, each) = (self.left.columns, self.sizes.depth * T::EACH);
        (0..terms.max(1)).step_by(each).map(move |start| start..terms.min(start + each))
    }

    /// Accumulates the sums in the output.
    ///
    /// # Safety
    /// Rows and columns must be in the output, and no other code may access them.
    unsafe fn sums<T: Terms>(&self, to: *mut f32, columns: Range<usize>, room: &mut Room) {
        let (isa, stride) = (self.isa, self.out.stride);
        for depth in self.depths::<T>() {
            let words = T::words(depth.len());
            let packed = space(&mut room.right, columns.len().div_ceil(COLUMNS) * right_panel(words));
            T::pack_right(isa, self.right, depth.clone(), columns.clone(), packed);
            for rows in pieces(self.rows.clone(), self.sizes.height) {
                let left = T::left(isa, self.left, rows.clone(), depth.clone(), |len| space(&mut room.left, len));
                // SAFETY: in the output by the caller's guarantee.
                let at = unsafe { to.add(rows.start * stride + columns.start) };
                let start = match self.out.start {
                    Start::Zero if depth.start == 0 => SumsAt::NONE,
                    Start::Row(start) if depth.start == 0 => SumsAt::every_row(&start[columns.clone()]),
                    _ => SumsAt { at, stride },
                };
                let tiles = Tiles { left, right: packed, words, rows: rows.len(), columns: columns.len() };
                // SAFETY: guaranteed by the caller.
                unsafe { tiles.compute::<T>(isa, self.sizes.order, start, SumsAt { at, stride }) };
            }
        }
    }

    /// Rounds the sums into the output when they are complete.
    ///
    /// # Safety
    /// The requirements of [`Block::sums`] apply.
    unsafe fn rounded<T: Terms, H: HalfFloat>(&self, to: *mut H, columns: Range<usize>, room: &mut Room) {
        let (isa, width) = (self.isa, columns.len());
        let len = |depth: &Range<usize>| width.div_ceil(COLUMNS) * right_panel(T::words(depth.len()));
        let packed = space(&mut room.right, self.depths::<T>().map(|depth| len(&depth)).sum());
        let mut rest = &mut *packed;
        for depth in self.depths::<T>() {
            let (packed, after) = rest.split_at_mut(len(&depth));
            T::pack_right(isa, self.right, depth, columns.clone(), packed);
            rest = after;
        }
        for rows in pieces(self.rows.clone(), self.sizes.height) {
            let sums = space(&mut room.sums, rows.len() * width);
            let place = SumsAt { at: sums.as_mut_ptr(), stride: width };
            let mut rest = &*packed;
            for depth in self.depths::<T>() {
                let (packed, after) = rest.split_at(len(&depth));
                let left = T::left(isa, self.left, rows.clone(), depth.clone(), |len| space(&mut room.left, len));
                let start = match self.out.start {
                    Start::Row(start) if depth.start == 0 => SumsAt::every_row(&start[columns.clone()]),
                    _ if depth.start == 0 => SumsAt::NONE,
                    _ => place,
                };
                let words = T::words(depth.len());
                let tiles = Tiles { left, right: packed, words, rows: rows.len(), columns: width };
                // SAFETY: the sums have room for these rows and columns.
                unsafe { tiles.compute::<T>(isa, self.sizes.order, start, place) };
                rest = after;
            }
            for (row, sums) in rows.zip(sums.chunks_exact(width)) {
                // SAFETY: in the output and exclusive, by the caller's guarantee. Elements are written before they
                // are read.
                let to = unsafe {
                    let to = to.add(row * self.out.stride + columns.start);
                    to.write_bytes(0, width);
                    std::slice::from_raw_parts_mut(to, width)
                };
                H::round(sums, to);
            }
        }
    }
}

/// The address of the first element of a block of sums, and the distance from one row to the next.
#[derive(Clone, Copy)]
struct SumsAt {
    at: *mut f32,
    stride: usize,
}

impl SumsAt {
    /// No start: sums begin at zero.
    const NONE: SumsAt = SumsAt { at: std::ptr::null_mut(), stride: 0 };

    /// Repeats the same row for every row. Must only be read.
    fn every_row(row: &[f32]) -> Self {
        Self { at: row.as_ptr().cast_mut(), stride: 0 }
    }

    /// # Safety
    /// The element must be inside the block.
    unsafe fn element(self, row: usize, column: usize) -> *mut f32 {
        // SAFETY: guaranteed by the caller.
        if self.at.is_null() { self.at } else { unsafe { self.at.add(row * self.stride + column) } }
    }
}

/// Packed operands that are multiplied tile by tile.
struct Tiles<'a> {
    left: Left<'a>,
    right: &'a [f32],
    words: usize,
    rows: usize,
    columns: usize,
}

impl Tiles<'_> {
    /// # Safety
    /// `start`, `out` and the operands must contain all rows and columns. No other code may access the rows and columns
    /// of `out`.
    unsafe fn compute<T: Terms>(&self, isa: Isa, order: Order, start: SumsAt, out: SumsAt) {
        let downs = || (0..self.rows).step_by(T::rows(isa));
        let acrosses = || (0..self.columns).step_by(T::tile_columns(isa));
        // SAFETY: guaranteed by the caller.
        let tile = |row, column| unsafe { self.tile::<T>(isa, row, column, start, out) };
        match order {
            Order::RowsFirst => downs().for_each(|row| {
                acrosses().for_each(|column| {
                    let (begin, end) = (column, self.columns.min(column + T::tile_columns(isa)));
                    self.prefetch_left::<T>(
                        isa,
                        row,
                        self.words * begin / self.columns..self.words * end / self.columns,
                    );
                    tile(row, column);
                });
            }),
            Order::ColumnsFirst => acrosses().for_each(|column| {
                downs().for_each(|row| {
                    if column == 0 {
                        self.prefetch_left::<T>(isa, row, 0..self.words);
                    }
                    tile(row, column);
                });
            }),
        }
    }

    /// Prefetches `words` of each row of the tile that follows the tile at `row`, unless the left operand was packed
    /// into panels. The hardware prefetcher does not predict where the next row begins, because the rows are too short.
    fn prefetch_left<T: Terms>(&self, isa: Isa, row: usize, words: Range<usize>) {
        let rows = T::rows(isa);
        if self.left.step == 1 && row + rows < self.rows {
            let next = self.left.data[(row / rows + 1) * self.left.panel..].as_ptr();
            for row in 0..rows.min(self.rows - row - rows) {
                words.clone().step_by(16).for_each(|word| prefetch(next.wrapping_add(row * self.left.rows + word)));
            }
        }
    }

    /// # Safety
    /// The requirements of [`Tiles::compute`] apply.
    unsafe fn tile<T: Terms>(&self, isa: Isa, row: usize, column: usize, start: SumsAt, out: SumsAt) {
        let rows = T::rows(isa);
        // SAFETY: guaranteed by the caller.
        let (from, to) = unsafe { (start.element(row, column), out.element(row, column)) };
        let tile = Tile {
            rows: (self.rows - row).min(rows),
            columns: (self.columns - column).min(T::tile_columns(isa)),
            depth: self.words,
            left: self.left.data[row / rows * self.left.panel..].as_ptr(),
            left_rows: self.left.rows,
            left_step: self.left.step,
            right: self.right[column / COLUMNS * right_panel(self.words) + column % COLUMNS..].as_ptr(),
            start: from,
            start_rows: start.stride,
            out: to,
            out_rows: out.stride,
        };
        // SAFETY: the packed panels hold `words` rows of `COLUMNS`, and the left operand holds the rows of the tile.
        unsafe { T::tile(isa, tile) };
    }
}

/// Splits a range into pieces of at most `size`.
fn pieces(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |start| start..range.end.min(start + size))
}

#[cfg(test)]
mod tests;

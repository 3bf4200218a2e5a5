//! Matrix products that promise their bits.
//!
//! Every element of a product is one chain of fused multiply-adds over the inner dimension, from the first term to the
//! last: `sum = fma(left[i][k], right[k][j], sum)`. So it depends on its row, its column and what the chain starts from,
//! and on nothing else: not on the rows beside it, the threads, the blocks, the layout of the operands or the
//! instruction set. (The `gemm` crate keeps no such promise: products of one row, of few elements or of short sides
//! take paths of their own there. It is also a tenth slower on the layouts of a backward pass.)
//!
//! Blocks of the right operand are packed into panels that stay in the second-level cache, a few rows of the left one
//! stay in the first-level cache, and tiles of the output in registers (Goto and van de Geijn, *Anatomy of
//! High-Performance Matrix Multiplication*, 2008).

mod pack;
mod panels;
mod tile;

use super::kernel::{Isa, bf16 as kernel};
use super::{measure, team};
use half::bf16;
pub(crate) use panels::{FewRows, Panels, Target};
use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use tile::Tile;
pub(crate) use tile::{COLUMNS, ROWS};

/// The elements of an operand.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a> {
    F32(&'a [f32]),
    /// Widened where they are packed, which is exact: the sums are those of the f32 values.
    Bf16(&'a [bf16]),
}

impl<'a> Elements<'a> {
    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }

    /// All from element `start` on.
    pub(crate) fn skip(self, start: usize) -> Self {
        match self {
            Self::F32(data) => Self::F32(&data[start..]),
            Self::Bf16(data) => Self::Bf16(&data[start..]),
        }
    }

    /// Those of a range as f32: a few rows at a time, so that what has to be widened stays in the first-level cache.
    pub(crate) fn floats(self, range: Range<usize>) -> Cow<'a, [f32]> {
        match self {
            Self::F32(data) => Cow::Borrowed(&data[range]),
            Self::Bf16(data) => {
                let mut wide = vec![0.0; range.len()];
                kernel::widen(Isa::best(), &data[range], &mut wide);
                Cow::Owned(wide)
            }
        }
    }

    /// Those from element `start` on, as f32, to `out`.
    pub(crate) fn read(self, isa: Isa, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(&data[start..start + out.len()]),
            Self::Bf16(data) => kernel::widen(isa, &data[start..start + out.len()], out),
        }
    }
}

impl<'a> From<&'a [f32]> for Elements<'a> {
    fn from(data: &'a [f32]) -> Self {
        Self::F32(data)
    }
}

impl<'a> From<&'a Vec<f32>> for Elements<'a> {
    fn from(data: &'a Vec<f32>) -> Self {
        Self::F32(data)
    }
}

impl<'a> From<&'a Cow<'_, [f32]>> for Elements<'a> {
    fn from(data: &'a Cow<'_, [f32]>) -> Self {
        Self::F32(data)
    }
}

impl<'a> From<&'a mut [f32]> for Elements<'a> {
    fn from(data: &'a mut [f32]) -> Self {
        Self::F32(data)
    }
}

impl<'a> From<&'a [bf16]> for Elements<'a> {
    fn from(data: &'a [bf16]) -> Self {
        Self::Bf16(data)
    }
}

/// A view of a slice as a matrix. One of the two strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: Elements<'a>,
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix.
    pub(crate) fn new(data: impl Into<Elements<'a>>, rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns)
    }

    /// A matrix whose rows start `row_stride` apart.
    pub(crate) fn strided(data: impl Into<Elements<'a>>, rows: usize, columns: usize, row_stride: usize) -> Self {
        let data = data.into();
        // Checked here, relied on by `multiply`.
        let needed = if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(needed <= data.len(), "a {rows}x{columns} matrix needs {needed} elements, there are {}", data.len());
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transpose, without a copy.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    fn is_transposed(&self) -> bool {
        self.column_stride != 1
    }

    /// Whether the innermost loop can read it where it is, as the left operand.
    fn rows_are_f32(&self) -> Option<&'a [f32]> {
        match self.data {
            Elements::F32(data) if self.column_stride == 1 => Some(data),
            _ => None,
        }
    }
}

/// What the sums start from.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a> {
    Zero,
    /// The output's own content.
    Output,
    /// The same row for every row of the output: a bias.
    Row(&'a [f32]),
}

/// `out = left · right`, `out` row-major and overwritten.
pub(crate) fn product(out: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    multiply_into(out, Start::Zero, left, right, threads);
}

/// `out += left · right`: the chain of each element goes on from what `out` holds.
pub(crate) fn add_product(out: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    multiply_into(out, Start::Output, left, right, threads);
}

/// The product of the rows of `x` with `weight`, in a new buffer.
pub(crate) fn rows_product<'a>(
    x: impl Into<Elements<'a>>,
    rows: usize,
    weight: Matrix<'_>,
    threads: usize,
) -> Vec<f32> {
    new_product(Start::Zero, Matrix::new(x, rows, weight.rows), weight, threads)
}

/// `start + left · right` in a new buffer, without a pass to zero the memory first.
pub(crate) fn new_product(start: Start<'_>, left: Matrix<'_>, right: Matrix<'_>, threads: usize) -> Vec<f32> {
    assert!(!matches!(start, Start::Output), "a new output has no content");
    let len = left.rows * right.columns;
    let mut out = Vec::with_capacity(len);
    // SAFETY: there is room for `len` elements, each of which is written, and none read before.
    unsafe {
        multiply(out.as_mut_ptr(), start, left, right, threads);
        out.set_len(len);
    }
    out
}

fn multiply_into(out: &mut [f32], start: Start<'_>, left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    assert_eq!(out.len(), left.rows * right.columns, "the output of a {}x{} product", left.rows, right.columns);
    // SAFETY: a `&mut` of the right length, which cannot overlap the operands.
    unsafe { multiply(out.as_mut_ptr(), start, left, right, threads) };
}

/// # Safety
/// `out` has room for the rows of `left` times the columns of `right`, initialised if that is the start, and overlaps
/// neither.
unsafe fn multiply(out: *mut f32, start: Start<'_>, left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    assert_eq!(left.columns, right.rows, "the inner dimensions of a product");
    if let Start::Row(row) = start {
        assert_eq!(row.len(), right.columns, "the start of a product with {} columns", right.columns);
    }
    let _timed = measure::product([&left, &right].map(Matrix::is_transposed), left.rows, right.columns, left.columns);
    let grid = Grid::new(&left, right.columns, threads);
    let out = Out { start, data: out, stride: right.columns };
    team::run(grid.parts(), &|part| {
        let (rows, columns) = grid.part(part);
        // SAFETY: the parts of a grid are disjoint and inside of the output, which is the caller's to give.
        unsafe { block(Isa::best(), out, left, right, rows, columns) };
    });
}

/// The whole output, of which each thread has a part.
#[derive(Clone, Copy)]
struct Out<'a> {
    start: Start<'a>,
    data: *mut f32,
    stride: usize,
}

// SAFETY: every thread writes its own part of the output and reads no other.
unsafe impl Sync for Out<'_> {}

/// How the output is cut between threads.
struct Grid {
    rows: usize,
    columns: usize,
    down: usize,
    across: usize,
}

impl Grid {
    /// Less work than this, in multiply-adds, is not worth waking a thread for.
    const SMALL: usize = 1 << 18;

    /// Packing an element costs about as much as this many multiply-adds.
    const PACKING: usize = 16;

    /// The cut with the least work for the busiest thread: each packs the columns that it needs, and its rows if the
    /// left operand has to be packed too.
    fn new(left: &Matrix<'_>, columns: usize, threads: usize) -> Grid {
        let (rows, depth) = (left.rows, left.columns);
        let threads = threads.min(rows * columns * depth / Self::SMALL).max(1);
        let packing = if left.rows_are_f32().is_some() { 0 } else { Self::PACKING };
        let cost = |down: usize, across: usize| {
            let rows = rows.div_ceil(ROWS).div_ceil(down) * ROWS;
            let columns = columns.div_ceil(COLUMNS).div_ceil(across) * COLUMNS;
            rows * columns + rows * packing + columns * Self::PACKING
        };
        let cuts = (1..=threads).map(|down| (down, threads / down));
        let (down, across) = cuts.min_by_key(|&(down, across)| cost(down, across)).unwrap_or((1, 1));
        Grid { rows, columns, down, across }
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
        (cut(self.rows, ROWS, down, self.down), cut(self.columns, COLUMNS, across, self.across))
    }
}

/// Terms of the inner dimension that are added while a block of the right operand is in the second-level cache.
const DEPTH: usize = 512;
/// Columns of such a block: 1.5 MB.
const WIDTH: usize = 768;
/// Rows of the left operand that are packed at a time.
const HEIGHT: usize = 256;

/// Lines of the largest packed blocks of the two operands.
const LEFT_LINES: usize = HEIGHT.div_ceil(ROWS) * pack::left_panel(DEPTH) / 16;
const RIGHT_LINES: usize = WIDTH.div_ceil(COLUMNS) * pack::right_panel(DEPTH) / 16;

/// Bytes that every thread that multiplies keeps for as long as it lives. Of these only what was needed is in memory.
pub(crate) const ROOM: usize = (LEFT_LINES + RIGHT_LINES) * size_of::<Line>();

thread_local! {
    /// Room for the packed blocks of the two operands.
    static PACKED: RefCell<(Vec<Line>, Vec<Line>)> =
        RefCell::new((Vec::with_capacity(LEFT_LINES), Vec::with_capacity(RIGHT_LINES)));
}

/// Makes this thread's room, so that what a process takes does not depend on which of its threads come to multiply.
pub(crate) fn make_room() {
    PACKED.with(|_| {});
}

/// The part of the output with these rows and columns.
///
/// # Safety
/// The part lies in the output, and nobody else has it.
unsafe fn block(
    isa: Isa,
    out: Out<'_>,
    left: Matrix<'_>,
    right: Matrix<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    if left.columns == 0 {
        // SAFETY: the caller's promise.
        return unsafe { tiles(isa, out, Left::NONE, &[], rows, columns, 0..0) };
    }
    PACKED.with_borrow_mut(|(packed_left, packed_right)| {
        for columns in pieces(columns, WIDTH) {
            for depth in pieces(0..left.columns, DEPTH) {
                let panels = columns.len().div_ceil(COLUMNS);
                let packed_right = room(packed_right, panels * pack::right_panel(depth.len()));
                pack::pack_right(isa, right, depth.clone(), columns.clone(), packed_right);
                if let Some(data) = left.rows_are_f32() {
                    let first = rows.start * left.row_stride + depth.start;
                    let left =
                        Left { data: &data[first..], rows: left.row_stride, step: 1, panel: ROWS * left.row_stride };
                    // SAFETY: the caller's promise.
                    unsafe { tiles(isa, out, left, packed_right, rows.clone(), columns.clone(), depth) };
                    continue;
                }
                for rows in pieces(rows.clone(), HEIGHT) {
                    let left = if let (Elements::Bf16(data), 1) = (left.data, left.column_stride) {
                        let packed = room(packed_left, rows.len() * depth.len());
                        pack::widen_left(isa, data, left.row_stride, rows.clone(), depth.clone(), packed);
                        Left { data: packed, rows: depth.len(), step: 1, panel: ROWS * depth.len() }
                    } else {
                        let panel = pack::left_panel(depth.len());
                        let packed = room(packed_left, rows.len().div_ceil(ROWS) * panel);
                        pack::pack_left(isa, left, rows.clone(), depth.clone(), packed);
                        Left { data: packed, rows: 1, step: ROWS, panel }
                    };
                    // SAFETY: the caller's promise.
                    unsafe { tiles(isa, out, left, packed_right, rows, columns.clone(), depth.clone()) };
                }
            }
        }
    });
}

/// The left operand as the innermost loop reads it.
struct Left<'a> {
    data: &'a [f32],
    /// From one row to the next, from one column to the next, and from one panel of [`ROWS`] rows to the next.
    rows: usize,
    step: usize,
    panel: usize,
}

impl Left<'_> {
    const NONE: Left<'static> = Left { data: &[], rows: 0, step: 0, panel: 0 };
}

/// All tiles of a block: a few rows of the left operand against each panel of the right one in turn.
///
/// # Safety
/// The block lies in the output, nobody else has it, and the operands hold it.
unsafe fn tiles(
    isa: Isa,
    out: Out<'_>,
    left: Left<'_>,
    right: &[f32],
    rows: Range<usize>,
    columns: Range<usize>,
    depth: Range<usize>,
) {
    let panel = pack::right_panel(depth.len());
    for (down, row) in rows.clone().step_by(ROWS).enumerate() {
        for (across, column) in columns.clone().step_by(COLUMNS).enumerate() {
            // SAFETY: inside of the output by the caller's promise.
            let at = unsafe { out.data.add(row * out.stride + column) };
            let (start, start_rows) = match out.start {
                _ if depth.start > 0 => (at.cast_const(), out.stride),
                Start::Zero => (std::ptr::null(), 0),
                Start::Output => (at.cast_const(), out.stride),
                Start::Row(start) => (start[column..].as_ptr(), 0),
            };
            let tile = Tile {
                rows: (rows.end - row).min(ROWS),
                columns: (columns.end - column).min(COLUMNS),
                depth: depth.len(),
                left: left.data[down * left.panel..].as_ptr(),
                left_rows: left.rows,
                left_step: left.step,
                right: right[across * panel..].as_ptr(),
                start,
                start_rows,
                out: at,
                out_rows: out.stride,
            };
            // SAFETY: the packed panels hold `depth` rows of `COLUMNS`, and the left operand the rows of the tile.
            unsafe { tile.compute(isa) };
        }
    }
}

/// A range in pieces of at most `size`.
fn pieces(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |start| start..range.end.min(start + size))
}

/// A cache line: panels begin on one, so that no register is loaded from two.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

fn room(buffer: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let lines = len.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, Line([0.0; 16]));
    }
    // SAFETY: a line is sixteen f32 and nothing else.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), len) }
}

#[cfg(test)]
mod tests;

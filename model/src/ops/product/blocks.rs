//! The loops of a product around its innermost one: blocks that fit the caches, and the tiles of a block.

use super::super::kernel::{HalfFloat, Isa};
use super::amx;
use super::pack::{left_panel, right_panel};
use super::terms::{Left, Terms};
use super::tile::{COLUMNS, ROWS as FEW_ROWS, Tile};
use super::{Matrix, Start};
use half::{bf16, f16};
use std::cell::RefCell;
use std::ops::Range;

/// The whole output, of which each thread has a part.
#[derive(Clone, Copy)]
pub(super) struct Out<'a> {
    pub(super) start: Start<'a>,
    pub(super) to: To,
    /// From one row to the next.
    pub(super) stride: usize,
}

/// Where the sums go.
#[derive(Clone, Copy)]
pub(crate) enum To {
    F32(*mut f32),
    /// Rounded when they are complete, so the inner dimension is not cut into blocks: at most [`LONGEST`] words, and a start
    /// that is not the output.
    Bf16(*mut bf16),
    /// Likewise.
    F16(*mut f16),
}

/// What sums are rounded to.
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

// SAFETY: every thread writes its own part of the output and reads no other.
unsafe impl Sync for Out<'_> {}

/// Words of the inner dimension that are passed while a block of the right operand is in the second-level cache.
const DEPTH: usize = 512;
/// Columns of such a block: 1.5 MB.
const WIDTH: usize = 768;
/// Rows of the left operand that are packed at a time.
const HEIGHT: usize = 256;

/// The longest inner dimension, in words, that is not cut: a block of its right operand has two panels.
pub(super) const LONGEST: usize = DEPTH * WIDTH / (2 * COLUMNS);

/// Lines of the largest packed blocks of the two operands, and of the sums of a row of tiles.
const LEFT_LINES: usize = HEIGHT.div_ceil(FEW_ROWS) * left_panel(DEPTH) / 16;
const RIGHT_LINES: usize = WIDTH.div_ceil(COLUMNS) * right_panel(DEPTH) / 16;
const SUM_LINES: usize = amx::ROWS * WIDTH / 16;

/// Bytes that every thread that multiplies keeps for as long as it lives. Of these only what was needed is in memory.
pub(crate) const ROOM: usize = (LEFT_LINES + RIGHT_LINES + SUM_LINES) * size_of::<Line>();

struct Room {
    left: Vec<Line>,
    right: Vec<Line>,
    sums: Vec<Line>,
}

thread_local! {
    static PACKED: RefCell<Room> = RefCell::new(Room {
        left: Vec::with_capacity(LEFT_LINES),
        right: Vec::with_capacity(RIGHT_LINES),
        sums: Vec::with_capacity(SUM_LINES),
    });
}

/// Makes this thread's room, so that what a process takes does not depend on which of its threads come to multiply.
pub(crate) fn make_room() {
    PACKED.with(|_| {});
}

/// How large blocks are.
struct Sizes {
    depth: usize,
    width: usize,
    height: usize,
}

impl Sizes {
    fn new<T: Terms>(words: usize, to: To) -> Self {
        match to {
            To::F32(_) => Self { depth: DEPTH, width: WIDTH, height: HEIGHT },
            // As much memory, in another shape.
            To::Bf16(_) | To::F16(_) => Self {
                depth: words.max(1),
                width: (DEPTH * WIDTH / words.max(1) / COLUMNS * COLUMNS).clamp(COLUMNS, WIDTH),
                height: (DEPTH * HEIGHT / words.max(1) / T::ROWS * T::ROWS).clamp(T::ROWS, HEIGHT),
            },
        }
    }
}

/// The part of the output with these rows and columns.
///
/// # Safety
/// The part lies in the output, and nobody else has it.
pub(super) unsafe fn block<T: Terms>(
    isa: Isa,
    out: Out<'_>,
    left: Matrix<'_>,
    right: Matrix<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    let sizes = Sizes::new::<T>(T::words(left.columns), out.to);
    let multiply = || {
        PACKED.with_borrow_mut(|room| {
            for columns in pieces(columns, sizes.width) {
                // One block of no terms where there are none.
                for start in (0..left.columns.max(1)).step_by(sizes.depth * T::EACH) {
                    let depth = start..left.columns.min(start + sizes.depth * T::EACH);
                    let words = T::words(depth.len());
                    let packed = space(&mut room.right, columns.len().div_ceil(COLUMNS) * right_panel(words));
                    T::pack_right(isa, right, depth.clone(), columns.clone(), packed);
                    for rows in pieces(rows.clone(), sizes.height) {
                        let left = T::left(isa, left, rows.clone(), depth.clone(), |len| space(&mut room.left, len));
                        let tiles = Tiles { left, right: packed, words, first: start == 0, columns: columns.clone() };
                        match out.to {
                            // SAFETY: the caller's promise.
                            To::F32(to) => unsafe { tiles.sums::<T>(isa, out, to, rows) },
                            // SAFETY: as above.
                            To::Bf16(to) => unsafe { tiles.rounded::<T, _>(isa, out, to, rows, &mut room.sums) },
                            // SAFETY: as above.
                            To::F16(to) => unsafe { tiles.rounded::<T, _>(isa, out, to, rows, &mut room.sums) },
                        }
                    }
                }
            }
        })
    };
    T::running(multiply);
}

/// A few rows of the left operand against each panel of the right one in turn.
struct Tiles<'a> {
    left: Left<'a>,
    right: &'a [f32],
    words: usize,
    /// Whether the inner dimension begins with this block.
    first: bool,
    columns: Range<usize>,
}

impl Tiles<'_> {
    /// Adds them up in the output.
    ///
    /// # Safety
    /// The block lies in the output, nobody else has it, and the operands hold it.
    unsafe fn sums<T: Terms>(&self, isa: Isa, out: Out<'_>, to: *mut f32, rows: Range<usize>) {
        for (down, row) in rows.clone().step_by(T::ROWS).enumerate() {
            for (across, column) in self.columns.clone().step_by(COLUMNS).enumerate() {
                // SAFETY: inside of the output by the caller's promise.
                let at = unsafe { to.add(row * out.stride + column) };
                let start = match out.start {
                    _ if !self.first => (at.cast_const(), out.stride),
                    Start::Zero => (std::ptr::null(), 0),
                    Start::Output => (at.cast_const(), out.stride),
                    Start::Row(start) => (start[column..].as_ptr(), 0),
                };
                // SAFETY: the caller's promise.
                unsafe { self.tile::<T>(isa, down, across, (rows.end - row).min(T::ROWS), start, (at, out.stride)) };
            }
        }
    }

    /// Rounds them into the output.
    ///
    /// # Safety
    /// As for [`Tiles::sums`].
    unsafe fn rounded<T: Terms, H: HalfFloat>(
        &self,
        isa: Isa,
        out: Out<'_>,
        to: *mut H,
        rows: Range<usize>,
        sums: &mut Vec<Line>,
    ) {
        let width = self.columns.len();
        let sums = space(sums, T::ROWS * width);
        for (down, row) in rows.clone().step_by(T::ROWS).enumerate() {
            let count = (rows.end - row).min(T::ROWS);
            for (across, column) in self.columns.clone().step_by(COLUMNS).enumerate() {
                let start = match out.start {
                    Start::Row(start) => (start[column..].as_ptr(), 0),
                    _ => (std::ptr::null(), 0),
                };
                let at = sums[column - self.columns.start..].as_mut_ptr();
                // SAFETY: the sums have room for all columns of these rows; the operands by the caller's promise.
                unsafe { self.tile::<T>(isa, down, across, count, start, (at, width)) };
            }
            for (row, sums) in (row..row + count).zip(sums.chunks_exact(width)) {
                // SAFETY: inside of the output, and ours, by the caller's promise. Elements are written before they are read.
                let to = unsafe {
                    let to = to.add(row * out.stride + self.columns.start);
                    to.write_bytes(0, width);
                    std::slice::from_raw_parts_mut(to, width)
                };
                H::round(isa, sums, to);
            }
        }
    }

    /// One tile, which starts from and goes to where the pairs of a place and the distance of its rows say.
    ///
    /// # Safety
    /// As for [`Tiles::sums`]; both places hold the tile.
    unsafe fn tile<T: Terms>(
        &self,
        isa: Isa,
        down: usize,
        across: usize,
        rows: usize,
        start: (*const f32, usize),
        out: (*mut f32, usize),
    ) {
        let tile = Tile {
            rows,
            columns: (self.columns.len() - across * COLUMNS).min(COLUMNS),
            depth: self.words,
            left: self.left.data[down * self.left.panel..].as_ptr(),
            left_rows: self.left.rows,
            left_step: self.left.step,
            right: self.right[across * right_panel(self.words)..].as_ptr(),
            start: start.0,
            start_rows: start.1,
            out: out.0,
            out_rows: out.1,
        };
        // SAFETY: the packed panels hold `words` rows of `COLUMNS`, and the left operand the rows of the tile.
        unsafe { T::tile(isa, tile) };
    }
}

/// A range in pieces of at most `size`.
fn pieces(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |start| start..range.end.min(start + size))
}

/// A cache line: panels begin on one, so that no register is loaded from two.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([f32; 16]);

/// The first `len` words of a buffer, which grows where it has to.
pub(super) fn space(buffer: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let lines = len.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, Line([0.0; 16]));
    }
    // SAFETY: a line is sixteen f32 and nothing else.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), len) }
}

/// The words of a buffer.
pub(super) fn words(buffer: &[Line]) -> &[f32] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast(), 16 * buffer.len()) }
}

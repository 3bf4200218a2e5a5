//! The buffers that every thread keeps for packed operands and sums.

use super::amx;
use super::caches::{DEPTH, HEIGHT, WIDTH};
use super::pack::{left_room, right_panel};
use super::tile::COLUMNS;
use std::cell::RefCell;

/// Cache lines of padding of a right operand that is packed in several pieces: one for each piece and panel. With a
/// first-level cache of 32 KiB, a piece has at least 128 words.
const PADDING_LINES: usize = DEPTH * WIDTH / (128 * COLUMNS);

/// Cache lines of the largest packed blocks of the two operands, and of sums before rounding. `left_room` allows eight
/// rows of padding, for any number of rows, but `HEIGHT` rows need at most two.
pub(super) const LEFT_LINES: usize = left_room(HEIGHT, DEPTH) / 16 - PADDING_LINES;
pub(super) const RIGHT_LINES: usize = WIDTH.div_ceil(COLUMNS) * right_panel(DEPTH) / 16 + PADDING_LINES;
pub(super) const SUM_LINES: usize = amx::ROWS * WIDTH / 16;

/// Limit in bytes on the buffers that every thread keeps for its lifetime once it has multiplied. Only the part that
/// was used is resident.
pub(crate) const ROOM: usize = (LEFT_LINES + RIGHT_LINES + SUM_LINES) * size_of::<Line>();

pub(super) struct Room {
    pub(super) left: Vec<Line>,
    pub(super) right: Vec<Line>,
    pub(super) sums: Vec<Line>,
}

thread_local! {
    pub(super) static PACKED: RefCell<Room> = RefCell::new(Room {
        left: Vec::with_capacity(LEFT_LINES),
        right: Vec::with_capacity(RIGHT_LINES),
        sums: Vec::with_capacity(SUM_LINES),
    });
}

/// Creates this thread's buffers, so that the memory of a process does not depend on which of its threads multiply.
pub(crate) fn make_room() {
    PACKED.with(|_| {});
}

/// A cache line. Panels begin at the start of a line, so that no register is loaded from two lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([f32; 16]);

/// Returns the first `len` words of a buffer, which grows if necessary.
pub(super) fn space(buffer: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let lines = len.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, Line([0.0; 16]));
    }
    // SAFETY: a line is sixteen f32 and nothing else.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), len) }
}

/// Returns the words of a buffer.
pub(super) fn words(buffer: &[Line]) -> &[f32] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast(), 16 * buffer.len()) }
}

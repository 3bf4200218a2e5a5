//! The arithmetic of causal attention, head by head over slices.
//!
//! The keys and values of a head are packed once. A block of queries passes over them a chunk of keys at a time, so
//! that the chunk stays in a core's caches until the whole block has used it. Each matrix product covers a few query
//! rows, and the keys from the first one that the first row sees to the position of the last row. The forward computes
//! two such products, the backward five. The gradients of keys and values are sums over queries, and are accumulated
//! one block of queries at a time. Heads are independent, so the work is split among threads by pairs of a sample and a
//! key and value head. Neither blocks nor chunks change the order of a sum. Positions that a query row does not see add
//! zeros to its sums, so its result depends only on the positions that it sees.

mod backward;
mod forward;

use super::geometry::{Geometry, pieces};
use crate::kernel::Isa;
use crate::kernel::softmax::{self as kernel, MOST_ROWS};
use crate::meta::footprint::floats;
use crate::parallel::parts;
use crate::product::{COLUMNS, Panels, tile_rows};
use std::ops::Range;

pub(crate) use backward::{Saved, backward};
pub(crate) use forward::forward;

/// Number of queries in a block of the backward.
const QUERIES: usize = 192;
/// Number of queries in a block of the forward of a long sequence: a multiple of [`rows_at_a_time`].
const QUERIES_OF_LONG: usize = 48;
/// If a sequence is longer than this, the keys and values of one head exceed a core's caches.
const LONG: usize = 4096;
/// Number of keys in a chunk: a multiple of [`COLUMNS`] and of [`rows_at_a_time`].
const KEYS: usize = 192;
const _: () = assert!(KEYS.is_multiple_of(COLUMNS));

/// Returns how many rows of scores are computed at a time: a multiple of the rows of a product's tile.
fn rows_at_a_time(isa: Isa) -> usize {
    MOST_ROWS / tile_rows(isa) * tile_rows(isa)
}

/// A few rows of a block of queries.
struct Few {
    /// Index of the first row in its block.
    first: usize,
    count: usize,
    /// The range from the first key that the first row attends to, to the last key that the last row attends to.
    seen: Range<usize>,
}

/// Splits a block of queries into groups of a few rows. `firsts` has the first key that each position sees.
fn few_rows(g: Geometry, isa: Isa, block: Range<usize>, firsts: &[usize]) -> impl Iterator<Item = Few> {
    pieces(block.clone(), rows_at_a_time(isa)).map(move |rows| {
        let seen = firsts[rows.start]..rows.end.min(g.time);
        Few { first: rows.start - block.start, count: rows.len(), seen }
    })
}

impl Geometry {
    /// Returns the bytes of temporary memory that all threads of a forward use together.
    pub(crate) fn forward_room(self) -> u64 {
        let (time, size, rows) = (self.time, self.size, if self.time > LONG { QUERIES_OF_LONG } else { MOST_ROWS });
        let panels = Panels::room(size, time) + Panels::room(time, size);
        self.parts() * (panels + floats(rows * room_of_scores(time)) + 2 * floats(rows * size))
    }

    /// Returns the bytes of temporary memory that all threads of a backward use together.
    pub(crate) fn backward_room(self) -> u64 {
        let (time, size, rows) = (self.time, self.size, QUERIES.min(self.queries.len()));
        // Keys; transposed keys and values; a block's queries and upstream gradient.
        let panels = Panels::room(time, size) + 2 * Panels::room(size, time) + 2 * Panels::room(rows, size);
        let block = 3 * floats(rows * size) + 2 * floats(rows * room_of_scores(KEYS.min(time)));
        self.parts() * (panels + block + floats(MOST_ROWS * size) + 2 * floats(time * size))
    }

    fn parts(self) -> u64 {
        if self.time == 0 { 0 } else { parts(self.batch * self.kv_heads, self.cost()) as u64 }
    }
}

/// Returns the number of floats of a row of scores for `positions` positions.
fn room_of_scores(positions: usize) -> usize {
    positions.next_multiple_of(16) + kernel::SPARE
}

/// Returns the positions that are in both ranges, as an empty range if there are none.
fn common(seen: Range<usize>, chunk: &Range<usize>) -> Range<usize> {
    seen.start.max(chunk.start)..seen.end.min(chunk.end)
}

/// Returns the start of the panel of keys that contains a position.
fn panel_start(position: usize) -> usize {
    position / COLUMNS * COLUMNS
}

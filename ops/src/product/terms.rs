//! The formats in which the innermost loop reads the terms of its sums: words of 32 bits.

use super::super::kernel::Isa;
use super::tile::{self, COLUMNS, Tile};
use super::{Matrix, amx, pack, pairs, squares};
use std::ops::Range;

/// A format of packed operands, with the tile that reads it. Words are stored as f32, whatever their bits mean.
pub(super) trait Terms {
    /// Terms in a word.
    const EACH: usize;
    /// Rows of a full tile.
    fn rows(isa: Isa) -> usize {
        tile::rows(isa)
    }

    /// Number of columns of a full tile. It divides the number of columns of a panel.
    fn tile_columns(isa: Isa) -> usize {
        tile::columns(isa)
    }

    /// Returns the number of words for this many terms, including padding.
    fn words(terms: usize) -> usize {
        terms.div_ceil(Self::EACH)
    }

    /// Runs `work`, which multiplies on this thread.
    fn running(work: impl FnOnce()) {
        work();
    }

    /// Packs a block of the right operand, as [`pack::pack_right`] does.
    fn pack_right(isa: Isa, right: Matrix<'_>, depth: Range<usize>, columns: Range<usize>, packed: &mut [f32]);

    /// Returns a block of the left operand, packed into `room` if necessary. `room` has space for the packed words.
    fn left<'a>(
        isa: Isa,
        left: Matrix<'a>,
        rows: Range<usize>,
        depth: Range<usize>,
        room: impl FnOnce(usize) -> &'a mut [f32],
    ) -> Left<'a>;

    /// # Safety
    /// The requirements of [`Tile::compute`] apply, except that the depth of `tile` counts words.
    unsafe fn tile(isa: Isa, tile: Tile);
}

/// The left operand as the innermost loop reads it.
pub(super) struct Left<'a> {
    pub(super) data: &'a [f32],
    /// Distances from one row to the next, from one word of a row to the next, and from the rows of one tile to the
    /// rows of the next tile.
    pub(super) rows: usize,
    pub(super) step: usize,
    pub(super) panel: usize,
}

impl<'a> Left<'a> {
    /// Describes rows that are `words` words apart.
    fn rows(isa: Isa, data: &'a [f32], words: usize) -> Self {
        Self { data, rows: words, step: 1, panel: tile::rows(isa) * words }
    }

    /// Describes panels of a tile's rows, which are stored word after word.
    fn panels(isa: Isa, data: &'a [f32], words: usize) -> Self {
        Self { data, rows: 1, step: tile::rows(isa), panel: pack::left_panel(isa, words) }
    }
}

/// One f32 per word.
pub(super) struct Wide;

impl Terms for Wide {
    const EACH: usize = 1;

    fn pack_right(isa: Isa, right: Matrix<'_>, depth: Range<usize>, columns: Range<usize>, packed: &mut [f32]) {
        pack::pack_right(isa, right, depth, columns, packed);
    }

    fn left<'a>(
        isa: Isa,
        left: Matrix<'a>,
        rows: Range<usize>,
        depth: Range<usize>,
        room: impl FnOnce(usize) -> &'a mut [f32],
    ) -> Left<'a> {
        let in_panels = left.column_stride != 1 || (pack::turns_left(isa, left.data) && rows.len() > tile::rows(isa));
        if in_panels {
            let packed = room(rows.len().div_ceil(tile::rows(isa)) * pack::left_panel(isa, depth.len()));
            pack::pack_left(isa, left, rows, depth.clone(), packed);
            return Left::panels(isa, packed, depth.len());
        }
        if let Some(data) = left.rows_are_f32() {
            // Reads the operand in place. If there are no terms, `data` may have no element at this index.
            let data = data.get(rows.start * left.row_stride + depth.start..).unwrap_or(&[]);
            return Left::rows(isa, data, left.row_stride);
        }
        let packed = room(rows.len() * depth.len());
        pack::widen_left(isa, left, rows, depth.clone(), packed);
        Left::rows(isa, packed, depth.len())
    }

    unsafe fn tile(isa: Isa, tile: Tile) {
        // SAFETY: guaranteed by the caller.
        unsafe { tile.compute(isa) };
    }
}

/// Two bf16 per word: see [`pairs`].
pub(super) struct Pairs;

impl Terms for Pairs {
    const EACH: usize = 2;

    fn pack_right(isa: Isa, right: Matrix<'_>, depth: Range<usize>, columns: Range<usize>, packed: &mut [f32]) {
        let panel = pack::right_panel(depth.len().div_ceil(2));
        pairs::pack_right(isa, right, depth, columns, panel, packed);
    }

    fn left<'a>(
        isa: Isa,
        left: Matrix<'a>,
        rows: Range<usize>,
        depth: Range<usize>,
        room: impl FnOnce(usize) -> &'a mut [f32],
    ) -> Left<'a> {
        let words = depth.len().div_ceil(2);
        if left.column_stride == 1 {
            let packed = room(rows.len() * words);
            pairs::pack_left_rows(isa, left, rows, depth, packed);
            return Left::rows(isa, packed, words);
        }
        let packed = room(rows.len().div_ceil(tile::rows(isa)) * pack::left_panel(isa, words));
        pairs::pack_left(isa, left, rows, depth, packed);
        Left::panels(isa, packed, words)
    }

    unsafe fn tile(_: Isa, tile: Tile) {
        // SAFETY: guaranteed by the caller; pairs are used only if the processor supports them.
        unsafe { tile.compute_pairs() };
    }
}

/// Two bf16 per word, in steps of sixteen words: see [`amx`].
pub(super) struct Squares;

impl Terms for Squares {
    const EACH: usize = 2;

    fn rows(_: Isa) -> usize {
        amx::ROWS
    }

    fn tile_columns(_: Isa) -> usize {
        COLUMNS
    }

    fn words(terms: usize) -> usize {
        squares::words(terms)
    }

    fn running(work: impl FnOnce()) {
        amx::configured(work);
    }

    fn pack_right(isa: Isa, right: Matrix<'_>, depth: Range<usize>, columns: Range<usize>, packed: &mut [f32]) {
        squares::pack_right(isa, right, depth, columns, packed);
    }

    fn left<'a>(
        isa: Isa,
        left: Matrix<'a>,
        rows: Range<usize>,
        depth: Range<usize>,
        room: impl FnOnce(usize) -> &'a mut [f32],
    ) -> Left<'a> {
        let words = Self::words(depth.len());
        let packed = room(rows.len().next_multiple_of(amx::SIDE) * words);
        squares::pack_left(isa, left, rows, depth, packed);
        Left { data: packed, rows: 0, step: 0, panel: amx::ROWS * words }
    }

    unsafe fn tile(_: Isa, tile: Tile) {
        // SAFETY: guaranteed by the caller; squares are used only if the processor supports AMX, and this call is
        // inside `running`.
        unsafe { amx::compute(tile) };
    }
}

//! A right operand that is laid out once for many products.
//!
//! In attention the same keys and values meet every group of query rows, and each group sees another part of them; to lay
//! that part out for each group anew costs a quarter of the multiplying.

use super::super::kernel::Isa;
use super::Matrix;
use super::blocks::{Line, space, words};
use super::pack::{pack_right, right_panel};
use super::tile::{COLUMNS, Tile};
use std::ops::Range;

/// A matrix as the innermost loop reads its right operand. A new one is empty.
#[derive(Default)]
pub(crate) struct Panels {
    lines: Vec<Line>,
    rows: usize,
    columns: usize,
}

/// A few rows of a left operand: element (r, k) is at `r · row + k · step`.
#[derive(Clone, Copy)]
pub(crate) struct FewRows<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) count: usize,
    pub(crate) row: usize,
    pub(crate) step: usize,
}

/// Where a product goes.
pub(crate) struct Target<'a> {
    pub(crate) data: &'a mut [f32],
    /// From one row to the next.
    pub(crate) row: usize,
    /// Whether it is added to what is there.
    pub(crate) add: bool,
}

impl Panels {
    /// Bytes of a matrix of this size.
    pub(crate) fn room(rows: usize, columns: usize) -> u64 {
        let lines = (columns.div_ceil(COLUMNS) * right_panel(rows)).div_ceil(16);
        if rows == 0 { 0 } else { (lines * size_of::<Line>()) as u64 }
    }

    /// Takes the place of what was there before, in the same memory.
    pub(crate) fn pack(&mut self, isa: Isa, matrix: Matrix<'_>) {
        (self.rows, self.columns) = (matrix.rows, matrix.columns);
        if matrix.rows > 0 {
            let packed = space(&mut self.lines, matrix.columns.div_ceil(COLUMNS) * right_panel(matrix.rows));
            pack_right(isa, matrix, 0..matrix.rows, 0..matrix.columns, packed);
        }
    }

    /// The product of `left` with a part of these rows and columns, each element the chain of [`super::product`]. The
    /// columns begin at a multiple of [`COLUMNS`].
    ///
    /// # Panics
    /// If the operands or the target are too small.
    pub(crate) fn product(
        &self,
        isa: Isa,
        left: FewRows<'_>,
        rows: Range<usize>,
        columns: Range<usize>,
        out: Target<'_>,
    ) {
        if left.count == 0 || columns.is_empty() {
            return;
        }
        assert!(columns.start.is_multiple_of(COLUMNS));
        assert!(rows.end <= self.rows && columns.end <= self.columns);
        assert!((left.count - 1) * left.row + rows.len().saturating_sub(1) * left.step < left.data.len());
        assert!((left.count - 1) * out.row + columns.len() <= out.data.len());
        let panel = right_panel(self.rows);
        for column in columns.clone().step_by(COLUMNS) {
            let at = out.data[column - columns.start..].as_mut_ptr();
            let tile = Tile {
                rows: left.count,
                columns: (columns.end - column).min(COLUMNS),
                depth: rows.len(),
                left: left.data.as_ptr(),
                left_rows: left.row,
                left_step: left.step,
                right: words(&self.lines)[column / COLUMNS * panel + rows.start * COLUMNS..].as_ptr(),
                start: if out.add { at.cast_const() } else { std::ptr::null() },
                start_rows: out.row,
                out: at,
                out_rows: out.row,
            };
            // SAFETY: what the tile reads and writes lies in the slices, by the assertions; a panel has `self.rows` rows of
            // `COLUMNS` elements.
            unsafe { tile.compute(isa) };
        }
    }
}

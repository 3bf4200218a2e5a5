//! A right operand that is packed once for many products.
//!
//! In attention, every group of query rows is multiplied with the same keys and values, and each group sees a
//! different part of them. Packing that part for each group again would cost a quarter of the time of the products.

use super::super::kernel::Isa;
use super::Matrix;
use super::pack::{pack_panels, right_panel};
use super::room::{Line, space, words};
use super::tile::{self, COLUMNS, Tile};
use std::ops::Range;

/// A matrix packed as the innermost loop reads its right operand. Empty when created.
#[derive(Default)]
pub(crate) struct Panels {
    lines: Vec<Line>,
    rows: usize,
    columns: usize,
    /// Number of columns of a panel that are used.
    wide: usize,
}

/// A few rows of a left operand. Element (r, k) is at `r · row + k · step`.
#[derive(Clone, Copy)]
pub(crate) struct FewRows<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) count: usize,
    pub(crate) row: usize,
    pub(crate) step: usize,
}

/// The destination of a product.
pub(crate) struct Target<'a> {
    pub(crate) data: &'a mut [f32],
    /// Distance from one row to the next.
    pub(crate) row: usize,
    /// Whether to add to the existing values.
    pub(crate) add: bool,
}

impl Panels {
    /// Returns the bytes of a packed matrix of this size.
    pub(crate) fn room(rows: usize, columns: usize) -> u64 {
        let lines = (columns.div_ceil(COLUMNS) * right_panel(rows)).div_ceil(16);
        if rows == 0 { 0 } else { (lines * size_of::<Line>()) as u64 }
    }

    /// Packs a matrix, reusing the memory of the previous one.
    pub(crate) fn pack(&mut self, isa: Isa, matrix: Matrix<'_>) {
        self.pack_panels(isa, matrix, COLUMNS);
    }

    /// Does the same as [`Panels::pack`], for products with all columns of the matrix.
    pub(crate) fn pack_for_all_columns(&mut self, isa: Isa, matrix: Matrix<'_>) {
        self.pack_panels(isa, matrix, tile::panel_columns(isa, matrix.columns));
    }

    fn pack_panels(&mut self, isa: Isa, matrix: Matrix<'_>, wide: usize) {
        (self.rows, self.columns, self.wide) = (matrix.rows, matrix.columns, wide);
        if matrix.rows > 0 {
            let packed = space(&mut self.lines, matrix.columns.div_ceil(self.wide) * right_panel(matrix.rows));
            pack_panels(isa, matrix, 0..matrix.rows, 0..matrix.columns, self.wide, packed);
        }
    }

    /// Computes the product of `left` with these rows and columns of the matrix. Each element is computed by the same
    /// chain of multiply-adds as in [`super::product`]. The columns must begin at a multiple of [`COLUMNS`], or at 0
    /// after [`Panels::pack_for_all_columns`].
    ///
    /// # Panics
    /// Panics if the operands or the target are too small.
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
        assert!(columns.start.is_multiple_of(self.wide));
        assert!(rows.end <= self.rows && columns.end <= self.columns);
        assert!((left.count - 1) * left.row + rows.len().saturating_sub(1) * left.step < left.data.len());
        assert!((left.count - 1) * out.row + columns.len() <= out.data.len());
        let panel = right_panel(self.rows);
        for column in columns.clone().step_by(self.wide) {
            let at = out.data[column - columns.start..].as_mut_ptr();
            let tile = Tile {
                rows: left.count,
                columns: (columns.end - column).min(self.wide),
                depth: rows.len(),
                left: left.data.as_ptr(),
                left_rows: left.row,
                left_step: left.step,
                right: words(&self.lines)[column / self.wide * panel + rows.start * COLUMNS..].as_ptr(),
                start: if out.add { at.cast_const() } else { std::ptr::null() },
                start_rows: out.row,
                out: at,
                out_rows: out.row,
            };
            // SAFETY: everything that the tile reads and writes is in the slices, by the assertions; a panel has
            // `self.rows` rows of `COLUMNS` elements.
            unsafe { tile.compute(isa) };
        }
    }
}

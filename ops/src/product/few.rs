//! Products of a few rows with a matrix whose rows are contiguous, such as the next token of each sequence with the
//! weight of a `Conv1D`.
//!
//! Every element of the right operand is read once and used only a few times, so packing would cost as much as the
//! product. Each element of the output is the same chain of fused multiply-adds as in `blocks/mod.rs`. It is loaded and
//! stored once for every [`DEPTH`] terms.

use super::super::kernel::{Isa, vectorised};
use super::blocks::Out;
use super::tile::rows as tile_rows;
use super::{Elements, Matrix, Start};
use std::ops::Range;

/// Number of rows of the right operand that are read side by side.
const DEPTH: usize = 8;
/// Number of columns whose sums are in registers.
const COLUMNS: usize = 64;

/// Returns the operands if this module computes products of this many rows, otherwise `None`.
pub(super) fn operands<'a>(
    isa: Isa,
    left: &Matrix<'a>,
    right: &Matrix<'a>,
    rows: usize,
) -> Option<(&'a [f32], &'a [f32])> {
    match (left.rows_are_f32(), right.data) {
        (Some(left), Elements::F32(right_data)) if rows <= tile_rows(isa) && right.column_stride == 1 => {
            Some((left, right_data))
        }
        _ => None,
    }
}

/// Computes these rows and columns of the output.
///
/// # Safety
/// The part must be in the output `to`, and no other code may access it. If the sums start from the output, it must be
/// initialized.
pub(super) unsafe fn product(
    isa: Isa,
    (out, to): (Out<'_>, *mut f32),
    (left, left_stride): (&[f32], usize),
    (right, right_stride): (&[f32], usize),
    depth: usize,
    (rows, columns): (Range<usize>, Range<usize>),
) {
    // SAFETY: guaranteed by the caller. Elements are written before they are read, unless the sums start from them.
    let row_of = |row: usize| unsafe {
        let start = to.add(row * out.stride + columns.start);
        if !matches!(out.start, Start::Output) {
            start.write_bytes(0, columns.len());
        }
        std::slice::from_raw_parts_mut(start, columns.len())
    };
    for row in rows.clone() {
        let sums = row_of(row);
        if let Start::Row(start) = out.start {
            sums.copy_from_slice(&start[columns.clone()]);
        }
    }
    for first in (0..depth).step_by(DEPTH) {
        let terms = first..depth.min(first + DEPTH);
        for row in rows.clone() {
            let left = &left[row * left_stride..][terms.clone()];
            let right = &right[first * right_stride + columns.start..];
            // SAFETY: as above; all elements were written.
            let sums =
                unsafe { std::slice::from_raw_parts_mut(to.add(row * out.stride + columns.start), columns.len()) };
            add_terms(isa, left, right, right_stride, sums);
        }
    }
}

vectorised! {
    /// Adds Σ left\[k\] · right\[k · stride + i\] to `sums[i]`, in the order of k.
    fn add_terms(left: &[f32], right: &[f32], stride: usize, sums: &mut [f32]) {
        let (blocks, rest) = sums.as_chunks_mut::<COLUMNS>();
        let done = blocks.len() * COLUMNS;
        for (block, sums) in blocks.iter_mut().enumerate() {
            let mut local = *sums;
            for (k, &x) in left.iter().enumerate() {
                let Some(row) = right[k * stride + block * COLUMNS..].first_chunk::<COLUMNS>() else { continue };
                for lane in 0..COLUMNS {
                    local[lane] = x.mul_add(row[lane], local[lane]);
                }
            }
            *sums = local;
        }
        for (i, sum) in rest.iter_mut().enumerate() {
            for (k, &x) in left.iter().enumerate() {
                *sum = x.mul_add(right[k * stride + done + i], *sum);
            }
        }
    }
}

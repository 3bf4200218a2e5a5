//! Products of a few rows with a matrix whose columns are contiguous, such as the next token of a sequence with the
//! weight of a `Linear`.
//!
//! Squares of the right operand are transposed in registers, as for packing, and multiplied immediately, so each
//! element is read once and not copied. Each element of the output is the same chain of fused multiply-adds as in
//! `blocks/mod.rs`.

use super::super::kernel::Isa;
use super::blocks::Out;
use super::pack::LANES;
use super::{Elements, Matrix, Start};
use std::ops::Range;
#[cfg(target_arch = "x86_64")]
use zero_isa::Vectors;

/// Number of rows whose sums are in registers.
const ROWS: usize = 4;

/// The operands of a product that this module computes.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    left: &'a [f32],
    left_stride: usize,
    right: &'a [f32],
    /// Distance from one column to the next.
    right_stride: usize,
    depth: usize,
}

/// Returns the operands if this module computes products of this many rows, otherwise `None`.
pub(super) fn operands<'a>(isa: Isa, left: &Matrix<'a>, right: &Matrix<'a>, rows: usize) -> Option<Operands<'a>> {
    match (left.rows_are_f32(), right.data) {
        (Some(left_data), Elements::F32(right_data))
            if rows <= ROWS && right.row_stride == 1 && right.column_stride != 1 && has_squares(isa) =>
        {
            Some(Operands {
                left: left_data,
                left_stride: left.row_stride,
                right: right_data,
                right_stride: right.column_stride,
                depth: left.columns,
            })
        }
        _ => None,
    }
}

#[cfg(target_arch = "x86_64")]
fn has_squares(isa: Isa) -> bool {
    matches!(isa.vectors(), Vectors::Avx512 | Vectors::Avx2)
}

#[cfg(not(target_arch = "x86_64"))]
fn has_squares(_: Isa) -> bool {
    false
}

/// Computes these rows and columns of the output, at most [`ROWS`] rows.
///
/// # Safety
/// The part must be in the output `to`, and no other code may access it. If the sums start from the output, it must be
/// initialized.
pub(super) unsafe fn product(
    isa: Isa,
    (out, to): (Out<'_>, *mut f32),
    operands: Operands<'_>,
    (rows, columns): (Range<usize>, Range<usize>),
) {
    for first in columns.clone().step_by(LANES) {
        let width = LANES.min(columns.end - first);
        let mut sums = [[0.0; LANES]; ROWS];
        // SAFETY: guaranteed by the caller; elements are read only if the sums start from them.
        let place = |row: usize| unsafe { to.add(row * out.stride + first) };
        for (row, sums) in rows.clone().zip(&mut sums) {
            match out.start {
                Start::Zero => {}
                Start::Row(start) => sums[..width].copy_from_slice(&start[first..first + width]),
                Start::Output => {
                    // SAFETY: as above; the output is initialized.
                    let start = unsafe { std::slice::from_raw_parts(place(row).cast_const(), width) };
                    sums[..width].copy_from_slice(start);
                }
            }
        }
        add_terms(isa, operands, &rows, first..first + width, &mut sums);
        for (row, sums) in rows.clone().zip(&sums) {
            // SAFETY: as above; the sums do not overlap the output.
            unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), place(row), width) };
        }
    }
}

type Sums = [[f32; LANES]; ROWS];

/// Adds the products of these rows and columns to `sums`, in the order of terms.
fn add_terms(isa: Isa, operands: Operands<'_>, rows: &Range<usize>, columns: Range<usize>, sums: &mut Sums) {
    let done = if columns.len() == LANES { add_squares(isa, operands, rows, columns.start, sums) } else { 0 };
    for (row, sums) in rows.clone().zip(sums) {
        let left = &operands.left[row * operands.left_stride..][done..operands.depth];
        for (column, sum) in columns.clone().zip(sums) {
            let column = &operands.right[column * operands.right_stride..][done..operands.depth];
            *sum = left.iter().zip(column).fold(*sum, |sum, (x, w)| x.mul_add(*w, sum));
        }
    }
}

/// Adds the terms in whole squares of [`LANES`] columns to `sums`. Returns the number of terms of each sum that are
/// done.
#[cfg(target_arch = "x86_64")]
fn add_squares(isa: Isa, operands: Operands<'_>, rows: &Range<usize>, first: usize, sums: &mut Sums) -> usize {
    let row = |row: usize| match row < rows.len() {
        true => &operands.left[(rows.start + row) * operands.left_stride..][..operands.depth],
        false => &[],
    };
    let column = |column| &operands.right[(first + column) * operands.right_stride..][..operands.depth];
    let (left, columns): ([&[f32]; ROWS], [&[f32]; LANES]) = (std::array::from_fn(row), std::array::from_fn(column));
    // SAFETY: an `Isa` of this level exists only after its features were detected.
    unsafe {
        match (isa.vectors(), rows.len()) {
            (Vectors::Avx512, 1) => x86::squares::<1>(left, columns, sums),
            (Vectors::Avx512, 2) => x86::squares::<2>(left, columns, sums),
            (Vectors::Avx512, _) => x86::squares::<ROWS>(left, columns, sums),
            (Vectors::Avx2, 1) => x86::small_squares::<1>(left, columns, sums),
            (Vectors::Avx2, 2) => x86::small_squares::<2>(left, columns, sums),
            (Vectors::Avx2, _) => x86::small_squares::<ROWS>(left, columns, sums),
            _ => 0,
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn add_squares(_: Isa, _: Operands<'_>, _: &Range<usize>, _: usize, _: &mut Sums) -> usize {
    0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::pack::x86::{turned, turned_eight};
    use super::{LANES, ROWS, Sums};
    use std::arch::x86_64::*;

    /// Adds the products of all whole squares of sixteen columns to the first `R` rows of sums. Returns the number of
    /// terms of each sum that are done. Rows of `left` that do not exist are empty; their sums are not used.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn squares<const R: usize>(left: [&[f32]; ROWS], columns: [&[f32]; LANES], sums: &mut Sums) -> usize {
        let stride = columns[1].as_ptr() as usize / 4 - columns[0].as_ptr() as usize / 4;
        let whole = columns[0].len() / LANES * LANES;
        let mut local = [_mm512_setzero_ps(); R];
        for (local, sums) in local.iter_mut().zip(&*sums) {
            // SAFETY: a row of sums has sixteen elements.
            *local = unsafe { _mm512_loadu_ps(sums.as_ptr()) };
        }
        for k in (0..whole).step_by(LANES) {
            let mut square = [_mm512_setzero_ps(); LANES];
            for (register, column) in square.iter_mut().zip(columns) {
                let part: &[f32; LANES] = column[k..].first_chunk().unwrap_or(&[0.0; LANES]);
                // SAFETY: `part` has sixteen elements; a prefetch reads nothing.
                unsafe {
                    // The same part of the next columns, into the second-level cache.
                    _mm_prefetch::<_MM_HINT_T1>(part.as_ptr().wrapping_add(LANES * stride).cast());
                    *register = _mm512_loadu_ps(part.as_ptr());
                }
            }
            let square = turned(square);
            for (sum, left) in local.iter_mut().zip(left) {
                let Some(x) = left.get(k..).and_then(|left| left.first_chunk::<LANES>()) else { continue };
                for i in 0..LANES {
                    *sum = _mm512_fmadd_ps(_mm512_set1_ps(x[i]), square[i], *sum);
                }
            }
        }
        for (local, sums) in local.into_iter().zip(sums) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), local) };
        }
        whole
    }

    /// Does the same as [`squares`], with registers of eight words.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn small_squares<const R: usize>(
        left: [&[f32]; ROWS],
        columns: [&[f32]; LANES],
        sums: &mut Sums,
    ) -> usize {
        const HALF: usize = LANES / 2;
        let stride = columns[1].as_ptr() as usize / 4 - columns[0].as_ptr() as usize / 4;
        let whole = columns[0].len() / HALF * HALF;
        for first in [0, HALF] {
            let mut local = [_mm256_setzero_ps(); R];
            for (local, sums) in local.iter_mut().zip(&*sums) {
                // SAFETY: half a row of sums has eight elements.
                *local = unsafe { _mm256_loadu_ps(sums[first..].as_ptr()) };
            }
            for k in (0..whole).step_by(HALF) {
                let mut square = [_mm256_setzero_ps(); HALF];
                for (register, column) in square.iter_mut().zip(&columns[first..]) {
                    let part: &[f32; HALF] = column[k..].first_chunk().unwrap_or(&[0.0; HALF]);
                    // SAFETY: `part` has eight elements; a prefetch reads nothing.
                    unsafe {
                        // The same part of the next columns, into the second-level cache.
                        _mm_prefetch::<_MM_HINT_T1>(part.as_ptr().wrapping_add(LANES * stride).cast());
                        *register = _mm256_loadu_ps(part.as_ptr());
                    }
                }
                let square = turned_eight(square);
                for (sum, left) in local.iter_mut().zip(left) {
                    let Some(x) = left.get(k..).and_then(|left| left.first_chunk::<HALF>()) else { continue };
                    for i in 0..HALF {
                        *sum = _mm256_fmadd_ps(_mm256_set1_ps(x[i]), square[i], *sum);
                    }
                }
            }
            for (local, sums) in local.into_iter().zip(&mut *sums) {
                // SAFETY: as above.
                unsafe { _mm256_storeu_ps(sums[first..].as_mut_ptr(), local) };
            }
        }
        whole
    }
}

//! Matrix products, through the `gemm` crate.
//!
//! gemm adds up the terms of an element in one order, whatever the number of threads, the layout of the operands and,
//! with the exceptions that [`rows_product`] keeps out of its way, the number of rows.

use gemm::Parallelism;

/// A view of a slice as a matrix.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns)
    }

    /// A matrix whose rows start `row_stride` apart.
    pub(crate) fn strided(data: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        // Checked here, relied on by `product`.
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
}

/// `out = left · right`, `out` row-major and overwritten.
pub(crate) fn product(out: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    multiply(out, false, left, right, threads);
}

/// `out += left · right`. The terms are added to `out` a block at a time, so the bits may differ from a product and
/// an addition after it.
pub(crate) fn add_product(out: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    multiply(out, true, left, right, threads);
}

/// `left · right`, row-major, without a pass to zero the memory first.
fn new_product(left: Matrix<'_>, right: Matrix<'_>, threads: usize) -> Vec<f32> {
    let len = left.rows * right.columns;
    let mut out = Vec::with_capacity(len);
    // SAFETY: there is room for `len` elements, and a product that does not add writes each of them without reading.
    unsafe {
        multiply_raw(out.as_mut_ptr(), false, left, right, threads);
        out.set_len(len);
    }
    out
}

fn multiply(out: &mut [f32], add: bool, left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    assert_eq!(out.len(), left.rows * right.columns, "the output of a {}x{} product", left.rows, right.columns);
    // SAFETY: a `&mut` of the right length, which cannot overlap the operands.
    unsafe { multiply_raw(out.as_mut_ptr(), add, left, right, threads) };
}

/// # Safety
/// `out` has room for the rows of `left` times the columns of `right`, initialised if `add`, and overlaps neither.
unsafe fn multiply_raw(out: *mut f32, add: bool, left: Matrix<'_>, right: Matrix<'_>, threads: usize) {
    let (rows, columns, inner) = (left.rows, right.columns, left.columns);
    assert_eq!(inner, right.rows, "the inner dimensions of a product");
    let parallelism = if threads <= 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
    // SAFETY: `Matrix` has checked that each operand's last element lies in its slice, whose strides fit an isize; the
    // rest is the caller's promise.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            out,
            1,
            columns as isize,
            add,
            left.data.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.data.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// The product of the rows of `x` with `weight`, each row with the same bits whatever rows it comes with.
///
/// gemm takes other paths, with another order of the terms, for matrix times vector, for up to 256 output elements,
/// and, where both sides are at most 64, for more than 512 terms. Products that small get rows of zeros until they
/// are past that.
pub(crate) fn rows_product(x: &[f32], rows: usize, weight: Matrix<'_>, threads: usize) -> Vec<f32> {
    let (inner, outputs) = (weight.rows, weight.columns);
    let enough = rows_enough(inner, outputs);
    if rows == 0 || rows >= enough {
        return new_product(Matrix::new(x, rows, inner), weight, threads);
    }
    let mut padded = vec![0.0; enough * inner];
    padded[..x.len()].copy_from_slice(x);
    let mut y = new_product(Matrix::new(&padded, enough, inner), weight, threads);
    y.truncate(rows * outputs);
    y
}

fn rows_enough(inner: usize, outputs: usize) -> usize {
    let past_vectors = 2;
    let past_tiny = 256 / outputs.max(1) + 1;
    let past_small = if outputs <= 64 && inner > 512 { 65 } else { 0 };
    past_vectors.max(past_tiny).max(past_small)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    #[test]
    fn a_row_does_not_depend_on_the_rows_beside_it() {
        for inner in [1, 2, 3, 16, 100, 513, 1030] {
            for outputs in [1, 2, 3, 10, 64, 65, 130] {
                let all = 150;
                let mut x = vec![0.0; all * inner];
                let mut w = vec![0.0; inner * outputs];
                Stream::new(1, "x", 0).fill_normal(0, &mut x);
                Stream::new(1, "w", 0).fill_normal(0, &mut w);
                for weight in [Matrix::new(&w, inner, outputs), Matrix::new(&w, outputs, inner).t()] {
                    let whole = rows_product(&x, all, weight, 1);
                    for rows in [1, 2, 3, 5, 17, 64, 65, 100] {
                        for first in [0, all - rows] {
                            let part = rows_product(&x[first * inner..(first + rows) * inner], rows, weight, 1);
                            let same =
                                part.iter().zip(&whole[first * outputs..]).all(|(a, b)| a.to_bits() == b.to_bits());
                            assert!(same, "{rows} rows from {first} of {all}, {inner} -> {outputs}");
                        }
                    }
                }
            }
        }
    }
}

//! The operands of a product: views of elements of several dtypes as matrices.

use crate::kernel::{HalfFloat, Isa};
use crate::quantized::QuantizedWeight;
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::Range;

/// The elements of an operand.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a> {
    F32(&'a [f32]),
    /// Widened when packed, which is exact: the sums are those of the f32 values.
    Bf16(&'a [bf16]),
    /// Widened when packed, like `Bf16`.
    F16(&'a [f16]),
    /// Dequantized when packed.
    Quantized(QuantizedWeight<'a>),
}

impl<'a> Elements<'a> {
    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
            Self::F16(data) => data.len(),
            Self::Quantized(weight) => weight.elements(),
        }
    }

    /// Returns the elements starting at `start`.
    pub(crate) fn skip(self, start: usize) -> Self {
        match self {
            Self::F32(data) => Self::F32(&data[start..]),
            Self::Bf16(data) => Self::Bf16(&data[start..]),
            Self::F16(data) => Self::F16(&data[start..]),
            Self::Quantized(weight) => Self::Quantized(weight.skip(start)),
        }
    }

    /// Returns the elements of a range as f32. Elements of other dtypes are widened into `room`, whose memory is reused
    /// for the next range. Pass a few rows at a time, so that `room` stays in the first-level cache.
    pub(crate) fn floats<'r>(self, range: Range<usize>, room: &'r mut Vec<f32>) -> &'r [f32]
    where
        'a: 'r,
    {
        match self {
            Self::F32(data) => &data[range],
            Self::Bf16(_) | Self::F16(_) | Self::Quantized(_) => {
                room.resize(range.len(), 0.0);
                self.read(Isa::current(), range.start, room);
                room
            }
        }
    }

    /// Copies the elements that begin at `start` to `out`, as f32.
    pub(crate) fn read(self, isa: Isa, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(&data[start..start + out.len()]),
            Self::Bf16(data) => bf16::widen(&data[start..start + out.len()], out),
            Self::F16(data) => f16::widen(&data[start..start + out.len()], out),
            Self::Quantized(weight) => weight.read(isa, start, out),
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

impl<'a> From<&'a [f16]> for Elements<'a> {
    fn from(data: &'a [f16]) -> Self {
        Self::F16(data)
    }
}

/// A view of a slice as a matrix. One of the two strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(super) data: Elements<'a>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a row-major matrix.
    pub(crate) fn new(data: impl Into<Elements<'a>>, rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns)
    }

    /// Creates a matrix whose rows start `row_stride` apart.
    pub(crate) fn strided(data: impl Into<Elements<'a>>, rows: usize, columns: usize, row_stride: usize) -> Self {
        let data = data.into();
        // `multiply` relies on this check.
        let needed = if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(needed <= data.len(), "a {rows}x{columns} matrix needs {needed} elements, got {}", data.len());
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// Returns the transpose, without a copy.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    pub(super) fn is_transposed(&self) -> bool {
        self.column_stride != 1
    }

    /// Returns the elements if the innermost loop can read them in place, as the left operand.
    pub(super) fn rows_are_f32(&self) -> Option<&'a [f32]> {
        match self.data {
            Elements::F32(data) if self.column_stride == 1 => Some(data),
            _ => None,
        }
    }
}

/// The initial values of the sums.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a> {
    Zero,
    /// The content of the output.
    Output,
    /// The same row for every row of the output: a bias.
    Row(&'a [f32]),
}

//! Gradients in the dtype in which they are kept until the update: f32, or bf16 on the host.

use std::ops::Range;

use half::bf16;
use zero_model::sink::FlatBuffer;

use crate::error::ZeroError;
use crate::threads::add_rounded;

/// A gradient.
#[derive(Debug)]
pub(crate) enum GradBuffer {
    F32(FlatBuffer),
    /// On the host.
    Bf16(Vec<bf16>),
}

/// Gradients on the host, which an update reads.
#[derive(Debug, Clone, Copy)]
pub enum Grads<'a> {
    /// In f32.
    F32(&'a [f32]),
    /// In bf16.
    Bf16(&'a [bf16]),
}

impl<'a> Grads<'a> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Borrows a range.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[range]),
            Self::Bf16(values) => Self::Bf16(&values[range]),
        }
    }

    /// Cuts the gradients into parts of `size`; the last may be shorter.
    pub(crate) fn parts(self, size: usize) -> Vec<Self> {
        (0..self.len()).step_by(size).map(|start| self.part(start..(start + size).min(self.len()))).collect()
    }

    /// Returns the gradients if they are f32.
    pub(crate) fn f32(self) -> Result<&'a [f32], ZeroError> {
        match self {
            Self::F32(values) => Ok(values),
            Self::Bf16(_) => Err(ZeroError::internal("this update needs gradients in f32")),
        }
    }
}

impl GradBuffer {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Bytes of each element.
    pub(crate) fn width(&self) -> usize {
        match self {
            Self::F32(_) => size_of::<f32>(),
            Self::Bf16(_) => size_of::<bf16>(),
        }
    }

    /// Returns the values if they are on the host.
    pub(crate) fn host(&self) -> Option<Grads<'_>> {
        match self {
            Self::F32(values) => values.host().map(Grads::F32),
            Self::Bf16(values) => Some(Grads::Bf16(values)),
        }
    }

    /// Returns the values if they are f32, on the host or on a GPU.
    pub(crate) fn f32(&self) -> Result<&FlatBuffer, ZeroError> {
        match self {
            Self::F32(values) => Ok(values),
            Self::Bf16(_) => Err(not_in_f32()),
        }
    }

    pub(crate) fn into_f32(self) -> Result<FlatBuffer, ZeroError> {
        match self {
            Self::F32(values) => Ok(values),
            Self::Bf16(_) => Err(not_in_f32()),
        }
    }

    /// Adds a gradient of the same type and length. Sums of bf16 are computed in f32 and rounded.
    pub(crate) fn add(&mut self, other: &Self) -> Result<(), ZeroError> {
        match (self, other) {
            (Self::F32(sum), Self::F32(other)) => Ok(sum.add(other)?),
            (Self::Bf16(sum), Self::Bf16(other)) => Ok(add_rounded(sum, other)?),
            _ => Err(ZeroError::internal("two gradients of one segment have different types")),
        }
    }

    /// Overwrites the values starting at `at` with a gradient of the same type.
    pub(crate) fn copy(&mut self, at: usize, from: &Self, range: Range<usize>) -> Result<(), ZeroError> {
        match (self, from) {
            (Self::F32(to), Self::F32(from)) => Ok(to.copy(at, from, range)?),
            (Self::Bf16(to), Self::Bf16(from)) => {
                to[at..at + range.len()].copy_from_slice(&from[range]);
                Ok(())
            }
            _ => Err(ZeroError::internal("two gradients of one segment have different types")),
        }
    }
}

fn not_in_f32() -> ZeroError {
    ZeroError::internal("gradients in bf16 are neither on a disk nor on a GPU")
}

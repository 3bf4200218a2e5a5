//! A flat vector of f32, wherever it is.

use std::ops::Range;

use candle_core::Result;

#[cfg(feature = "cuda")]
use crate::device::Array;

/// A flat vector of f32.
#[derive(Debug)]
pub enum FlatBuffer {
    /// On the host.
    Host(Vec<f32>),
    /// In the memory of a GPU.
    #[cfg(feature = "cuda")]
    Device(Array),
}

impl From<Vec<f32>> for FlatBuffer {
    fn from(values: Vec<f32>) -> Self {
        Self::Host(values)
    }
}

impl Default for FlatBuffer {
    fn default() -> Self {
        Self::Host(vec![])
    }
}

impl FlatBuffer {
    /// How many values there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            #[cfg(feature = "cuda")]
            Self::Device(array) => array.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values of one on the host.
    #[must_use]
    pub fn host(&self) -> Option<&[f32]> {
        match self {
            Self::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }

    /// The values of one on the host, to be written.
    #[must_use]
    pub fn host_mut(&mut self) -> Option<&mut [f32]> {
        match self {
            Self::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }

    /// The values on the host: themselves, or a copy when all is done that came before.
    ///
    /// # Errors
    /// What the driver of a GPU says.
    pub fn into_host(self) -> Result<Vec<f32>> {
        match self {
            Self::Host(values) => Ok(values),
            #[cfg(feature = "cuda")]
            Self::Device(array) => {
                let mut values = vec![0.0; array.len()];
                array.to_host(0..array.len(), &mut values)?;
                Ok(values)
            }
        }
    }

    /// Copies a range to the host; of a GPU when all is done that came before.
    ///
    /// # Errors
    /// What the driver of a GPU says.
    ///
    /// # Panics
    /// If the range is not in it, or of another length than `to`.
    pub fn read(&self, range: Range<usize>, to: &mut [f32]) -> Result<()> {
        match self {
            Self::Host(values) => to.copy_from_slice(&values[range]),
            #[cfg(feature = "cuda")]
            Self::Device(array) => array.to_host(range, to)?,
        }
        Ok(())
    }

    /// Overwrites what begins at `at`.
    ///
    /// # Errors
    /// What the driver of a GPU says.
    ///
    /// # Panics
    /// If there are not as many values.
    pub fn write(&mut self, at: usize, from: &[f32]) -> Result<()> {
        match self {
            Self::Host(values) => values[at..at + from.len()].copy_from_slice(from),
            #[cfg(feature = "cuda")]
            Self::Device(array) => array.upload(at, from)?,
        }
        Ok(())
    }

    /// Overwrites what begins at `at` with a range of another.
    ///
    /// # Errors
    /// What the driver of a GPU says.
    ///
    /// # Panics
    /// If one of them has not as many values.
    pub fn copy(&mut self, at: usize, from: &FlatBuffer, range: Range<usize>) -> Result<()> {
        match (self, from) {
            (to, Self::Host(from)) => to.write(at, &from[range]),
            #[cfg(feature = "cuda")]
            (Self::Host(to), Self::Device(from)) => {
                let end = at + range.len();
                from.to_host(range, &mut to[at..end])
            }
            #[cfg(feature = "cuda")]
            (Self::Device(to), Self::Device(from)) => to.copy(at, from, range),
        }
    }

    /// Adds another of the same length, element by element. Both are in the same memory.
    ///
    /// # Errors
    /// They are not, or what the driver of a GPU says.
    pub fn add(&mut self, other: &FlatBuffer) -> Result<()> {
        match (self, other) {
            (Self::Host(to), Self::Host(from)) => {
                for (to, from) in to.iter_mut().zip(from) {
                    *to += from;
                }
                Ok(())
            }
            #[cfg(feature = "cuda")]
            (Self::Device(to), Self::Device(from)) => to.add(from),
            #[cfg(feature = "cuda")]
            _ => candle_core::bail!("a sum of values on the host and on a GPU"),
        }
    }
}

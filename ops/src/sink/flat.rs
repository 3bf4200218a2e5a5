//! Flat f32 buffers on the host or on a GPU.

use std::ops::Range;

use candle_core::Result;

#[cfg(feature = "cuda")]
use crate::device::Array;

/// A flat f32 buffer.
#[derive(Debug)]
pub enum FlatBuffer {
    /// In host memory.
    Host(Vec<f32>),
    /// In GPU memory.
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
    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            #[cfg(feature = "cuda")]
            Self::Device(array) => array.len(),
        }
    }

    /// Returns whether the buffer is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the values if they are on the host.
    #[must_use]
    pub fn host(&self) -> Option<&[f32]> {
        match self {
            Self::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }

    /// Returns the values for writing if they are on the host.
    #[must_use]
    pub fn host_mut(&mut self) -> Option<&mut [f32]> {
        match self {
            Self::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }

    /// Returns the values if they are on the host, and frees them otherwise.
    #[must_use]
    pub fn if_on_host(self) -> Option<Vec<f32>> {
        match self {
            Self::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }

    /// Returns the values on the host. Values on a GPU are copied after all earlier work on the stream.
    ///
    /// # Errors
    /// Returns the GPU driver's error.
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

    /// Rounds values on a GPU to the dtype in which they were sent between ranks, so that every reader accepts them.
    /// Does nothing on the host.
    ///
    /// # Errors
    /// Returns the GPU driver's error.
    pub fn round_communicated(&mut self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Device(array) => array.round_communicated(),
        }
    }

    /// Copies a range to the host. On a GPU, waits for all earlier work on the stream.
    ///
    /// # Errors
    /// Returns the GPU driver's error.
    ///
    /// # Panics
    /// Panics if the range is out of bounds, or its length differs from that of `to`.
    pub fn read(&self, range: Range<usize>, to: &mut [f32]) -> Result<()> {
        match self {
            Self::Host(values) => to.copy_from_slice(&values[range]),
            #[cfg(feature = "cuda")]
            Self::Device(array) => array.to_host(range, to)?,
        }
        Ok(())
    }

    /// Overwrites the values starting at `at`.
    ///
    /// # Errors
    /// Returns the GPU driver's error.
    ///
    /// # Panics
    /// Panics if the values do not fit.
    pub fn write(&mut self, at: usize, from: &[f32]) -> Result<()> {
        match self {
            Self::Host(values) => values[at..at + from.len()].copy_from_slice(from),
            #[cfg(feature = "cuda")]
            Self::Device(array) => array.upload(at, from)?,
        }
        Ok(())
    }

    /// Overwrites the values starting at `at` with a range of another buffer.
    ///
    /// # Errors
    /// Returns the GPU driver's error.
    ///
    /// # Panics
    /// Panics if a range is out of bounds.
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

    /// Adds another buffer of the same length, element by element. Both must be in the same memory.
    ///
    /// # Errors
    /// Fails if the buffers are in different memories. Returns errors of the GPU driver.
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
            _ => candle_core::bail!("cannot add values on the host to values on a GPU"),
        }
    }
}

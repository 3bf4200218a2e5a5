//! Samples out of files: each reader appends records, and one place makes batches of them.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use zero_engine::{Batch, DataError};

use super::dataset::{BoxError, Dataset};

/// What a reader of files gives. Reading a record neither changes anything nor waits for other readers.
pub(crate) trait Records: Send + Sync {
    /// Number of samples, at least 1.
    fn samples(&self) -> usize;

    /// What each sample has.
    fn shape(&self) -> SampleShape;

    /// Appends sample `index`.
    ///
    /// # Errors
    /// If there is no such sample, or it cannot be read. `samples` is then as it was.
    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError>;
}

/// What the samples of files have; all have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleShape {
    /// So many tokens, and as many targets.
    Tokens(usize),
    /// So many features, and one target.
    Features(usize),
}

/// Samples one after the other, row by row: the storage of a batch's tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Samples {
    /// T tokens a sample, or none.
    pub(crate) tokens: Vec<u32>,
    /// So many features a sample as a row has, or none.
    pub(crate) features: Vec<f32>,
    /// T next tokens a sample, or one label.
    pub(crate) targets: Vec<u32>,
}

/// The samples of files, as [`open`](super::open) and its likes read them.
#[derive(Clone)]
pub struct FileDataset(Arc<dyn Records>);

impl FileDataset {
    pub(super) fn new(records: impl Records + 'static) -> Self {
        Self(Arc::new(records))
    }

    /// What each sample has.
    #[must_use]
    pub fn shape(&self) -> SampleShape {
        self.0.shape()
    }

    #[cfg(test)]
    pub(super) fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
        self.0.append(index, samples)
    }
}

impl std::fmt::Debug for FileDataset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} samples of {:?}", self.0.samples(), self.0.shape())
    }
}

impl Dataset for FileDataset {
    fn len(&self) -> usize {
        self.0.samples()
    }

    /// Tokens `[rows, T]` and the token behind each as targets; or features `[rows, N]` and a class for each row.
    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        let (mut samples, rows) = (Samples::default(), indices.len());
        for &index in indices {
            self.0.append(index, &mut samples)?;
        }
        let cpu = &Device::Cpu;
        Ok(match self.0.shape() {
            SampleShape::Tokens(length) => Batch::new(
                Tensor::from_vec(samples.tokens, (rows, length), cpu)?,
                Tensor::from_vec(samples.targets, (rows, length), cpu)?,
            ),
            SampleShape::Features(features) => Batch::new(
                Tensor::from_vec(samples.features, (rows, features), cpu)?,
                Tensor::from_vec(samples.targets, rows, cpu)?,
            ),
        })
    }

    fn tokens_per_sample(&self) -> usize {
        match self.0.shape() {
            SampleShape::Tokens(length) => length,
            SampleShape::Features(_) => 1,
        }
    }
}

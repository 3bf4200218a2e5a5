//! Reads samples from files. Each reader appends records, and [`FileDataset`] collects them into batches.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use zero_engine::{At, Batch, DataError};
use zero_model::zoo::POSITION_IDS;

use super::dataset::{BoxError, Dataset};
use super::fingerprint::DocumentFacts;
use super::watch::Watch;

/// A reader of files. Reading a sample changes no state and does not wait for other threads.
pub(crate) trait Records: Send + Sync {
    /// Returns the number of samples, at least 1.
    fn samples(&self) -> usize;

    /// Returns the shape that all samples have.
    fn shape(&self) -> SampleShape;

    /// Returns the columns of a table that names them.
    fn columns(&self) -> Option<&Columns> {
        None
    }

    /// Appends sample `index`.
    ///
    /// # Errors
    /// Fails if `index` is out of range or the sample cannot be read. On an error, `samples` is unchanged.
    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError>;

    /// Returns the number of positions at the end of sample `index` that are padding.
    ///
    /// # Errors
    /// Fails if the sample's length cannot be read.
    fn padding(&self, _index: usize) -> Result<usize, DataError> {
        Ok(0)
    }

    /// Calls `visit` with each document, in the order of the files.
    ///
    /// # Errors
    /// Fails if the documents cannot be read.
    fn each_document(&self, _visit: &mut dyn FnMut(DocumentFacts)) -> Result<(), DataError> {
        Ok(())
    }

    /// Reads and checks everything that was not read when the files were opened.
    ///
    /// # Errors
    /// Fails at the first damaged position or token outside the vocabulary, or if `watch` stops the check.
    fn verify(&self, _watch: &dyn Watch) -> Result<(), DataError> {
        Ok(())
    }

    /// Returns where the tokens of each file are stored. The list is empty if the files were not tokenized.
    fn tokenized(&self) -> Vec<TokenizedWhere> {
        vec![]
    }

    /// Describes conversations in one line, which a run prints at its start. Returns `None` for other data.
    fn description(&self) -> Option<String> {
        None
    }
}

/// The names of the columns of a table, in the order of the columns.
pub(crate) struct Columns {
    /// The first file of the table that has names, and the position of the names in it.
    pub(super) path: PathBuf,
    pub(super) at: Option<At>,
    pub(super) names: Vec<String>,
}

impl Columns {
    /// Fails if `first` has other columns, or the same columns in another order.
    pub(super) fn same_as(&self, first: &Self) -> Result<(), DataError> {
        if self.names == first.names {
            return Ok(());
        }
        let [names, expected] = [self, first].map(|columns| columns.names.join(", "));
        let message = format!("the columns are {names}, but {expected} in {}", first.path.display());
        Err(DataError::Damaged { path: self.path.clone(), at: self.at, message })
    }
}

/// Where the tokens of a file are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenizedWhere {
    pub(crate) documents: u64,
    pub(crate) tokens: u64,
    /// Whether the tokens are in the cache. Otherwise they are in memory.
    pub(crate) is_cached: bool,
    /// Whether this process has just tokenized the file.
    pub(crate) is_new: bool,
}

/// The shape of the samples in files, which is the same for all samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleShape {
    /// Number of tokens per sample. A sample has the same number of targets.
    Tokens(usize),
    /// Number of features per sample. A sample has one target.
    Features(usize),
}

/// The concatenated samples of a batch. They become the storage of the batch's tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Samples {
    /// T tokens per sample; empty for tables.
    pub(crate) tokens: Vec<u32>,
    /// The features of each sample; empty for tokens.
    pub(crate) features: Vec<f32>,
    /// The T next tokens of each sample, or one label per sample.
    pub(crate) targets: Vec<u32>,
    /// The T next tokens of each sample, with −100 for tokens that are not trained. Replaces `targets`.
    pub(crate) labels: Vec<i64>,
    /// The position of each token in its document, if a sample may contain several documents.
    pub(crate) position_ids: Vec<u32>,
}

/// The samples in files, returned by [`open`](super::open), [`text`](super::text) and the other functions.
#[derive(Clone)]
pub struct FileDataset(Arc<dyn Records>);

impl FileDataset {
    pub(super) fn new(records: impl Records + 'static) -> Self {
        Self(Arc::new(records))
    }

    /// Returns the shape that all samples have.
    #[must_use]
    pub fn shape(&self) -> SampleShape {
        self.0.shape()
    }

    /// Describes conversations in one line: their number, and how many of them are truncated, padded or dropped.
    /// Returns `None` for other data.
    #[must_use]
    pub fn description(&self) -> Option<String> {
        self.0.description()
    }

    /// Returns the number of positions at the end of sample `index` that are padding.
    ///
    /// # Errors
    /// Fails if the sample's length cannot be read.
    pub fn padding(&self, index: usize) -> Result<usize, DataError> {
        self.0.padding(index)
    }

    /// Fails if both data sets are tables with named columns, and the names or their order differ.
    pub(crate) fn same_columns(&self, first: &Self) -> Result<(), DataError> {
        match (self.0.columns(), first.0.columns()) {
            (Some(columns), Some(first)) => columns.same_as(first),
            _ => Ok(()),
        }
    }

    pub(crate) fn records(&self) -> &dyn Records {
        &*self.0
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

    /// Returns tokens `[rows, T]` with the next tokens as targets, or features `[rows, N]` with one class per row. The
    /// targets have the dtype u32. The targets of conversations have the dtype i64, and are −100 for tokens that are
    /// not trained. Packed samples also have the input [`POSITION_IDS`].
    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        let (mut samples, rows) = (Samples::default(), indices.len());
        for &index in indices {
            self.0.append(index, &mut samples)?;
        }
        let cpu = &Device::Cpu;
        Ok(match self.0.shape() {
            SampleShape::Tokens(length) => {
                let batch = Batch::new(
                    Tensor::from_vec(samples.tokens, (rows, length), cpu)?,
                    match samples.labels.is_empty() {
                        true => Tensor::from_vec(samples.targets, (rows, length), cpu)?,
                        false => Tensor::from_vec(samples.labels, (rows, length), cpu)?,
                    },
                );
                match samples.position_ids.is_empty() {
                    true => batch,
                    false => batch.input(POSITION_IDS, Tensor::from_vec(samples.position_ids, (rows, length), cpu)?),
                }
            }
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

    fn length(&self, index: usize) -> Result<usize, BoxError> {
        Ok(self.tokens_per_sample() - self.0.padding(index)?)
    }
}

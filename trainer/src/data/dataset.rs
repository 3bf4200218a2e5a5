//! The trait of a data set. Its samples can be read in any order, one batch at a time.

use std::sync::Arc;

use zero_engine::Batch;

/// Any error. The `?` operator converts errors from candle, the standard library and `anyhow` to this type.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Samples with random access.
///
/// From the seed and the position in the run, [`sample_index`](super::sample_index) computes which sample a rank trains
/// on. A data set therefore does not depend on ranks, epochs or shuffling, and a resumed run continues with the next
/// sample. Every rank opens the whole data set and reads its own samples.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use zero_train::data::BoxError;
/// use zero_train::{Batch, Dataset};
///
/// /// Sample i is the number i, and twice that.
/// struct Doubles;
///
/// impl Dataset for Doubles {
///     fn len(&self) -> usize {
///         1000
///     }
///
///     fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
///         let x: Vec<f32> = indices.iter().map(|&i| i as f32).collect();
///         let x = Tensor::from_vec(x, (indices.len(), 1), &Device::Cpu)?;
///         Ok(Batch::new(x.clone(), (x * 2.0)?))
///     }
/// }
/// ```
pub trait Dataset: Send + Sync {
    /// Returns the number of samples.
    fn len(&self) -> usize;

    /// Loads the samples `indices` in this order. The first dimension of every tensor has `indices.len()` rows.
    ///
    /// # Errors
    /// Fails if a sample cannot be read; the run ends with this error.
    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError>;

    /// Returns the number of tokens per sample, or 1 if samples are not sequences. A run computes its throughput from
    /// this number.
    fn tokens_per_sample(&self) -> usize {
        1
    }

    /// Returns the number of tokens of sample `index` without the padding at its end.
    ///
    /// # Errors
    /// Fails if the sample's length cannot be read; the run ends with this error.
    fn length(&self, _index: usize) -> Result<usize, BoxError> {
        Ok(self.tokens_per_sample())
    }

    /// Returns whether the data set has no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        (**self).batch(indices)
    }

    fn tokens_per_sample(&self) -> usize {
        (**self).tokens_per_sample()
    }

    fn length(&self, index: usize) -> Result<usize, BoxError> {
        (**self).length(index)
    }
}

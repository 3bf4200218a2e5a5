//! A data set: a number of samples that can be read in any order, a batch at a time.

use std::sync::Arc;

use zero_engine::Batch;

/// Any error: `?` makes one of candle's, of the system's and of `anyhow`'s.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Samples with random access.
///
/// Which sample a rank trains on at a step is a pure function of seed, epoch and position
/// ([`sample_index`](super::sample_index)). A data set therefore knows no ranks, no epochs and no shuffling, and a resumed run goes on with the
/// next sample. Every rank opens the whole data set and reads its own samples.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use zero_train::Batch;
/// use zero_train::data::{BoxError, Dataset};
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
    /// Number of samples.
    fn len(&self) -> usize;

    /// Samples `indices`, in this order: the first dimension of every tensor has `indices.len()` rows.
    ///
    /// # Errors
    /// A sample that cannot be read. The run ends with this error.
    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError>;

    /// Tokens of a sample, for the throughput that a run reports; 1 where samples are no sequences.
    fn tokens_per_sample(&self) -> usize {
        1
    }

    /// Whether the data set has no samples.
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
}

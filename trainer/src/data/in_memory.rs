//! Data sets that a program creates: tensors in memory, or a function that computes a sample.

use std::marker::PhantomData;

use candle_core::{Device, Tensor};
use zero_engine::{Activations, Batch, DataError, Error};

use super::dataset::{BoxError, Dataset};

/// Tensors in memory. Their first dimension is the number of samples.
#[derive(Debug, Clone)]
pub struct InMemory {
    all: Batch,
    samples: usize,
}

impl InMemory {
    /// Creates a data set from one or several input tensors and their targets.
    ///
    /// # Errors
    /// Fails if the tensors differ in their number of samples.
    pub fn new(inputs: impl Into<Activations>, targets: Tensor) -> Result<Self, Error> {
        Self::of(Batch::new(inputs, targets))
    }

    /// Creates a data set from one batch that holds all samples, for example with named tensors ([`Batch::named`]).
    ///
    /// # Errors
    /// Fails if the tensors differ in their number of samples.
    pub fn of(all: Batch) -> Result<Self, Error> {
        Ok(Self { samples: all.rows()?, all: all.map(Tensor::contiguous)? })
    }
}

impl Dataset for InMemory {
    fn len(&self) -> usize {
        self.samples
    }

    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        if let Some(&index) = indices.iter().find(|&&index| index >= self.samples) {
            return Err(DataError::Index { index, samples: self.samples }.into());
        }
        let rows: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let rows = Tensor::from_vec(rows, indices.len(), &Device::Cpu)?;
        Ok(self.all.map(|tensor| tensor.index_select(&rows.to_device(tensor.device())?, 0))?)
    }
}

/// A data set whose samples are computed by a function; see [`from_fn`].
pub struct FromFn<F, S> {
    samples: usize,
    sample: F,
    kind: PhantomData<fn() -> S>,
}

/// Creates a data set of `samples` samples. `sample` computes one sample without a batch dimension: either its inputs
/// and target, or a [`Batch`] of named tensors. The data set stacks the samples of a batch. The result of `sample` must
/// depend only on the index: all ranks and a resumed run must get the same values for an index.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use zero_train::data::{Dataset, from_fn};
///
/// let squares = from_fn(100, |i| {
///     let x = i as f32 / 100.0;
///     Ok((Tensor::new(&[x], &Device::Cpu)?, Tensor::new(&[x * x], &Device::Cpu)?))
/// });
/// assert_eq!(squares.batch(&[3, 5])?.only_target()?.dims(), [2, 1]);
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn from_fn<F, S>(samples: usize, sample: F) -> FromFn<F, S>
where
    F: Fn(usize) -> Result<S, BoxError> + Send + Sync,
    S: Into<Batch>,
{
    FromFn { samples, sample, kind: PhantomData }
}

impl<F, S> Dataset for FromFn<F, S>
where
    F: Fn(usize) -> Result<S, BoxError> + Send + Sync,
    S: Into<Batch>,
{
    fn len(&self) -> usize {
        self.samples
    }

    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        let sample = |&index: &usize| (self.sample)(index).map(Into::into);
        let samples = indices.iter().map(sample).collect::<Result<Vec<Batch>, _>>()?;
        let first = samples.first().ok_or("the batch has no samples")?;
        let forms = |sample| Batch::names(sample).zip(sample.tensors().map(Tensor::dims));
        if let Some(other) = samples.iter().position(|sample| !forms(sample).eq(forms(first))) {
            let [own, expected] = [&samples[other], first].map(|sample| forms(sample).collect::<Vec<_>>());
            let (index, first) = (indices[other], indices[0]);
            return Err(format!("sample {index} has {own:?}, but sample {first} has {expected:?}").into());
        }
        let mut column = 0..;
        Ok(first.map(|_| {
            let place = column.next().unwrap_or_default();
            Tensor::stack(&samples.iter().filter_map(|sample| sample.tensors().nth(place)).collect::<Vec<_>>(), 0)
        })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_picked_by_row() {
        let x = Tensor::arange(0f32, 6.0, &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
        let y = Tensor::new(&[7u32, 8, 9], &Device::Cpu).unwrap();
        let data = InMemory::new(Activations::new(vec![x.clone(), x.clone()]), y.clone()).unwrap();
        let batch = data.batch(&[2, 0, 2]).unwrap();
        assert_eq!(batch.inputs.tensors()[1].to_vec2::<f32>().unwrap(), [[4., 5.], [0., 1.], [4., 5.]]);
        assert_eq!(batch.only_target().unwrap().to_vec1::<u32>().unwrap(), [9, 7, 9]);
        assert_eq!(data.batch(&[3]).unwrap_err().to_string(), "sample 3 is out of range: the data set has 3 samples");
        let error = InMemory::new(x, y.narrow(0, 0, 2).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "invalid batch: `input` has 3 samples, but `target` has 2");
    }

    #[test]
    fn samples_of_a_function_are_stacked() {
        let data = from_fn(10, |i| {
            let x = Tensor::full(i as f32, if i < 9 { 2 } else { 3 }, &Device::Cpu)?;
            Ok((x, Tensor::new(i as u32, &Device::Cpu)?))
        });
        let batch = data.batch(&[4, 1]).unwrap();
        assert_eq!(batch.inputs.single().unwrap().to_vec2::<f32>().unwrap(), [[4., 4.], [1., 1.]]);
        assert_eq!(batch.only_target().unwrap().to_vec1::<u32>().unwrap(), [4, 1]);
        let error = data.batch(&[4, 9]).unwrap_err().to_string();
        assert_eq!(
            error,
            r#"sample 9 has [("input", [3]), ("target", [])], but sample 4 has [("input", [2]), ("target", [])]"#
        );
    }
}

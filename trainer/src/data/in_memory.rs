//! Data sets that a program creates: tensors in memory, or a function that computes a sample.

use std::marker::PhantomData;

use candle_core::{Device, Tensor};
use zero_engine::{Activations, Batch, DataError, Error};

use super::dataset::{BoxError, Dataset};

/// Tensors in memory; the first dimension counts samples.
#[derive(Debug, Clone)]
pub struct InMemory {
    inputs: Vec<Tensor>,
    targets: Tensor,
    samples: usize,
}

impl InMemory {
    /// Creates a data set from `inputs`, one tensor or several, and their targets.
    ///
    /// # Errors
    /// Fails if the tensors differ in their number of samples.
    pub fn new(inputs: impl Into<Activations>, targets: Tensor) -> Result<Self, Error> {
        let batch = Batch::new(inputs, targets);
        let samples = batch.rows()?;
        let inputs = batch.inputs.tensors().iter().map(Tensor::contiguous).collect::<candle_core::Result<_>>()?;
        Ok(Self { inputs, targets: batch.targets.contiguous()?, samples })
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
        let pick = |tensor: &Tensor| tensor.index_select(&rows.to_device(tensor.device())?, 0);
        let inputs = self.inputs.iter().map(pick).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Batch::new(Activations::new(inputs), pick(&self.targets)?))
    }
}

/// A data set whose samples are computed by a function; see [`from_fn`].
pub struct FromFn<F, X> {
    samples: usize,
    sample: F,
    inputs: PhantomData<fn() -> X>,
}

/// Creates a data set of `samples` samples. `sample` computes the inputs and the target of one sample, without a batch
/// dimension; the data set stacks them. `sample` must depend on the index alone, because several ranks, and a resumed
/// run, request the same sample and must get the same values.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use zero_train::data::{Dataset, from_fn};
///
/// let squares = from_fn(100, |i| {
///     let x = i as f32 / 100.0;
///     Ok((Tensor::new(&[x], &Device::Cpu)?, Tensor::new(&[x * x], &Device::Cpu)?))
/// });
/// assert_eq!(squares.batch(&[3, 5])?.targets.dims(), [2, 1]);
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn from_fn<F, X>(samples: usize, sample: F) -> FromFn<F, X>
where
    F: Fn(usize) -> Result<(X, Tensor), BoxError> + Send + Sync,
    X: Into<Activations>,
{
    FromFn { samples, sample, inputs: PhantomData }
}

impl<F, X> Dataset for FromFn<F, X>
where
    F: Fn(usize) -> Result<(X, Tensor), BoxError> + Send + Sync,
    X: Into<Activations>,
{
    fn len(&self) -> usize {
        self.samples
    }

    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        // One column per tensor of a sample, with the target last.
        let mut columns: Vec<Vec<Tensor>> = vec![];
        for &index in indices {
            let (inputs, target) = (self.sample)(index)?;
            let inputs: Activations = inputs.into();
            let sample: Vec<&Tensor> = inputs.tensors().iter().chain([&target]).collect();
            if columns.is_empty() {
                columns.resize(sample.len(), vec![]);
            }
            let dims =
                |tensors: &mut dyn Iterator<Item = &Tensor>| tensors.map(|t| t.dims().to_vec()).collect::<Vec<_>>();
            let (own, first) = (dims(&mut sample.iter().copied()), dims(&mut columns.iter().filter_map(|c| c.first())));
            if !first.is_empty() && own != first {
                let other = indices[0];
                return Err(
                    format!("sample {index} has tensors of shapes {own:?}, but sample {other} of {first:?}").into()
                );
            }
            columns.iter_mut().zip(sample).for_each(|(column, tensor)| column.push(tensor.clone()));
        }
        let mut stacked = columns.iter().map(|column| Tensor::stack(column, 0)).collect::<Result<Vec<_>, _>>()?;
        let targets = stacked.pop().ok_or("the batch has no samples")?;
        Ok(Batch::new(Activations::new(stacked), targets))
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
        assert_eq!(batch.targets.to_vec1::<u32>().unwrap(), [9, 7, 9]);
        assert_eq!(data.batch(&[3]).unwrap_err().to_string(), "sample 3 is out of range: the data set has 3 samples");
        let error = InMemory::new(x, y.narrow(0, 0, 2).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "the batch does not fit: 3 inputs for 2 targets");
    }

    #[test]
    fn samples_of_a_function_are_stacked() {
        let data = from_fn(10, |i| {
            let x = Tensor::full(i as f32, if i < 9 { 2 } else { 3 }, &Device::Cpu)?;
            Ok((x, Tensor::new(i as u32, &Device::Cpu)?))
        });
        let batch = data.batch(&[4, 1]).unwrap();
        assert_eq!(batch.inputs.single().unwrap().to_vec2::<f32>().unwrap(), [[4., 4.], [1., 1.]]);
        assert_eq!(batch.targets.to_vec1::<u32>().unwrap(), [4, 1]);
        let error = data.batch(&[4, 9]).unwrap_err().to_string();
        assert_eq!(error, "sample 9 has tensors of shapes [[3], []], but sample 4 of [[2], []]");
    }
}

//! Cutting the graph between two layers, and running one layer's backward from the gradient of its output.
//!
//! `Tensor::backward` seeds with ones and takes no upstream gradient. An operation whose forward is one
//! element and whose backward is the stored gradient turns it into one that does. A region of our own operations
//! ([`crate::ops`]) runs backward without candle.

use crate::layers::Activations;
use crate::ops::region;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};

/// Backpropagates from `outputs` with the gradients `upstream`, one of the same shape for each.
///
/// # Errors
/// If a graph node refuses its backward, or an output has no gradient of its shape.
pub fn backward_from(outputs: &[(Tensor, Tensor)]) -> Result<GradStore> {
    for (output, upstream) in outputs {
        if output.shape() != upstream.shape() {
            candle_core::bail!("gradient of shape {:?} for an output of {:?}", upstream.shape(), output.shape());
        }
    }
    if let [(output, upstream)] = outputs
        && let Some((input, gradient)) = region::backward(output, upstream)?
    {
        return match gradient {
            Some(gradient) if input.is_variable() => {
                let mut store = GradStore::default();
                store.insert_id(input.id(), gradient);
                Ok(store)
            }
            Some(gradient) => backward_from(&[(input, gradient)]),
            None => Ok(GradStore::default()),
        };
    }
    let seeds: Vec<Tensor> = outputs.iter().map(|(y, dy)| y.apply_op1(Seed(dy.clone()))).collect::<Result<_>>()?;
    match seeds.as_slice() {
        [one] => one.backward(),
        many => Tensor::stack(many, 0)?.sum_all()?.backward(),
    }
}

/// What the next layer takes of a layer's outputs, cut off from their graph.
///
/// The only output of a block of this crate becomes a leaf at once: its values are moved there, since the block's backward
/// does not need them. Others share their values with what is returned.
///
/// # Errors
/// If candle cannot reach the storage.
pub fn hand_on(outputs: &Activations) -> Result<Activations> {
    if let [output] = outputs.tensors()
        && let Some(values) = region::take_values(output)?
    {
        return Ok(Tensor::from_storage(values, output.shape(), BackpropOp::none(), true).into());
    }
    Ok(Activations::new(outputs.tensors().iter().map(Tensor::detach).collect()))
}

struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed-gradient"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.device().zeros_impl(&Shape::from(()), DType::F32)?, Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

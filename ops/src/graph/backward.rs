//! Cutting the graph between two layers, and running one layer's backward from the gradient of its output.
//!
//! `Tensor::backward` seeds with ones and takes no upstream gradient. An operation whose forward is one
//! element and whose backward is the stored gradient turns it into one that does. A fused block of our own operations
//! ([`crate::ops`]) runs backward without candle.

use super::fused_block;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
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
        && let Some((input, gradient)) = fused_block::backward(output, upstream)?
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

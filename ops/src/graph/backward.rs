//! Cuts the graph between two layers and runs one layer's backward from the gradient of its output.
//!
//! `Tensor::backward` starts from a gradient of ones and accepts no upstream gradient. A helper operation supplies the
//! upstream gradient: its forward returns a single element, and its backward returns the stored gradient. A fused block
//! of this crate's operations runs its backward without candle.

use super::fused_block;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};

/// Backpropagates from each output with its upstream gradient of the same shape.
///
/// # Errors
/// Fails if a graph node returns an error, or a gradient differs from its output in shape.
pub fn backward_from(outputs: &[(Tensor, Tensor)]) -> Result<GradStore> {
    for (output, upstream) in outputs {
        if output.shape() != upstream.shape() {
            candle_core::bail!(
                "the gradient has shape {:?}, but the output has {:?}",
                upstream.shape(),
                output.shape()
            );
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

//! Cuts candle's graph between two layers.

use crate::activations::Activations;
use candle_core::op::BackpropOp;
use candle_core::{Result, Tensor};
use zero_ops::graph::take_values;

/// Detaches a layer's outputs from their graph, for the next layer.
///
/// If the layer ends with a fused block of `zero-ops` and has a single output, that output becomes an autograd leaf
/// without a copy: the block's backward pass does not need the values, so they are moved into the leaf. Other outputs
/// share their values with the returned tensors.
///
/// # Errors
/// Fails if candle cannot access the storage.
pub fn hand_on(outputs: &Activations) -> Result<Activations> {
    if let [output] = outputs.tensors()
        && let Some(values) = take_values(output)?
    {
        return Ok(Tensor::from_storage(values, output.shape(), BackpropOp::none(), true).into());
    }
    Ok(Activations::new(outputs.tensors().iter().map(Tensor::detach).collect()))
}

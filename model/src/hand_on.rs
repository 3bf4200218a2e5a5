//! Cutting candle's graph between two layers.

use crate::layers::Activations;
use candle_core::op::BackpropOp;
use candle_core::{Result, Tensor};
use zero_ops::graph::take_values;

/// What the next layer takes of a layer's outputs, cut off from their graph.
///
/// The only output of a block of this crate becomes a leaf at once: its values are moved there, since the block's backward
/// does not need them. Others share their values with what is returned.
///
/// # Errors
/// If candle cannot reach the storage.
pub fn hand_on(outputs: &Activations) -> Result<Activations> {
    if let [output] = outputs.tensors()
        && let Some(values) = take_values(output)?
    {
        return Ok(Tensor::from_storage(values, output.shape(), BackpropOp::none(), true).into());
    }
    Ok(Activations::new(outputs.tensors().iter().map(Tensor::detach).collect()))
}

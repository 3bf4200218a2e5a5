//! The task of `resume.rs`: which of four features is the largest?

use candle_core::{Device, Result, Tensor};
use zero_train::{Batch, Layers, zoo};

/// Returns a model that classifies which of four features is the largest.
pub(crate) fn model() -> Layers {
    zoo::mlp(&zoo::MlpConfig {
        input_size: 4,
        hidden_sizes: vec![32, 32],
        num_labels: 4,
        hidden_act: zoo::Activation::Silu,
        base: None,
    })
}

/// Returns the batch of a step. It depends only on the step, so a resumed run sees the same batches.
pub(crate) fn batch(step: u64) -> Result<Batch> {
    let feature = |i: u64| ((step * 37 + i * i * 11 + i * 5) % 101) as f32 / 101.0;
    let features: Vec<f32> = (0..32).map(feature).collect();
    let features = Tensor::from_vec(features, (8, 4), &Device::Cpu)?;
    let largest = features.argmax(1)?;
    Ok(Batch::new(features, largest))
}

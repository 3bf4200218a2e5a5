//! Models with Hugging Face's configuration fields, tensor names and tensor layouts.
//!
//! A configuration becomes a list of layers. Building the list creates the parameters and checks that sizes fit
//! together. Checkpoints of the same architecture on the Hugging Face hub load by name.

mod gpt2;
mod language_head;
mod llama;
mod llama_config;
mod mlp;
mod pair_head;

pub use gpt2::{Gpt2Config, gpt2};
pub use language_head::LanguageHead;
pub use llama::llama;
pub use llama_config::{LayerType, LlamaConfig};
pub use mlp::{MlpConfig, mlp};
pub use pair_head::{LABEL_COUNTS, LABEL_GROUPS, LABELS, REFERENCE_LOG_PROBS};
pub use zero_ops::{Activation, PreferenceLoss};

use candle_core::{Result, Tensor};
use candle_nn::Module;
use zero_ops::AttentionSpan;
use zero_ops::graph::fused_block;
use zero_ops::scaled;

use crate::activations::Activations;

/// The norm before a language model's head. It also multiplies the head's inputs by a factor, which differs from 1 only
/// if the model is wider than its base model.
struct Last<M>(M, f32);

impl<M: Module> Module for Last<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        fused_block(x, |x| scaled(&self.0.forward(x)?, self.1))
    }
}

/// Returns how many times larger one of a model's sizes is than in its base model; 1 without a base model.
fn times_as_wide<C>(config: &C, base: Option<&C>, size: impl Fn(&C) -> usize) -> f64 {
    base.map_or(1.0, |base| size(config) as f64 / size(base) as f64)
}

/// Name of the input that a model of packed samples takes in addition to tokens: `[batch, time]` of u32, the position
/// of each token in its document. A document begins at each 0.
pub const POSITION_IDS: &str = "position_ids";

/// Returns a layer's input, and [`POSITION_IDS`] if samples are packed.
fn with_positions(x: &Activations) -> Result<(&Tensor, Option<&Tensor>)> {
    match x.tensors() {
        [x] => Ok((x, None)),
        [x, position_ids] => Ok((x, Some(position_ids))),
        many => candle_core::bail!("a layer expects one tensor and {POSITION_IDS}, but got {} tensors", many.len()),
    }
}

/// Limits a span to the documents that `position_ids` describe. Returns the span unchanged if samples are not packed.
fn within_documents(span: &AttentionSpan, position_ids: Option<&Tensor>) -> AttentionSpan {
    match position_ids {
        Some(position_ids) => span.clone().position_ids(position_ids.clone()),
        None => span.clone(),
    }
}

/// Fails unless each of the named sizes is at least 1.
fn check_sizes(model: &str, sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => candle_core::bail!("{model}: {name} must be at least 1"),
        None => Ok(()),
    }
}

//! Models with Hugging Face's configuration fields, tensor names and tensor layouts.
//!
//! A configuration becomes a list of layers. Building the list creates the parameters and checks that sizes fit
//! together. Checkpoints of the same architecture on the Hugging Face hub load by name.

mod gpt2;
mod language_head;
mod llama;
mod mlp;

pub use gpt2::{Gpt2Config, gpt2};
pub use language_head::LanguageHead;
pub use llama::{LlamaConfig, llama};
pub use mlp::{MlpConfig, mlp};
pub use zero_ops::{Activation, UnknownActivation};

use candle_core::{Result, Tensor};
use candle_nn::Module;
use zero_ops::graph::fused_block;

/// A layer that consists of one operation of this project.
struct Alone<M>(M);

impl<M: Module> Module for Alone<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        fused_block(x, |x| self.0.forward(x))
    }
}

/// Fails unless each of the named sizes is at least 1.
fn check_sizes(model: &str, sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => candle_core::bail!("{model}: {name} must be at least 1"),
        None => Ok(()),
    }
}

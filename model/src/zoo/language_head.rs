//! The head of a language model.

use crate::layers::{Activations, Head, Layer};
use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::{Linear, linear_cross_entropy};

/// Computes the logits x·Wᵀ, or the loss by [`linear_cross_entropy`] without storing all logits.
#[derive(Clone, Debug)]
pub struct LanguageHead {
    weight: Tensor,
}

impl LanguageHead {
    /// Creates a head. The parameter `weight` has shape `[vocabulary, width]` and is initialized from a normal
    /// distribution with standard deviation `std`.
    ///
    /// # Errors
    /// Returns errors of the builder.
    pub fn new(width: usize, vocabulary: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints((vocabulary, width), "weight", Init::Randn { mean: 0.0, stdev: std })?;
        Ok(Self { weight })
    }
}

impl Layer for LanguageHead {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        Ok(Linear::from_tensors(self.weight.clone(), None).forward(x.single()?)?.into())
    }
}

impl Head for LanguageHead {
    fn loss(&self, x: &Activations, targets: &Tensor, pass: &Pass, gradient: f32) -> Result<Tensor> {
        let x = x.single()?;
        match pass.training {
            true => fused_block(x, |x| linear_cross_entropy(x, &self.weight, targets, gradient)),
            false => linear_cross_entropy(&x.detach(), &self.weight.detach(), targets, gradient),
        }
    }
}

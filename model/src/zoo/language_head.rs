//! The head of a language model.

use crate::layers::{Activations, Head, Layer};
use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::{Linear, linear_cross_entropy};

/// Logits x·Wᵀ where they are asked for; the loss, [`linear_cross_entropy`], without them.
#[derive(Clone, Debug)]
pub struct LanguageHead {
    weight: Tensor,
}

impl LanguageHead {
    /// A normal weight of `[vocabulary, width]` and standard deviation `std`, named `weight`.
    ///
    /// # Errors
    /// What the builder says.
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

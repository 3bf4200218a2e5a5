//! A multilayer perceptron that classifies vectors.

use super::language_head::targets_that_count;
use super::{Activation, check_sizes};
use crate::activations::Activations;
use crate::layers::{Head, Layer, Layers};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::{Linear, cross_entropy};

/// Builds a perceptron that maps vectors `[batch, input_size]` to logits `[batch, num_labels]`. Its loss is
/// [`cross_entropy`].
///
/// The layers are `layers.0`, `layers.1`, …. Each is a linear map, followed by the activation except in the last.
/// Weights are initialized from a normal distribution with standard deviation √(2/inputs) (He et al., 2015). Biases
/// start at 0.
pub fn mlp(config: &MlpConfig) -> Layers {
    let (config, last) = (config.clone(), config.hidden_sizes.len());
    let build = move |i, vb: VarBuilder| Perceptron::new(&config, i, vb);
    let build_last = build.clone();
    Layers::new().layers("layers", last, build).head(format!("layers.{last}"), move |vb| build_last(last, vb))
}

/// Sizes of [`mlp`].
#[derive(Clone, Debug, PartialEq)]
pub struct MlpConfig {
    /// Length of an input vector.
    pub input_size: usize,
    /// Widths of the hidden layers.
    pub hidden_sizes: Vec<usize>,
    /// Number of classes.
    pub num_labels: usize,
    /// Activation of the hidden layers.
    pub hidden_act: Activation,
}

struct Perceptron {
    linear: Linear,
    activation: Option<Activation>,
}

impl Perceptron {
    fn new(config: &MlpConfig, index: usize, vb: VarBuilder) -> Result<Self> {
        let inputs = match index {
            0 => config.input_size,
            _ => config.hidden_sizes[index - 1],
        };
        let (outputs, activation) = match config.hidden_sizes.get(index) {
            Some(&width) => (width, Some(config.hidden_act)),
            None => (config.num_labels, None),
        };
        check_sizes("mlp", &[("the input of a layer", inputs), ("the output of a layer", outputs)])?;
        Ok(Self { linear: Linear::new(inputs, outputs, (2.0 / inputs as f64).sqrt(), vb)?, activation })
    }
}

impl Perceptron {
    /// Returns the tensor that ties the fused block to the graph. The first layer's input needs no gradient, but its
    /// weight does.
    fn root<'a>(&'a self, x: &'a Tensor) -> &'a Tensor {
        if x.track_op() { x } else { self.linear.weight() }
    }

    fn outputs(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.linear.forward(x)?;
        match self.activation {
            Some(activation) => activation.apply(&y),
            None => Ok(y),
        }
    }
}

impl Layer for Perceptron {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let x = x.single()?;
        Ok(fused_block(self.root(x), |_| self.outputs(x))?.into())
    }
}

impl Head for Perceptron {
    fn loss(&self, x: &Activations, targets: &Tensor, _: &Pass, _: f32) -> Result<Tensor> {
        let x = x.single()?;
        fused_block(self.root(x), |_| cross_entropy(&self.outputs(x)?, targets))
    }

    fn weight(&self, targets: &Tensor) -> Result<Option<u64>> {
        targets_that_count(targets)
    }
}

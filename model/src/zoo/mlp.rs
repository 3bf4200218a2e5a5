//! A multilayer perceptron that classifies vectors.

use super::language_head::targets_that_count;
use super::{Activation, check_sizes, times_as_wide};
use crate::activations::Activations;
use crate::base_shapes::BaseShapes;
use crate::layer::{Head, Layer};
use crate::layers::Layers;
use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::{Linear, activate, cross_entropy, scaled};

/// Builds a perceptron that maps vectors `[batch, input_size]` to logits `[batch, num_labels]`. Its loss is
/// [`cross_entropy`].
///
/// The layers are `layers.0`, `layers.1`, …. Each is a linear layer, followed by the activation in all but the last.
/// Weights are initialized from a normal distribution with standard deviation √(2/inputs) (He et al., 2015). Biases
/// start at 0. With a [`base`](MlpConfig::base) the model is in µP.
pub fn mlp(config: &MlpConfig) -> Layers {
    let base_shapes = config.base.as_deref().map(|base| BaseShapes::new(mlp(base), mlp(&base.wider())));
    let (config, last) = (config.clone(), config.hidden_sizes.len());
    let build = move |i, vb: VarBuilder| Perceptron::new(&config, i, vb);
    let build_last = build.clone();
    let layers = Layers::new().layers("layers", last, build);
    let mut layers = layers.head(format!("layers.{last}"), move |vb| build_last(last, vb));
    layers.base_shapes = base_shapes;
    layers
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
    /// The base model of µP: the same model with different `hidden_sizes`. The inputs of the last layer are divided by
    /// the multiplier of the last hidden layer. The last layer's initial weights have the same standard deviation as in
    /// the base model.
    pub base: Option<Box<Self>>,
}

impl MlpConfig {
    /// Returns the same model with all widths doubled.
    fn wider(&self) -> Self {
        Self { hidden_sizes: self.hidden_sizes.iter().map(|size| 2 * size).collect(), ..self.clone() }
    }

    fn check_base(&self) -> Result<()> {
        let Some(base) = self.base.as_deref() else { return Ok(()) };
        let same = Self { hidden_sizes: base.hidden_sizes.clone(), base: None, ..self.clone() };
        if base.hidden_sizes.len() != self.hidden_sizes.len() || same != *base {
            bail!("mlp: the base model differs in more than the sizes of its hidden layers");
        }
        Ok(())
    }
}

struct Perceptron {
    linear: Linear,
    activation: Option<Activation>,
    /// Factor that multiplies the inputs.
    factor: f32,
}

impl Perceptron {
    fn new(config: &MlpConfig, index: usize, vb: VarBuilder) -> Result<Self> {
        config.check_base()?;
        let inputs = match index {
            0 => config.input_size,
            _ => config.hidden_sizes[index - 1],
        };
        let (outputs, activation) = match config.hidden_sizes.get(index) {
            Some(&width) => (width, Some(config.hidden_act)),
            None => (config.num_labels, None),
        };
        check_sizes("mlp", &[("the input of a layer", inputs), ("the output of a layer", outputs)])?;
        let last_hidden = |config: &MlpConfig| config.hidden_sizes.last().copied().unwrap_or(1);
        let wider = match activation {
            Some(_) => 1.0,
            None => times_as_wide(config, config.base.as_deref(), last_hidden),
        };
        let std = (2.0 * wider / inputs as f64).sqrt();
        Ok(Self { linear: Linear::new(inputs, outputs, std, vb)?, activation, factor: (1.0 / wider) as f32 })
    }
}

impl Perceptron {
    /// Returns the tensor that connects the fused block to the graph: the input, or the weight if the input needs no
    /// gradient, as in the first layer.
    fn root<'a>(&'a self, x: &'a Tensor) -> &'a Tensor {
        if x.track_op() { x } else { self.linear.weight() }
    }

    fn outputs(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.linear.forward(&scaled(x, self.factor)?)?;
        match self.activation {
            Some(activation) => activate(&y, activation),
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

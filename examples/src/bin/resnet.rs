//! A small ResNet that learns to classify drawn shapes. It uses candle's convolutions, and batch norms whose running
//! statistics are equal on all ranks and part of every checkpoint.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin resnet
//! ```

#[path = "../shapes.rs"]
mod shapes;

use candle_core::{Result, Tensor};
use candle_nn::loss::cross_entropy;
use candle_nn::{Conv2d, Conv2dConfig, Linear, Module, VarBuilder, conv2d_no_bias, linear};
use shapes::{CLASSES, Shapes};
use zero_train::metrics::accuracy;
use zero_train::ops::BatchNorm;
use zero_train::{Layers, Trainer};

/// Channels of each block; every block but the first halves the height and the width.
const WIDTHS: [usize; 3] = [8, 16, 32];

const CONFIG: &str = "
train_batch_size: 16
optimizer: {type: AdamW, params: {lr: 0.003, weight_decay: 0}}
zero_optimization: {stage: 3}
training: {epochs: 6, eval_every: 50}
";

/// A convolution without a bias, and a batch norm.
struct Convolution(Conv2d, BatchNorm);

impl Convolution {
    fn new([inputs, outputs]: [usize; 2], kernel: usize, stride: usize, vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { padding: kernel / 2, stride, ..Conv2dConfig::default() };
        let convolution = conv2d_no_bias(inputs, outputs, kernel, config, vb.pp("conv"))?;
        Ok(Self(convolution, BatchNorm::new(outputs, 1e-5, 0.1, vb.pp("bn"))?))
    }
}

impl Module for Convolution {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x)?)
    }
}

/// Two convolutions in parallel with a shortcut, which is a convolution if the shape changes.
struct Block {
    first: Convolution,
    second: Convolution,
    shortcut: Option<Convolution>,
}

impl Block {
    fn new(index: usize, vb: VarBuilder) -> Result<Self> {
        let (inputs, outputs) = (WIDTHS[index.saturating_sub(1)], WIDTHS[index]);
        let stride = if index == 0 { 1 } else { 2 };
        let shortcut = (index > 0).then(|| Convolution::new([inputs, outputs], 1, stride, vb.pp("shortcut")));
        Ok(Self {
            first: Convolution::new([inputs, outputs], 3, stride, vb.pp("first"))?,
            second: Convolution::new([outputs, outputs], 3, 1, vb.pp("second"))?,
            shortcut: shortcut.transpose()?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.second.forward(&self.first.forward(x)?.relu()?)?;
        let x = self.shortcut.as_ref().map_or_else(|| Ok(x.clone()), |shortcut| shortcut.forward(x))?;
        (x + y)?.relu()
    }
}

/// Maps the mean of all pixels to scores of the classes.
struct Head(Linear);

impl Module for Head {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(&x.mean((2, 3))?)
    }
}

fn main() -> anyhow::Result<()> {
    let trainer = Trainer::from_args_over("resnet.yaml", CONFIG)?;
    let shapes = Shapes::draw("resnet")?;
    let (train, valid) = (shapes.images("train")?, shapes.images("valid")?);
    let model = Layers::new()
        .layer("stem", |vb| Convolution::new([3, WIDTHS[0]], 3, 1, vb))
        .layers("block", WIDTHS.len(), |index, vb| Block::new(index, vb))
        .layer("head", |vb| Ok(Head(linear(WIDTHS[2], CLASSES.len(), vb)?)))
        .loss(cross_entropy);
    let summary = trainer.model(model).data(train, valid).metric("accuracy", accuracy).fit()?;
    // An evaluation uses the running statistics.
    let reached = summary.evaluation.and_then(|evaluation| evaluation.metric("accuracy"));
    assert!(reached.is_some_and(|accuracy| accuracy > 0.9), "it did not learn: {reached:?}");
    Ok(())
}

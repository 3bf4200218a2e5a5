//! The layers of `resnet.rs`: candle's convolutions, and batch norms.

use candle_core::{Result, Tensor};
use candle_nn::{Conv2d, Conv2dConfig, Linear, Module, VarBuilder, conv2d_no_bias};
use zero_train::ops::BatchNorm;

/// Channels of each block; every block but the first halves the height and the width.
pub(crate) const WIDTHS: [usize; 3] = [8, 16, 32];

/// A convolution without a bias, and a batch norm.
pub(crate) struct Convolution(Conv2d, BatchNorm);

impl Convolution {
    pub(crate) fn new([inputs, outputs]: [usize; 2], kernel: usize, stride: usize, vb: VarBuilder) -> Result<Self> {
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
pub(crate) struct Block {
    first: Convolution,
    second: Convolution,
    shortcut: Option<Convolution>,
}

impl Block {
    pub(crate) fn new(index: usize, vb: VarBuilder) -> Result<Self> {
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
pub(crate) struct Head(pub(crate) Linear);

impl Module for Head {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(&x.mean((2, 3))?)
    }
}

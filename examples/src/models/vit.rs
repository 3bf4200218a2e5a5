//! The layers of `vit.rs`, written with the library's differentiable operations.

use candle_core::{D, Result, Tensor};
use candle_nn::{Module, VarBuilder, ops::softmax};
use zero_train::ops::{LayerNorm, Linear, gelu};

use crate::shapes::SIZE;

const PATCH: usize = 4;
pub(crate) const WIDTH: usize = 32;
const HEADS: usize = 4;
pub(crate) const STD: f64 = 0.05; // standard deviation of the initial weights

/// Maps images [batch, 3, SIZE, SIZE] to one vector for each patch, [batch, patches, WIDTH].
pub(crate) struct Patches {
    linear: Linear,
    positions: Tensor,
}

impl Patches {
    pub(crate) fn new(vb: VarBuilder) -> Result<Self> {
        let count = (SIZE as usize / PATCH).pow(2);
        let init = candle_nn::Init::Randn { mean: 0.0, stdev: STD };
        let positions = vb.get_with_hints((count, WIDTH), "positions", init)?;
        Ok(Self { linear: Linear::new(3 * PATCH * PATCH, WIDTH, STD, vb.pp("linear"))?, positions })
    }
}

impl Module for Patches {
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let (batch, side) = (images.dim(0)?, SIZE as usize / PATCH);
        let cut = images.reshape((batch, 3, side, PATCH, side, PATCH))?.permute((0, 2, 4, 1, 3, 5))?;
        let patches = cut.reshape((batch, side * side, 3 * PATCH * PATCH))?;
        self.linear.forward(&patches)?.broadcast_add(&self.positions)
    }
}

/// Attention between all patches, and a perceptron.
pub(crate) struct Block {
    norms: [LayerNorm; 2],
    attention: [Linear; 2],
    perceptron: [Linear; 2],
}

impl Block {
    pub(crate) fn new(vb: VarBuilder) -> Result<Self> {
        let norm = |name: &str| LayerNorm::new(WIDTH, 1e-5, vb.pp(name));
        let linear = |inputs, outputs, name: &str| Linear::new(inputs, outputs, STD, vb.pp(name));
        Ok(Self {
            norms: [norm("norm_1")?, norm("norm_2")?],
            attention: [linear(WIDTH, 3 * WIDTH, "qkv")?, linear(WIDTH, WIDTH, "out")?],
            perceptron: [linear(WIDTH, 4 * WIDTH, "up")?, linear(4 * WIDTH, WIDTH, "down")?],
        })
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, patches, _) = x.dims3()?;
        let qkv = self.attention[0].forward(x)?.reshape((batch, patches, 3, HEADS, WIDTH / HEADS))?;
        let [q, k, v] = [0, 1, 2].map(|part| qkv.narrow(2, part, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous());
        let scores = (q?.matmul(&k?.t()?.contiguous()?)? / ((WIDTH / HEADS) as f64).sqrt())?;
        let mixed = softmax(&scores, D::Minus1)?.matmul(&v?)?.transpose(1, 2)?.reshape((batch, patches, WIDTH))?;
        self.attention[1].forward(&mixed)
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ([norm_1, norm_2], [up, down]) = (&self.norms, &self.perceptron);
        let x = (x + self.attend(&norm_1.forward(x)?)?)?;
        &x + down.forward(&gelu(&up.forward(&norm_2.forward(&x)?)?)?)?
    }
}

/// Maps the mean of all patches to scores of the classes.
pub(crate) struct Head(pub(crate) Linear);

impl Module for Head {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(&x.mean(1)?)
    }
}

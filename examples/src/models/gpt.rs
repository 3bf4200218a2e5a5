//! The layers of `gpt.rs`, written with the library's differentiable operations.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use zero_train::ops::{Embedding, LayerNorm, Linear, causal_attention_packed, gelu};

pub(crate) const VOCABULARY: usize = 256; // bytes
pub(crate) const WIDTH: usize = 64;
const HEADS: usize = 4;
pub(crate) const TIME: usize = 64; // the longest sequence
pub(crate) const STD: f64 = 0.05; // standard deviation of the initial weights

/// Maps token ids [batch, time] to vectors [batch, time, WIDTH].
pub(crate) struct Embed {
    tokens: Embedding,
    positions: Embedding,
}

impl Embed {
    pub(crate) fn new(vb: VarBuilder) -> Result<Self> {
        let tokens = Embedding::new(VOCABULARY, WIDTH, STD, vb.pp("tokens"))?;
        Ok(Self { tokens, positions: Embedding::new(TIME, WIDTH, STD, vb.pp("positions"))? })
    }
}

impl Module for Embed {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, ids.dim(1)? as u32, ids.device())?.broadcast_as(ids.shape())?;
        self.tokens.forward(ids)? + self.positions.forward(&positions)?
    }
}

/// Attention and a perceptron, each with a norm before it and a residual connection around it.
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
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ([norm_1, norm_2], [qkv, out], [up, down]) = (&self.norms, &self.attention, &self.perceptron);
        let x = (x + out.forward(&causal_attention_packed(&qkv.forward(&norm_1.forward(x)?)?, HEADS)?)?)?;
        &x + down.forward(&gelu(&up.forward(&norm_2.forward(&x)?)?)?)?
    }
}

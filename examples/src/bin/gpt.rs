//! A GPT from scratch. Its layers use the library's differentiable operations, and ZeRO-3 trains it on the bytes of a
//! fixed text, a license.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin gpt
//! ```

use candle_core::{D, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use zero_train::ops::{Embedding, LayerNorm, Linear, causal_attention_packed, cross_entropy, gelu};
use zero_train::{Batch, Config, Engine, Layers, process};

const TEXT: &[u8] = include_bytes!("../../../LICENSE-APACHE");
const VOCABULARY: usize = 256; // bytes
const WIDTH: usize = 64;
const HEADS: usize = 4;
const TIME: usize = 64; // the longest sequence
const STD: f64 = 0.05; // standard deviation of the initial weights

/// Maps token ids [batch, time] to vectors [batch, time, WIDTH].
struct Embed {
    tokens: Embedding,
    positions: Embedding,
}

impl Embed {
    fn new(vb: VarBuilder) -> Result<Self> {
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
struct Block {
    norms: [LayerNorm; 2],
    attention: [Linear; 2],
    perceptron: [Linear; 2],
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
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

/// Returns 16 windows of the text, and the same windows one byte later.
fn batch(step: usize) -> Result<Batch> {
    let windows = |shift: usize| {
        let starts = (0..16).map(|i| (step * 16 + i) * 997 % (TEXT.len() - TIME));
        let ids: Vec<u32> = starts.flat_map(|at| &TEXT[at + shift..][..TIME]).map(|&byte| byte.into()).collect();
        Tensor::from_vec(ids, (16, TIME), &Device::Cpu)
    };
    Ok(Batch::new(windows(0)?, windows(1)?))
}

fn main() -> anyhow::Result<()> {
    let model = Layers::new()
        .layer("embed", Embed::new)
        .layers("block", 2, |_, vb| Block::new(vb))
        .layer("norm", |vb| LayerNorm::new(WIDTH, 1e-5, vb))
        .layer("head", |vb| Linear::no_bias(WIDTH, VOCABULARY, STD, vb))
        .tie("embed.tokens.weight", "head.weight")
        .loss(cross_entropy);
    let config = "{train_batch_size: 16, optimizer: {type: AdamW, params: {lr: 0.003}}, zero_optimization: {stage: 3}}";
    let config = Config::parse("ds.yaml", config)?;
    process::set_up(&config)?; // before anything computes
    let mut engine = Engine::new(config, model)?;
    let train = |step| Ok(engine.train_batch(&batch(step)?)?.loss);
    let losses = (0..200).map(train).collect::<anyhow::Result<Vec<f32>>>()?;
    let mut text = b"## ".map(u32::from).to_vec();
    for _ in 0..60 {
        let logits = engine.forward(Tensor::new(&text[..], &Device::Cpu)?.unsqueeze(0)?)?;
        text.extend(logits.single()?.argmax(D::Minus1)?.flatten_all()?.to_vec1::<u32>()?.last());
    }
    if engine.communicator().rank() == 0 {
        let text: Vec<u8> = text.iter().map(|&id| id as u8).collect();
        println!("loss {:.4} -> {:.4}\n{}", losses[0], losses[199], String::from_utf8_lossy(&text));
    }
    assert!(losses[0] > 5.0 && losses[199] < 2.0, "it did not learn");
    Ok(())
}

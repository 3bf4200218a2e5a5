//! A GPT from scratch. Its layers use the library's differentiable operations, and ZeRO-3 trains it on the bytes of a
//! fixed text, a license.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin gpt
//! ```

#[path = "../models/gpt.rs"]
mod gpt;

use candle_core::{D, Device, Result, Tensor};
use gpt::{Block, Embed, STD, TIME, VOCABULARY, WIDTH};
use zero_train::ops::{LayerNorm, Linear, cross_entropy};
use zero_train::{Batch, Config, Engine, Layers, process};

const TEXT: &[u8] = include_bytes!("../../../LICENSE-APACHE");

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

//! Generates greedy tokens with the Llama of candle-transformers, as candle's own example does.
//! `benches/peers/generate.py` compares it with `zero-train generate`.
//!
//! ```sh
//! cargo run --release -p zero-examples --example candle_generate -- FOLDER COUNT TOKEN…
//! ```
//!
//! Prints the new tokens as a JSON list, and the number of new tokens per second of the whole run, prompt included.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, count, prompt @ ..] = arguments.as_slice() else {
        anyhow::bail!("usage: candle_generate FOLDER COUNT TOKEN…");
    };
    let (folder, count) = (Path::new(folder), count.parse::<usize>()?);
    let prompt = prompt.iter().map(|token| Ok(token.parse()?)).collect::<anyhow::Result<Vec<u32>>>()?;
    let config: LlamaConfig = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json"))?)?;
    let (config, device) = (config.into_config(false), Device::Cpu);
    let weights = std::fs::read(folder.join("model.safetensors"))?;
    let vb = VarBuilder::from_buffered_safetensors(weights, DType::F32, &device)?;
    let (model, mut cache) = (Llama::load(vb, &config)?, Cache::new(true, DType::F32, &config, &device)?);

    let started = Instant::now();
    let (mut new, mut input, mut position) = (vec![], prompt, 0);
    while new.len() < count {
        let tokens = Tensor::new(input.as_slice(), &device)?.unsqueeze(0)?;
        let logits = model.forward(&tokens, position, &mut cache)?.squeeze(0)?.to_vec1::<f32>()?;
        position += input.len();
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).context("no logits")?.0 as u32;
        new.push(best);
        input = vec![best];
    }
    let rate = count as f64 / started.elapsed().as_secs_f64();
    println!("{}", serde_json::to_string(&new)?);
    eprintln!("{rate:.2} tokens/s");
    Ok(())
}

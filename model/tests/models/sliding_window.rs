//! Compares a Llama with a sliding window with the same model written in f64 with a mask.

use std::collections::HashMap;

use crate::built;
use crate::check::{close, plain_attention_within, rotated};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use zero_model::zoo::{LlamaConfig, llama};
use zero_model::{Activations, Model, Pass};

const TIME: usize = 70;

fn config(sliding_window: Option<usize>) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 19,
        hidden_size: 12,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: Some(4),
        max_position_embeddings: TIME,
        sliding_window,
        // Weights are larger than in training, so that no operation is nearly linear.
        initializer_range: 0.5,
        ..LlamaConfig::default()
    }
}

fn ids(seed: usize) -> Tensor {
    let ids: Vec<u32> = (0..2 * TIME).map(|i| (i * i + seed * i) as u32 % 19).collect();
    Tensor::from_vec(ids, (2, TIME), &Device::Cpu).unwrap()
}

fn logits(model: &Model, tokens: &Tensor) -> Tensor {
    let pass = Pass { training: true, seed: 1, step: 1, sample: 0, layer: 0 };
    let start = Activations::from(tokens.clone());
    let outputs = model.layers().iter().try_fold(start, |x, layer| layer.run(&x, &pass)).unwrap();
    outputs.single().unwrap().clone()
}

/// Computes the logits of the model in f64, with a mask for the window.
fn plain(p: &HashMap<&str, Tensor>, tokens: &Tensor, c: &LlamaConfig, window: usize) -> Result<Tensor> {
    let norm = |x: &Tensor, name: &str| {
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(c.rms_norm_eps))?.sqrt()?.recip()?;
        x.broadcast_mul(&scale)?.broadcast_mul(&p[name])
    };
    let linear = |x: &Tensor, name: String| x.broadcast_matmul(&p[name.as_str()].t()?);
    let (heads, kv_heads, size) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim.unwrap());
    let angle = |position: usize, pair: usize| position as f64 * c.rope_theta.powf(-2.0 * pair as f64 / size as f64);
    let split = |x: Tensor, heads: usize| x.reshape((2, TIME, heads, size));
    let turned = |x: Tensor, heads: usize| rotated(&split(x, heads)?, size / 2, 1.0, angle);
    let embedding = &p["model.embed_tokens.weight"];
    let mut x = embedding.index_select(&tokens.flatten_all()?, 0)?.reshape((2, TIME, c.hidden_size))?;
    for i in 0..c.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}.weight");
        let y = norm(&x, &at("input_layernorm"))?;
        let q = turned(linear(&y, at("self_attn.q_proj"))?, heads)?;
        let k = turned(linear(&y, at("self_attn.k_proj"))?, kv_heads)?;
        let v = split(linear(&y, at("self_attn.v_proj"))?, kv_heads)?;
        let attended = plain_attention_within(&q, &k, &v, |_, row| (row + 1).saturating_sub(window))?;
        x = (x + linear(&attended.reshape((2, TIME, heads * size))?, at("self_attn.o_proj"))?)?;
        let y = norm(&x, &at("post_attention_layernorm"))?;
        let gate = linear(&y, at("mlp.gate_proj"))?.silu()?;
        x = (x + linear(&(gate * linear(&y, at("mlp.up_proj"))?)?, at("mlp.down_proj"))?)?;
    }
    linear(&norm(&x, "model.norm.weight")?, "lm_head.weight".into())
}

#[test]
fn a_sliding_window_equals_an_explicit_mask() {
    let (tokens, weights) = (ids(3), ids(5).to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap());
    // Σ logits · weights, as an arbitrary upstream gradient.
    let total = |y: &Tensor| y.broadcast_mul(&weights.to_dtype(y.dtype()).unwrap()).unwrap().sum_all().unwrap();
    for (given, window) in [(Some(2), 2), (Some(5), 5), (Some(64), 64), (Some(200), TIME), (None, TIME)] {
        let config = config(given);
        let model = built(llama(&config), DType::F32);
        let vars: Vec<Var> = model
            .parameters()
            .iter()
            .map(|p| Var::from_tensor(&p.leaf().detach().to_dtype(DType::F64).unwrap()).unwrap())
            .collect();
        let named = model.parameters().iter().zip(&vars).map(|(p, v)| (p.name(), v.as_tensor().clone())).collect();
        let (got, want) = (logits(&model, &tokens), plain(&named, &tokens, &config, window).unwrap());
        close(&format!("window {given:?}, logits"), &got, &want, 3e-5);
        let (got, want) = (total(&got).backward().unwrap(), total(&want).backward().unwrap());
        for (p, v) in model.parameters().iter().zip(&vars) {
            let what = format!("window {given:?}, {}", p.name());
            close(&what, got.get(p.leaf()).unwrap(), want.get(v).unwrap(), 3e-5);
        }
    }
}

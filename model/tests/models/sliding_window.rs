//! Compares a Llama with a sliding window with the same model written in f64 with a mask.

use std::collections::HashMap;

use candle_core::{CpuStorage, D, DType, Device, Result, Tensor, Var};
use zero_model::zoo::{LlamaConfig, llama};
use zero_model::{Activations, Model, Pass, init};

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

fn built(config: &LlamaConfig) -> Model {
    let model = llama(config).build(DType::F32).unwrap();
    for p in model.parameters() {
        let mut values = vec![0.0; p.elements()];
        init::fill(&p.init(), p.shape(), p.name(), 3, 0, &mut values);
        p.fill(CpuStorage::F32(values)).unwrap();
    }
    model
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
    let half = size / 2;
    let table = |f: fn(f64) -> f64| {
        let angle = |at: usize| (at / half) as f64 * c.rope_theta.powf(-2.0 * (at % half) as f64 / size as f64);
        let values: Vec<f64> = (0..TIME * half).map(|at| f(angle(at))).collect();
        Tensor::from_vec(values, (1, TIME, 1, half), &Device::Cpu)
    };
    let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
    let rotated = |x: Tensor| {
        let (a, b) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?], 3)
    };
    let seen = |row: usize, column: usize| column <= row && row - column < window;
    let mask = |at: usize| if seen(at / TIME, at % TIME) { 0.0 } else { f64::NEG_INFINITY };
    let mask = Tensor::from_vec((0..TIME * TIME).map(mask).collect::<Vec<f64>>(), (TIME, TIME), &Device::Cpu)?;
    let split = |x: Tensor, heads: usize| x.reshape((2, TIME, heads, size));
    let spread = |x: Tensor| -> Result<Tensor> {
        let x = x.unsqueeze(3)?.broadcast_as((2, TIME, kv_heads, heads / kv_heads, size))?;
        x.reshape((2, TIME, heads, size))?.transpose(1, 2)?.contiguous()
    };
    let embedding = &p["model.embed_tokens.weight"];
    let mut x = embedding.index_select(&tokens.flatten_all()?, 0)?.reshape((2, TIME, c.hidden_size))?;
    for i in 0..c.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}.weight");
        let y = norm(&x, &at("input_layernorm"))?;
        let q = rotated(split(linear(&y, at("self_attn.q_proj"))?, heads)?)?.transpose(1, 2)?.contiguous()?;
        let k = spread(rotated(split(linear(&y, at("self_attn.k_proj"))?, kv_heads)?)?)?;
        let v = spread(split(linear(&y, at("self_attn.v_proj"))?, kv_heads)?)?;
        let scores = (q.matmul(&k.t()?.contiguous()?)? / (size as f64).sqrt())?.broadcast_add(&mask)?;
        let attended = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?.transpose(1, 2)?;
        x = (x + linear(&attended.reshape((2, TIME, heads * size))?, at("self_attn.o_proj"))?)?;
        let y = norm(&x, &at("post_attention_layernorm"))?;
        let gate = linear(&y, at("mlp.gate_proj"))?;
        let gate = (&gate * (gate.neg()?.exp()? + 1.0)?.recip()?)?;
        x = (x + linear(&(gate * linear(&y, at("mlp.up_proj"))?)?, at("mlp.down_proj"))?)?;
    }
    linear(&norm(&x, "model.norm.weight")?, "lm_head.weight".into())
}

#[test]
fn a_sliding_window_equals_an_explicit_mask() {
    let (tokens, weights) = (ids(3), ids(5).to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap());
    // Σ logits · weights, as an arbitrary upstream gradient.
    let total = |y: &Tensor| y.broadcast_mul(&weights.to_dtype(y.dtype()).unwrap()).unwrap().sum_all().unwrap();
    let doubles =
        |x: &Tensor| -> Vec<f64> { x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap() };
    let near = |name: &str, got: &Tensor, want: &Tensor| {
        let (got, want) = (doubles(got), doubles(want));
        let size = want.iter().fold(0f64, |m, v| m.max(v.abs()));
        let worst = got.iter().zip(&want).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(got.len() == want.len() && worst <= 3e-5 * size, "{name}: {worst} of {size}");
    };
    for (given, window) in [(Some(2), 2), (Some(5), 5), (Some(64), 64), (Some(200), TIME), (None, TIME)] {
        let config = config(given);
        let model = built(&config);
        let vars: Vec<Var> = model
            .parameters()
            .iter()
            .map(|p| Var::from_tensor(&p.leaf().detach().to_dtype(DType::F64).unwrap()).unwrap())
            .collect();
        let named = model.parameters().iter().zip(&vars).map(|(p, v)| (p.name(), v.as_tensor().clone())).collect();
        let (got, want) = (logits(&model, &tokens), plain(&named, &tokens, &config, window).unwrap());
        near(&format!("window {given:?}, logits"), &got, &want);
        let (got, want) = (total(&got).backward().unwrap(), total(&want).backward().unwrap());
        for (p, v) in model.parameters().iter().zip(&vars) {
            near(&format!("window {given:?}, {}", p.name()), got.get(p.leaf()).unwrap(), want.get(v).unwrap());
        }
    }
}

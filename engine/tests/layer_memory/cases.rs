//! The models and batches whose memory is measured.

use candle_core::{DType, Device, Result, Tensor};
use zero_model::zoo::{Activation, Gpt2Config, LayerType, LlamaConfig, MlpConfig, gpt2, llama, mlp};
use zero_model::{Layers, ops};

pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) layers: Layers,
    pub(crate) dtype: DType,
    /// Inputs and targets.
    pub(crate) batch: (Tensor, Tensor),
}

/// Returns all cases.
pub(crate) fn all() -> Result<Vec<Case>> {
    let mut cases = gpt2_cases()?;
    cases.extend(llama_cases()?);
    cases.extend(family_cases()?);
    cases.extend(mlp_cases()?);
    cases.extend(ignoring_cases()?);
    Ok(cases)
}

fn tokens(batch: usize, time: usize, vocabulary: usize) -> Result<(Tensor, Tensor)> {
    let ids = |shift| (0..batch * time).map(move |i| ((i * 31 + shift) % vocabulary) as u32).collect::<Vec<_>>();
    let tensor = |ids| Tensor::from_vec(ids, (batch, time), &Device::Cpu);
    Ok((tensor(ids(0))?, tensor(ids(1))?))
}

fn gpt2_cases() -> Result<Vec<Case>> {
    let mut cases = vec![];
    for (batch, time, width, heads, vocabulary) in
        [(1, 32, 64, 2, 100), (4, 64, 128, 4, 5000), (2, 256, 64, 1, 50257), (3, 100, 768, 12, 1000)]
    {
        for (dtype, dropout, tied, activation, tile_rows) in [
            (DType::F32, 0.0, true, Activation::GeluNew, None),
            (DType::F32, 0.1, false, Activation::Gelu, None),
            (DType::BF16, 0.0, false, Activation::GeluNew, None),
            (DType::BF16, 0.1, true, Activation::Silu, None),
            (DType::F32, 0.1, true, Activation::GeluNew, Some(64)),
            (DType::F32, 0.0, true, Activation::Silu, Some(128)),
            (DType::BF16, 0.0, true, Activation::GeluNew, Some(128)),
            (DType::BF16, 0.0, true, Activation::Gelu, Some(64)),
            (DType::F16, 0.1, true, Activation::GeluNew, None),
            (DType::F16, 0.0, false, Activation::Silu, Some(128)),
        ] {
            let config = Gpt2Config {
                vocab_size: vocabulary,
                n_positions: 256,
                n_embd: width,
                n_layer: 2,
                n_head: heads,
                activation_function: activation,
                resid_pdrop: dropout,
                embd_pdrop: dropout,
                attn_pdrop: dropout,
                tie_word_embeddings: tied,
                tiled_mlp_rows: tile_rows,
                ..Gpt2Config::default()
            };
            let sizes = format!("batch {batch}, time {time}, width {width}, vocabulary {vocabulary}");
            cases.push(Case {
                name: format!(
                    "gpt2 of {dtype:?}, {sizes}, {activation:?}, dropout {dropout}, tied {tied}, tiles {tile_rows:?}"
                ),
                layers: gpt2(&config),
                dtype,
                batch: tokens(batch, time, vocabulary)?,
            });
        }
    }
    Ok(cases)
}

/// Gemma 3 and Phi-3, whose blocks have other operations than Llama's.
fn family_cases() -> Result<Vec<Case>> {
    let (batch, time) = (3, 96);
    let llama_config = LlamaConfig {
        vocab_size: 1000,
        hidden_size: 128,
        intermediate_size: 344,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 1 << 30,
        sliding_window: Some(20),
        ..LlamaConfig::default()
    };
    let gemma3 = |tiled_mlp_rows| LlamaConfig {
        layer_types: vec![LayerType::SlidingAttention, LayerType::FullAttention],
        qk_norm: true,
        query_pre_attn_scalar: Some(10.0),
        rope_local_base_freq: Some(100.0),
        hidden_act: Activation::GeluNew,
        norm_unit_offset: true,
        post_norms: true,
        scale_embeddings: true,
        tie_word_embeddings: true,
        tiled_mlp_rows,
        ..llama_config.clone()
    };
    let phi3 = LlamaConfig { fused_projections: true, partial_rotary_factor: 0.75, ..llama_config.clone() };
    let mut cases = vec![];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (name, config) in
            [("gemma 3", gemma3(None)), ("gemma 3 in tiles", gemma3(Some(64))), ("phi 3", phi3.clone())]
        {
            cases.push(Case {
                name: format!("{name} of {dtype:?}"),
                layers: llama(&config),
                dtype,
                batch: tokens(batch, time, 1000)?,
            });
        }
    }
    Ok(cases)
}

fn llama_cases() -> Result<Vec<Case>> {
    let mut cases = vec![];
    for (batch, time, width, inner, heads, kv_heads, window) in [
        (1, 32, 64, 100, 4, 4, None),
        (4, 64, 128, 344, 8, 2, Some(20)),
        (2, 256, 256, 688, 4, 1, None),
        (1, 100, 512, 1376, 8, 8, Some(64)),
    ] {
        for (dtype, tile_rows) in [
            (DType::F32, None),
            (DType::BF16, None),
            (DType::F16, None),
            (DType::F32, Some(64)),
            (DType::BF16, Some(128)),
            (DType::F16, Some(64)),
        ] {
            let config = LlamaConfig {
                vocab_size: 3000,
                hidden_size: width,
                intermediate_size: inner,
                num_hidden_layers: 2,
                num_attention_heads: heads,
                num_key_value_heads: kv_heads,
                max_position_embeddings: 256,
                sliding_window: window,
                tie_word_embeddings: window.is_some(),
                qkv_bias: kv_heads == 1,
                attention_bias: kv_heads == 8,
                mlp_bias: kv_heads == 8,
                tiled_mlp_rows: tile_rows,
                ..LlamaConfig::default()
            };
            let sizes = format!("batch {batch}, time {time}, width {width}, {kv_heads} of {heads} heads");
            cases.push(Case {
                name: format!("llama of {dtype:?}, {sizes}, window {window:?}, tiles {tile_rows:?}"),
                layers: llama(&config),
                dtype,
                batch: tokens(batch, time, 3000)?,
            });
        }
    }
    Ok(cases)
}

fn mlp_cases() -> Result<Vec<Case>> {
    let mut cases = vec![];
    for (batch, hidden_act) in [(1, Activation::Relu), (100, Activation::Gelu), (1000, Activation::Silu)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let config =
                MlpConfig { input_size: 300, hidden_sizes: vec![500, 60], num_labels: 150, hidden_act, base: None };
            let labels: Vec<u32> = (0..batch as u32).map(|i| i * 7 % 150).collect();
            let x = (Tensor::arange(0, batch as u32 * 300, &Device::Cpu)?.to_dtype(DType::F32)? / 1e6)?;
            cases.push(Case {
                name: format!("mlp of {dtype:?}, batch {batch}, {hidden_act:?}"),
                layers: mlp(&config),
                dtype,
                batch: (x.reshape((batch, 300))?.to_dtype(dtype)?, Tensor::new(labels, &Device::Cpu)?),
            });
        }
    }
    Ok(cases)
}

/// Cases with i64 targets, some of which are ignored, so that the head copies the rows whose targets count.
fn ignoring_cases() -> Result<Vec<Case>> {
    let mut cases = vec![];
    // A plan assumes that every row has a target. Here the rows with a target fill a whole chunk, so the peak equals
    // the plan's.
    let vocabulary = 5000;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let config = Gpt2Config {
            vocab_size: vocabulary,
            n_positions: 256,
            n_embd: 128,
            n_layer: 1,
            n_head: 2,
            ..Gpt2Config::default()
        };
        let (inputs, targets) = tokens(16, 64, vocabulary)?;
        let targets: Vec<u32> = targets.flatten_all()?.to_vec1()?;
        let some =
            targets.iter().enumerate().map(|(i, &target)| if i % 9 == 0 { ops::IGNORE_INDEX } else { target.into() });
        let targets = Tensor::from_vec(some.collect::<Vec<i64>>(), (16, 64), &Device::Cpu)?;
        let name = format!("gpt2 of {dtype:?}, ignored targets");
        cases.push(Case { name, layers: gpt2(&config), dtype, batch: (inputs, targets) });
    }
    Ok(cases)
}

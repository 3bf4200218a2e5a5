//! Models are bit-identical on every processor. The files in `golden` were recorded on x86-64. After an intended change
//! of bits, run `UPDATE_GOLDEN=1 cargo test --workspace --test models golden`.
//!
//! Products of two bf16 operands are rounded differently on a processor with AMX. Their digests are skipped there, and
//! must be recorded on a processor without AMX or in `qemu-x86_64`.

#[path = "../../../optim/tests/golden/record.rs"]
mod record;

use crate::built;
use crate::check::ids;
use candle_core::{DType, Result, Tensor};
use record::Record;
use zero_model::sink::{Gradients, promise};
use zero_model::zoo::{Gpt2Config, LayerType, LlamaConfig, gpt2, llama};
use zero_model::{Activations, Layers, Pass, ops};

const AMX: &str = "products of two bf16 operands go through AMX here";

/// Returns the loss, and the gradients of all parameters in one buffer. With a buffer, blocks run as fused blocks, as
/// in training.
fn step(layers: Layers, dtype: DType, input: &Tensor, targets: &Tensor) -> Result<(f32, Vec<f32>)> {
    let model = built(layers, dtype);
    let (mut leaves, mut end) = (vec![], 0);
    for p in model.parameters() {
        leaves.push((p.leaf().id(), end..end + p.elements(), false));
        end += p.elements();
    }
    let mut sink = Gradients::default();
    sink.add_buffer(vec![f32::NAN; end], leaves);
    let last = model.layers().len() - 1;
    let pass = |layer: usize| Pass { training: true, seed: 1, step: 1, sample: 0, layer: layer as u32 };
    let loss = promise(|| {
        let x = (0..last)
            .try_fold(Activations::from(input.clone()), |x, layer| model.layers()[layer].run(&x, &pass(layer)))?;
        model.loss(&x, std::slice::from_ref(targets), &pass(last), 1.0)
    })?;
    let (mut sink, store) = sink.capture(|| loss.backward());
    let mut store = store?;
    model.parameters().iter().try_for_each(|p| sink.absorb(&mut store, p.leaf()))?;
    Ok((loss.to_scalar()?, sink.into_buffers().remove(0)))
}

#[test]
fn models() {
    let mut record = Record::default();
    let (tokens, targets) = (ids("tokens", &[3, 40], 97), ids("targets", &[3, 40], 97));
    let gpt2_config =
        Gpt2Config { vocab_size: 97, n_positions: 40, n_embd: 24, n_layer: 2, n_head: 3, ..Gpt2Config::default() };
    let llama_config = LlamaConfig {
        vocab_size: 97,
        hidden_size: 24,
        intermediate_size: 50,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 40,
        ..LlamaConfig::default()
    };
    let gemma3_config = LlamaConfig {
        hidden_act: ops::Activation::GeluNew,
        qk_norm: true,
        query_pre_attn_scalar: Some(10.0),
        sliding_window: Some(9),
        layer_types: vec![LayerType::SlidingAttention, LayerType::FullAttention],
        rope_local_base_freq: Some(100.0),
        norm_unit_offset: true,
        post_norms: true,
        scale_embeddings: true,
        ..llama_config.clone()
    };
    let phi3_config = LlamaConfig { fused_projections: true, partial_rotary_factor: 0.7, ..llama_config.clone() };
    for dtype in [DType::F32, DType::BF16] {
        for (name, layers) in [
            ("gpt2", gpt2(&gpt2_config)),
            ("llama", llama(&llama_config)),
            ("gemma 3", llama(&gemma3_config)),
            ("phi 3", llama(&phi3_config)),
        ] {
            let name = format!("{name}, {}", dtype.as_str());
            if dtype == DType::BF16 && ops::Isa::current().has_amx() {
                record.skip(name, AMX);
                continue;
            }
            let (loss, gradients) = step(layers, dtype, &tokens, &targets).unwrap();
            assert!(loss.is_finite() && gradients.iter().all(|value| value.is_finite()), "{name}");
            record.add(name, gradients.iter().chain([&loss]).map(|value| value.to_bits()));
        }
    }
    record.compare(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/golden/models.txt"));
}

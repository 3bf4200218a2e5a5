//! Qwen3, Gemma 3 and Phi-3: all layouts are bit-identical.

use crate::world;

use world::{BF16, assert_same, llama_config, reproducible, run_of};
use zero_engine::zoo;
use zero_model::ops::RopeScaling;

/// Layers with and without a sliding window. The window is shorter than a row of 16 tokens.
fn layer_types() -> Vec<zoo::LayerType> {
    [zoo::LayerType::SlidingAttention, zoo::LayerType::FullAttention].repeat(2)
}

fn qwen3() -> zoo::LlamaConfig {
    zoo::LlamaConfig {
        num_hidden_layers: 4,
        qk_norm: true,
        head_dim: Some(12),
        sliding_window: Some(5),
        layer_types: layer_types(),
        ..llama_config()
    }
}

pub(crate) fn gemma3() -> zoo::LlamaConfig {
    zoo::LlamaConfig {
        hidden_act: zoo::Activation::GeluNew,
        query_pre_attn_scalar: Some(10.0),
        rope_local_base_freq: Some(100.0),
        norm_unit_offset: true,
        post_norms: true,
        scale_embeddings: true,
        tie_word_embeddings: true,
        ..qwen3()
    }
}

/// Rows have at most 16 tokens, so they use LongRoPE's short factors, packed or not.
pub(crate) fn phi3() -> zoo::LlamaConfig {
    zoo::LlamaConfig {
        num_hidden_layers: 4,
        fused_projections: true,
        partial_rotary_factor: 0.75,
        sliding_window: Some(5),
        rope_scaling: Some(RopeScaling::LongRope {
            short_factor: vec![1.0, 1.5, 2.5],
            long_factor: vec![3.0, 4.5, 6.5],
            factor: None,
            attention_factor: Some(1.25),
            original_max_position_embeddings: 16,
        }),
        ..llama_config()
    }
}

/// Phi-3 with rows longer than `original_max_position_embeddings`.
fn long_phi3() -> zoo::LlamaConfig {
    let rope_scaling = phi3().rope_scaling.map(|scaling| match scaling {
        RopeScaling::LongRope { short_factor, long_factor, factor, attention_factor, .. } => RopeScaling::LongRope {
            short_factor,
            long_factor,
            factor,
            attention_factor,
            original_max_position_embeddings: 8,
        },
        other => other,
    });
    zoo::LlamaConfig { rope_scaling, ..phi3() }
}

#[test]
fn families_are_bit_identical_in_every_layout() {
    for family in [qwen3, gemma3, phi3, long_phi3] {
        for dtype in ["", BF16] {
            let run = |ranks: usize, stage: u8, data: usize, more: &str| {
                let text = reproducible(stage, data, &format!("{dtype}\n{more}"));
                run_of(|| zoo::llama(&family()), ranks, 6, &text)
            };
            let expected = run(1, 0, 1, "");
            assert!(expected.losses[0] != expected.losses[5]);
            for (ranks, stage) in [(2, 0), (2, 1), (4, 2), (2, 3), (4, 3)] {
                let got = run(ranks, stage, ranks, "");
                assert_same(&expected, &got, &format!("{:?} {dtype} stage {stage}, {ranks} ranks", family()));
            }
            for schedule in ["1f1b", "zb_h1"] {
                let pipeline = format!("pipeline: {{stages: 2, schedule: {schedule}}}");
                assert_same(&expected, &run(4, 3, 2, &pipeline), &format!("{:?} {dtype} {pipeline}", family()));
            }
            let recomputes = "activation_checkpointing: {enabled: true}";
            assert_same(&expected, &run(2, 3, 2, recomputes), &format!("{:?} {dtype} {recomputes}", family()));
        }
    }
}

//! A tiled MLP does not change a bit of a training run.

use crate::world;

use world::{assert_same, gpt2_config, run_of};
use zero_engine::{Layers, zoo};

/// A model with dropout: each tile must use the masks of the untiled run.
fn gpt2(tiled_mlp_rows: Option<usize>) -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_inner: None, resid_pdrop: 0.1, tiled_mlp_rows, ..gpt2_config() })
}

fn llama(tiled_mlp_rows: Option<usize>) -> Layers {
    zoo::llama(&zoo::LlamaConfig {
        vocab_size: 61,
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 16,
        initializer_range: 0.1,
        mlp_bias: true,
        tiled_mlp_rows,
        ..zoo::LlamaConfig::default()
    })
}

/// Micro-batches of 144 rows: tiles of 64 rows leave a last tile of 16.
fn settings(zero_stage: u8, extra: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 9\ngradient_accumulation_steps: 2\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40, stage3_max_reuse_distance: 0}}\n{extra}"
    )
}

#[test]
fn tiled_mlps_are_bit_identical() {
    for model in [gpt2, llama] {
        for dtype in ["", "bf16: {enabled: true}\n", "fp16: {enabled: true, initial_scale_power: 20, hysteresis: 1}\n"]
        {
            for (zero_stage, ranks) in [(0, 1), (3, 2)] {
                let expected = run_of(|| model(None), ranks, 6, &settings(zero_stage, dtype));
                assert!(expected.losses[0] != expected.losses[5]);
                for kept in ["", "activation_checkpointing: {}\n"] {
                    for rows in [64, 128, 1024] {
                        let got =
                            run_of(|| model(Some(rows)), ranks, 6, &settings(zero_stage, &format!("{dtype}{kept}")));
                        assert_same(&expected, &got, &format!("ZeRO {zero_stage}, tiles of {rows}, {dtype}{kept}"));
                    }
                }
            }
        }
    }
}

/// Zero-bubble schedules do not split the backward of a tiled layer, and tied gradients are summed over stages.
#[test]
fn tiled_mlps_in_pipelines_are_bit_identical() {
    for model in [gpt2, llama] {
        let expected = run_of(|| model(None), 1, 6, &settings(0, ""));
        for schedule in ["1f1b", "zb_h1"] {
            let pipeline = format!("pipeline: {{stages: 2, schedule: {schedule}}}");
            let got = run_of(|| model(Some(64)), 2, 6, &settings(0, &pipeline));
            assert_same(&expected, &got, schedule);
        }
    }
}

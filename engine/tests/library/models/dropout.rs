//! Dropout of models from a configuration: every layout draws the same masks.

use crate::world;

use world::{BF16, FP16, assert_same, batch, engine_of, gpt2_config, llama_config, run_of, world};
use zero_engine::{Config, Engine, Layers, configured_layers, zoo};

fn gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { embd_pdrop: 0.1, resid_pdrop: 0.1, attn_pdrop: 0.2, ..gpt2_config() })
}

fn llama() -> Layers {
    zoo::llama(&zoo::LlamaConfig { sliding_window: Some(9), attention_dropout: 0.2, ..llama_config() })
}

fn text(zero_stage: u8, micro_batch: usize, accumulation: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: {micro_batch}\ngradient_accumulation_steps: {accumulation}\n{more}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40}}"
    )
}

#[test]
fn layouts_and_recomputation_are_bit_identical() {
    for layers in [gpt2, llama] {
        for dtype in ["", BF16, FP16] {
            let more = format!("training: {{reproducible: true}}\n{dtype}");
            let expected = run_of(layers, 1, 4, &text(0, 2, 4, &more));
            for (ranks, zero_stage) in [(1, 3), (2, 0), (2, 2), (4, 1), (4, 3)] {
                for recomputation in ["", "activation_checkpointing: {}"] {
                    let more = format!("{more}\n{recomputation}");
                    let got = run_of(layers, ranks, 4, &text(zero_stage, 2, 4 / ranks, &more));
                    assert_same(&expected, &got, &format!("{more}, ZeRO {zero_stage}, {ranks} ranks"));
                }
            }
            let more = format!("{more}\npipeline: {{stages: 2}}\nactivation_checkpointing: {{interval: 2}}");
            assert_same(&expected, &run_of(layers, 4, 4, &text(1, 2, 2, &more)), &more);
        }
    }
}

/// Each sample has its own mask, so the micro-batch size changes the loss of a step by rounding only.
#[test]
fn dropout_masks_do_not_depend_on_the_micro_batch_size() {
    for layers in [gpt2, llama] {
        let first = |micro_batch: usize, more: &str| {
            let text = text(0, micro_batch, 8 / micro_batch, more);
            world(1, |comm| {
                let mut engine = engine_of(layers(), comm, &text);
                let evaluated = engine.eval_batch(&batch(0, 8)).unwrap();
                (engine.train_batch(&batch(0, 8)).unwrap().loss, evaluated)
            })[0]
        };
        let (whole, evaluated) = first(8, "");
        for micro_batch in [1, 2, 4] {
            let (loss, other) = first(micro_batch, "");
            assert!((loss - whole).abs() < 1e-5 * whole, "{loss} for {whole}");
            assert!((other - evaluated).abs() < 1e-5 * evaluated, "{other} for {evaluated}");
        }
        // An evaluation drops nothing, so its loss differs.
        assert!((evaluated - whole).abs() > 1e-4 * whole, "{evaluated} and {whole}");
    }
}

/// The dropout keys of the configuration take effect in the model.
#[test]
fn dropout_keys_reach_the_model() {
    let loss = |model: &str| {
        world(1, |comm| {
            let text = format!("train_batch_size: 4\ntraining: {{seed: 3}}\nmodel: {{{model}, vocab_size: 61}}");
            let config = Config::with_world_size("test.yaml", text, 1).unwrap_or_else(|e| panic!("{e}"));
            let layers = configured_layers(&config, None).unwrap();
            Engine::with_communicator(config, layers, comm).unwrap().train_batch(&batch(0, 4)).unwrap().loss
        })[0]
    };
    let gpt2 = "type: gpt2, n_positions: 16, n_embd: 32, n_layer: 1, n_head: 2, initializer_range: 0.3";
    let llama = "type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, \
                 max_position_embeddings: 16, initializer_range: 0.3";
    for (model, keys) in [(gpt2, &["embd_pdrop", "resid_pdrop", "attn_pdrop"][..]), (llama, &["attention_dropout"])] {
        let without = loss(model);
        for key in keys {
            assert_eq!(loss(&format!("{model}, {key}: 0.0")), without, "{key}");
            assert_ne!(loss(&format!("{model}, {key}: 0.2")), without, "{key}");
        }
    }
}

//! Ranks that cut layers among them (`tensor_parallel.autotp_size`): losses, norms and parameters differ from those of one rank by
//! rounding only, initial values have its bits, and ranks send what the formulas say.

mod combined;
mod own_layers;
mod pytorch;

use zero_engine::{Engine, Layers, zoo};

use crate::world::{BF16, Trajectory, config, gpt2_config, llama_config, relative_difference, run_of, world};

const STEPS: u64 = 6;

fn gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_head: 4, ..gpt2_config() })
}

fn dropping_gpt2() -> Layers {
    let dropout = zoo::Gpt2Config { embd_pdrop: 0.1, resid_pdrop: 0.1, attn_pdrop: 0.2, ..gpt2_config() };
    zoo::gpt2(&zoo::Gpt2Config { n_head: 4, ..dropout })
}

fn tiled_gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_head: 4, tiled_mlp_rows: Some(64), ..gpt2_config() })
}

/// Four query heads read two key and value heads through a sliding window; norms of queries and keys; biases.
fn llama() -> Layers {
    let llama = zoo::LlamaConfig { sliding_window: Some(9), attention_dropout: 0.2, ..llama_config() };
    zoo::llama(&zoo::LlamaConfig { qk_norm: true, attention_bias: true, mlp_bias: true, ..llama })
}

/// Queries, keys and values in one weight, and gate and up in another.
fn phi3() -> Layers {
    zoo::llama(&zoo::LlamaConfig { fused_projections: true, tie_word_embeddings: true, ..llama_config() })
}

fn keys(ranks: usize, micro_batch: usize, accumulation: usize, stage: u8, more: &str) -> String {
    format!(
        "tensor_parallel: {{autotp_size: {ranks}}}\ntrain_micro_batch_size_per_gpu: {micro_batch}\n\
         gradient_accumulation_steps: {accumulation}\n{more}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}"
    )
}

fn losses(trajectory: &Trajectory) -> Vec<f32> {
    trajectory.losses.iter().map(|&bits| f32::from_bits(bits)).collect()
}

/// Asserts that losses and norms differ by rounding.
#[track_caller]
fn assert_near(found: &Trajectory, expected: &Trajectory, tolerance: f32, what: &str) {
    let difference = relative_difference(&losses(found), &losses(expected));
    assert!(difference < tolerance, "{what}: {difference}\n{:?}\n{:?}", losses(found), losses(expected));
    let norms = found.norms.iter().zip(&expected.norms).map(|pair| (f64::from_bits(*pair.0), f64::from_bits(*pair.1)));
    for (found, expected) in norms {
        // Both overflow in f16, or neither does.
        let is_near = (found / expected - 1.0).abs() < 10.0 * f64::from(tolerance);
        assert!(is_near || !found.is_finite() && !expected.is_finite(), "{what}: norm {found} for {expected}");
    }
}

#[test]
fn initial_values_have_the_bits_of_one_rank() {
    for layers in [gpt2, llama, phi3] {
        let values = |ranks: usize| {
            let text = keys(ranks, 1, 1, 3, "");
            let all = world(ranks, |comm| {
                let mut engine = Engine::with_communicator(config(ranks, &text), layers(), comm).unwrap();
                let names: Vec<String> =
                    engine.model().parameters().iter().map(|parameter| parameter.name().to_string()).collect();
                names.iter().map(|name| engine.full_parameter(name).unwrap()).collect::<Vec<_>>()
            });
            assert!(all.iter().all(|values| *values == all[0]));
            all[0].clone()
        };
        let expected = values(1);
        assert!(values(2) == expected);
    }
}

#[test]
fn losses_and_norms_differ_from_one_rank_by_rounding() {
    for layers in [gpt2, dropping_gpt2, tiled_gpt2, llama, phi3] {
        for accumulation in [1, 2] {
            let expected = run_of(layers, 1, STEPS, &keys(1, 2, accumulation, 0, ""));
            for stage in [0, 3] {
                let text = keys(2, 2, accumulation, stage, "");
                assert_near(&run_of(layers, 2, STEPS, &text), &expected, 1e-5, &text);
            }
        }
        let expected = run_of(layers, 1, STEPS, &keys(1, 2, 1, 0, BF16));
        let text = keys(2, 2, 1, 0, BF16);
        assert_near(&run_of(layers, 2, STEPS, &text), &expected, 1e-2, &text);
    }
}

//! Tensor parallelism (`tensor_parallel.autotp_size`): initial values are bit-identical to one rank, losses and norms
//! differ from one rank by rounding only, and ranks send the bytes of the formulas.

mod combined;
mod own_layers;
mod pytorch;
mod quantized;
mod state;
mod traffic;

use zero_engine::{Engine, Layers, zoo};

use crate::sequence_parallel::{dropping_gpt2, gpt2};
use crate::world::{
    BF16, agreed, assert_near, assert_same, engine_of, gpt2_config, llama_config, run_of, trajectory, world,
};

const STEPS: u64 = 4;

fn tiled_gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_head: 4, tiled_mlp_rows: Some(64), ..gpt2_config() })
}

/// A Llama with four query heads that share two key and value heads, a sliding window, norms of queries and keys, and
/// biases.
fn llama() -> Layers {
    let llama = zoo::LlamaConfig { sliding_window: Some(9), attention_dropout: 0.2, ..llama_config() };
    zoo::llama(&zoo::LlamaConfig { qk_norm: true, attention_bias: true, mlp_bias: true, ..llama })
}

/// A Llama with one weight for queries, keys and values, and one for the gate and up projections.
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

/// The names and the bits of all parameters.
type Parameters = Vec<(String, Vec<u32>)>;

/// Saves checkpoints after `prepare` on four ranks and on two ranks, both with layers in two parts, and on one rank.
/// Asserts that each checkpoint loads with any number of parts. Returns the parameters of each checkpoint.
fn load_with_any_number_of_parts(
    layers: fn() -> Layers,
    more: &str,
    prepare: impl Fn(&mut Engine) + Sync,
) -> [Parameters; 3] {
    let folder = tempfile::tempdir().unwrap();
    let values = |ranks: usize, tensor: usize, saves: bool| {
        let text = keys(tensor, 4, 1, 3, more);
        let all = world(ranks, |comm| {
            let mut engine = engine_of(layers(), comm, &text);
            if saves {
                prepare(&mut engine);
                engine.save_checkpoint(folder.path()).unwrap();
            } else {
                engine.resume(folder.path()).unwrap();
            }
            trajectory(&mut engine, 0).parameters
        });
        agreed(all, &text)
    };
    [(4, 2), (2, 2), (1, 1)].map(|(ranks, tensor)| {
        let saved = values(ranks, tensor, true);
        for (ranks, tensor) in [(1, 1), (2, 1), (2, 2), (4, 2)] {
            assert!(values(ranks, tensor, false) == saved, "{ranks} ranks, {tensor} parts");
        }
        saved
    })
}

#[test]
fn initial_values_have_the_bits_of_one_rank() {
    for layers in [gpt2, llama, phi3] {
        let of = |ranks: usize| run_of(layers, ranks, 0, &keys(ranks, 1, 1, 3, ""));
        assert_same(&of(1), &of(2), "initial values");
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

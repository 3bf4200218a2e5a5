//! Pipelines are bit-identical to one stage, for every schedule, ZeRO stage and number of replicas.

mod bits;
mod by_time;
mod checkpoints;
mod evaluation;
mod failures;
mod layouts;
mod parameters;
mod recomputation;
mod tensors;
mod tied;
mod ties;
mod traffic;
mod variations;
mod zero_bubble;

use zero_engine::{Layers, zoo};

use crate::world::{agreed, assert_same, engine_of, run_of};

const SCHEDULES: [&str; 4] = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"];

/// Nine layers, which divide evenly only into one or three stages.
fn model(tied: bool) -> Layers {
    gpt2(16, tied)
}

/// The same model with a different width. At width 40, the tied parameter has three blocks of 1,024 elements, so its
/// shards are uneven.
fn gpt2(width: usize, tied: bool) -> Layers {
    zoo::gpt2(&zoo::Gpt2Config {
        vocab_size: 61,
        n_positions: 16,
        n_embd: width,
        n_layer: 6,
        n_head: 2,
        n_inner: Some(24),
        initializer_range: 0.1,
        resid_pdrop: 0.1,
        tie_word_embeddings: tied,
        ..zoo::Gpt2Config::default()
    })
}

/// Two samples per micro-batch.
fn text(zero_stage: u8, micro_batches: usize, pipeline: &str, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\n{more}\n\
         pipeline: {{{pipeline}}}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 20}}"
    )
}

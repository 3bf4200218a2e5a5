//! Sequence parallelism, by heads (`sequence_parallel_size`) or by queries (`mesh.context_parallel_degree`): losses and
//! gradient norms differ from one rank by rounding only, and all layouts with the same slices train bit-identically.
//! Outputs are bit-identical to one rank, except with ring attention, where they differ by rounding.

mod combinations;
mod combined;
mod last_layer;
mod peers;
mod traffic;

use std::collections::BTreeMap;
use std::sync::Mutex;

use candle_core::Tensor;
use zero_engine::{Layers, zoo};
use zero_model::ops::own_slice;

use crate::world::{BF16, FP16, assert_near, assert_same, batch, engine_of, gpt2_config, llama_config, run_of, world};

const STEPS: u64 = 3;

pub(crate) fn gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_head: 4, ..gpt2_config() })
}

pub(crate) fn dropping_gpt2() -> Layers {
    let dropout = zoo::Gpt2Config { embd_pdrop: 0.1, resid_pdrop: 0.1, attn_pdrop: 0.2, ..gpt2_config() };
    zoo::gpt2(&zoo::Gpt2Config { n_head: 4, ..dropout })
}

/// A Llama with grouped queries (four query heads share two key and value heads) and a sliding window.
fn llama() -> Layers {
    zoo::llama(&zoo::LlamaConfig { sliding_window: Some(9), attention_dropout: 0.2, ..llama_config() })
}

/// Six query heads and three key and value heads, which four ranks cannot divide evenly.
fn uneven_llama() -> Layers {
    let heads = zoo::LlamaConfig { hidden_size: 48, num_attention_heads: 6, num_key_value_heads: 3, ..llama_config() };
    zoo::llama(&zoo::LlamaConfig { qk_norm: true, ..heads })
}

fn keys(slices: usize, micro_batch: usize, accumulation: usize, stage: u8, more: &str) -> String {
    format!(
        "sequence_parallel_size: {slices}\ntrain_micro_batch_size_per_gpu: {micro_batch}\n\
         gradient_accumulation_steps: {accumulation}\n{more}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}"
    )
}

/// The ways to share sequences, each as a change of [`keys`].
const KINDS: [fn(String) -> String; 3] = [by_heads, by_queries, by_ring];

fn by_heads(text: String) -> String {
    text
}

fn by_queries(text: String) -> String {
    let (first, rest) = text.split_once('\n').unwrap();
    let size = first.strip_prefix("sequence_parallel_size: ").unwrap();
    match rest.contains("mesh: {") {
        true => rest.replace("mesh: {", &format!("mesh: {{context_parallel_degree: {size}, ")),
        false => format!("mesh: {{context_parallel_degree: {size}}}\n{rest}"),
    }
}

/// By queries, with ring attention.
fn by_ring(text: String) -> String {
    const DEGREE: &str = "context_parallel_degree";
    by_queries(text).replacen(DEGREE, &format!("context_parallel_rotate_method: alltoall, {DEGREE}"), 1)
}

/// Both by heads and by queries, for four slices: the two ranks of a pair exchange heads, and the two pairs exchange
/// keys and values.
fn by_both(text: String) -> String {
    let text = by_queries(text.replacen("sequence_parallel_size: 4", "sequence_parallel_size: 2", 1));
    format!("sequence_parallel_size: 2\n{text}")
}

/// Like [`by_both`], with ring attention between the pairs.
fn by_both_with_ring(text: String) -> String {
    let text = by_ring(text.replacen("sequence_parallel_size: 4", "sequence_parallel_size: 2", 1));
    format!("sequence_parallel_size: 2\n{text}")
}

/// Returns all ways to share sequences among `slices` ranks.
fn kinds(slices: usize) -> Vec<fn(String) -> String> {
    let both = [by_both as fn(String) -> String, by_both_with_ring].into_iter().filter(|_| slices == 4);
    KINDS.into_iter().chain(both).collect()
}

/// Evaluates two micro-batches. Returns their logits, joined from the slices of the ranks.
fn outputs(layers: fn() -> Layers, ranks: usize, slices: usize, text: &str) -> Vec<Vec<f32>> {
    let seen: Mutex<BTreeMap<(usize, usize), Tensor>> = Mutex::default();
    world(ranks, |comm| {
        let place = comm.rank() % slices;
        let mut engine = engine_of(layers(), comm, text);
        engine
            .eval_observed(
                2,
                |index| Ok(batch(index as u64, 3)),
                |observed| {
                    let logits = observed.outputs()?.single()?.to_dtype(candle_core::DType::F32)?;
                    seen.lock().unwrap().insert((observed.micro_batch, place), logits);
                    Ok(())
                },
            )
            .unwrap();
    });
    let seen = seen.into_inner().unwrap();
    let whole = |micro_batch: usize| {
        let parts: Vec<&Tensor> = seen.range((micro_batch, 0)..(micro_batch + 1, 0)).map(|(_, part)| part).collect();
        assert_eq!(parts.len(), slices);
        let has = |key: &str| text.contains(key);
        let whole = match has("context_parallel_degree") {
            false => Tensor::cat(&parts, 1).unwrap(),
            // Each pair of ranks has two chunks, one from each end of the sequence, and each of its ranks has one of
            // them.
            true if has("sequence_parallel_size") => Tensor::cat(&[0, 2, 3, 1].map(|rank| parts[rank]), 1).unwrap(),
            // Each rank has a chunk from each end of the sequence.
            true => {
                let length = parts[0].dim(1).unwrap() / 2;
                let chunk = |part: &Tensor, half: usize| part.narrow(1, half * length, length).unwrap();
                let first = parts.iter().map(|part| chunk(part, 0));
                let second = parts.iter().rev().map(|part| chunk(part, 1));
                Tensor::cat(&first.chain(second).collect::<Vec<_>>(), 1).unwrap()
            }
        };
        whole.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    (0..2).map(whole).collect()
}

/// Asserts that logits are bit-identical or, with ring attention, that they differ by at most a few roundings to the
/// dtype.
fn assert_outputs(found: &[Vec<f32>], expected: &[Vec<f32>], text: &str) {
    let tolerance = match text {
        _ if !text.contains("alltoall") => 0.0,
        _ if text.contains(BF16) => 3e-2,
        _ if text.contains(FP16) => 4e-3,
        _ => 2e-6,
    };
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        let is_near =
            (found - expected).abs() <= tolerance && (tolerance > 0.0 || found.to_bits() == expected.to_bits());
        assert!(is_near, "{found} instead of {expected}: {text}");
    }
}

#[test]
fn outputs_have_the_bits_of_one_rank() {
    for layers in [gpt2, llama, uneven_llama] {
        for more in ["", BF16, FP16] {
            let expected = outputs(layers, 1, 1, &keys(1, 3, 1, 0, more));
            for slices in [2, 4] {
                for kind in kinds(slices) {
                    let text = kind(keys(slices, 3, 1, 0, more));
                    assert_outputs(&outputs(layers, slices, slices, &text), &expected, &text);
                }
            }
        }
        let expected = outputs(layers, 1, 1, &keys(1, 3, 1, 0, ""));
        for kind in KINDS {
            let text = kind(keys(2, 3, 1, 0, "pipeline: {stages: 2}"));
            assert_outputs(&outputs(layers, 4, 2, &text), &expected, &text);
        }
    }
}

/// ZeRO changes where parameters are stored, but not the values with which ranks compute. The first loss is the mean of
/// the slices' mean losses, which are rounded to f32, so it differs from the loss of one rank by at most one unit in
/// the last place.
#[test]
fn the_forward_has_the_bits_of_one_rank_at_every_zero_stage() {
    for layers in [gpt2, llama, uneven_llama] {
        let expected = outputs(layers, 1, 1, &keys(1, 3, 1, 0, ""));
        let first_loss = |ranks: usize, text: &str| run_of(layers, ranks, 1, text).losses[0];
        let of_one_rank = first_loss(1, &keys(1, 3, 1, 0, ""));
        for slices in [2, 4] {
            let of_stage_0 = first_loss(slices, &keys(slices, 3, 1, 0, ""));
            assert!(of_stage_0.abs_diff(of_one_rank) <= 1, "{slices} slices");
            for stage in 0..=3 {
                let text = keys(slices, 3, 1, stage, "");
                assert_outputs(&outputs(layers, slices, slices, &text), &expected, &text);
                assert_eq!(first_loss(slices, &text), of_stage_0, "{text}");
            }
        }
    }
}

#[test]
fn losses_and_norms_differ_from_one_rank_by_rounding() {
    for layers in [gpt2, dropping_gpt2, llama, uneven_llama] {
        for accumulation in [1, 2] {
            let expected = run_of(layers, 1, STEPS, &keys(1, 2, accumulation, 0, ""));
            for slices in [2, 4] {
                for kind in kinds(slices) {
                    let text = kind(keys(slices, 2, accumulation, 0, ""));
                    assert_near(&run_of(layers, slices, STEPS, &text), &expected, 1e-5, &text);
                }
            }
        }
    }
}

#[test]
fn layouts_with_the_same_slices_are_bit_identical() {
    let reproducible = "training: {reproducible: true}";
    for (layers, slices) in [(dropping_gpt2 as fn() -> Layers, 2), (dropping_gpt2, 4), (llama, 2), (llama, 4)] {
        for kind in kinds(slices) {
            let expected = run_of(layers, slices, STEPS, &kind(keys(slices, 1, 4, 2, reproducible)));
            for (replicas, stage, more) in [
                (1, 3, ""),
                (2, 2, ""),
                (2, 3, ""),
                (4, 0, ""),
                (4, 1, ""),
                (4, 3, ""),
                (1, 3, "activation_checkpointing: {}"),
                (2, 2, "mesh: {data_parallel_replicate_degree: 2}"),
                (2, 3, "mesh: {data_parallel_replicate_degree: 2}"),
            ] {
                let text = kind(keys(slices, 1, 4 / replicas, stage, &format!("{reproducible}\n{more}")));
                assert_same(&expected, &run_of(layers, slices * replicas, STEPS, &text), &text);
            }
            for (stage, schedule) in [(2, "1f1b"), (2, "zb_h1"), (3, "1f1b")] {
                let pipeline = format!("{reproducible}\npipeline: {{stages: 2, schedule: {schedule}}}");
                let text = kind(keys(slices, 1, 4, stage, &pipeline));
                assert_same(&expected, &run_of(layers, 2 * slices, STEPS, &text), &text);
            }
        }
    }
}

#[test]
fn inputs_stay_whole_without_sequence_parallelism() {
    let x = Tensor::zeros((2, 4), candle_core::DType::U32, &candle_core::Device::Cpu).unwrap();
    assert_eq!(own_slice(&x).unwrap().dims(), [2, 4]);
}

//! Reductions in 8 and 4 bits match their definition.

use zero_config::{Source, load};
use zero_engine::{Batch, Config, Engine, Layers, zoo};
use zero_optim::BlockCodes;
use zero_partition::Kind;

use super::{GRADIENTS, rounded};
use crate::world::{batch, gpt2_config, world};

/// Returns a configuration without clipping and with β₁ = 0, so that AdamW's first moment after one step is the
/// gradient.
fn moments(text: &str, ranks: usize, ranks_per_host: usize) -> Config {
    let text = format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_allreduce_op: sum\ngradient_clipping: 0.0\n{text}\n\
         optimizer: {{type: AdamW, params: {{lr: 0.01, betas: [0.0, 0.9]}}}}"
    );
    let source = Source { name: "test.yaml".into(), text };
    let config = load(source, &[]).and_then(|typed| typed.on_hosts(ranks_per_host).resolve(Some(ranks)));
    config.unwrap_or_else(|errors| panic!("{errors}"))
}

/// Returns a model whose parameters have several blocks of codes, some of them shorter than a full block.
fn blocks() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { vocab_size: 300, ..gpt2_config() })
}

/// Takes the first step on a batch, and returns the gradients of each parameter.
fn gradients(ranks: usize, text: &str, batch: &Batch) -> Vec<Vec<f32>> {
    gradients_on_hosts(ranks, ranks, text, batch)
}

/// Like `gradients`, with `ranks_per_host` ranks on each host.
fn gradients_on_hosts(ranks: usize, ranks_per_host: usize, text: &str, batch: &Batch) -> Vec<Vec<f32>> {
    let parts = world(ranks, |comm| {
        let mut engine = Engine::with_communicator(moments(text, ranks, ranks_per_host), blocks(), comm).unwrap();
        engine.train_batch(batch).unwrap();
        let held = engine.zero().held_ranges(Kind::State(0)).into_iter();
        let read = |range| (engine.zero().read(Kind::State(0), &range).unwrap(), range);
        let sizes: Vec<usize> = engine.model().parameters().iter().map(|p| p.elements()).collect();
        (sizes, held.map(read).collect::<Vec<_>>())
    });
    let mut all: Vec<Vec<f32>> = parts[0].0.iter().map(|&elements| vec![f32::NAN; elements]).collect();
    for (values, range) in parts.into_iter().flat_map(|(_, read)| read) {
        all[range.parameter][range.elements].copy_from_slice(&values);
    }
    all
}

/// Each near group adds up decoded 8-bit codes. The sums of all near groups are added up as decoded 4-bit codes.
#[test]
fn hierarchical_reductions_use_8_bits_then_4_bits() {
    for (ranks, near) in [(4, 2), (6, 2), (6, 3)] {
        let samples = batch(0, ranks);
        let of_rank = |rank| gradients(1, "zero_optimization: {stage: 2}", &samples.narrow(rank, 1).unwrap());
        let local: Vec<Vec<Vec<f32>>> = (0..ranks).map(of_rank).collect();
        let sum = |parts: Vec<Vec<f32>>| {
            let add = |sum: Vec<f32>, next: Vec<f32>| sum.iter().zip(next).map(|(sum, next)| sum + next).collect();
            parts.into_iter().reduce(add).unwrap()
        };
        let expected: Vec<Vec<f32>> = (0..local[0].len())
            .map(|parameter| {
                let of_group = |group: &[Vec<Vec<f32>>]| {
                    let all = group.iter().map(|gradients| rounded(BlockCodes::Int8, &gradients[parameter]));
                    rounded(BlockCodes::Fp4, &sum(all.collect()))
                };
                sum(local.chunks(near).map(of_group).collect())
            })
            .collect();
        for keys in ["overlap_comm: true", "overlap_comm: false, reduce_bucket_size: 0"] {
            let text = format!("zero_optimization: {{{GRADIENTS}, stage: 3, zero_hpz_partition_size: {near}, {keys}}}");
            assert!(gradients(ranks, &text, &samples) == expected, "{text}, {ranks} ranks");
        }
        // Without secondary shards, each host is a near group.
        for keys in ["stage: 2", "stage: 3"] {
            let text = format!("zero_optimization: {{{GRADIENTS}, {keys}}}");
            let found = gradients_on_hosts(ranks, near, &text, &samples);
            assert!(found == expected, "{text}, {ranks} ranks on hosts of {near}");
        }
    }
}

/// A reduction adds up the codes of all ranks in rank order, so the error is at most half a scale for each rank.
#[test]
fn reductions_add_the_quantized_gradients_of_all_ranks() {
    for ranks in [2, 3, 4] {
        let samples = batch(0, ranks);
        let plain = "zero_optimization: {stage: 2}";
        let of_rank = |rank| gradients(1, plain, &samples.narrow(rank, 1).unwrap());
        let local: Vec<Vec<Vec<f32>>> = (0..ranks).map(of_rank).collect();
        let parameters = local[0].len();
        let expected: Vec<Vec<f32>> = (0..parameters)
            .map(|parameter| {
                let of_ranks = local.iter().map(|gradients| rounded(BlockCodes::Int8, &gradients[parameter]));
                let add = |sum: Vec<f32>, next: Vec<f32>| sum.iter().zip(next).map(|(sum, next)| sum + next).collect();
                of_ranks.reduce(add).unwrap()
            })
            .collect();
        for keys in [
            "stage: 2",
            "stage: 3",
            "stage: 3, stage3_param_persistence_threshold: 0, overlap_comm: false, reduce_bucket_size: 0",
            "stage: 2, overlap_comm: true, reduce_bucket_size: 500000000",
        ] {
            let text = format!("zero_optimization: {{{GRADIENTS}, {keys}}}");
            assert!(gradients(ranks, &text, &samples) == expected, "{text}, {ranks} ranks");
        }
        for (parameter, sum) in expected.iter().enumerate() {
            for (block, values) in sum.chunks(BlockCodes::Int8.block()).enumerate() {
                let of_rank = |gradients: &Vec<Vec<f32>>| -> Vec<f64> {
                    gradients[parameter]
                        .chunks(BlockCodes::Int8.block())
                        .nth(block)
                        .unwrap()
                        .iter()
                        .map(|&x| f64::from(x))
                        .collect()
                };
                let all: Vec<Vec<f64>> = local.iter().map(of_rank).collect();
                let half_a_scale = |values: &Vec<f64>| {
                    values.iter().fold(0.0f64, |max, x| x.abs().max(max)) / 127.0 * (1.0 + 1.0 / 128.0) / 2.0
                };
                let bound: f64 = all.iter().map(half_a_scale).sum();
                for (i, &value) in values.iter().enumerate() {
                    let exact: f64 = all.iter().map(|values| values[i]).sum();
                    // The f32 sums add rounding errors of their own.
                    let error = (f64::from(value) - exact).abs();
                    assert!(error <= bound * 1.000_01, "{parameter}, {block}, {i}: {error:e}, {bound:e}");
                }
            }
        }
    }
}

/// If gradients are added up on each host first, all hosts need the same number of ranks.
#[test]
fn hosts_with_different_numbers_of_ranks_are_refused() {
    let errors = world(4, |comm| {
        let text = format!("zero_optimization: {{stage: 2, {GRADIENTS}}}");
        let per_host = if comm.rank() == 3 { 1 } else { 2 };
        Engine::with_communicator(moments(&text, 4, per_host), blocks(), comm).err().unwrap().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("ranks per host is 2 on rank 0 and 1 on rank 3")), "{errors:?}");
}

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

/// A value for each element of each parameter: its gradient, or the rank that sums its gradient.
type OfParameters<T> = Vec<Vec<T>>;

/// Takes the first step on a batch, and returns the gradients and the ranks that have summed them.
fn gradients(ranks: usize, text: &str, batch: &Batch) -> (OfParameters<f32>, OfParameters<usize>) {
    gradients_on_hosts(ranks, ranks, text, batch)
}

/// Like `gradients`, with `ranks_per_host` ranks on each host.
fn gradients_on_hosts(
    ranks: usize,
    ranks_per_host: usize,
    text: &str,
    batch: &Batch,
) -> (OfParameters<f32>, OfParameters<usize>) {
    let parts = world(ranks, |comm| {
        let mut engine = Engine::with_communicator(moments(text, ranks, ranks_per_host), blocks(), comm).unwrap();
        engine.train_batch(batch).unwrap();
        let held = engine.zero().held_ranges(Kind::State(0)).into_iter();
        let read = |range| (engine.zero().read(Kind::State(0), &range).unwrap(), range);
        let sizes: Vec<usize> = engine.model().parameters().iter().map(|p| p.elements()).collect();
        (sizes, held.map(read).collect::<Vec<_>>())
    });
    let mut all: OfParameters<f32> = parts[0].0.iter().map(|&elements| vec![f32::NAN; elements]).collect();
    let mut owners: OfParameters<usize> = parts[0].0.iter().map(|&elements| vec![0; elements]).collect();
    for (rank, (_, read)) in parts.into_iter().enumerate() {
        for (values, range) in read {
            all[range.parameter][range.elements.clone()].copy_from_slice(&values);
            owners[range.parameter][range.elements].fill(rank);
        }
    }
    (all, owners)
}

/// Returns the gradients of each rank alone, for one sample each.
fn of_each_rank(ranks: usize, samples: &Batch) -> Vec<OfParameters<f32>> {
    let of_rank = |rank| gradients(1, "zero_optimization: {stage: 2}", &samples.narrow(rank, 1).unwrap()).0;
    (0..ranks).map(of_rank).collect()
}

/// Adds the quantized and dequantized values of all other vectors to the vector with index `own`, in the order of
/// `values`.
fn summed(codes: BlockCodes, values: &[&[f32]], own: usize) -> Vec<f32> {
    let mut sum = values[own].to_vec();
    for (_, values) in values.iter().enumerate().filter(|(index, _)| *index != own) {
        sum.iter_mut().zip(rounded(codes, values)).for_each(|(sum, value)| *sum += value);
    }
    sum
}

/// Returns the gradients. Each element is the sum that the element's owner computes. `by_owner` returns the sums that a
/// rank would compute for a whole parameter.
fn of_owners(
    owners: &OfParameters<usize>,
    ranks: usize,
    by_owner: impl Fn(usize, usize) -> Vec<f32>,
) -> OfParameters<f32> {
    let of_parameter = |(parameter, owners): (usize, &Vec<usize>)| {
        let all: Vec<Vec<f32>> = (0..ranks).map(|owner| by_owner(parameter, owner)).collect();
        owners.iter().enumerate().map(|(element, &owner)| all[owner][element]).collect()
    };
    owners.iter().enumerate().map(of_parameter).collect()
}

/// In each near group, one rank adds up dequantized 8-bit codes. The owner adds up the sums of the near groups, which
/// arrive as 4-bit codes. Values that stay on a rank are not rounded. The errors are within their bounds.
#[test]
fn hierarchical_reductions_use_8_bits_then_4_bits() {
    for (ranks, near) in [(4, 2), (6, 2), (6, 3)] {
        let samples = batch(0, ranks);
        let local = of_each_rank(ranks, &samples);
        let by_owner = |parameter: usize, owner: usize| {
            let of_group = |group: &[OfParameters<f32>]| {
                let values: Vec<&[f32]> = group.iter().map(|gradients| &gradients[parameter][..]).collect();
                summed(BlockCodes::Int8, &values, owner % near)
            };
            let sums: Vec<Vec<f32>> = local.chunks(near).map(of_group).collect();
            summed(BlockCodes::Fp4, &sums.iter().map(|sum| &sum[..]).collect::<Vec<_>>(), owner / near)
        };
        for keys in ["overlap_comm: true", "overlap_comm: false, reduce_bucket_size: 0"] {
            let text = format!("zero_optimization: {{{GRADIENTS}, stage: 3, zero_hpz_partition_size: {near}, {keys}}}");
            let (found, owners) = gradients(ranks, &text, &samples);
            assert!(found == of_owners(&owners, ranks, by_owner), "{text}, {ranks} ranks");
        }
        // Without secondary shards, each host is a near group.
        for keys in ["stage: 2", "stage: 3"] {
            let text = format!("zero_optimization: {{{GRADIENTS}, {keys}}}");
            let (found, owners) = gradients_on_hosts(ranks, near, &text, &samples);
            assert!(found == of_owners(&owners, ranks, by_owner), "{text}, {ranks} ranks on hosts of {near}");
            is_within_bounds((&found, &owners), &local, near);
        }
    }
}

/// The owner of a shard adds the codes of all other ranks to its own gradient, in rank order. The errors are within
/// their bounds.
#[test]
fn reductions_add_the_quantized_gradients_of_all_other_ranks() {
    for ranks in [2, 3, 4] {
        let samples = batch(0, ranks);
        let local = of_each_rank(ranks, &samples);
        let by_owner = |parameter: usize, owner: usize| {
            let values: Vec<&[f32]> = local.iter().map(|gradients| &gradients[parameter][..]).collect();
            summed(BlockCodes::Int8, &values, owner)
        };
        let mut sums = vec![];
        for keys in [
            "stage: 2",
            "stage: 3",
            "stage: 3, stage3_param_persistence_threshold: 0, overlap_comm: false, reduce_bucket_size: 0",
            "stage: 2, overlap_comm: true, reduce_bucket_size: 500000000",
        ] {
            let text = format!("zero_optimization: {{{GRADIENTS}, {keys}}}");
            let (found, owners) = gradients(ranks, &text, &samples);
            assert!(found == of_owners(&owners, ranks, by_owner), "{text}, {ranks} ranks");
            sums.push((found, owners));
        }
        let (found, owners) = &sums[0];
        is_within_bounds((found, owners), &local, ranks);
    }
}

/// Checks that each gradient differs from the exact sum of `local`, the gradients of all ranks, by at most the rounding
/// errors of codes and f32 sums. `near` is the number of ranks in a near group.
///
/// Quantizing changes a value by at most half the distance between two neighbouring codes
/// (`optim/src/block_codes/mod.rs`). A scale is the largest absolute value of a block divided by 127 or 12, and rounded
/// up to the 8 bits of bf16, to at most 1 + 2⁻⁷ times the quotient.
/// - In 8 bits, the error of each value is at most half a scale. In each near group, one rank adds the codes of all
///   other ranks to its own values, so the error of the group's sum S is at most the sum of half the scales of those ranks.
/// - In 4 bits, the error is at most half a scale for |S| up to 4 scales, one scale up to 8, and two scales up to 12. The
///   owner adds the codes of S of all other groups to that of its own.
/// - A sum of n terms in f32 adds at most 2⁻²⁴ of the sum of absolute values n times.
///
/// The bounds follow from `local` alone: |S| differs from the exact sum by at most the error of the 8-bit level.
fn is_within_bounds(
    (found, owners): (&OfParameters<f32>, &OfParameters<usize>),
    local: &[OfParameters<f32>],
    near: usize,
) {
    const ROUNDED_UP: f64 = 1.0 + 1.0 / 128.0;
    let mut closest = 0.0f64;
    for (parameter, found) in found.iter().enumerate() {
        let values = |gradients: &OfParameters<f32>| gradients[parameter].iter().map(|&x| f64::from(x)).collect();
        let exact: Vec<Vec<f64>> = local.iter().map(values).collect();
        let half_a_scale = |values: &[f64]| values.iter().fold(0.0, |most, x| x.abs().max(most)) / 127.0 / 2.0;
        let of_blocks = |values: &Vec<f64>| -> Vec<f64> {
            values.chunks(BlockCodes::Int8.block()).map(|block| half_a_scale(block) * ROUNDED_UP).collect()
        };
        let in_8_bits: Vec<Vec<f64>> = exact.iter().map(of_blocks).collect();
        for start in (0..found.len()).step_by(BlockCodes::Fp4.block()) {
            let (block, owner) = (start..found.len().min(start + BlockCodes::Fp4.block()), owners[parameter][start]);
            // For each near group, the largest possible error of its sums, and these sums without errors.
            let of_group = |group: usize| -> (f64, Vec<f64>) {
                let ranks = group * near..(group + 1) * near;
                let others = ranks.clone().filter(|rank| rank % near != owner % near);
                let error = others.map(|rank| in_8_bits[rank][start / BlockCodes::Int8.block()]).sum();
                (error, block.clone().map(|i| ranks.clone().map(|rank| exact[rank][i]).sum()).collect())
            };
            let groups: Vec<(f64, Vec<f64>)> = (0..local.len() / near).map(of_group).collect();
            for i in block.clone() {
                let of_fp4 = |(error, sums): &(f64, Vec<f64>)| {
                    let most = sums.iter().fold(0.0, |most, x| x.abs().max(most));
                    let (least, scale) = ((most - error) / 12.0, (most + error) / 12.0 * ROUNDED_UP);
                    let scales = (sums[i - start].abs() + error) / least;
                    scale
                        * if scales <= 4.0 {
                            0.5
                        } else if scales <= 8.0 {
                            1.0
                        } else {
                            2.0
                        }
                };
                let others = groups.iter().enumerate().filter(|(group, _)| *group != owner / near);
                let of_codes = groups.iter().map(|(error, _)| error).sum::<f64>()
                    + others.map(|(_, group)| of_fp4(group)).sum::<f64>();
                let absolute: f64 = exact.iter().map(|values| values[i].abs()).sum();
                let of_f32 = local.len() as f64 * 2f64.powi(-24) * (absolute + of_codes);
                let sum: f64 = exact.iter().map(|values| values[i]).sum();
                let (error, bound) = ((f64::from(found[i]) - sum).abs(), of_codes + of_f32);
                assert!(error <= bound, "{parameter}, {i}: {error:e}, {bound:e}");
                closest = closest.max(if bound > 0.0 { error / bound } else { 0.0 });
            }
        }
    }
    // Some errors are close to their bounds.
    assert!(closest > 0.9, "{closest}");
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

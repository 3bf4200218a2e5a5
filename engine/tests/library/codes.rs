//! Collectives in 8 and 4 bits (qwZ and qgZ of ZeRO++): equal to their definition, deterministic, resumable, near the exact
//! run, and with the bytes of the closed form.

use candle_core::{Device, Tensor};
use zero_config::{Source, load};
use zero_engine::pipeline::Instruction;
use zero_engine::{Batch, Config, Engine, Error, Layers, zoo};
use zero_optim::BlockCodes;
use zero_partition::{Kind, Payload, expected_payload};

use crate::bytes::all_reduced;
use crate::on_disk::offloaded;
use crate::world::{
    BF16, FP16, Trajectory, agreed, assert_same, batch, config, engine, gpt2_config, reproducible, run, run_of,
    trajectory, world,
};

const WEIGHTS: &str = "zero_quantized_weights: true";
const GRADIENTS: &str = "zero_quantized_gradients: true";
const BOTH: &str = "zero_quantized_weights: true, zero_quantized_gradients: true";
const STEPS: u64 = 5;

/// Adds keys to `zero_optimization`.
fn with(text: &str, keys: &str) -> String {
    assert!(text.contains("zero_optimization: {"), "{text}");
    text.replace("zero_optimization: {", &format!("zero_optimization: {{{keys}, "))
}

/// Rounds the values of a parameter to codes.
fn rounded(codes: BlockCodes, values: &[f32]) -> Vec<f32> {
    let (mut bytes, mut back) = (vec![0; codes.bytes(values.len())], vec![0.0; values.len()]);
    codes.quantize(values, &mut bytes).unwrap();
    codes.dequantize(&bytes, &mut back).unwrap();
    back
}

/// The weights that layers read are the codes of the exact ones: the same loss and norm as with a model of such weights.
#[test]
fn layers_read_the_codes_of_the_weights() {
    let plain = reproducible(3, 2, "").replace("threshold: 40", "threshold: 0");
    let text = with(&plain, WEIGHTS);
    let found = world(2, |comm| {
        let (coded, mut exact) = (engine(comm.clone(), &text), engine(comm, &plain));
        let mut coded = coded;
        let names: Vec<String> = exact.model().parameters().iter().map(|p| p.name().to_string()).collect();
        for name in &names {
            let values = coded.full_parameter(name).unwrap();
            assert_eq!(values, exact.full_parameter(name).unwrap(), "{name}: a checkpoint has the exact weights");
            exact.set_parameter(name, &rounded(BlockCodes::Int8, &values)).unwrap();
        }
        let [a, b] = [&mut coded, &mut exact].map(|engine| {
            let evaluated = engine.eval_batch(&batch(7, 4)).unwrap();
            let step = engine.train_batch(&batch(0, 4)).unwrap();
            (evaluated.to_bits(), step.loss.to_bits(), step.grad_norm.to_bits())
        });
        assert_eq!(a, b);
        a
    });
    assert!(found[0] == found[1] && found[0].1 != run(2, 1, &plain).losses[0]);
}

/// Codes of weights do not depend on the layout, so neither does a reproducible run.
#[test]
fn gathers_of_codes_are_equal_in_every_layout() {
    for more in ["", BF16, FP16, "adapter: {r: 8}"] {
        let text = |ranks, more: &str| with(&reproducible(3, ranks, more), WEIGHTS);
        let expected = run(1, STEPS, &text(1, more));
        let exact = run(1, STEPS, &reproducible(3, 1, more));
        assert!(expected.losses != exact.losses && expected.losses[0] != expected.losses[4], "{more}");
        for ranks in [2, 4] {
            assert_same(&expected, &run(ranks, STEPS, &text(ranks, more)), &text(ranks, more));
        }
        let groups = text(4, &format!("mesh: {{data_parallel_replicate_degree: 2}}\n{more}"));
        assert_same(&expected, &run(4, STEPS, &groups), &groups);
        let stages = text(2, &format!("pipeline: {{stages: 2}}\n{more}"));
        assert_same(&expected, &run(4, STEPS, &stages), &stages);
        let near = with(&text(4, more), "zero_hpz_partition_size: 2, stage3_max_reuse_distance: 0");
        assert_same(&expected, &run(4, STEPS, &near), &near);
        for keys in ["overlap_comm: false", "stage3_max_reuse_distance: 0", "stage3_prefetch_bucket_size: 0"] {
            let text = with(&text(2, more), keys);
            assert_same(&expected, &run(2, STEPS, &text), &text);
        }
    }
}

#[test]
fn parameters_on_a_disk_are_gathered_as_codes() {
    let folder = tempfile::tempdir().unwrap();
    let layers = || zoo::gpt2(&zoo::Gpt2Config { n_embd: 48, n_layer: 3, ..gpt2_config() });
    for more in ["", BF16] {
        let expected = run_of(layers, 1, STEPS, &with(&reproducible(3, 1, more), WEIGHTS));
        for ranks in [1, 2] {
            let text = with(&offloaded(&reproducible(3, ranks, more), folder.path()), WEIGHTS);
            assert_same(&expected, &run_of(layers, ranks, STEPS, &text), &text);
        }
    }
}

/// Frozen weights alone: the trained ones, such as those of an adapter, are gathered as they are.
#[test]
fn frozen_weights_are_gathered_as_codes() {
    const FROZEN: &str = "zero_quantized_nontrainable_weights: true";
    let text = |more: &str, keys| with(&reproducible(3, 2, more), keys);
    let adapter = "adapter: {r: 8}";
    let [frozen, all] = [FROZEN, WEIGHTS].map(|keys| run(2, STEPS, &text(adapter, keys)));
    assert!(frozen.losses != all.losses && frozen.losses != run(2, STEPS, &reproducible(3, 2, adapter)).losses);
    // Without frozen weights, the key has no effect.
    assert_same(&run(2, STEPS, &reproducible(3, 2, "")), &run(2, STEPS, &text("", FROZEN)), FROZEN);
    // Weights that are stored in 8 or 4 bits are sent as they are.
    let stored = "adapter: {r: 8}\nquantization_config: {load_in_8bit: true}";
    let on_one = with(&reproducible(3, 1, stored), FROZEN);
    assert_same(&run(1, STEPS, &on_one), &run(2, STEPS, &text(stored, FROZEN)), stored);
}

/// Keys without clipping, with which the first moment of AdamW after the first step is the gradient.
fn moments(text: &str, ranks: usize, ranks_per_host: usize) -> Config {
    let text = format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_allreduce_op: sum\ngradient_clipping: 0.0\n{text}\n\
         optimizer: {{type: AdamW, params: {{lr: 0.01, betas: [0.0, 0.9]}}}}"
    );
    let source = Source { name: "test.yaml".into(), text };
    let config = load(source, &[]).and_then(|typed| typed.on_hosts(ranks_per_host).resolve(Some(ranks)));
    config.unwrap_or_else(|errors| panic!("{errors}"))
}

/// Several blocks, of which some are shorter.
fn blocks() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { vocab_size: 300, ..gpt2_config() })
}

/// Takes the first step on a batch, and returns the gradients of each parameter.
fn gradients(ranks: usize, text: &str, batch: &Batch) -> Vec<Vec<f32>> {
    gradients_on_hosts(ranks, ranks, text, batch)
}

/// The same on hosts of a number of ranks.
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

/// With near groups, each of them adds up codes of 8 bits, and the sums are added up as codes of 4 bits.
#[test]
fn reductions_between_near_groups_add_codes_of_their_sums() {
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
        // Without secondary shards, hosts are near groups.
        for keys in ["stage: 2", "stage: 3"] {
            let text = format!("zero_optimization: {{{GRADIENTS}, {keys}}}");
            let found = gradients_on_hosts(ranks, near, &text, &samples);
            assert!(found == expected, "{text}, {ranks} ranks on hosts of {near}");
        }
    }
}

/// A reduction adds the codes of the gradients of all ranks in their order, so the error is at most half a scale of each rank.
#[test]
fn reductions_add_the_codes_of_all_ranks() {
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
                    // Sums in f32 round too.
                    let error = (f64::from(value) - exact).abs();
                    assert!(error <= bound * 1.000_01, "{parameter}, {block}, {i}: {error:e}, {bound:e}");
                }
            }
        }
    }
}

fn text(stage: u8, keys: &str, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: 2\n{more}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40, {keys}}}"
    )
}

#[test]
fn runs_are_deterministic_and_all_ranks_agree() {
    for (ranks, stage, keys, more) in [
        (2, 2, GRADIENTS, ""),
        (3, 3, BOTH, ""),
        (2, 3, BOTH, BF16),
        (2, 3, BOTH, FP16),
        (4, 2, GRADIENTS, "mesh: {data_parallel_replicate_degree: 2}"),
        (4, 3, BOTH, "mesh: {data_parallel_replicate_degree: 2}\nbf16: {enabled: true}"),
        (4, 3, BOTH, "pipeline: {stages: 2, schedule: zb_h1}"),
        (4, 3, "zero_quantized_gradients: true, zero_hpz_partition_size: 2", ""),
        (
            8,
            3,
            "zero_quantized_gradients: true, zero_hpz_partition_size: 2",
            "mesh: {data_parallel_replicate_degree: 2}",
        ),
        (2, 2, GRADIENTS, "data_types: {grad_accum_dtype: bf16}\nbf16: {enabled: true}"),
    ] {
        let text = text(stage, keys, more);
        let once = run(ranks, STEPS, &text);
        assert!(once.losses[0] != once.losses[4], "{text}");
        assert_same(&once, &run(ranks, STEPS, &text), &text);
        // The order in which collectives end changes nothing.
        for others in ["overlap_comm: false", "overlap_comm: true", "reduce_bucket_size: 0"] {
            assert_same(&once, &run(ranks, STEPS, &with(&text, others)), others);
        }
    }
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    for (ranks, more) in [(2, ""), (4, "mesh: {data_parallel_replicate_degree: 2}"), (2, BF16)] {
        let (text, folder) = (text(3, BOTH, more), tempfile::tempdir().unwrap());
        let whole = run(ranks, 6, &text);
        world(ranks, |comm| {
            let mut engine = engine(comm, &text);
            trajectory(&mut engine, 3);
            engine.save_checkpoint(folder.path()).unwrap();
        });
        let rest = world(ranks, |comm| -> Trajectory {
            let mut engine = engine(comm, &text);
            engine.resume(folder.path()).unwrap();
            trajectory(&mut engine, 3)
        });
        let rest = agreed(rest, &text);
        assert_eq!((&rest.losses[..], &rest.norms[..]), (&whole.losses[3..], &whole.norms[3..]), "{text}");
        assert!(rest.parameters == whole.parameters, "{text}");
    }
}

/// A gradient that overflows stays visible in its codes, so that the step is skipped.
#[test]
fn an_overflow_skips_the_step() {
    let text = text(2, GRADIENTS, "fp16: {enabled: true, initial_scale_power: 30, hysteresis: 1}");
    let skipped = world(2, |comm| {
        let mut engine = engine(comm, &text);
        (0..12).map(|step| engine.train_batch(&batch(step, 4)).unwrap().skipped).collect::<Vec<_>>()
    });
    assert!(skipped[0] == skipped[1] && skipped[0][0] && !skipped[0][11], "{skipped:?}");
}

/// The mean loss of the last steps of a run of 500 is that of the exact run within 0.5 %.
#[test]
fn losses_are_near_those_of_the_exact_run() {
    const OF_A_RUN: u64 = 500;
    const LAST: usize = 50;
    let loss = |ranks: usize, keys: &str| -> f64 {
        let text = format!(
            "train_batch_size: 4\nscheduler: {{type: WarmupLR, params: {{warmup_num_steps: 20, warmup_max_lr: 0.002}}}}\n\
             zero_optimization: {{stage: 3, stage3_param_persistence_threshold: 40, {keys}}}"
        );
        let all = world(ranks, |comm| {
            let mut engine = Engine::with_communicator(config(ranks, &text), zoo::gpt2(&gpt2_config()), comm).unwrap();
            (0..OF_A_RUN).map(|step| engine.train_batch(&noisy(step, 4)).unwrap().loss).collect::<Vec<f32>>()
        });
        let losses = agreed(all, &text);
        losses[losses.len() - LAST..].iter().map(|&loss| f64::from(loss)).sum::<f64>() / LAST as f64
    };
    let exact = loss(2, "overlap_comm: true");
    for keys in [WEIGHTS, GRADIENTS, BOTH] {
        let found = loss(2, keys);
        eprintln!("{keys}: {found}, exact {exact}");
        assert!((found / exact - 1.0).abs() <= 0.005, "{keys}: {found}, exact {exact}");
    }
    // In 4 bits, many of the elements of these gradients become zero.
    let near = format!("{BOTH}, zero_hpz_partition_size: 2");
    let found = loss(4, &near);
    eprintln!("{near}: {found}, exact {exact}");
    assert!((found / exact - 1.0).abs() <= 0.02, "{near}: {found}, exact {exact}");
}

/// Tokens of which every third is random, so that the loss stays above zero.
fn noisy(step: u64, samples: usize) -> Batch {
    let token = |i: usize| {
        let random = (step * 1_000_003 + i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        if i.is_multiple_of(3) { (random % 61) as u32 } else { ((i / 3 * 7 + i) % 61) as u32 }
    };
    let row = 16;
    let tensor = |first: usize| {
        let tokens = (first..first + samples * row).map(token).collect();
        Tensor::from_vec(tokens, (samples, row), &Device::Cpu).unwrap()
    };
    Batch::new(tensor(0), tensor(1))
}

/// Near groups of k of n ranks, with R shard groups: a gather of Ψ elements sends their codes in 8 bits to each other rank of
/// its shard group. A reduction sends codes in 8 bits of all Ψ elements to each other rank of the near group, and codes in 4
/// bits to each other near group. Between hosts of k ranks, if each host sends what several ranks need only once, that is
/// 0.75Ψ(n − k)/n values of 16 bits.
#[test]
fn bytes_sent_match_the_closed_form() {
    const MICRO_BATCHES: usize = 2;
    for (replicates, shards, near) in [(1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 4, 2), (1, 6, 2), (1, 6, 3), (2, 4, 2)] {
        for (stage, keys) in [(3u8, WEIGHTS), (3, BOTH), (2, GRADIENTS)].into_iter().filter(|of| near == 1 || of.0 == 3)
        {
            let ranks = replicates * shards;
            let text = format!(
                "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {MICRO_BATCHES}\n{BF16}\n\
                 mesh: {{data_parallel_replicate_degree: {replicates}}}\n\
                 zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0, \
                 stage3_max_reuse_distance: 0, zero_hpz_partition_size: {near}, {keys}}}"
            );
            let measured = world(ranks, |comm| {
                let rank = comm.rank();
                let layers =
                    zoo::gpt2(&zoo::Gpt2Config { vocab_size: 64, n_embd: 256, n_inner: None, ..gpt2_config() });
                let mut engine = Engine::with_communicator(config(ranks, &text), layers, comm).unwrap();
                let sent = engine.train_batch(&batch(0, ranks * MICRO_BATCHES)).unwrap().sent_bytes;
                let (zero, groups) = (engine.zero(), engine.zero().groups());
                let place = (groups.mesh(), groups.at());
                let options = &engine.settings().zero;
                let payload = expected_payload(engine.program(), zero.layout(), place, 2, options, |_| 0);
                let [norm, losses] =
                    [zero_optim::exact_sum::LIMBS, MICRO_BATCHES].map(|elements| all_reduced(elements, ranks, rank));
                assert_eq!(sent, payload.total() + (8 * norm + 4 * losses) as u64, "{text}, rank {rank}");
                let segments = zero.layout().segments();
                let bytes = |codes: BlockCodes, segment: usize| -> usize {
                    segments[segment].pieces.iter().map(|piece| codes.bytes(piece.range.len())).sum()
                };
                let elements = |ids: &[usize]| ids.iter().map(|&id| segments[id].elements()).sum::<usize>();
                let [mut gathered, mut of_codes, mut again, mut refreshed] = [0; 4];
                for instruction in &engine.program().instructions {
                    match instruction {
                        Instruction::Gather { segments: ids } => {
                            gathered += elements(ids);
                            of_codes += ids.iter().map(|&id| bytes(BlockCodes::Int8, id)).sum::<usize>();
                        }
                        Instruction::GatherSecondary { segments: ids } => again += elements(ids),
                        Instruction::Refresh { segments: ids } => refreshed += elements(ids),
                        _ => {}
                    }
                }
                let reduced = |codes| (0..segments.len()).map(|segment| bytes(codes, segment)).sum::<usize>();
                let reduced = [BlockCodes::Int8, BlockCodes::Fp4].map(reduced);
                (zero.layout().elements(), payload, [gathered, of_codes, again, refreshed], reduced)
            });
            let (elements, _, [gathered, of_codes, again, refreshed], [in_8_bits, in_4_bits]) = measured[0];
            let (r, n, m) = (replicates, shards, MICRO_BATCHES);
            let k = if near > 1 { near } else { n };
            // Values of 16 bits are scattered to their owners at once.
            let (scatters, gathers) = (keys == WEIGHTS, if keys == GRADIENTS { 2 * refreshed } else { of_codes });
            let (reduced, between) = match scatters {
                true => ((k - 1) * 2 * elements, (n - k) * 2 * elements),
                false => (n / k * (k - 1) * in_8_bits, (n / k - 1) * in_4_bits),
            };
            let within = r * ((k - 1) * gathers + m * reduced + n / k * (k - 1) * again * 2);
            // Replicates sum the shards of all micro-batches at once.
            let replicated = 2 * (r - 1) * 2 * elements;
            let across = r * ((n - k) * gathers + m * between) + replicated;
            let sum = |of: fn(&Payload) -> u64| measured.iter().map(|(_, payload, ..)| of(payload)).sum::<u64>();
            assert_eq!(sum(|payload| payload.within), within as u64, "{text}");
            assert_eq!(sum(|payload| payload.across), across as u64, "{text}");
            if near > 1 && !scatters {
                assert_eq!(gathered, elements, "{text}");
                let of_hosts = (n / k - 1) * (of_codes + in_4_bits);
                let formula = 0.75 * 2.0 * elements as f64 * (n / k - 1) as f64;
                assert!((of_hosts as f64 / formula - 1.0).abs() <= 0.01, "{of_hosts} {formula}: {text}");
            }
            // Scales add less than 1 %.
            assert!(of_codes >= gathered && of_codes as f64 <= 1.01 * gathered as f64, "{text}");
        }
    }
}

/// Where gradients are added up on each host first, all hosts need the same number of ranks.
#[test]
fn hosts_with_different_numbers_of_ranks_are_refused() {
    let errors = world(4, |comm| {
        let text = format!("zero_optimization: {{stage: 2, {GRADIENTS}}}");
        let per_host = if comm.rank() == 3 { 1 } else { 2 };
        Engine::with_communicator(moments(&text, 4, per_host), blocks(), comm).err().unwrap().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("ranks per host is 2 on rank 0 and 1 on rank 3")), "{errors:?}");
}

/// A rank that leaves during a step is named with the collective in which the others wait for it.
#[test]
fn a_lost_rank_is_named_with_the_collective() {
    for (stage, keys, operation) in [(2, GRADIENTS, "all_to_all"), (3, BOTH, "all_to_all")] {
        let text = text(stage, keys, "");
        let errors = world(2, |comm| {
            let rank = comm.rank();
            let mut engine = engine(comm, &text);
            let mut micro_batch = 0;
            let step = engine.train_with(|_| {
                micro_batch += 1;
                match (rank, micro_batch) {
                    (1, 2) => Err(Error::Batch("the rank leaves".to_string())),
                    _ => Ok(batch(0, 1)),
                }
            });
            step.expect_err("a rank is lost").to_string()
        });
        assert!(errors[0].contains("rank 1") && errors[0].contains(operation), "{errors:?}");
    }
}

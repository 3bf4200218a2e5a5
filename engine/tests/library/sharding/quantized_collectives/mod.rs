//! Collectives in 8 and 4 bits (qwZ and qgZ of ZeRO++): gathers match their definition, and runs are deterministic,
//! resumable and near the exact run.

mod reductions;
mod traffic;

use candle_core::{Device, Tensor};
use zero_engine::{Batch, Error, Layers, zoo};
use zero_optim::BlockCodes;

use crate::sharding::on_disk::offloaded;
use crate::world::{
    BF16, FP16, agreed, assert_same, batch, engine, engine_of, gpt2_config, reproducible, resume, run, run_of, save,
    world,
};

const WEIGHTS: &str = "zero_quantized_weights: true";
const GRADIENTS: &str = "zero_quantized_gradients: true";
const BOTH: &str = "zero_quantized_weights: true, zero_quantized_gradients: true";
/// Keys of `zero_optimization` for an adapter on a frozen base model.
const FROZEN_BASE: &str =
    "zero_quantized_nontrainable_weights: true, zero_quantized_gradients: true, zero_hpz_partition_size: 2";
const STEPS: u64 = 5;

/// Adds keys to `zero_optimization`.
fn with(text: &str, keys: &str) -> String {
    assert!(text.contains("zero_optimization: {"), "{text}");
    text.replace("zero_optimization: {", &format!("zero_optimization: {{{keys}, "))
}

/// Quantizes the values of a parameter and dequantizes them again.
fn rounded(codes: BlockCodes, values: &[f32]) -> Vec<f32> {
    let (mut bytes, mut back) = (vec![0; codes.bytes(values.len())], vec![0.0; values.len()]);
    codes.quantize(values, &mut bytes).unwrap();
    codes.dequantize(&bytes, &mut back).unwrap();
    back
}

/// Layers compute with the dequantized weights: loss and norm equal those of a model whose weights have these values.
#[test]
fn layers_compute_with_the_dequantized_weights() {
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

/// The codes of weights do not depend on the layout, so a reproducible run is bit-identical in every layout.
#[test]
fn quantized_gathers_are_bit_identical_in_every_layout() {
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

/// A model whose layers have a few thousand elements, enough to fill pages of a disk.
fn layers() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_embd: 48, n_layer: 3, ..gpt2_config() })
}

#[test]
fn parameters_on_disk_are_gathered_quantized() {
    let folder = tempfile::tempdir().unwrap();
    for more in ["", BF16] {
        let expected = run_of(layers, 1, STEPS, &with(&reproducible(3, 1, more), WEIGHTS));
        for ranks in [1, 2] {
            let text = with(&offloaded(&reproducible(3, ranks, more), folder.path()), WEIGHTS);
            assert_same(&expected, &run_of(layers, ranks, STEPS, &text), &text);
        }
    }
}

/// Only frozen weights are gathered as codes. Trained weights, such as those of an adapter, are gathered exactly.
#[test]
fn frozen_weights_are_gathered_quantized() {
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
        (2, 3, BOTH, "adapter: {r: 8}"),
        (4, 3, FROZEN_BASE, "adapter: {r: 8}\nbf16: {enabled: true}"),
    ] {
        let text = text(stage, keys, more);
        let once = run(ranks, STEPS, &text);
        assert!(once.losses[0] != once.losses[4], "{text}");
        assert_same(&once, &run(ranks, STEPS, &text), &text);
        // The order in which collectives finish does not change the bits.
        for others in ["overlap_comm: false", "overlap_comm: true", "reduce_bucket_size: 0"] {
            assert_same(&once, &run(ranks, STEPS, &with(&text, others)), others);
        }
    }
}

/// Codes have the same bits wherever a run keeps its state. With several shard groups, this holds only for one
/// micro-batch per step. With more, gradients on a disk are summed over the groups in each micro-batch, but gradients
/// in memory only once per step.
#[test]
fn offloaded_state_is_bit_identical() {
    let folder = tempfile::tempdir().unwrap();
    const GROUPS: &str = "mesh: {data_parallel_replicate_degree: 2}";
    for (ranks, micro_batches, more) in [(2, 2, ""), (3, 2, BF16), (2, 2, "adapter: {r: 8}"), (4, 1, GROUPS)] {
        let micro_batches = format!("gradient_accumulation_steps: {micro_batches}");
        let text = text(3, BOTH, more).replace("gradient_accumulation_steps: 2", &micro_batches);
        let expected = run_of(layers, ranks, STEPS, &text);
        let on_host = with(&text, "offload_optimizer: {device: cpu}, offload_param: {device: cpu}");
        for offloaded in [on_host, offloaded(&text, folder.path())] {
            assert_same(&expected, &run_of(layers, ranks, STEPS, &offloaded), &offloaded);
        }
    }
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let disk = tempfile::tempdir().unwrap();
    for (ranks, text) in [
        (2, text(3, BOTH, "")),
        (4, text(3, BOTH, "mesh: {data_parallel_replicate_degree: 2}")),
        (2, text(3, BOTH, BF16)),
        (2, text(3, BOTH, "adapter: {r: 8}")),
        (4, text(3, FROZEN_BASE, "adapter: {r: 8}")),
        (2, offloaded(&text(3, BOTH, ""), disk.path())),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let whole = run_of(layers, ranks, 6, &text);
        save((ranks, 3), folder.path(), |comm| engine_of(layers(), comm, &text));
        let rest = resume((ranks, 3), folder.path(), |comm| engine_of(layers(), comm, &text));
        assert_same(&whole.after(3), &rest, &text);
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

/// The loss of the last 50 of 500 steps stays close to that of the exact run. With codes of 4 bits, it varies from seed
/// to seed, so only its mean over at least 8 seeds must be within 0.5 %. `ZERO_TRAIN_SEEDS` sets the number of seeds.
#[test]
fn losses_stay_close_to_those_without_quantization() {
    const OF_A_RUN: u64 = 500;
    const LAST: usize = 50;
    let seeds = std::env::var("ZERO_TRAIN_SEEDS").map_or(1, |seeds| seeds.parse::<u64>().unwrap());
    let loss = |ranks: usize, keys: &str, seed: u64| -> f64 {
        let text = format!(
            "train_batch_size: 4\ntraining: {{seed: {seed}}}\n\
             scheduler: {{type: WarmupLR, params: {{warmup_num_steps: 20, warmup_max_lr: 0.002}}}}\n\
             zero_optimization: {{stage: 3, stage3_param_persistence_threshold: 40, {keys}}}"
        );
        let all = world(ranks, |comm| {
            let mut engine = engine_of(zoo::gpt2(&gpt2_config()), comm, &text);
            let step = |step| engine.train_batch(&noisy(seed * OF_A_RUN + step, 4)).unwrap().loss;
            (0..OF_A_RUN).map(step).collect::<Vec<f32>>()
        });
        let losses = agreed(all, &text);
        losses[losses.len() - LAST..].iter().map(|&loss| f64::from(loss)).sum::<f64>() / LAST as f64
    };
    let exact: Vec<f64> = (0..seeds).map(|seed| loss(2, "overlap_comm: true", seed)).collect();
    let near = format!("{BOTH}, zero_hpz_partition_size: 2");
    let of_few = if seeds < 8 { 0.015 } else { 0.005 };
    for (ranks, keys, bound) in [(2, WEIGHTS, 0.005), (2, GRADIENTS, 0.005), (2, BOTH, 0.005), (4, &near, of_few)] {
        let difference = |(seed, exact): (u64, &f64)| loss(ranks, keys, seed) / exact - 1.0;
        let all: Vec<f64> = (0..seeds).zip(&exact).map(difference).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let deviation =
            (all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (all.len() as f64 - 1.0).max(1.0)).sqrt();
        eprintln!("{keys}: {:+.3} % of {seeds} seeds, standard deviation {:.3} %", 100.0 * mean, 100.0 * deviation);
        assert!(mean.abs() <= bound, "{keys}: {all:?}");
    }
}

/// Returns tokens of which every third is random, so that the loss stays above zero.
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

/// If a rank leaves during a step, the error names it and the collective in which the others wait for it.
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

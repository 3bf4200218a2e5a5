//! The gradient noise scale: the estimates match the formula on gradients of single micro-batches, at every layout.

use zero_engine::{Batch, Config, Engine, GradientNoise, zoo};

use crate::world::{agreed, batch, gpt2_config, world};

fn engine(comm: std::sync::Arc<dyn zero_engine::comm::Communicator>, text: &str) -> Engine {
    let config = Config::with_world_size("test.yaml", text, comm.size()).unwrap_or_else(|error| panic!("{error}"));
    Engine::with_communicator(config, zoo::gpt2(&gpt2_config()), comm).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Returns the gradient norm of a step on a batch of `samples` samples.
fn norm(batch: &Batch, samples: usize) -> f64 {
    let text = format!("train_batch_size: {samples}\ngradient_clipping: 0");
    world(1, |comm| engine(comm, &text).train_batch(batch).unwrap().grad_norm).remove(0)
}

#[test]
fn noise_scale_estimates_match_the_formula() {
    let all = batch(3, 8);
    let squared_small = (0..4).map(|index| norm(&all.narrow(2 * index, 2).unwrap(), 2).powi(2)).sum::<f64>() / 4.0;
    let expected = GradientNoise::estimate((2.0, squared_small), (8.0, norm(&all, 8).powi(2)));
    assert!(expected.noise > 0.0, "{expected:?}");
    for (ranks, replicas, stage, more) in [
        (1, 1, 0, ""),
        (1, 1, 2, ""),
        (2, 2, 0, ""),
        (4, 4, 1, "gradient_allreduce_op: sum"),
        (2, 2, 3, ""),
        (4, 2, 1, "pipeline: {stages: 2}"),
        (2, 2, 2, "activation_checkpointing: {}"),
        (2, 2, 1, "fp16: {enabled: true, initial_scale_power: 8}"),
    ] {
        let text = format!(
            "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {}\ngradient_clipping: 0.5\n{more}\n\
             training: {{gradient_noise_scale: {{}}}}\nzero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}",
            4 / replicas
        );
        let noise = world(ranks, |comm| engine(comm, &text).train_batch(&all).unwrap().noise);
        let noise = agreed(noise, &text).expect("an estimate");
        let bound = if more.starts_with("fp16") { 0.05 } else { 1e-4 };
        let apart = |found: f64, expected: f64| (found - expected).abs() / squared_small;
        assert!(apart(noise.signal, expected.signal) < bound, "{text}: {noise:?}, {expected:?}");
        assert!(apart(noise.noise, expected.noise) < 8.0 * bound, "{text}: {noise:?}, {expected:?}");
    }
    let unmeasured = world(1, |comm| engine(comm, "train_batch_size: 8").train_batch(&all).unwrap().noise);
    assert_eq!(unmeasured, [None]);
}

/// For gradients that are a constant plus independent noise, the estimates are unbiased.
#[test]
fn the_noise_scale_formula_is_unbiased() {
    let (signal, deviation, dimensions) = (0.5_f64, 2.0_f64, 10);
    // |G|² is 10 · 0.25, and tr Σ is 10 · 4.
    let expected = |samples: f64| f64::from(dimensions) * (signal.powi(2) + deviation.powi(2) / samples);
    let of = GradientNoise::estimate((4.0, expected(4.0)), (64.0, expected(64.0)));
    assert!((of.signal - 2.5).abs() < 1e-12 && (of.noise - 40.0).abs() < 1e-12, "{of:?}");
}

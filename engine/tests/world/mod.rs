//! Ranks as threads, and small models, shared by the engine's tests.
#![allow(dead_code, unreachable_pub)] // each test file uses a part

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use zero_engine::comm::{Communicator, Options, threads};
use zero_engine::{Batch, Config, Engine, Layers, Step, zoo};

pub const BF16: &str = "bf16: {enabled: true}";
/// With the small models of these tests, the first steps overflow in f16, and later steps do not.
pub const FP16: &str = "fp16: {enabled: true, initial_scale_power: 22, hysteresis: 1}";

/// Runs `rank` on every rank of a world of threads.
pub fn world<T: Send>(ranks: usize, rank: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let started: Vec<_> =
            threads(ranks, &Options::default()).into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
        started.into_iter().map(|handle| handle.join().expect("a rank panicked")).collect()
    })
}

/// The small model's configuration, without dropout.
pub fn gpt2_config() -> zoo::Gpt2Config {
    zoo::Gpt2Config {
        vocab_size: 61,
        n_positions: 16,
        n_embd: 32,
        n_layer: 2,
        n_head: 2,
        n_inner: Some(64),
        initializer_range: 0.1,
        ..zoo::Gpt2Config::default()
    }
}

/// The configuration of a small Llama.
pub fn llama_config() -> zoo::LlamaConfig {
    zoo::LlamaConfig {
        vocab_size: 61,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 16,
        initializer_range: 0.1,
        ..zoo::LlamaConfig::default()
    }
}

pub fn gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { resid_pdrop: 0.1, ..gpt2_config() })
}

/// Creates a configuration for runs of the small model. `extra` is appended, and may set another optimizer.
pub fn config(ranks: usize, extra: &str) -> Config {
    let optimizer = match extra.lines().any(|line| line.starts_with("optimizer:")) {
        true => "",
        false => "optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0.1}}\n",
    };
    let text = format!("gradient_clipping: 0.5\n{optimizer}{extra}");
    Config::with_world_size("test.yaml", text, ranks).unwrap_or_else(|e| panic!("{e}"))
}

/// Returns keys for [`config`], for a reproducible run (its bits do not depend on the layout) on global batches of 4
/// samples, with `data` data-parallel ranks.
pub fn reproducible(stage: u8, data: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {}\n{more}\ntraining: {{reproducible: true}}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}",
        4 / data
    )
}

/// Creates an engine for the small model. `text` has keys for [`config`].
pub fn engine(comm: Arc<dyn Communicator>, text: &str) -> Engine {
    engine_of(gpt2(), comm, text)
}

/// Like [`engine`], for another model.
pub fn engine_of(layers: Layers, comm: Arc<dyn Communicator>, text: &str) -> Engine {
    Engine::with_communicator(config(comm.size(), text), layers, comm).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Creates an engine for a whole configuration with a `model` section.
pub fn configured_engine(comm: Arc<dyn Communicator>, text: &str) -> Engine {
    let config = Config::with_world_size("test.yaml", text, comm.size()).unwrap_or_else(|error| panic!("{error}"));
    let layers = zero_engine::configured_layers(&config, None).unwrap_or_else(|error| panic!("{text}: {error}"));
    Engine::with_communicator(config, layers, comm).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Trains `steps` steps on `ranks` ranks and saves a checkpoint in `folder`. Returns the checkpoint's path.
pub fn save(
    (ranks, steps): (usize, u64),
    folder: &Path,
    engine: impl Fn(Arc<dyn Communicator>) -> Engine + Sync,
) -> PathBuf {
    let saved = world(ranks, |comm| {
        let mut engine = engine(comm);
        train(&mut engine, steps);
        engine.save_checkpoint(folder).unwrap_or_else(|error| panic!("{error}"))
    });
    agreed(saved, "checkpoints")
}

/// Resumes from a checkpoint in `folder` on `ranks` ranks and trains `steps` steps. All ranks must agree.
pub fn resume(
    (ranks, steps): (usize, u64),
    folder: &Path,
    engine: impl Fn(Arc<dyn Communicator>) -> Engine + Sync,
) -> Trajectory {
    let all = world(ranks, |comm| {
        let mut engine = engine(comm);
        engine.resume(folder).unwrap_or_else(|error| panic!("{error}"));
        trajectory(&mut engine, steps)
    });
    agreed(all, "resumed")
}

/// Asserts that a [`reproducible`] run with `more`, saved by two ranks at stage 3, continues in each of `layouts`
/// (ranks and stage) as if it had not stopped.
pub fn assert_resumes(more: &str, layouts: &[(usize, u8)]) {
    let folder = tempfile::tempdir().unwrap();
    let whole = run(1, 6, &reproducible(0, 1, more));
    save((2, 3), folder.path(), |comm| engine(comm, &reproducible(3, 2, more)));
    for &(ranks, stage) in layouts {
        let rest = resume((ranks, 3), folder.path(), |comm| engine(comm, &reproducible(stage, ranks, more)));
        assert_same(&whole.after(3), &rest, more);
    }
}

/// Returns the largest difference, relative to the values in `b`.
pub fn relative_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f32::max)
}

/// Creates a global batch of token ids that depends only on the step.
pub fn batch(step: u64, samples: usize) -> Batch {
    let token = |i: usize| ((i as u64 * 7 + step * 13 + (i as u64 * i as u64) % 11) % 61) as u32;
    let row = 16;
    let inputs: Vec<u32> = (0..samples * row).map(token).collect();
    let targets: Vec<u32> = (1..=samples * row).map(token).collect();
    let tensor = |v: Vec<u32>| Tensor::from_vec(v, (samples, row), &Device::Cpu).unwrap();
    Batch::new(tensor(inputs), tensor(targets))
}

/// Results that must be bit-identical: every loss and norm, and the final parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trajectory {
    pub losses: Vec<u32>,
    pub norms: Vec<u64>,
    pub parameters: Vec<(String, Vec<u32>)>,
}

impl Trajectory {
    /// Returns the losses as numbers.
    pub fn loss_values(&self) -> Vec<f32> {
        self.losses.iter().map(|&bits| f32::from_bits(bits)).collect()
    }

    /// Returns the part of the run after `steps` steps.
    pub fn after(&self, steps: usize) -> Self {
        let (losses, norms) = (self.losses[steps..].to_vec(), self.norms[steps..].to_vec());
        Self { losses, norms, parameters: self.parameters.clone() }
    }

    fn norm_values(&self) -> impl Iterator<Item = f64> {
        self.norms.iter().map(|&bits| f64::from_bits(bits))
    }
}

pub fn train(engine: &mut Engine, steps: u64) -> Vec<Step> {
    (engine.steps()..engine.steps() + steps)
        .map(|step| {
            engine.train_batch(&batch(step, engine.config().train_batch_size)).unwrap_or_else(|e| panic!("{e}"))
        })
        .collect()
}

pub fn trajectory(engine: &mut Engine, steps: u64) -> Trajectory {
    let samples = engine.config().train_batch_size;
    trajectory_on(engine, steps, |step| batch(step, samples))
}

/// Like [`trajectory`], on other batches.
pub fn trajectory_on(engine: &mut Engine, steps: u64, batch: impl Fn(u64) -> Batch) -> Trajectory {
    trajectory_of(engine, steps, |engine, step| engine.train_batch(&batch(step)).unwrap_or_else(|e| panic!("{e}")))
}

/// Like [`trajectory`], with another way to run a step.
pub fn trajectory_of(engine: &mut Engine, steps: u64, mut run: impl FnMut(&mut Engine, u64) -> Step) -> Trajectory {
    let numbers = engine.steps()..engine.steps() + steps;
    let steps: Vec<Step> = numbers.map(|step| run(engine, step)).collect();
    Trajectory {
        losses: steps.iter().map(|step| step.loss.to_bits()).collect(),
        norms: steps.iter().map(|step| step.grad_norm.to_bits()).collect(),
        parameters: parameters(engine),
    }
}

/// Gathers all parameters: names and bits.
pub fn parameters(engine: &mut Engine) -> Vec<(String, Vec<u32>)> {
    let names: Vec<String> = engine.model().parameters().iter().map(|p| p.name().to_string()).collect();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    names.into_iter().map(|name| (name.clone(), bits(engine.full_parameter(&name).unwrap()))).collect()
}

/// Trains the small model on a world of threads. All ranks must agree.
pub fn run(ranks: usize, steps: u64, extra: &str) -> Trajectory {
    run_of(gpt2, ranks, steps, extra)
}

/// Like [`run`], with another model.
pub fn run_of(layers: impl Fn() -> Layers + Sync, ranks: usize, steps: u64, extra: &str) -> Trajectory {
    agreed(world(ranks, |comm| trajectory(&mut engine_of(layers(), comm, extra), steps)), extra)
}

/// Returns the result that all ranks agree on.
#[track_caller]
pub fn agreed<T: PartialEq>(mut all: Vec<T>, what: &str) -> T {
    let first = all.swap_remove(0);
    assert!(all.iter().all(|other| *other == first), "ranks disagree: {what}");
    first
}

/// Compares step by step, to report the first difference instead of megabytes of values.
#[track_caller]
pub fn assert_same(a: &Trajectory, b: &Trajectory, what: &str) {
    for (step, (x, y)) in a.losses.iter().zip(&b.losses).enumerate() {
        assert_eq!(f32::from_bits(*x), f32::from_bits(*y), "{what}: loss of step {}", step + 1);
    }
    assert_eq!(a.norms, b.norms, "{what}: gradient norms");
    for ((name, x), (_, y)) in a.parameters.iter().zip(&b.parameters) {
        assert!(x == y, "{what}: parameter {name}");
    }
    assert_eq!(a, b, "{what}");
}

/// Asserts that losses and norms differ by rounding only.
#[track_caller]
pub fn assert_near(found: &Trajectory, expected: &Trajectory, tolerance: f32, what: &str) {
    assert!(expected.norm_values().all(f64::is_finite), "{what}: {:?}", expected.norms);
    assert_near_or_overflown(found, expected, tolerance, what);
}

/// Like [`assert_near`], but for f16: the norm of a step may be infinite or NaN in both runs.
#[track_caller]
pub fn assert_near_or_overflown(found: &Trajectory, expected: &Trajectory, tolerance: f32, what: &str) {
    let (losses, of_expected) = (found.loss_values(), expected.loss_values());
    let difference = relative_difference(&losses, &of_expected);
    assert!(difference < tolerance, "{what}: {difference}\n{losses:?}\n{of_expected:?}");
    for (found, expected) in found.norm_values().zip(expected.norm_values()) {
        let is_near = (found / expected - 1.0).abs() < 10.0 * f64::from(tolerance);
        assert!(is_near || !found.is_finite() && !expected.is_finite(), "{what}: norm {found} for {expected}");
    }
}

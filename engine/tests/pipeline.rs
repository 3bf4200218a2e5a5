//! Pipelines: the same bits as one stage, whatever the schedule, the ZeRO stage and the number of replicas.

mod world;

use world::{Trajectory, config, trajectory, world};
use zero_train::{Engine, Layers, zoo};

const SCHEDULES: [&str; 4] = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"];

/// Nine layers: they come out even for no number of stages but one and three.
fn model(tied: bool) -> Layers {
    zoo::gpt2(&zoo::Gpt2Config {
        vocab_size: 61,
        n_positions: 16,
        n_embd: 16,
        n_layer: 6,
        n_head: 2,
        n_inner: Some(24),
        initializer_range: 0.1,
        resid_pdrop: 0.1,
        tie_word_embeddings: tied,
        ..zoo::Gpt2Config::default()
    })
}

/// Two samples a micro-batch, four micro-batches a replica.
fn text(zero_stage: u8, pipeline: &str, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 4\n{more}\npipeline: {{{pipeline}}}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 20}}"
    )
}

fn run(stages: usize, data: usize, tied: bool, steps: u64, text: &str) -> Trajectory {
    let mut all = world(stages * data, |comm| {
        let engine = Engine::with_communicator(config(stages * data, text), model(tied), comm);
        trajectory(&mut engine.unwrap_or_else(|e| panic!("{text}: {e}")), steps)
    });
    let first = all.swap_remove(0);
    assert!(all.iter().all(|other| *other == first), "ranks disagree: {text}");
    first
}

fn assert_same(a: &Trajectory, b: &Trajectory, what: &str) {
    for (step, (x, y)) in a.losses.iter().zip(&b.losses).enumerate() {
        assert_eq!(f32::from_bits(*x), f32::from_bits(*y), "{what}: loss of step {}", step + 1);
    }
    assert_eq!(a.norms, b.norms, "{what}: gradient norms");
    for ((name, x), (_, y)) in a.parameters.iter().zip(&b.parameters) {
        assert!(x == y, "{what}: parameter {name}");
    }
    assert_eq!(a, b, "{what}");
}

fn every_pipeline_is_equal(zero_stage: u8) {
    for (data, tied) in [(1, true), (2, true), (1, false), (2, false)] {
        let expected = run(1, data, tied, 20, &text(zero_stage, "stages: 1", ""));
        assert!(expected.losses[0] != expected.losses[19]);
        for stages in 1..=4 {
            for schedule in SCHEDULES {
                let got = run(
                    stages,
                    data,
                    tied,
                    20,
                    &text(zero_stage, &format!("stages: {stages}, schedule: {schedule}"), ""),
                );
                assert_same(&expected, &got, &format!("{schedule}, {stages} × {data}, ZeRO {zero_stage}, tied {tied}"));
            }
        }
    }
}

#[test]
fn every_pipeline_is_equal_at_zero_stage_0() {
    every_pipeline_is_equal(0);
}

#[test]
fn every_pipeline_is_equal_at_zero_stage_1() {
    every_pipeline_is_equal(1);
}

#[test]
fn every_pipeline_is_equal_at_zero_stage_2() {
    every_pipeline_is_equal(2);
}

#[test]
fn every_pipeline_is_equal_at_zero_stage_3() {
    every_pipeline_is_equal(3);
}

//! Losses, gradient norms and final parameters are bit-identical to those of one stage.

use super::{SCHEDULES, assert_same, model, run_of, text};
use crate::world::{BF16, FP16};

fn every_pipeline_is_equal(zero_stage: u8) {
    for (data, tied) in [(1, true), (2, true), (1, false), (2, false)] {
        let expected = run_of(|| model(tied), data, 3, &text(zero_stage, 4, "stages: 1", ""));
        assert!(expected.losses[0] != expected.losses[2]);
        for stages in 1..=4 {
            for schedule in SCHEDULES {
                let pipeline = format!("stages: {stages}, schedule: {schedule}");
                let got = run_of(|| model(tied), stages * data, 3, &text(zero_stage, 4, &pipeline, ""));
                assert_same(&expected, &got, &format!("{schedule}, {stages} × {data}, ZeRO {zero_stage}, tied {tied}"));
            }
        }
    }
}

#[test]
fn every_pipeline_is_bit_identical_at_zero_stage_0() {
    every_pipeline_is_equal(0);
}

#[test]
fn every_pipeline_is_bit_identical_at_zero_stage_1() {
    every_pipeline_is_equal(1);
}

#[test]
fn every_pipeline_is_bit_identical_at_zero_stage_2() {
    every_pipeline_is_equal(2);
}

#[test]
fn every_pipeline_is_bit_identical_at_zero_stage_3() {
    every_pipeline_is_equal(3);
}

/// The replicas together train on eight micro-batches.
#[test]
fn reproducible_runs_are_bit_identical_in_every_layout() {
    let reproducible = |zero_stage: u8, data: usize, stages: usize, schedule: &str| {
        let pipeline = format!("stages: {stages}, schedule: {schedule}");
        let text = text(zero_stage, 8 / data, &pipeline, "training: {reproducible: true}");
        run_of(|| model(true), stages * data, 3, &text)
    };
    let expected = reproducible(0, 1, 1, "1f1b");
    for zero_stage in 0..=3 {
        for data in [1, 2, 4] {
            for stages in 1..=3 {
                // With one stage, all schedules give the same program.
                for schedule in &SCHEDULES[..if stages == 1 { 1 } else { 4 }] {
                    let got = reproducible(zero_stage, data, stages, schedule);
                    assert_same(&expected, &got, &format!("{schedule}, {stages} × {data}, ZeRO {zero_stage}"));
                }
            }
        }
    }
}

#[test]
fn bf16_pipelines_are_bit_identical() {
    pipelines_are_equal_in(BF16, 3);
}

/// Some of these steps overflow.
#[test]
fn fp16_pipelines_are_bit_identical() {
    pipelines_are_equal_in(FP16, 8);
}

fn pipelines_are_equal_in(dtype: &str, steps: u64) {
    for zero_stage in [0, 3] {
        for data in [1, 2] {
            let run = |stages: usize, schedule: &str| {
                let pipeline = format!("stages: {stages}, schedule: {schedule}");
                run_of(|| model(true), stages * data, steps, &text(zero_stage, 4, &pipeline, dtype))
            };
            let expected = run(1, "1f1b");
            assert!(expected.losses.first() != expected.losses.last());
            for stages in [2, 3] {
                for schedule in SCHEDULES {
                    let what = format!("{schedule}, {stages} × {data}, ZeRO {zero_stage}, {dtype}");
                    assert_same(&expected, &run(stages, schedule), &what);
                }
            }
        }
    }
}

//! Activation checkpointing is bit-identical under every schedule.

use super::{SCHEDULES, assert_same, model, run_of, text};

#[test]
fn every_schedule_is_bit_identical_with_checkpointing() {
    for (zero_stage, data) in [(0, 1), (1, 2), (2, 2), (3, 2)] {
        let expected = run_of(|| model(true), data, 4, &text(zero_stage, 4, "stages: 1", ""));
        for stages in 2..=3 {
            for schedule in SCHEDULES {
                for section in ["{}", "{interval: 3}"] {
                    let pipeline = format!("stages: {stages}, schedule: {schedule}");
                    let again = format!("activation_checkpointing: {section}");
                    let got = run_of(|| model(true), stages * data, 4, &text(zero_stage, 4, &pipeline, &again));
                    assert_same(
                        &expected,
                        &got,
                        &format!("{schedule}, {stages} × {data}, ZeRO {zero_stage}, {section}"),
                    );
                }
            }
        }
    }
}

//! Compares drawn grids character by character.

use zero_pipeline::grid::grid;
use zero_pipeline::schedule;
use zero_pipeline::simulate::{LayerCosts, SegmentCosts};
use zero_pipeline::{Costs, Degrees, Mesh, Program, Schedule, Stages, World, ZeroStage, simulate};

use crate::shapes::shape;

/// Draws a schedule on stages with `chunks` chunks of two layers each. The times are per chunk.
fn drawn(
    schedule: Schedule,
    stages: (usize, usize),
    data: usize,
    micro_batches: usize,
    times: [f64; 3],
    columns: usize,
) -> String {
    let (count, chunks) = stages;
    let layers = 2 * count * chunks;
    let shape = shape(layers, ZeroStage::Zero);
    let stages = Stages::new(&shape, count, (0..layers / 2).map(|part| 2 * part..2 * part + 2).collect()).unwrap();
    let [forward, input, weight] = times.map(|seconds| seconds / 2.0);
    let layer = LayerCosts {
        forward,
        backward: input + weight,
        backward_input: input,
        backward_weight: weight,
        ..LayerCosts::default()
    };
    let costs = Costs::of_compute(vec![layer; layers], vec![SegmentCosts::default(); layers]);
    let mesh = Mesh::new(count * data, Degrees::stages(count)).unwrap();
    let program = |rank| schedule::training(schedule, &shape, &stages, mesh.coordinates(rank).stage, micro_batches);
    let programs: Vec<Program> = (0..count * data).map(program).collect();
    let world = World { shape: &shape, stages: &stages, mesh, capacity: 0 };
    let timeline = simulate(&programs, &world, &costs).unwrap();
    let text = grid(&timeline, &stages, mesh, columns);
    assert!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
    text
}

#[test]
fn one_forward_one_backward() {
    let found = drawn(Schedule::OneFOneB, (4, 1), 1, 8, [1.0, 0.5, 0.5], 80);
    let expected = "\
seconds  0              5              10             15             20
rank 0   F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7
rank 1   .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7 .
rank 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7 .  .
rank 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .  .  .
";
    assert_eq!(found, expected, "\n{found}");
}

#[test]
fn longer_work_continues_as_dashes() {
    let found = drawn(Schedule::OneFOneB, (2, 1), 1, 2, [1.0, 1.0, 1.0], 80);
    let expected = "\
seconds  0              5
rank 0   F0 F1 .  .  B0--- .  B1---
rank 1   .  F0 B0--- F1 B1--- .  .
";
    assert_eq!(found, expected, "\n{found}");
}

#[test]
fn chunks_have_letters_and_a_wide_grid_continues_below() {
    // Chunks take 12.5 and 20 milliseconds, with two ranks per stage.
    let found = drawn(Schedule::Interleaved, (2, 2), 2, 4, [0.0125, 0.020, 0.0], 80);
    let expected = "\
ms         0                   62                  125                 188
ranks 0-1  F0a F1a F0b F1b F2a .   B0b F3a B1b---- F2b B0a F3b B1a---- .   B2b-
ranks 2-3  .   F0a F1a F0b B0b---- F1b B1b F2a B0a---- F3a B1a F2b B2b---- F3b

ms                     250
ranks 0-1  --- .   B3b B2a---- B3a
ranks 2-3  B3b---- B2a B3a---- .
";
    assert_eq!(found, expected, "\n{found}");
}

#[test]
fn deferred_weight_gradients_fill_the_end() {
    let found = drawn(Schedule::ZeroBubble, (3, 1), 1, 4, [1.0, 1.0, 1.0], 120);
    let expected = "\
seconds  0              5              10
rank 0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
rank 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
rank 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
";
    assert_eq!(found, expected, "\n{found}");
}

#[test]
fn any_width_and_any_times_are_drawn() {
    for columns in [80, 120, 200] {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZeroBubble] {
            let found = drawn(schedule, (16, 1), 1, 64, [0.3, 0.0001, 1e3], columns);
            assert!(found.contains("F63") && found.contains("B63"), "\n{found}");
        }
    }
    // All durations are zero: the grid is empty.
    assert_eq!(drawn(Schedule::OneFOneB, (2, 1), 1, 3, [0.0; 3], 80), "");
}

//! Compares the simulator with formulas for the bubble and for the number of live micro-batches.

mod communication;

use zero_pipeline::Instruction::*;
use zero_pipeline::schedule;
use zero_pipeline::simulate::{LayerCosts, Link, SegmentCosts, Sharing, SimulationError};
use zero_pipeline::{
    Costs, Degrees, Mesh, ModelShape, Program, Schedule, Stages, Timeline, World, ZeroStage, alive, simulate,
};

use crate::shapes::shape;

/// Returns costs with which only layers take time.
fn costs(layers: usize, layer: LayerCosts) -> Costs {
    let segment = SegmentCosts { parameters: 40, gradients: 40, ..SegmentCosts::default() };
    Costs::of_compute(vec![layer; layers], vec![segment; layers])
}

/// Returns the costs of a layer: seconds of the forward, of the backward for the inputs and of the backward for the
/// weights. Tests pass whole numbers, so that sums are exact.
fn layer(forward: f64, input: f64, weight: f64) -> LayerCosts {
    LayerCosts {
        forward,
        backward: input + weight,
        backward_input: input,
        backward_weight: weight,
        inputs: 100,
        input_gradients: 100,
    }
}

/// Simulates a schedule on `count` stages with `chunks` chunks of one layer each, with equal costs for all layers. Also
/// returns the peak number of live micro-batches of each rank.
fn run(
    schedule: Schedule,
    count: usize,
    chunks: usize,
    micro_batches: usize,
    layer: LayerCosts,
) -> (Timeline, Vec<usize>) {
    let layers = count * chunks;
    let shape = shape(layers, ZeroStage::Zero);
    let stages = Stages::new(&shape, count, (0..layers).map(|l| l..l + 1).collect()).unwrap();
    let program = |stage| schedule::training(schedule, &shape, &stages, stage, micro_batches);
    let programs: Vec<Program> = (0..count).map(program).collect();
    let world =
        World { shape: &shape, stages: &stages, mesh: Mesh::new(count, Degrees::stages(count)).unwrap(), capacity: 0 };
    let alive = programs.iter().map(|program| alive(program, &stages)).collect();
    (simulate(&programs, &world, &costs(layers, layer)).unwrap(), alive)
}

/// Asserts that each rank is idle for `idle` seconds and busy for `busy`.
fn idle(timeline: &Timeline, idle: f64, busy: f64, what: &str) {
    assert_eq!(timeline.makespan(), idle + busy, "{what}");
    assert_eq!(timeline.busy(), vec![busy; timeline.ranks], "{what}");
    assert_eq!(timeline.idle(), vec![idle; timeline.ranks], "{what}");
}

#[test]
fn bubbles_of_gpipe_and_1f1b_are_the_closed_form() {
    for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
        for p in 1..=16 {
            for m in 1..=64 {
                let (found, alive) = run(schedule, p, 1, m, layer(1.0, 1.0, 1.0));
                idle(&found, (p - 1) as f64 * 3.0, m as f64 * 3.0, &format!("{schedule} {p} {m}"));
                let closed_form = (p - 1) as f64 / (m + p - 1) as f64;
                assert!((found.bubble() - closed_form).abs() < 1e-12);
                let expected = |rank| if schedule == Schedule::GPipe { m } else { m.min(p - rank) };
                assert_eq!(alive, (0..p).map(expected).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn bubbles_of_interleaved_chunks_are_the_closed_form() {
    for p in 1..=16 {
        for v in 2..=4 {
            for m in (p..=64).step_by(p) {
                for (forward, backward) in [(1.0, 1.0), (1.0, 2.0)] {
                    let (found, _) = run(Schedule::Interleaved, p, v, m, layer(forward, backward, 0.0));
                    let both = forward + backward;
                    idle(&found, (p - 1) as f64 * both, (m * v) as f64 * both, &format!("{p} {v} {m} {both}"));
                    let closed_form = (p - 1) as f64 / (v * m + p - 1) as f64;
                    assert!((found.bubble() - closed_form).abs() < 1e-12);
                }
            }
        }
    }
}

#[test]
fn zero_bubble_has_a_third_of_1f1bs_bubble_at_its_memory() {
    for p in 1..=16 {
        for m in p..=64 {
            for (forward, input, weight) in [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0)] {
                let layer = layer(forward, input, weight);
                let (plain, plain_alive) = run(Schedule::OneFOneB, p, 1, m, layer);
                let (zero, zero_alive) = run(Schedule::ZeroBubble, p, 1, m, layer);
                let (work, gaps) = (forward + input + weight, (p - 1) as f64);
                idle(&plain, gaps * work, m as f64 * work, &format!("1f1b {p} {m}"));
                idle(&zero, gaps * (forward + input - weight), m as f64 * work, &format!("zb_h1 {p} {m} {layer:?}"));
                assert_eq!(zero_alive.iter().max(), plain_alive.iter().max(), "{p} {m}");
            }
        }
    }
}

/// Returns two stages of two layers each, and a mesh of four ranks: two replicas of each stage.
fn world(shape: &ModelShape) -> (Stages, Mesh) {
    (Stages::new(shape, 2, vec![0..2, 2..4]).unwrap(), Mesh::new(4, Degrees::stages(2)).unwrap())
}

#[test]
fn deferred_weight_gradients_keep_micro_batches_alive() {
    // The last stage has one micro-batch between forward and backward, and three whose weight gradients are deferred.
    let (_, alive) = run(Schedule::ZeroBubble, 4, 1, 8, layer(1.0, 1.0, 1.0));
    assert_eq!(alive[3], 4);
    let shape = shape(4, ZeroStage::Zero);
    let evaluation = schedule::forward_only(&shape, &Stages::single(&shape), 0, 3);
    assert_eq!(zero_pipeline::alive(&evaluation, &Stages::single(&shape)), 0);
}

#[test]
fn invalid_tables_and_programs_are_errors() {
    let shape = shape(4, ZeroStage::Zero);
    let (stages, mesh) = world(&shape);
    let world = World { shape: &shape, stages: &stages, mesh, capacity: 0 };
    let program = |rank: usize| schedule::training(Schedule::OneFOneB, &shape, &stages, rank / 2, 3);
    let programs: Vec<Program> = (0..4).map(program).collect();
    let good = costs(4, layer(1.0, 1.0, 1.0));
    let error = |programs: &[Program], costs: &Costs| simulate(programs, &world, costs).expect_err("there is a defect");
    assert!(simulate(&programs, &world, &good).is_ok());

    let found = error(&programs[..3], &good);
    assert_eq!(found, SimulationError::Programs { programs: 3, ranks: 4 });
    let found = error(&programs, &costs(3, layer(1.0, 1.0, 1.0)));
    assert_eq!(found, SimulationError::Table { what: "layers", found: 3, expected: 4 });
    assert_eq!(error(&programs, &costs(4, layer(-1.0, 1.0, 1.0))), SimulationError::NotATime(-1.0));
    let found = error(&programs, &Costs { load: f64::NAN, ..good.clone() });
    assert!(matches!(found, SimulationError::NotATime(seconds) if seconds.is_nan()));
    let standing = Costs { pipe: Link { latency: 0.0, bandwidth: 0.0 }, ..good.clone() };
    assert_eq!(error(&programs, &standing), SimulationError::NotABandwidth(0.0));
    let standing = Costs { sharing: Sharing { computing: 0.0, ..Sharing::NONE }, ..good.clone() };
    assert_eq!(error(&programs, &standing), SimulationError::NotARate(0.0));

    let mut other = programs.clone();
    other[2].instructions.insert(1, Forward { layer: 9, micro_batch: 0 });
    let found = error(&other, &good).to_string();
    assert!(found.starts_with("rank 2, instruction 1 (forward layer 9") && found.contains("does not exist"), "{found}");
    let mut other = programs.clone();
    other[0].instructions.retain(|i| !matches!(i, Send { .. }));
    let found = error(&other, &good).to_string();
    assert!(found.starts_with("rank 0") && found.contains("never completes"), "{found}");
    let mut other = programs;
    other[3].instructions.retain(|i| !matches!(i, GradientNorm));
    let found = error(&other, &good).to_string();
    assert!(found.contains("(gradient_norm): it waits for an operation that never completes"), "{found}");
}

//! Checkpoints of runs with local steps, and runs that continue from them.

use std::path::Path;
use std::sync::Arc;

use zero_engine::Engine;
use zero_engine::comm::Communicator;
use zero_partition::{Category, Kind, Range};

use super::{of_replicates, staged, text};
use crate::optimizers::whole_parameters::{LAMB, MUON};
use crate::world::{Trajectory, engine, train, trajectory, world};

/// Resumes a rank from a checkpoint. Returns its replicate and its trajectory up to step 8.
pub(super) fn resumed(comm: Arc<dyn Communicator>, text: &str, root: &Path) -> (usize, Trajectory) {
    let mut engine = engine(comm, text);
    engine.resume(root).unwrap();
    let rest = 8 - engine.steps();
    (engine.zero().outer().unwrap().share.replicate, trajectory(&mut engine, rest))
}

/// Trains and saves after step 3. The second replicate skips the update of step 2, so the replicates have made
/// different numbers of updates.
pub(super) fn with_a_skipped_update(
    comm: Arc<dyn Communicator>,
    text: &str,
    root: Option<&Path>,
) -> (usize, Trajectory) {
    let mut engine = engine(comm, text);
    let replicate = engine.zero().outer().unwrap().share.replicate;
    train(&mut engine, 1);
    engine.skip_beyond(if replicate == 1 { 1e-9 } else { f64::INFINITY });
    assert_eq!(train(&mut engine, 1)[0].skipped, replicate == 1);
    engine.skip_beyond(f64::INFINITY);
    assert!(train(&mut engine, 1)[0].averaged);
    if let Some(root) = root {
        engine.save_checkpoint(root).unwrap();
    }
    (replicate, trajectory(&mut engine, 5))
}

/// A checkpoint has the optimizer states of every replicate, and the outer momentum.
#[test]
fn a_resumed_run_is_bit_identical_to_an_uninterrupted_one() {
    // ZeRO stage, ranks of a shard group, pipeline stages.
    let layouts = [(0, 1, 1), (0, 2, 1), (1, 2, 1), (2, 1, 1), (3, 2, 1), (3, 1, 2), (2, 2, 2)];
    for optimizer in ["", MUON, LAMB] {
        let keys = |layout: (u8, usize, usize)| (2 * layout.1 * layout.2, staged(layout, optimizer));
        let (ranks, first) = keys(layouts[0]);
        let whole = of_replicates(world(ranks, |comm| with_a_skipped_update(comm, &first, None)), &first);
        for from in layouts {
            let root = tempfile::tempdir().unwrap();
            let (ranks, text) = keys(from);
            let saved = world(ranks, |comm| with_a_skipped_update(comm, &text, Some(root.path())));
            assert!(of_replicates(saved, &text) == whole, "{text}");
            let folder = root.path().join("step-00000003");
            assert!(zero_checkpoint::verify(&folder).is_empty(), "{text}");
            for to in [layouts[0], from, layouts[4]] {
                let (ranks, text) = keys(to);
                let rest = of_replicates(world(ranks, |comm| resumed(comm, &text, root.path())), &text);
                assert!(rest == whole, "{from:?} to {to:?}, {optimizer}");
            }
        }
    }
}

/// If a run continues with more replicates, the additional replicates take over the states of the saved ones. A run
/// without local steps takes over the states of the first replicate.
#[test]
fn another_number_of_replicates_continues() {
    let root = tempfile::tempdir().unwrap();
    let two = text(1, 1, 1, "");
    let saved = world(2, |comm| {
        let mut engine = engine(comm, &two);
        train(&mut engine, 3);
        engine.save_checkpoint(root.path()).unwrap();
        state(&mut engine)
    });
    assert!(saved[0].0 == saved[1].0 && saved[0].1 != saved[1].1, "only the optimizer states differ");
    let four = two.replace("degree: 2", "degree: 4").replace("gpu: 4", "gpu: 2");
    let loaded = world(4, |comm| loaded(comm, &four, root.path()));
    assert!(loaded.iter().enumerate().all(|(rank, found)| *found == saved[rank % 2]));
    let plain = "train_micro_batch_size_per_gpu: 8\nzero_optimization: {stage: 1}";
    assert!(world(1, |comm| self::loaded(comm, plain, root.path()))[0] == saved[0]);
    // A run with local steps also continues from a checkpoint of a run without them, which has no outer momentum.
    let other = tempfile::tempdir().unwrap();
    let plain = world(1, |comm| {
        let mut engine = engine(comm, plain);
        train(&mut engine, 2);
        engine.save_checkpoint(other.path()).unwrap();
        state(&mut engine)
    });
    assert!(world(2, |comm| self::loaded(comm, &two, other.path())).iter().all(|found| *found == plain[0]));
}

/// Returns the values of a parameter, and those of one of its optimizer states.
fn state(engine: &mut Engine) -> (Vec<f32>, Vec<f32>) {
    let name = "transformer.h.1.mlp.c_fc.weight";
    let (zero, first) = (engine.zero(), Kind::State(0));
    let is_it = |range: &Range| zero.model().parameters()[range.parameter].name() == name;
    let range = zero.held_ranges(first).into_iter().find(is_it).unwrap();
    let moments = zero.read(first, &range).unwrap();
    (engine.full_parameter(name).unwrap(), moments)
}

fn loaded(comm: Arc<dyn Communicator>, text: &str, root: &Path) -> (Vec<f32>, Vec<f32>) {
    let mut engine = engine(comm, text);
    engine.resume(root).unwrap();
    let found = state(&mut engine);
    train(&mut engine, 3);
    found
}

/// Without momentum, the outer optimizer has no state.
#[test]
fn plain_outer_sgd_holds_and_saves_no_momentum() {
    let root = tempfile::tempdir().unwrap();
    let text = text(1, 1, 1, "").replace("{steps: 3}", "{steps: 3, outer_momentum: 0, outer_lr: 1.0}");
    let states = world(2, |comm| {
        let mut engine = engine(comm, &text);
        let elements = engine.zero().layout().elements() as u64;
        train(&mut engine, 3);
        engine.save_checkpoint(root.path()).unwrap();
        let rest = trajectory(&mut engine, 3);
        (engine.zero().ledger().peak(Category::OptimizerState), 8 * elements + 2 * elements, rest)
    });
    assert_eq!(states[0].0 + states[1].0, states[0].1 + states[1].1);
    let again = world(2, |comm| {
        let mut engine = engine(comm, &text);
        engine.resume(root.path()).unwrap();
        trajectory(&mut engine, 3)
    });
    assert!(again[0] == states[0].2 && again[1] == states[1].2);
}

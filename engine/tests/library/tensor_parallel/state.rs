//! Tensor parallelism with state on a disk, stochastic rounding of parameters, LAMB, and local steps.

use zero_engine::Layers;

use super::{STEPS, gpt2, keys, llama, load_with_any_number_of_parts, phi3};
use crate::optimizers::eight_bit::ADAMW;
use crate::optimizers::whole_parameters::LAMB;
use crate::sharding::local_steps::of_replicates;
use crate::sharding::on_disk::{STOCHASTIC, offloaded};
use crate::world::{Trajectory, assert_near, assert_same, engine_of, run_of, train, trajectory, world};

/// Runs with state on a disk are bit-identical to runs in memory, and use the disk.
#[test]
fn state_on_a_disk_is_bit_identical() {
    let folder = tempfile::tempdir().unwrap();
    for (layers, more) in [(gpt2 as fn() -> Layers, ""), (llama, LAMB), (phi3, STOCHASTIC), (gpt2, ADAMW)] {
        for (ranks, stage) in [(2, 1), (4, 2), (2, 3), (4, 3)] {
            let text = keys(2, 2, 2, stage, more);
            let on_disk = offloaded(&text, folder.path());
            let moved = world(ranks, |comm| {
                let mut engine = engine_of(layers(), comm, &on_disk);
                train(&mut engine, 1);
                engine.zero().disk_use().map_or(0, |used| used.read.min(used.written))
            });
            assert!(moved.iter().all(|&bytes| bytes > 0), "{on_disk}");
            assert_same(&run_of(layers, ranks, 3, &text), &run_of(layers, ranks, 3, &on_disk), &on_disk);
        }
    }
}

/// LAMB uses the norms of whole parameters, and stochastic rounding uses the positions of elements in whole parameters.
#[test]
fn updates_match_one_rank_up_to_rounding() {
    for layers in [gpt2 as fn() -> Layers, llama, phi3] {
        for (more, tolerance) in [(LAMB, 1e-5), (STOCHASTIC, 2e-2)] {
            let expected = run_of(layers, 1, STEPS, &keys(1, 2, 1, 0, more));
            for (ranks, micro_batch, stage) in [(2, 2, 0), (2, 2, 3), (4, 1, 2), (4, 1, 3)] {
                let text = keys(2, micro_batch, 1, stage, more);
                assert_near(&run_of(layers, ranks, STEPS, &text), &expected, tolerance, &text);
            }
        }
    }
}

#[test]
fn layouts_with_the_same_tensor_groups_are_bit_identical() {
    let reproducible = "training: {reproducible: true}";
    for more in [LAMB, STOCHASTIC] {
        let text = |accumulation, stage, other: &str| {
            keys(2, 1, accumulation, stage, &format!("{more}\n{reproducible}\n{other}"))
        };
        let expected = run_of(gpt2, 2, STEPS, &text(4, 2, ""));
        for (ranks, accumulation, stage, other) in
            [(2, 4, 3, ""), (4, 2, 1, ""), (4, 2, 3, ""), (4, 4, 2, "pipeline: {stages: 2}")]
        {
            let text = text(accumulation, stage, other);
            assert_same(&expected, &run_of(gpt2, ranks, STEPS, &text), &text);
        }
    }
}

#[test]
fn checkpoints_load_at_any_tensor_parallel_degree() {
    for more in [LAMB, STOCHASTIC] {
        load_with_any_number_of_parts(gpt2, more, |engine| drop(train(engine, 2)));
    }
}

/// Returns the keys of two replicates on global batches of 8 samples, with three local steps. Each replicate consists
/// of `shards` groups of `tensor` ranks per pipeline stage.
fn local(tensor: usize, stage: u8, shards: usize, more: &str) -> String {
    let of_mesh = "mesh: {data_parallel_replicate_degree: 2}\ntraining: {local_steps: {steps: 3}}";
    keys(tensor, 2, 2 / shards, stage, &format!("{of_mesh}\n{more}"))
}

/// Runs two replicates. All ranks of a replicate must agree.
fn replicates(ranks: usize, steps: u64, text: &str) -> [Trajectory; 2] {
    let found = world(ranks, |comm| {
        let mut engine = engine_of(gpt2(), comm, text);
        let trajectory = trajectory(&mut engine, steps);
        (engine.zero().outer().unwrap().share.replicate, trajectory)
    });
    of_replicates(found, text)
}

#[test]
fn replicates_that_train_independently_match_those_of_single_ranks() {
    let expected = replicates(2, 7, &local(1, 0, 1, ""));
    assert!(expected[0].losses != expected[1].losses);
    let mut of_layouts = vec![];
    for (ranks, stage, shards, more) in
        [(4, 0, 1, ""), (4, 3, 1, ""), (8, 2, 2, ""), (8, 3, 2, ""), (8, 3, 1, "pipeline: {stages: 2}")]
    {
        let text = local(2, stage, shards, more);
        let found = replicates(ranks, 7, &text);
        for (found, expected) in found.iter().zip(&expected) {
            assert_near(found, expected, 1e-5, &text);
        }
        of_layouts.push((text, found));
    }
    for (text, found) in &of_layouts {
        assert!(*found == of_layouts[0].1, "{text}");
    }
}

/// A checkpoint has the parameters from which the replicates started, the states of each replicate, and the outer
/// momentum, all stored by the positions of elements in whole parameters.
#[test]
fn replicates_resume_at_any_tensor_parallel_degree() {
    let layouts = [(1, 2, 1, 2), (2, 2, 1, 4), (2, 3, 2, 8)];
    for (tensor, stage, shards, ranks) in layouts {
        let (root, text) = (tempfile::tempdir().unwrap(), local(tensor, stage, shards, ""));
        let saved = world(ranks, |comm| {
            let mut engine = engine_of(gpt2(), comm, &text);
            train(&mut engine, 3);
            engine.save_checkpoint(root.path()).unwrap();
            (engine.zero().outer().unwrap().share.replicate, trajectory(&mut engine, 4))
        });
        let whole = of_replicates(saved, &text);
        for (to, stage, shards, ranks) in layouts {
            let text = local(to, stage, shards, "");
            let rest = world(ranks, |comm| {
                let mut engine = engine_of(gpt2(), comm, &text);
                engine.resume(root.path()).unwrap();
                (engine.zero().outer().unwrap().share.replicate, trajectory(&mut engine, 4))
            });
            for (rest, whole) in of_replicates(rest, &text).iter().zip(&whole) {
                match to == tensor {
                    true => assert_same(whole, rest, &text),
                    false => assert_near(rest, whole, 1e-5, &text),
                }
            }
        }
    }
}

//! Offloading to disk does not change a bit of a run.

use crate::world;

use std::path::Path;

use tempfile::TempDir;
use world::{BF16, FP16, Trajectory, assert_same, engine_of, resume, save, trajectory, world};
use zero_engine::{Layers, zoo};

/// A model whose layers have a few thousand elements, enough to fill pages of a disk. Some layers have several tiles.
fn model() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config {
        vocab_size: 61,
        n_positions: 16,
        n_embd: 48,
        n_layer: 3,
        n_head: 2,
        resid_pdrop: 0.1,
        ..zoo::Gpt2Config::default()
    })
}

const OPTIMIZER: u8 = 1;
const PARAMETERS: u8 = 2;

/// Returns the keys of a run. `more` is added to `zero_optimization`.
fn settings(zero_stage: u8, micro_batches: usize, on_disk: u8, folder: &Path, more: &str, extra: &str) -> String {
    let section = |name: &str, bit: u8| match on_disk & bit {
        0 => String::new(),
        _ => format!(", {name}: {{device: nvme, nvme_path: '{}'}}", folder.display()),
    };
    let (optimizer, parameters) = (section("offload_optimizer", OPTIMIZER), section("offload_param", PARAMETERS));
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\n\
         aio: {{block_size: 4096}}\n{extra}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40, \
         stage3_max_reuse_distance: 0, sub_group_size: 2048{optimizer}{parameters}{more}}}"
    )
}

fn run(ranks: usize, steps: u64, text: &str) -> (Trajectory, u64) {
    let mut all = world(ranks, |comm| {
        let mut engine = engine_of(model(), comm, text);
        let trajectory = trajectory(&mut engine, steps);
        let moved = engine.zero().disk_use().map_or(0, |used| used.read.min(used.written));
        (trajectory, moved)
    });
    let (first, moved) = all.remove(0);
    for (other, _) in all {
        assert_same(&first, &other, text);
    }
    (first, moved)
}

#[test]
fn offloading_is_bit_identical() {
    let folder = TempDir::new().unwrap();
    for (ranks, micro_batches) in [(1, 1), (2, 1), (2, 3), (3, 2)] {
        for (zero_stage, offloaded) in
            [(1, &[OPTIMIZER][..]), (2, &[OPTIMIZER]), (3, &[OPTIMIZER, PARAMETERS, OPTIMIZER | PARAMETERS])]
        {
            for extra in ["", BF16, FP16] {
                let text = |what| settings(zero_stage, micro_batches, what, folder.path(), "", extra);
                let (expected, none) = run(ranks, 3, &text(0));
                for &what in offloaded {
                    let (got, moved) = run(ranks, 3, &text(what));
                    let layout = format!("ZeRO {zero_stage}, {ranks} ranks, {micro_batches} micro-batches");
                    assert_same(&expected, &got, &format!("{layout}, {what}, {extra}"));
                    assert!(none == 0 && moved > 0, "{moved} bytes");
                }
            }
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files were left");
}

#[test]
fn every_optimizer_is_bit_identical_when_offloaded() {
    let folder = TempDir::new().unwrap();
    for optimizer in crate::parity::OPTIMIZERS {
        for extra in [optimizer.to_string(), format!("{optimizer}\n{BF16}")] {
            let text = |what| settings(3, 1, what, folder.path(), "", &extra);
            let (expected, _) = run(2, 5, &text(0));
            let (got, moved) = run(2, 5, &text(OPTIMIZER | PARAMETERS));
            assert_same(&expected, &got, &extra);
            assert!(moved > 0, "{extra}");
            let on_host = text(0).replace("{stage: 3", "{stage: 3, offload_optimizer: {device: cpu}");
            assert_same(&expected, &run(2, 5, &on_host).0, &on_host);
        }
    }
}

#[test]
fn options_of_offloading_are_bit_identical() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().display();
    let (expected, _) = run(2, 4, &settings(3, 2, 0, folder.path(), "", ""));
    // With a `sub_group_size` of 0, a tile has as many elements as a rank's shard of the largest parameter.
    let by_parameter = settings(3, 2, OPTIMIZER, folder.path(), "", "").replace("size: 2048", "size: 0");
    assert_same(&expected, &run(2, 4, &by_parameter).0, &by_parameter);
    for buffers in [1, 2, 3, 8] {
        for (read, write) in [(false, false), (true, false), (false, true), (true, true)] {
            if buffers == 1 && (read || write) {
                continue;
            }
            let more = format!(
                ", offload_optimizer: {{device: nvme, nvme_path: '{path}', buffer_count: {buffers}, pipeline_read: {read}, \
                 pipeline_write: {write}}}, offload_param: {{device: nvme, nvme_path: '{path}', buffer_count: {buffers}}}"
            );
            for extra in ["", "activation_checkpointing: {}"] {
                let (got, _) = run(2, 4, &settings(3, 2, 0, folder.path(), &more, extra));
                assert_same(&expected, &got, &more);
            }
        }
    }
}

#[test]
fn reproducible_runs_keep_the_tree_of_gradients_in_memory() {
    let folder = TempDir::new().unwrap();
    let text =
        |what, micro_batches| settings(3, micro_batches, what, folder.path(), "", "training: {reproducible: true}");
    let (expected, _) = run(1, 4, &text(0, 4));
    for (ranks, micro_batches) in [(1, 4), (2, 2), (4, 1)] {
        let (got, _) = run(ranks, 4, &text(OPTIMIZER | PARAMETERS, micro_batches));
        assert_same(&expected, &got, &format!("{ranks} ranks"));
    }
}

/// A checkpoint saved with state on disk loads into memory, and vice versa.
#[test]
fn checkpoints_do_not_depend_on_offload() {
    let folder = TempDir::new().unwrap();
    for extra in ["", BF16, FP16] {
        let text = |what| settings(3, 1, what, folder.path(), "", extra);
        let (expected, _) = run(2, 6, &text(0));
        for (before, after) in [(0, OPTIMIZER | PARAMETERS), (OPTIMIZER | PARAMETERS, 0), (OPTIMIZER, PARAMETERS)] {
            let checkpoints = TempDir::new().unwrap();
            save((2, 3), checkpoints.path(), |comm| engine_of(model(), comm, &text(before)));
            let rest = resume((2, 3), checkpoints.path(), |comm| engine_of(model(), comm, &text(after)));
            assert_same(&expected.after(3), &rest, &format!("{before} -> {after} {extra}"));
        }
    }
}

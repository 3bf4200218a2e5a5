//! A run saved under a pipeline resumes under any other layout, bit-identically to an uninterrupted run.

use std::path::{Path, PathBuf};

use super::{SCHEDULES, agreed, assert_same, engine_of, gpt2, run_of, text};
use crate::world::{BF16, FP16, Trajectory, save, train, trajectory, world};

/// A layout: pipeline stages, replicas, ZeRO stage, schedule.
type Setup<'a> = (usize, usize, u8, &'a str);

const REPRODUCIBLE: &str = "training: {reproducible: true}";

/// The configuration of a layout, with `all` micro-batches over all replicas.
fn settings((stages, data, zero_stage, schedule): Setup<'_>, all: usize, more: &str) -> String {
    text(zero_stage, all / data, &format!("stages: {stages}, schedule: {schedule}"), more)
}

/// Returns the number of steps before and after the checkpoint. In f16 the first steps overflow.
fn steps(text: &str) -> u64 {
    if text.contains(FP16) { 4 } else { 2 }
}

/// Trains some steps and saves a checkpoint.
fn saved(root: &Path, place: Setup<'_>, text: &str) -> PathBuf {
    save((place.0 * place.1, steps(text)), root, |comm| engine_of(gpt2(40, true), comm, text))
}

/// Resumes from a checkpoint and trains the same number of steps again.
fn resumed(root: &Path, folder: &Path, place: Setup<'_>, text: &str) -> Trajectory {
    let all = world(place.0 * place.1, |comm| {
        let mut engine = engine_of(gpt2(40, true), comm, text);
        assert_eq!(engine.resume(root).unwrap().as_deref(), Some(folder));
        assert_eq!(engine.steps(), steps(text));
        trajectory(&mut engine, steps(text))
    });
    agreed(all, text)
}

/// Gradients of micro-batches are summed in order of arrival, so ZeRO stages 0 and 1 are bit-identical, and stages 2
/// and 3 are.
#[test]
fn a_resumed_run_is_bit_identical_to_an_uninterrupted_one() {
    let root = tempfile::tempdir().unwrap();
    for (zero_stage, schedule) in (0..=3).zip(SCHEDULES) {
        for more in ["", BF16, FP16] {
            let of = |place| settings(place, 8, more);
            let whole = run_of(|| gpt2(40, true), 2, 2 * steps(more), &of((1, 2, zero_stage, "1f1b")));
            let from = (3, 2, zero_stage, schedule);
            let root = root.path().join(format!("{zero_stage}{}", more.len()));
            let folder = saved(&root, from, &of(from));
            for (stages, paired, schedule) in
                [(3, false, schedule), (2, true, "zb_h1"), (1, false, "1f1b"), (4, true, "interleaved_1f1b")]
            {
                let into = (stages, 2, if paired { zero_stage ^ 1 } else { zero_stage }, schedule);
                assert_same(
                    &whole.after(steps(more) as usize),
                    &resumed(&root, &folder, into, &of(into)),
                    &format!("{from:?} into {into:?} {more}"),
                );
            }
        }
    }
}

/// Gradients are summed over a tree of all micro-batches, so any ZeRO stage and any number of replicas give the same
/// bits.
#[test]
fn a_reproducible_run_resumes_under_any_layout() {
    let root = tempfile::tempdir().unwrap();
    let of = |place| settings(place, 8, REPRODUCIBLE);
    let whole = run_of(|| gpt2(40, true), 1, 4, &of((1, 1, 0, "1f1b")));
    for (zero_stage, schedule) in (0..=3).zip(SCHEDULES) {
        let from = (3, 2, zero_stage, schedule);
        let root = root.path().join(zero_stage.to_string());
        let folder = saved(&root, from, &of(from));
        for into in [
            (2, 4, (zero_stage + 1) % 4, "1f1b"),
            (3, 1, (zero_stage + 2) % 4, "gpipe"),
            (1, 4, (zero_stage + 3) % 4, "1f1b"),
            (2, 1, 3, "interleaved_1f1b"),
            (1, 1, 0, "1f1b"),
        ] {
            assert_same(&whole.after(2), &resumed(&root, &folder, into, &of(into)), &format!("{from:?} into {into:?}"));
        }
    }
}

/// The opposite direction: a checkpoint of one stage resumes under a pipeline.
#[test]
fn a_checkpoint_of_one_stage_resumes_under_a_pipeline() {
    let root = tempfile::tempdir().unwrap();
    for zero_stage in 0..=3 {
        let of = |place| settings(place, 8, "");
        let from = (1, 2, zero_stage, "1f1b");
        let whole = run_of(|| gpt2(40, true), 2, 4, &of(from));
        let root = root.path().join(zero_stage.to_string());
        let folder = saved(&root, from, &of(from));
        for into in [(2, 2, zero_stage ^ 1, "1f1b"), (3, 2, zero_stage, "zb_h1")] {
            assert_same(&whole.after(2), &resumed(&root, &folder, into, &of(into)), &format!("{from:?} into {into:?}"));
        }
    }
}

/// One shard of the last stage is damaged. All ranks of all stages reject the checkpoint and keep their state.
#[test]
fn damage_is_refused_by_every_rank_of_every_stage() {
    let root = tempfile::tempdir().unwrap();
    let place = (3, 2, 3, "1f1b");
    let text = settings(place, 8, "");
    let folder = saved(root.path(), place, &text);
    let shard = folder.join("shard-00005-of-00006.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    world(6, |comm| {
        let mut engine = engine_of(gpt2(40, true), comm, &text);
        let before = engine.full_parameter("transformer.wte.weight").unwrap();
        let error = engine.load_checkpoint(&folder).expect_err("a damaged checkpoint is loaded");
        assert!(error.to_string().contains("shard-00005-of-00006.safetensors"), "{error}");
        assert_eq!(error.exit_status(), 3, "{error}");
        assert_eq!(engine.full_parameter("transformer.wte.weight").unwrap(), before);
        train(&mut engine, 1);
    });
}

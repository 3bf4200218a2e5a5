//! Saves that are interrupted, fail or run in the background, and the choice of the checkpoints to keep.

use std::fs;
use std::path::Path;

use super::{copy, engine, saved, settings, state};
use crate::world::{BF16, FP16, train, trajectory, world};

#[test]
fn an_interrupted_save_is_not_a_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(3, "");
    let good = saved(root.path(), 2, 2, &text);
    // A crash leaves a folder that was not renamed yet, or a folder without a manifest.
    copy(&good, &root.path().join(".unfinished-step-00000003"));
    fs::remove_file(root.path().join(".unfinished-step-00000003/manifest.json")).unwrap();
    copy(&good, &root.path().join("step-00000009"));
    fs::remove_file(root.path().join("step-00000009/manifest.json")).unwrap();
    fs::write(root.path().join("step-latest"), "not a number").unwrap();
    world(2, |comm| {
        let mut engine = engine(comm, &text);
        assert_eq!(engine.resume(root.path()).unwrap(), Some(good.clone()));
        train(&mut engine, 1);
        // The next save of that step replaces the unfinished folder.
        assert_eq!(engine.save_checkpoint(root.path()).unwrap(), root.path().join("step-00000003"));
    });
    assert!(!root.path().join(".unfinished-step-00000003").exists());
    assert_eq!(fs::read_to_string(root.path().join("latest")).unwrap(), "step-00000003\n");
    let empty = root.path().join("empty");
    world(1, |comm| assert_eq!(engine(comm, &text).resume(&empty).unwrap(), None));
}

/// A save that fails on one rank fails on all, and keeps the older checkpoint.
#[test]
fn a_failed_save_leaves_the_older_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(2, "");
    let good = saved(root.path(), 2, 1, &text);
    world(2, |comm| {
        let mut engine = engine(comm, &text);
        engine.resume(root.path()).unwrap();
        train(&mut engine, 1);
        let file = root.path().join("file");
        fs::write(&file, "no folder").unwrap();
        let error = engine.save_checkpoint(&file).expect_err("saved into a file");
        assert_eq!(error.exit_status(), 3, "{error}");
        assert_eq!(engine.resume(root.path()).unwrap(), Some(good.clone()));
        assert_eq!(engine.steps(), 1);
    });
}

#[test]
fn the_last_checkpoints_are_kept() {
    let steps = |keep_last: &str| {
        let root = tempfile::tempdir().unwrap();
        let text = settings(1, &format!("training: {{{keep_last}}}"));
        world(2, |comm| {
            let mut engine = engine(comm, &text);
            for _ in 0..4 {
                train(&mut engine, 1);
                engine.save_checkpoint(root.path()).unwrap();
            }
        });
        let mut names: Vec<String> = fs::read_dir(root.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("step-"))
            .collect();
        names.sort();
        names
    };
    assert_eq!(steps("keep_last: 2"), ["step-00000003", "step-00000004"]);
    assert_eq!(steps("keep_last: 0").len(), 4, "0 keeps all");
}

/// `keep_every` keeps every third checkpoint; `keep_last` counts only the others.
#[test]
fn keep_every_keeps_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(1, "training: {keep_last: 2, keep_every: 3}");
    world(2, |comm| {
        let mut engine = engine(comm, &text);
        for _ in 0..8 {
            train(&mut engine, 1);
            engine.save_checkpoint(root.path()).unwrap();
        }
    });
    assert_eq!(steps(root.path()), [3, 6, 7, 8]);
}

/// After a run is set back to an earlier step, checkpoints of later steps do not count as the newest, and the new
/// checkpoint is not deleted as the oldest.
#[test]
fn a_run_set_back_to_an_older_step_keeps_new_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(1, "training: {keep_last: 1}");
    let first = saved(root.path(), 2, 2, &text);
    fs::rename(&first, root.path().join("kept")).unwrap();
    saved(root.path(), 2, 6, &text);
    fs::rename(root.path().join("kept"), &first).unwrap();
    world(2, |comm| {
        let mut engine = engine(comm, &text);
        engine.load_checkpoint(&first).unwrap();
        train(&mut engine, 1);
        engine.save_checkpoint(root.path()).unwrap();
    });
    assert_eq!(steps(root.path()), [3, 6], "step 2 is deleted, step 6 is kept");
    assert_eq!(fs::read_to_string(root.path().join("latest")).unwrap(), "step-00000003\n");
    let aside = zero_checkpoint::set_back(root.path(), 3).unwrap();
    assert_eq!(aside, [root.path().join("superseded-step-00000006")]);
    assert_eq!(steps(root.path()), [3]);
}

fn steps(root: &Path) -> Vec<u64> {
    zero_checkpoint::committed(root).unwrap().into_iter().map(|(step, _)| step).collect()
}

/// A background save writes the state at the time when it started, byte-identical to a foreground save, and does not
/// affect training.
#[test]
fn a_background_save_has_the_state_of_its_step() {
    let root = tempfile::tempdir().unwrap();
    for (name, more) in [("plain", ""), ("bf16", BF16), ("fp16", FP16)] {
        for zero_stage in 0..=3 {
            let root = root.path().join(format!("{name}-{zero_stage}"));
            let text = settings(zero_stage, &format!("{more}\ntraining: {{save_async: true, keep_last: 0}}"));
            let whole = world(2, |comm| trajectory(&mut engine(comm, &text), 6));
            let waited = root.join("waited");
            world(2, |comm| {
                let mut engine = engine(comm, &text);
                for _ in 0..2 {
                    train(&mut engine, 2);
                    engine.save_checkpoint(&waited).unwrap();
                }
            });
            let trajectories = world(2, |comm| {
                let mut engine = engine(comm, &text);
                train(&mut engine, 2);
                engine.save_checkpoint_in_background(&root, serde_json::Value::Null).unwrap();
                train(&mut engine, 2);
                // The second save waits for the first.
                engine.save_checkpoint_in_background(&root, serde_json::Value::Null).unwrap();
                let trajectory = trajectory(&mut engine, 2);
                engine.finish_save().unwrap();
                let ended = engine.ended_save().unwrap();
                assert_eq!((ended.step, ended.result.unwrap()), (4, root.join("step-00000004")));
                assert!(engine.ended_save().is_none(), "a result is returned only once");
                trajectory
            });
            for (whole, rest) in whole.iter().zip(&trajectories) {
                assert_eq!(rest.losses, whole.losses[4..], "{name}, stage {zero_stage}");
                assert!(rest.parameters == whole.parameters, "{name}, stage {zero_stage}");
            }
            for step in [2, 4] {
                let step = format!("step-{step:08}");
                for entry in fs::read_dir(waited.join(&step)).unwrap() {
                    let name = entry.unwrap().file_name();
                    let [expected, found] =
                        [&waited, &root].map(|root| fs::read(root.join(&step).join(&name)).unwrap());
                    assert!(expected == found, "{name:?} of {step}");
                }
            }
        }
    }
}

/// A background save that fails on one rank is reported to all, and the next save works.
#[test]
fn a_save_in_the_background_fails_on_every_rank() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(3, "training: {save_async: true}");
    world(2, |comm| {
        let rank = comm.rank();
        let mut engine = engine(comm, &text);
        train(&mut engine, 1);
        engine.save_checkpoint_in_background(root.path(), serde_json::Value::Null).unwrap();
        engine.finish_save().unwrap();
        engine.ended_save().unwrap().result.unwrap();
        train(&mut engine, 1);
        let file = root.path().join("step-00000001/manifest.json");
        engine.save_checkpoint_in_background(&file, serde_json::Value::Null).expect_err("a folder in a file");
        // Moves the folder away during the save, before it is committed. A rename is atomic. A removal would fail if
        // the writer added a file meanwhile.
        engine.save_checkpoint_in_background(root.path(), serde_json::Value::Null).unwrap();
        if rank == 0 {
            fs::rename(root.path().join(".unfinished-step-00000002"), root.path().join("moved")).unwrap();
        }
        engine.finish_save().unwrap();
        let ended = engine.ended_save().unwrap();
        assert_eq!(ended.step, 2);
        ended.result.expect_err("committed without its folder");
        train(&mut engine, 1);
        engine.save_checkpoint(root.path()).unwrap();
        assert_eq!(engine.resume(root.path()).unwrap(), Some(root.path().join("step-00000003")));
    });
}

/// If a run is set back and saves a step again, the new checkpoint replaces the old folder.
#[test]
fn saving_a_step_again_replaces_it() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(3, "");
    saved(root.path(), 2, 1, &text);
    let other = text.replace("micro_batch_size_per_gpu: 1", "micro_batch_size_per_gpu: 2");
    let folder = saved(root.path(), 2, 1, &other);
    let expected = state(2, &other, |engine| drop(train(engine, 1)));
    let loaded = state(2, &text, |engine| drop(engine.load_checkpoint(&folder).unwrap()));
    assert!(loaded == expected);
    let names: Vec<_> = fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "one checkpoint and `latest`: {names:?}");
}

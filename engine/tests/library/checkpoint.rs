//! A run resumes from a checkpoint bit-identically under any layout, and every rank rejects a damaged checkpoint.

use crate::world;

use std::fs;
use std::path::{Path, PathBuf};

use world::{BF16, FP16, Trajectory, batch, config, gpt2, train, trajectory, world};
use zero_engine::{Engine, Kind, Layers, zoo};

fn settings(zero_stage: u8, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\n{more}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 64}}"
    )
}

fn engine(ranks: usize, text: &str, comm: std::sync::Arc<dyn zero_engine::comm::Communicator>) -> Engine {
    Engine::with_communicator(config(ranks, text), gpt2(), comm).unwrap_or_else(|e| panic!("{e}"))
}

/// Trains `steps` steps and saves a checkpoint.
fn saved(root: &Path, ranks: usize, steps: u64, text: &str) -> PathBuf {
    let folders = world(ranks, |comm| {
        let mut engine = engine(ranks, text, comm);
        train(&mut engine, steps);
        engine.save_checkpoint(root).unwrap_or_else(|e| panic!("{e}"))
    });
    assert!(folders.iter().all(|folder| *folder == folders[0]));
    folders[0].clone()
}

#[test]
fn a_resumed_run_is_the_uninterrupted_run() {
    let root = tempfile::tempdir().unwrap();
    for (name, more) in [
        ("plain", "gradient_accumulation_steps: 2"),
        ("bf16", BF16),
        ("fp16", FP16),
        ("scheduled", "scheduler: {type: WarmupLR, params: {warmup_num_steps: 8, warmup_max_lr: 0.01}}"),
        ("rmsprop", "optimizer: {type: RMSprop, params: {lr: 0.001, momentum: 0.9}}"),
        ("nadam", "optimizer: {type: NAdam}"),
        ("radam", "optimizer: {type: RAdam}"),
        ("schedule-free", "optimizer: {type: AdamWScheduleFree}"),
        (
            "one cycle",
            "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.0001, cycle_max_lr: 0.01, cycle_first_step_size: 4, \
             cycle_second_step_size: 3, decay_step_size: 2, decay_lr_rate: 0.5, decay_mom_rate: 0.01}}",
        ),
    ] {
        for zero_stage in 0..=3 {
            let text = settings(zero_stage, more);
            let root = root.path().join(format!("{name}-{zero_stage}"));
            let whole = world(2, |comm| trajectory(&mut engine(2, &text, comm), 10));
            let folder = saved(&root, 2, 5, &text);
            assert_eq!(folder, root.join("step-00000005"));
            let rest: Vec<Trajectory> = world(2, |comm| {
                let mut engine = engine(2, &text, comm);
                assert_eq!(engine.resume(&root).unwrap(), Some(folder.clone()));
                assert_eq!(engine.steps(), 5);
                trajectory(&mut engine, 5)
            });
            for (whole, rest) in whole.iter().zip(&rest) {
                assert_eq!(rest.losses, whole.losses[5..], "{name}, stage {zero_stage}: losses");
                assert_eq!(rest.norms, whole.norms[5..], "{name}, stage {zero_stage}: norms");
                assert!(rest.parameters == whole.parameters, "{name}, stage {zero_stage}: parameters");
            }
        }
    }
}

/// Collects the parameters and optimizer states of all ranks: (parameter, kind, bits).
fn state(ranks: usize, text: &str, prepare: impl Fn(&mut Engine) + Sync) -> Vec<(String, Kind, Vec<u32>)> {
    let pieces = world(ranks, |comm| {
        let mut engine = engine(ranks, text, comm);
        prepare(&mut engine);
        let mut pieces = vec![];
        for kind in engine.zero().kinds() {
            for range in engine.zero().saved_ranges() {
                let values = engine.zero().read(kind, &range).unwrap();
                pieces.push((range.parameter, kind, range.elements.start, values));
            }
        }
        let names: Vec<String> = engine.model().parameters().iter().map(|p| p.name().to_string()).collect();
        (names, pieces)
    });
    let names = pieces[0].0.clone();
    let mut pieces: Vec<_> = pieces.into_iter().flat_map(|(_, pieces)| pieces).collect();
    pieces.sort_by_key(|(parameter, kind, start, _)| (*parameter, *kind, *start));
    let mut whole: Vec<(String, Kind, Vec<u32>)> = vec![];
    for (parameter, kind, start, values) in pieces {
        if start == 0 {
            whole.push((names[parameter].clone(), kind, vec![]));
        }
        let bits = &mut whole.last_mut().unwrap().2;
        assert_eq!(bits.len(), start, "a gap in {}", names[parameter]);
        bits.extend(values.into_iter().map(f32::to_bits));
    }
    whole
}

#[test]
fn a_checkpoint_loads_into_any_layout() {
    let root = tempfile::tempdir().unwrap();
    for more in ["", BF16, FP16] {
        for (zero_stage, ranks) in [(0, 1), (1, 2), (2, 3), (3, 4)] {
            let text = settings(zero_stage, more);
            let folder = saved(&root.path().join(format!("{zero_stage}{}", more.len())), ranks, 3, &text);
            let original = state(ranks, &text, |engine| drop(train(engine, 3)));
            assert_eq!(original.len(), 3 * (2 * 12 + 4), "parameters and two states of each");
            for into_ranks in [1, 2, 3] {
                for into_stage in 0..=3 {
                    let loaded = state(into_ranks, &settings(into_stage, more), |engine| {
                        engine.load_checkpoint(&folder).unwrap_or_else(|e| panic!("{e}"));
                    });
                    assert!(
                        loaded == original,
                        "stage {zero_stage} on {ranks} ranks into stage {into_stage} on {into_ranks}"
                    );
                }
            }
        }
    }
}

/// Every rank reads replicated parameters, so all ranks must have the full, equal values after a load.
#[test]
fn every_rank_has_the_loaded_parameters() {
    let root = tempfile::tempdir().unwrap();
    let folder = saved(root.path(), 2, 2, &settings(3, ""));
    for zero_stage in 0..=3 {
        let losses = world(3, |comm| {
            let mut engine = engine(3, &settings(zero_stage, ""), comm);
            engine.load_checkpoint(&folder).unwrap();
            (
                engine.forward(batch(9, 1).inputs).unwrap().tensors()[0]
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap(),
                engine.local_parameter("transformer.wte.weight").unwrap(),
            )
        });
        assert!(losses.iter().all(|(logits, _)| *logits == losses[0].0), "stage {zero_stage}");
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Loads `bad` on two ranks. Checks that both reject it and keep their state, and then continue from `good`.
fn refused(bad: &Path, good: &Path) -> Vec<String> {
    world(2, |comm| {
        let mut engine = engine(2, &settings(3, ""), comm);
        train(&mut engine, 1);
        let before = engine.full_parameter("transformer.h.1.mlp.c_fc.weight").unwrap();
        let error = engine.load_checkpoint(bad).expect_err("a damaged checkpoint is loaded");
        assert_eq!(error.exit_status(), 3, "{error}");
        assert_eq!(
            engine.full_parameter("transformer.h.1.mlp.c_fc.weight").unwrap(),
            before,
            "a rejected load changed the state"
        );
        assert_eq!(engine.steps(), 1);
        engine.load_checkpoint(good).unwrap();
        train(&mut engine, 1);
        error.to_string()
    })
}

#[test]
fn damage_is_refused_by_every_rank() {
    let root = tempfile::tempdir().unwrap();
    let good = saved(root.path(), 2, 2, &settings(3, ""));
    let shard = |folder: &Path, rank: usize| folder.join(format!("shard-{rank:05}-of-00002.safetensors"));
    let manifest = |folder: &Path| folder.join("manifest.json");
    // Changes a manifest and updates its checksum, so that only the check of the content can fail.
    let replace = |path: &Path, from: &str, to: &str| {
        let text = fs::read_to_string(path).unwrap();
        assert!(text.contains(from), "no {from:?} to replace");
        let text = text.replacen(from, to, 1);
        let (body, _) = text.rsplit_once("\n  \"crc32\": ").unwrap();
        let crc32 = crc32fast::hash(body.as_bytes());
        fs::write(path, format!("{body}\n  \"crc32\": {crc32}\n}}\n")).unwrap();
    };
    type Damage<'a> = Box<dyn Fn(&Path) + 'a>;
    let cases: Vec<(&str, Damage<'_>, &str)> = vec![
        (
            "a flipped bit in the data of rank 0",
            Box::new(|f| edit(&shard(f, 0), |b| *b.last_mut().unwrap() ^= 1)),
            "checksum",
        ),
        (
            "a flipped bit in the data of rank 1",
            Box::new(|f| edit(&shard(f, 1), |b| *b.last_mut().unwrap() ^= 1)),
            "checksum",
        ),
        ("a flipped bit in a header", Box::new(|f| edit(&shard(f, 1), |b| b[9] ^= 4)), "header is damaged"),
        (
            "a flipped bit in a name",
            Box::new(|f| edit(&shard(f, 1), |b| b[20] ^= 4)),
            "the tensor is not in the manifest",
        ),
        (
            "a flipped bit in the manifest",
            Box::new(|f| edit(&manifest(f), |b| b[20] ^= 4)),
            "the checksum does not match",
        ),
        ("a truncated shard", Box::new(|f| edit(&shard(f, 1), |b| b.truncate(b.len() / 2))), "when it was written"),
        ("an empty shard", Box::new(|f| edit(&shard(f, 0), Vec::clear)), "0 bytes, but"),
        ("a longer shard", Box::new(|f| edit(&shard(f, 0), |b| b.push(0))), "when it was written"),
        ("a missing shard", Box::new(|f| fs::remove_file(shard(f, 1)).unwrap()), "shard-00001-of-00002.safetensors"),
        ("a missing manifest", Box::new(|f| fs::remove_file(manifest(f)).unwrap()), "manifest.json"),
        (
            "a truncated manifest",
            Box::new(|f| edit(&manifest(f), |b| b.truncate(b.len() / 2))),
            "manifest.json is damaged",
        ),
        ("an empty manifest", Box::new(|f| edit(&manifest(f), Vec::clear)), "manifest.json is damaged"),
        (
            "another format",
            Box::new(|f| replace(&manifest(f), "zero-train-checkpoint", "other")),
            "the format is `other`",
        ),
        (
            "a later version",
            Box::new(|f| replace(&manifest(f), "\"version\": 3", "\"version\": 4")),
            "the manifest has version 4",
        ),
        ("an unknown field", Box::new(|f| replace(&manifest(f), "\"step\"", "\"stepp\"")), "unknown field `stepp`"),
        (
            "a shard elsewhere",
            Box::new(|f| replace(&manifest(f), "shard-00001", "../shard-00001")),
            "is named `../shard",
        ),
        (
            "a gap",
            Box::new(|f| replace(&manifest(f), "\"start\": 0", "\"start\": 1")),
            "a gap or an overlap at element 0",
        ),
        ("another shape", Box::new(|f| replace(&manifest(f), "61,", "62,")), "of 1984 elements"),
    ];
    for (number, (name, damage, expected)) in cases.iter().enumerate() {
        let bad = root.path().join(format!("bad-{number}"));
        copy(&good, &bad);
        damage(&bad);
        for said in refused(&bad, &good) {
            assert!(said.contains(expected), "{name}: {said}");
        }
    }
    let nowhere = root.path().join("nowhere");
    for said in refused(&nowhere, &good) {
        assert!(said.contains("nowhere/manifest.json"), "{said}");
    }
}

#[test]
fn another_model_or_optimizer_is_refused_by_every_rank() {
    let root = tempfile::tempdir().unwrap();
    let good = saved(root.path(), 2, 1, &settings(3, ""));
    let with = |n_embd: usize, n_layer: usize, n_inner: usize| {
        move || -> Layers {
            let sizes =
                zoo::Gpt2Config { vocab_size: 61, n_positions: 16, n_embd, n_layer, n_head: 2, ..Default::default() };
            zoo::gpt2(&zoo::Gpt2Config { n_inner: Some(n_inner), ..sizes })
        }
    };
    type Model = Box<dyn Fn() -> Layers + Sync>;
    let sgd = "train_micro_batch_size_per_gpu: 1\noptimizer: {type: SGD, params: {lr: 0.1}}";
    let adamw = "train_micro_batch_size_per_gpu: 1";
    let cases: [(Model, &str, &str); 5] = [
        (
            Box::new(with(16, 2, 64)),
            adamw,
            "`transformer.wte.weight` has shape [61, 32] in the checkpoint and [61, 16] in the model",
        ),
        (
            Box::new(with(32, 3, 64)),
            adamw,
            "the model's parameter `transformer.h.2.ln_1.weight` is not in the checkpoint",
        ),
        (
            Box::new(with(32, 1, 64)),
            adamw,
            "the checkpoint's parameter `transformer.h.1.attn.c_attn.bias` is not in the model",
        ),
        (
            Box::new(with(32, 2, 32)),
            adamw,
            "`transformer.h.0.mlp.c_fc.weight` has shape [32, 64] in the checkpoint and [32, 32] in the model",
        ),
        (
            Box::new(gpt2),
            sgd,
            "the checkpoint has optimizer states [\"exp_avg\", \"exp_avg_sq\"], but the configured optimizer has []",
        ),
    ];
    for (model, text, expected) in cases {
        let said = world(2, |comm| {
            let config = zero_engine::Config::with_world_size("other.yaml", text, 2).unwrap();
            let mut engine = Engine::with_communicator(config, model(), comm).unwrap();
            engine.load_checkpoint(&good).expect_err("another model's checkpoint is loaded").to_string()
        });
        for said in said {
            assert!(said.contains(expected), "{said}");
        }
    }
}

#[test]
fn an_interrupted_save_is_not_a_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(3, "");
    let good = saved(root.path(), 2, 2, &text);
    // A crash leaves a folder that was never renamed, or one whose manifest was never written.
    copy(&good, &root.path().join(".unfinished-step-00000003"));
    fs::remove_file(root.path().join(".unfinished-step-00000003/manifest.json")).unwrap();
    copy(&good, &root.path().join("step-00000009"));
    fs::remove_file(root.path().join("step-00000009/manifest.json")).unwrap();
    fs::write(root.path().join("step-latest"), "not a number").unwrap();
    world(2, |comm| {
        let mut engine = engine(2, &text, comm);
        assert_eq!(engine.resume(root.path()).unwrap(), Some(good.clone()));
        train(&mut engine, 1);
        // The next save of that step replaces the unfinished folder.
        assert_eq!(engine.save_checkpoint(root.path()).unwrap(), root.path().join("step-00000003"));
    });
    assert!(!root.path().join(".unfinished-step-00000003").exists());
    assert_eq!(fs::read_to_string(root.path().join("latest")).unwrap(), "step-00000003\n");
    let empty = root.path().join("empty");
    world(1, |comm| assert_eq!(engine(1, &text, comm).resume(&empty).unwrap(), None));
}

/// A save that fails on one rank fails on all, and keeps the older checkpoint.
#[test]
fn a_failed_save_leaves_the_older_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(2, "");
    let good = saved(root.path(), 2, 1, &text);
    world(2, |comm| {
        let mut engine = engine(2, &text, comm);
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
            let mut engine = engine(2, &text, comm);
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
        let mut engine = engine(2, &text, comm);
        for _ in 0..8 {
            train(&mut engine, 1);
            engine.save_checkpoint(root.path()).unwrap();
        }
    });
    assert_eq!(steps(root.path()), [3, 6, 7, 8]);
}

/// After a run is set back, checkpoints of later steps do not count as the newest, and the new checkpoint is not
/// deleted as the oldest.
#[test]
fn a_run_that_is_set_back_keeps_new_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let text = settings(1, "training: {keep_last: 1}");
    let first = saved(root.path(), 2, 2, &text);
    fs::rename(&first, root.path().join("kept")).unwrap();
    saved(root.path(), 2, 6, &text);
    fs::rename(root.path().join("kept"), &first).unwrap();
    world(2, |comm| {
        let mut engine = engine(2, &text, comm);
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

/// A background save writes the state at its start, byte-identical to a foreground save, and does not affect training.
#[test]
fn a_background_save_has_the_state_of_its_step() {
    let root = tempfile::tempdir().unwrap();
    for (name, more) in [("plain", ""), ("bf16", BF16), ("fp16", FP16)] {
        for zero_stage in 0..=3 {
            let root = root.path().join(format!("{name}-{zero_stage}"));
            let text = settings(zero_stage, &format!("{more}\ntraining: {{save_async: true, keep_last: 0}}"));
            let whole = world(2, |comm| trajectory(&mut engine(2, &text, comm), 6));
            let waited = root.join("waited");
            world(2, |comm| {
                let mut engine = engine(2, &text, comm);
                for _ in 0..2 {
                    train(&mut engine, 2);
                    engine.save_checkpoint(&waited).unwrap();
                }
            });
            let trajectories = world(2, |comm| {
                let mut engine = engine(2, &text, comm);
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
        let mut engine = engine(2, &text, comm);
        train(&mut engine, 1);
        engine.save_checkpoint_in_background(root.path(), serde_json::Value::Null).unwrap();
        engine.finish_save().unwrap();
        engine.ended_save().unwrap().result.unwrap();
        train(&mut engine, 1);
        let file = root.path().join("step-00000001/manifest.json");
        engine.save_checkpoint_in_background(&file, serde_json::Value::Null).expect_err("a folder in a file");
        // Moves the folder away during the save, before it is committed. A rename is atomic; a removal would fail if
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

/// Data continue after the samples that were consumed, not after the steps, also if the batch size has changed.
#[test]
fn data_continue_after_the_consumed_samples() {
    let root = tempfile::tempdir().unwrap();
    let folder = saved(root.path(), 2, 3, &settings(1, "gradient_accumulation_steps: 2"));
    world(1, |comm| {
        let mut engine = engine(1, &settings(1, ""), comm);
        engine.load_checkpoint(&folder).unwrap();
        assert_eq!((engine.steps(), engine.samples()), (3, 12));
        train(&mut engine, 1);
        assert_eq!((engine.steps(), engine.samples()), (4, 13));
    });
}

/// A step that is saved again, after the run was set back, replaces the old folder.
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

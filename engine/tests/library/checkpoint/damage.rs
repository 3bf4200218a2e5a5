//! All ranks reject a damaged checkpoint, and a checkpoint of another model or optimizer.

use std::fs;
use std::path::Path;

use zero_engine::{Engine, Layers, zoo};

use super::{copy, engine, saved, settings};
use crate::world::{gpt2, train, world};

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Loads `bad` on two ranks. Checks that both ranks reject it, keep their state, and can then continue from `good`.
fn refused(bad: &Path, good: &Path) -> Vec<String> {
    world(2, |comm| {
        let mut engine = engine(comm, &settings(3, ""));
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

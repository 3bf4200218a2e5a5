//! `model.pretrained`: every layout starts with weights bit-identical to the folder's, each rank reads only its shard,
//! and unsuitable files are rejected.

mod reads;

use crate::world;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use world::{batch, parameters, train, world};
use zero_engine::{Config, Engine, Error, ExportDtype, Weights, configured_layers};

const F32: Weights = Weights { dtype: ExportDtype::F32, max_shard_bytes: 5_000_000_000, averaged: false };
const GPT2: &str =
    "type: gpt2, vocab_size: 61, n_positions: 16, n_embd: 32, n_layer: 2, n_head: 2, initializer_range: 0.1";
const LLAMA: &str = "type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, \
                     num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 16, initializer_range: 0.1";

/// Bits of all parameters by name.
type Parameters = Vec<(String, Vec<u32>)>;

fn config(ranks: usize, text: &str) -> Config {
    let text = format!("train_micro_batch_size_per_gpu: 1\n{text}");
    Config::with_world_size("test.yaml", text, ranks).unwrap_or_else(|e| panic!("{e}"))
}

fn engine(comm: std::sync::Arc<dyn zero_engine::comm::Communicator>, text: &str) -> Result<Engine, Error> {
    let config = config(comm.size(), text);
    let layers = configured_layers(&config, None)?;
    Engine::with_communicator(config, layers, comm)
}

/// Trains a model for a few steps. Returns its export in `root`, its parameters, and the loss of its next step.
fn trained(root: &Path, model: &str) -> (PathBuf, Parameters, u32) {
    let (folder, parameters, loss) = world(1, |comm| {
        let mut engine = engine(comm, &format!("model: {{{model}}}\noptimizer: {{type: SGD}}")).unwrap();
        train(&mut engine, 3);
        let folder = engine.save_checkpoint(root.join("run")).unwrap();
        let parameters = parameters(&mut engine);
        (folder, parameters, engine.train_batch(&batch(9, 1)).unwrap().loss.to_bits())
    })
    .remove(0);
    let out = root.join("exported");
    let (_, left_out) = zero_engine::export(&folder, &out, F32).unwrap();
    assert_eq!(left_out, ["no tokenizer: the checkpoint names no tokenizer"]);
    (out, parameters, loss)
}

fn pretrained(folder: &Path) -> String {
    format!("model: {{pretrained: {:?}}}\n", folder.display().to_string())
}

#[test]
fn every_layout_starts_from_the_bits_of_an_export() {
    let llama3 = "rope_scaling: {rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 64}";
    for model in [
        GPT2.to_string(),
        format!("{GPT2}, tie_word_embeddings: false, n_inner: 96"),
        format!("{LLAMA}, {llama3}"),
        format!("{LLAMA}, tie_word_embeddings: true, attention_bias: true, mlp_bias: true, head_dim: 6"),
        format!("{LLAMA}, sliding_window: 5"),
        format!("{LLAMA}, qkv_bias: true, tie_word_embeddings: true"),
        format!("{LLAMA}, qkv_bias: true, sliding_window: 5"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let (folder, expected, loss) = trained(root.path(), &model);
        for ranks in 1..=3 {
            for stage in [0, 3] {
                let zero = format!("zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 64}}");
                let ranks = world(ranks, |comm| {
                    let mut engine = engine(comm, &format!("{}{zero}", pretrained(&folder))).unwrap();
                    let parameters = parameters(&mut engine);
                    let samples = engine.config().train_batch_size;
                    (parameters, engine.train_batch(&batch(9, samples)).unwrap().loss.to_bits())
                });
                for (rank, (parameters, first)) in ranks.iter().enumerate() {
                    assert!(*parameters == expected, "{model}: rank {rank} of {}, stage {stage}", ranks.len());
                    assert!(ranks.len() > 1 || *first == loss, "{model}: loss at stage {stage}");
                }
            }
        }
        // A checkpoint can be exported after the pretrained folder is gone.
        let again = world(1, |comm| {
            let mut engine = engine(comm, &pretrained(&folder)).unwrap();
            engine.save_checkpoint(root.path().join("again")).unwrap()
        });
        fs::remove_dir_all(&folder).unwrap();
        let out = root.path().join("exported-again");
        let (exported, _) = zero_engine::export(&again[0], &out, F32).unwrap();
        assert_eq!(exported.files, ["model.safetensors", "config.json"], "{model}");
    }
}

#[test]
fn pipelines_and_other_dtypes_start_from_the_folder() {
    let root = tempfile::tempdir().unwrap();
    for (name, model) in [("gpt2", GPT2.to_string()), ("qwen2", format!("{LLAMA}, qkv_bias: true"))] {
        let (folder, expected, _) = trained(&root.path().join(name), &model);
        for (ranks, layout) in [
            (2, "pipeline: {stages: 2}"),
            (4, "pipeline: {stages: 2}\nzero_optimization: {stage: 3, stage3_param_persistence_threshold: 64}"),
            (2, "bf16: {enabled: true}\nzero_optimization: {stage: 1}"),
            (2, "fp16: {enabled: true}\nzero_optimization: {stage: 2}"),
            (2, "bf16: {enabled: true}\nzero_optimization: {stage: 3, stage3_param_persistence_threshold: 64}"),
        ] {
            let ranks = world(ranks, |comm| {
                parameters(&mut engine(comm, &format!("{}{layout}", pretrained(&folder))).unwrap())
            });
            assert!(ranks.iter().all(|parameters| *parameters == expected), "{name}, {layout}");
        }
    }
}

#[test]
fn exporting_a_pretrained_model_gives_the_same_bytes() {
    let root = tempfile::tempdir().unwrap();
    for (name, model) in [("qwen2", format!("{LLAMA}, qkv_bias: true")), ("gpt2", GPT2.to_string())] {
        let root = root.path().join(name);
        let (folder, ..) = trained(&root, &model);
        let saved =
            world(1, |comm| engine(comm, &pretrained(&folder)).unwrap().save_checkpoint(root.join("b")).unwrap());
        zero_engine::export(&saved[0], &root.join("again"), F32).unwrap();
        for file in ["config.json", "model.safetensors"] {
            let read = |folder: PathBuf| fs::read(folder.join(file)).unwrap();
            assert!(read(folder.clone()) == read(root.join("again")), "{name}: {file}");
        }
    }
}

type Tensors = BTreeMap<String, Tensor>;

fn load(folder: &Path) -> Tensors {
    candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap().into_iter().collect()
}

fn save(path: &Path, tensors: &Tensors) {
    let tensors: HashMap<&str, Tensor> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    candle_core::safetensors::save(&tensors, path).unwrap();
}

/// Copies the folder `like` with changed tensors.
fn changed(root: &Path, name: &str, like: &Path, change: impl FnOnce(&mut Tensors)) -> PathBuf {
    let folder = root.join(name);
    fs::create_dir(&folder).unwrap();
    fs::copy(like.join("config.json"), folder.join("config.json")).unwrap();
    let mut tensors = load(like);
    change(&mut tensors);
    save(&folder.join("model.safetensors"), &tensors);
    folder
}

/// Returns the initial parameters on two ranks, or the error.
fn begun(folder: &Path) -> Result<Parameters, String> {
    let stage = "zero_optimization: {stage: 3, stage3_param_persistence_threshold: 64}";
    let begin = |comm| match engine(comm, &format!("{}{stage}", pretrained(folder))) {
        Ok(mut engine) => Ok(parameters(&mut engine)),
        Err(error) => {
            assert_eq!(error.exit_status(), 3, "{error}");
            Err(error.to_string())
        }
    };
    let mut ranks = world(2, begin);
    let (last, first) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    match (&first, &last) {
        (Ok(first), Ok(last)) => assert!(first == last),
        // An error has one line, then the key that names the folder, then an optional help.
        (Err(_), Err(last)) => {
            let (said, more) = last.split_once('\n').unwrap_or((last, "  in: "));
            assert!(!said.is_empty() && more.starts_with("  in: ") && more.lines().count() <= 2, "{last}");
        }
        _ => panic!("one of two ranks began: {first:?} {last:?}"),
    }
    first
}

#[test]
fn names_of_older_files_are_accepted() {
    let root = tempfile::tempdir().unwrap();
    let (gpt2, expected, _) = trained(&root.path().join("gpt2"), GPT2);
    // The tensors are as in GPT-2's first files: their names have no prefix, and they include attention masks and the
    // tied head.
    let old = changed(root.path(), "old", &gpt2, |tensors| {
        let head = tensors["transformer.wte.weight"].clone();
        let bare = |name: &String| name.strip_prefix("transformer.").unwrap().to_string();
        *tensors = tensors.iter().map(|(name, tensor)| (bare(name), tensor.clone())).collect();
        let mask = Tensor::zeros((1, 1, 16, 16), DType::U8, &Device::Cpu).unwrap();
        for layer in 0..2 {
            tensors.insert(format!("h.{layer}.attn.bias"), mask.clone());
            tensors.insert(format!("h.{layer}.attn.masked_bias"), mask.clone());
        }
        tensors.insert("lm_head.weight".into(), head);
    });
    assert!(begun(&old).unwrap() == expected);
    let (llama, expected, _) = trained(&root.path().join("llama"), &format!("{LLAMA}, tie_word_embeddings: true"));
    let old = changed(root.path(), "old-llama", &llama, |tensors| {
        let bare = |name: &String| name.strip_prefix("model.").unwrap().to_string();
        *tensors = tensors.iter().map(|(name, tensor)| (bare(name), tensor.clone())).collect();
        let angles = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
        tensors.insert("layers.0.self_attn.rotary_emb.inv_freq".into(), angles);
    });
    assert!(begun(&old).unwrap() == expected);
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let root = tempfile::tempdir().unwrap();
    let (gpt2, ..) = trained(&root.path().join("gpt2"), GPT2);
    let (norm, wte) = ("transformer.ln_f.weight", "transformer.wte.weight");
    let refused = |name: &str, said: &str, change: &dyn Fn(&mut Tensors)| {
        let folder = changed(root.path(), name, &gpt2, change);
        let error = begun(&folder).unwrap_err();
        assert!(error.contains(said) && error.contains(&folder.display().to_string()), "{name}: {error}");
        error
    };
    let some = |tensors: &Tensors| tensors[norm].clone();
    refused("missing", "is incompatible: `transformer.ln_f.weight` is missing", &|t| drop(t.remove(norm)));
    refused("extra", "is incompatible: `score.weight` is not in the model", &|t| {
        drop(t.insert("score.weight".into(), some(t)))
    });
    refused("narrow", "`transformer.ln_f.weight` has shape [31] in the file and [32] in the model", &|t| {
        let narrow = some(t).narrow(0, 0, 31).unwrap();
        t.insert(norm.into(), narrow);
    });
    refused("integers", "`transformer.ln_f.weight` has dtype U32; only F32, BF16 and F16 are supported", &|t| {
        let integers = some(t).to_dtype(DType::U32).unwrap();
        t.insert(norm.into(), integers);
    });
    refused("twice", "`transformer.ln_f.weight` is the same parameter as `ln_f.weight` in", &|t| {
        t.insert("ln_f.weight".into(), some(t));
    });
    refused(
        "another-head",
        "`lm_head.weight` differs from `transformer.wte.weight`, but the model ties the two",
        &|t| {
            let other = (t[wte].clone() + 1.0).unwrap();
            t.insert("lm_head.weight".into(), other);
        },
    );
    refused(
        "a-head-of-another-shape",
        "`lm_head.weight` has shape [60, 32] in the file and [61, 32] in the model",
        &|t| {
            let other = t[wte].narrow(0, 0, 60).unwrap();
            t.insert("lm_head.weight".into(), other);
        },
    );
    let all = refused("all", "; and 19 more", &|t| *t = BTreeMap::from([("x".into(), some(t))]));
    assert_eq!(all.matches(" is missing").count(), 10, "{all}");
    // An untied head is an ordinary parameter, which must exist.
    let untied = changed(root.path(), "untied", &gpt2, |_| ());
    let path = untied.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["tie_word_embeddings"] = json!(false);
    fs::write(&path, config.to_string()).unwrap();
    let error = begun(&untied).unwrap_err();
    assert!(error.contains("`lm_head.weight` is missing"), "{error}");
}

#[test]
fn only_files_of_the_folder_are_read() {
    let root = tempfile::tempdir().unwrap();
    let (gpt2, expected, _) = trained(&root.path().join("gpt2"), GPT2);
    let folder = root.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::copy(gpt2.join("config.json"), folder.join("config.json")).unwrap();
    let refused = |said: &str| {
        let error = begun(&folder).unwrap_err();
        assert!(error.contains(said), "{error}");
    };
    refused("folder: the folder contains neither model.safetensors nor model.safetensors.index.json");
    fs::write(folder.join("pytorch_model.bin"), "pickle").unwrap();
    refused(
        "folder: the folder contains pytorch_model.bin but no safetensors file, which is the only supported format; convert it with Python: transformers.",
    );

    // The index lists two files.
    let (mut one, mut other) = (load(&gpt2), Tensors::new());
    let late: Vec<String> = one.keys().skip(9).cloned().collect();
    late.into_iter().for_each(|name| drop(other.insert(name.clone(), one.remove(&name).unwrap())));
    save(&folder.join("a.safetensors"), &one);
    save(&folder.join("b.safetensors"), &other);
    let index = |map: &dyn Fn(&str) -> String| {
        let names =
            one.keys().map(|name| (name, "a.safetensors")).chain(other.keys().map(|name| (name, "b.safetensors")));
        let map: BTreeMap<&String, String> = names.map(|(name, file)| (name, map(file))).collect();
        fs::write(folder.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    };
    index(&|file| file.to_string());
    assert!(begun(&folder).unwrap() == expected);
    index(&|_| "b.safetensors".to_string());
    refused("folder is incompatible: ");
    fs::copy(gpt2.join("model.safetensors"), root.path().join("outside.safetensors")).unwrap();
    for outside in [
        "../outside.safetensors".to_string(),
        root.path().join("outside.safetensors").display().to_string(),
        "..".into(),
    ] {
        index(&|_| outside.clone());
        refused(&format!("the index lists the file `{outside}`, which is outside this folder"));
    }
    index(&|file| file.to_string());
    fs::remove_file(folder.join("b.safetensors")).unwrap();
    refused("b.safetensors: No such file");
    symlink("../outside.safetensors", folder.join("b.safetensors")).unwrap();
    refused("b.safetensors: the file is a link to");
    refused("outside the folder; copy the file itself into the folder");
    fs::write(folder.join("model.safetensors.index.json"), "{}").unwrap();
    refused("model.safetensors.index.json is damaged: missing field `weight_map`");

    // The index swaps the files, although both exist.
    fs::remove_file(folder.join("b.safetensors")).unwrap();
    save(&folder.join("b.safetensors"), &other);
    index(&|file| if file == "a.safetensors" { "b.safetensors".into() } else { "a.safetensors".into() });
    refused("which has no such tensor");

    // Hugging Face's cache consists of links within the cache folder.
    let cache = root.path().join("models--a--b");
    let snapshot = cache.join("snapshots/0123");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(cache.join("blobs")).unwrap();
    for (blob, file) in [("x", "config.json"), ("y", "model.safetensors")] {
        fs::copy(gpt2.join(file), cache.join("blobs").join(blob)).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(file)).unwrap();
    }
    assert!(begun(&snapshot).unwrap() == expected);
    fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    symlink("../../../outside.safetensors", snapshot.join("model.safetensors")).unwrap();
    assert!(begun(&snapshot).unwrap_err().contains("the file is a link to"));
}

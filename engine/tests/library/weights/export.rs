//! Exported weights are byte-identical from every layout, have the checkpoint's values, and give the same logits in
//! Hugging Face's transformers.

use crate::python;
use crate::world;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use python::python;
use serde_json::{Value, json};
use world::{batch, gpt2_config, parameters, train, world};
use zero_engine::{Config, Engine, ExportDtype, Layers, Weights, zoo};

const F32: Weights = Weights { dtype: ExportDtype::F32, max_shard_bytes: 5_000_000_000, averaged: false };

const GPT2: &str = "{type: gpt2, vocab_size: 61, n_positions: 16, n_embd: 32, n_layer: 2, n_head: 2, n_inner: 64, initializer_range: 0.1}";

fn gpt2() -> Layers {
    zoo::gpt2(&gpt2_config())
}

fn config_of(ranks: usize, model: &str, more: &str) -> Config {
    let text = format!("train_micro_batch_size_per_gpu: 1\nmodel: {model}\n{more}");
    Config::with_world_size("test.yaml", text, ranks).unwrap_or_else(|e| panic!("{e}"))
}

fn zero(stage: u8) -> String {
    format!("zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 64}}")
}

/// Trains a few steps on one rank and saves a checkpoint.
fn saved(root: &Path, model: &str, layers: impl Fn() -> Layers + Sync) -> PathBuf {
    world(1, |comm| {
        let mut engine = Engine::with_communicator(config_of(1, model, ""), layers(), comm).unwrap();
        train(&mut engine, 3);
        engine.save_checkpoint(root).unwrap()
    })
    .remove(0)
}

/// Reads all files of a folder.
fn content(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).unwrap())).collect()
}

#[test]
fn every_layout_gives_the_same_bytes() {
    let root = tempfile::tempdir().unwrap();
    let first = saved(&root.path().join("first"), GPT2, gpt2);
    let out = root.path().join("exported");
    let (exported, left_out) = zero_engine::export(&first, &out, F32).unwrap();
    assert_eq!(
        (exported.tensors, exported.files.as_slice()),
        (28, &["model.safetensors", "config.json"].map(String::from)[..])
    );
    assert_eq!(left_out, ["no tokenizer: the checkpoint names no tokenizer"]);
    let expected = content(&out);
    for ranks in 1..=3 {
        for stage in 0..=3 {
            let name = format!("{ranks}-{stage}");
            let folder = world(ranks, |comm| {
                let mut engine = Engine::with_communicator(config_of(ranks, GPT2, &zero(stage)), gpt2(), comm).unwrap();
                engine.load_checkpoint(&first).unwrap();
                engine.save_checkpoint(root.path().join(&name)).unwrap()
            });
            let out = root.path().join(format!("exported-{name}"));
            zero_engine::export(&folder[0], &out, F32).unwrap();
            assert!(content(&out) == expected, "{name}");
        }
    }
}

/// Returns the bits of the loss of one step, after `prepare`.
fn loss(model: &str, layers: impl Fn() -> Layers + Sync, more: &str, prepare: impl Fn(&mut Engine) + Sync) -> u32 {
    world(1, |comm| {
        let mut engine = Engine::with_communicator(config_of(1, model, more), layers(), comm).unwrap();
        prepare(&mut engine);
        engine.train_batch(&batch(9, 1)).unwrap().loss.to_bits()
    })[0]
}

#[test]
fn a_run_can_start_from_an_export() {
    let root = tempfile::tempdir().unwrap();
    let folder = saved(root.path(), GPT2, gpt2);
    let goes_on = loss(GPT2, gpt2, "", |engine| drop(engine.load_checkpoint(&folder).unwrap()));
    let whole = root.path().join("whole");
    zero_engine::export(&folder, &whole, F32).unwrap();
    let parts = root.path().join("parts");
    let (exported, _) = zero_engine::export(&folder, &parts, Weights { max_shard_bytes: 10_000, ..F32 }).unwrap();
    assert!(exported.files.len() > 4, "{:?}", exported.files);
    for out in [&whole, &parts] {
        let more = format!("training: {{initial_weights: [\"{}/*.safetensors\"]}}", out.display());
        assert_eq!(loss(GPT2, gpt2, &more, |_| ()), goes_on, "{}", out.display());
    }
    let index: Value = serde_json::from_slice(&fs::read(parts.join("model.safetensors.index.json")).unwrap()).unwrap();
    let all = candle_core::safetensors::load(whole.join("model.safetensors"), &Device::Cpu).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), all.len());
    let mut bytes = 0;
    for (name, file) in map {
        let part = candle_core::safetensors::load(parts.join(file.as_str().unwrap()), &Device::Cpu).unwrap();
        let of_file: usize =
            map.iter().filter(|(_, other)| *other == file).map(|(name, _)| 4 * all[name].elem_count()).sum();
        assert!(of_file <= 10_000 || part.len() == 1, "{file} has {of_file} bytes");
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(values(&part[name]) == values(&all[name]) && part[name].dims() == all[name].dims(), "{name}");
        bytes += 4 * all[name].elem_count();
    }
    assert_eq!(index["metadata"]["total_size"], bytes);
}

#[test]
fn sixteen_bits_are_rounded_and_never_overflow() {
    let root = tempfile::tempdir().unwrap();
    let folder = saved(root.path(), GPT2, gpt2);
    zero_engine::export(&folder, &root.path().join("f32"), F32).unwrap();
    let load = |name: &str| {
        candle_core::safetensors::load(root.path().join(name).join("model.safetensors"), &Device::Cpu).unwrap()
    };
    let all = load("f32");
    let names: Vec<String> = gpt2().build(DType::F32).unwrap().parameters().iter().map(|p| p.name().into()).collect();
    assert_eq!(names.len(), all.len());
    for (dtype, of_tensor, name) in
        [(ExportDtype::Bf16, DType::BF16, "bfloat16"), (ExportDtype::F16, DType::F16, "float16")]
    {
        zero_engine::export(&folder, &root.path().join(name), Weights { dtype, ..F32 }).unwrap();
        let config: Value =
            serde_json::from_slice(&fs::read(root.path().join(name).join("config.json")).unwrap()).unwrap();
        assert_eq!(config["torch_dtype"], name);
        let narrow = load(name);
        for parameter in &names {
            let values =
                |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(narrow[parameter].dtype(), of_tensor);
            assert!(values(&narrow[parameter]) == values(&all[parameter].to_dtype(of_tensor).unwrap()), "{parameter}");
        }
    }
    let large = world(1, |comm| {
        let mut engine = Engine::with_communicator(config_of(1, GPT2, ""), gpt2(), comm).unwrap();
        engine.set_parameter("transformer.ln_f.bias", &[7e4; 32]).unwrap();
        engine.save_checkpoint(root.path().join("large")).unwrap()
    });
    let out = root.path().join("too-large");
    let error =
        zero_engine::export(&large[0], &out, Weights { dtype: ExportDtype::F16, ..F32 }).unwrap_err().to_string();
    assert!(error.contains("a value of `transformer.ln_f.bias` is too large for F16"), "{error}");
    assert!(!out.exists());
}

#[test]
fn a_failed_export_leaves_no_files() {
    let root = tempfile::tempdir().unwrap();
    let folder = saved(&root.path().join("run"), GPT2, gpt2);
    let used = root.path().join("used");
    fs::create_dir(&used).unwrap();
    fs::write(used.join("mine"), "mine").unwrap();
    let error = zero_engine::export(&folder, &used, F32).unwrap_err();
    assert!(error.exit_status() == 3 && error.to_string().contains("the folder already exists"), "{error}");
    assert_eq!(content(&used), BTreeMap::from([("mine".to_string(), b"mine".to_vec())]));
    // Damages the first tensor of the file, which is a parameter.
    let shard = folder.join("shard-00000-of-00001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[data + 5] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let out = root.path().join("out");
    let error = zero_engine::export(&folder, &out, F32).unwrap_err();
    assert!(error.exit_status() == 3 && error.to_string().contains("`transformer.h.0.attn.c_attn.bias@0`"), "{error}");
    let left: Vec<String> =
        fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!out.exists() && left.iter().all(|name| !name.starts_with(".unfinished")), "{left:?}");
}

#[test]
fn models_unknown_to_hugging_face_have_no_config() {
    let root = tempfile::tempdir().unwrap();
    let reason = |name: &str, model: &str| {
        let text = format!("train_micro_batch_size_per_gpu: 1\n{model}");
        let folder = world(1, |comm| {
            let config = Config::with_world_size("test.yaml", text.as_str(), 1).unwrap();
            Engine::with_communicator(config, gpt2(), comm).unwrap().save_checkpoint(root.path().join(name)).unwrap()
        });
        let (exported, left_out) =
            zero_engine::export(&folder[0], &root.path().join(format!("{name}-out")), F32).unwrap();
        assert_eq!(exported.files, ["model.safetensors"]);
        left_out[0].clone()
    };
    assert_eq!(reason("own", ""), "no config.json: the program built the model in code, not from a `model` section");
    let other =
        reason("other", "model: {type: gpt2, vocab_size: 61, n_positions: 16, n_embd: 32, n_layer: 3, n_head: 2}");
    assert_eq!(other, "no config.json: the checkpoint's parameters do not match the GPT-2 in its `model` section");
    let mlp = reason("mlp", "model: {type: mlp, input_size: 4, hidden_sizes: [4], output_size: 2}");
    assert_eq!(mlp, "no config.json: Hugging Face has no architecture for an MLP");
}

#[test]
fn transformers_computes_the_same_logits() {
    let root = tempfile::tempdir().unwrap();
    let gpt2 = "type: gpt2, vocab_size: 61, n_positions: 16, n_embd: 32, n_layer: 2, n_head: 2, initializer_range: 0.1";
    let llama = "type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, \
                 num_attention_heads: 4, max_position_embeddings: 16, rope_theta: 500.0, initializer_range: 0.1";
    let llama3 = "rope_scaling: {rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 64}";
    let cases = [
        ("GPT2LMHeadModel", format!("{{{gpt2}, n_inner: 64}}")),
        ("GPT2LMHeadModel", format!("{{{gpt2}, tie_word_embeddings: false}}")),
        ("LlamaForCausalLM", format!("{{{llama}, num_key_value_heads: 2, {llama3}}}")),
        (
            "LlamaForCausalLM",
            format!("{{{llama}, tie_word_embeddings: true, rope_scaling: {{rope_type: linear, factor: 4}}}}"),
        ),
        ("LlamaForCausalLM", format!("{{{llama}, head_dim: 12, attention_bias: true, mlp_bias: true}}")),
        ("MistralForCausalLM", format!("{{{llama}, num_key_value_heads: 2, sliding_window: 5}}")),
        ("Qwen2ForCausalLM", format!("{{{llama}, num_key_value_heads: 2, qkv_bias: true, tie_word_embeddings: true}}")),
        ("Qwen2ForCausalLM", format!("{{{llama}, qkv_bias: true, sliding_window: 5}}")),
    ];
    let tokens = batch(9, 1).inputs;
    let (mut ours, mut exported) = (vec![], vec![]);
    for (index, (class, model)) in cases.iter().enumerate() {
        let layers = || zero_engine::configured_layers(&config_of(1, model, ""), None).unwrap();
        let folder = saved(&root.path().join(format!("{index}")), model, layers);
        let out = root.path().join(format!("{index}-out"));
        zero_engine::export(&folder, &out, F32).unwrap();
        let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["architectures"], json!([class]));
        let logits = world(1, |comm| {
            let mut engine = Engine::with_communicator(config_of(1, model, ""), layers(), comm).unwrap();
            engine.load_checkpoint(&folder).unwrap();
            let logits = engine.forward(tokens.clone()).unwrap().tensors()[0].flatten_all().unwrap();
            logits.to_vec1::<f32>().unwrap()
        });
        ours.extend(logits);
        exported.push(out);
    }
    let ids = tokens.single().unwrap().to_vec2::<u32>().unwrap();
    let script = format!(
        "import json, torch\n\
         from transformers import AutoModelForCausalLM\n\
         for folder in {exported:?}:\n  \
           model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)\n  \
           assert not said['missing_keys'] and not said['unexpected_keys'], said\n  \
           with torch.no_grad(): logits = model.eval()(torch.tensor({ids:?})).logits\n  \
           print(json.dumps([type(model).__name__, logits.flatten().tolist()]))"
    );
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    assert_eq!(theirs.lines().count(), cases.len(), "{theirs}");
    for ((line, ours), (class, model)) in theirs.lines().zip(&ours).zip(&cases) {
        let (theirs_class, theirs): (String, Vec<f32>) = serde_json::from_str(line).unwrap();
        assert_eq!((theirs_class.as_str(), theirs.len()), (*class, ours.len()));
        let largest = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{class}: logits differ by {largest:.1e} at most");
        assert!(largest <= 1e-5, "{model}: {largest:e}");
    }
}

/// A tokenizer of four words.
const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2, "?": 3}, "unk_token": "?"}}"#;

#[test]
fn the_tokenizer_is_exported() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("words.json");
    fs::write(&path, TOKENIZER).unwrap();
    let more = format!("data: {{train: none.txt, tokenizer: {:?}}}", path.display().to_string());
    let folder = world(1, |comm| {
        let mut engine = Engine::with_communicator(config_of(1, GPT2, &more), gpt2(), comm).unwrap();
        train(&mut engine, 1);
        engine.save_checkpoint(root.path().join("run")).unwrap()
    })
    .remove(0);
    let out = root.path().join("out");
    let (_, left_out) = zero_engine::export(&folder, &out, F32).unwrap();
    assert!(left_out.is_empty(), "{left_out:?}");
    let files = content(&out);
    assert_eq!(files["tokenizer.json"], TOKENIZER.as_bytes());
    assert!(files.contains_key("tokenizer_config.json"));
    fs::remove_file(&path).unwrap();
    let (_, left_out) = zero_engine::export(&folder, &root.path().join("other"), F32).unwrap();
    assert_eq!(left_out, [format!("no tokenizer: {} no longer exists", path.display())]);
    let script = format!(
        "from transformers import AutoTokenizer\nprint(AutoTokenizer.from_pretrained({out:?})('b c x a')['input_ids'])"
    );
    let Some(said) = python(&["transformers"], &script) else { return };
    assert_eq!(said.trim(), "[1, 2, 3, 0]");
}

#[test]
fn the_python_code_of_the_docs_reads_a_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let folders = world(2, |comm| {
        let mut engine = Engine::with_communicator(config_of(2, GPT2, &zero(3)), gpt2(), comm).unwrap();
        train(&mut engine, 2);
        let folder = engine.save_checkpoint(root.path()).unwrap();
        (folder, parameters(&mut engine).into_iter().collect())
    });
    let (folder, expected): &(PathBuf, BTreeMap<String, Vec<u32>>) = &folders[0];
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/checkpoints.md")).unwrap();
    let lines = page.split("```python\n").nth(1).and_then(|rest| rest.split("\n```").next()).expect("lines of Python");
    let shown = "\"runs/quickstart/checkpoints/step-00000200\"";
    assert!(lines.contains(shown) && lines.lines().filter(|line| !line.is_empty()).count() <= 10, "{lines}");
    let script = format!(
        "{}\nprint(json.dumps({{name: p.view(np.uint32).flatten().tolist() for name, p in parameters.items()}}))",
        lines.replace(shown, &format!("{folder:?}"))
    );
    let Some(out) = python(&["numpy", "safetensors"], &script) else { return };
    let read: BTreeMap<String, Vec<u32>> = serde_json::from_str(&out).unwrap();
    assert!(read == *expected);
}

//! `model.pretrained`: the keys of a Hugging Face folder become the model, and contradictions name both values.

mod families;
mod unsupported;

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;
use zero_config::{Config, Gpt2, Llama, Model, Origin, Tokenizer};

/// Creates a folder with this `config.json`.
fn folder(config: &Value) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    folder
}

/// Resolves a configuration with the folder, more keys of its model, and more sections.
fn with(folder: &TempDir, model: &str, more: &str) -> Result<Config, String> {
    let text = format!("train_batch_size: 1\nmodel: {{pretrained: {:?}, {model}}}\n{more}", folder.path());
    Config::parse("ds.yaml", text).map_err(|errors| errors.to_string())
}

fn resolved(config: &Value) -> Config {
    with(&folder(config), "", "").unwrap_or_else(|errors| panic!("{config}\n{errors}"))
}

fn gpt2(config: Config) -> Gpt2 {
    match config.model {
        Some(Model::Gpt2(model)) => model,
        other => panic!("{other:?}"),
    }
}

fn llama(config: &Value) -> Llama {
    match resolved(config).model {
        Some(Model::Llama(model)) => model,
        other => panic!("{other:?}"),
    }
}

/// Returns the message about an unsupported `config.json`, which must be a single error.
fn refused(config: &Value) -> String {
    match with(&folder(config), "", "") {
        Ok(config) => panic!("accepted: {}", config.to_yaml()),
        Err(errors) => {
            assert_eq!(errors.matches("error:").count(), 1, "{errors}");
            errors
        }
    }
}

#[test]
fn sizes_come_from_the_folder_and_other_keys_from_the_file() {
    let config = json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 61, "n_positions": 32, "n_ctx": 32, "n_embd": 24,
        "n_layer": 3, "n_head": 4, "n_inner": null, "embd_pdrop": 0.0, "resid_pdrop": 0, "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-6, "torch_dtype": "float32", "use_cache": true, "scale_attn_weights": true,
    });
    let folder = folder(&config);
    let config = with(&folder, "tiled_mlp_rows: 64, vocab_size: auto", "").unwrap();
    assert_eq!(config.warnings, []);
    assert_eq!(config.origins.get("model.n_embd"), Origin::Pretrained);
    assert_eq!(config.origins.get("model.tiled_mlp_rows"), Origin::Line(2));
    assert!(config.to_yaml_with_origins().contains("# pretrained"));
    let model = gpt2(config.clone());
    assert_eq!(model.pretrained.as_deref(), folder.path().to_str());
    assert_eq!((model.vocab_size, model.n_positions, model.n_embd, model.n_layer), (Some(61), 32, 24, 3));
    assert_eq!((model.n_head, model.n_inner, model.layer_norm_epsilon), (4, 96, 1e-6));
    assert_eq!((model.tie_word_embeddings, model.tiled_mlp_rows), (true, Some(64)));

    // The resolved configuration can be used again, even without the folder, and then warns about it.
    assert_eq!(Config::parse("resolved.yaml", config.to_yaml()).unwrap(), config);
    drop(folder);
    let without = Config::parse("resolved.yaml", config.to_yaml()).unwrap();
    assert_eq!(without, config);
    assert_eq!(without.warnings.len(), 1);
    assert!(
        without.warnings[0]
            .message
            .ends_with("config.json does not exist: the model is built from the configuration alone")
    );
}

#[test]
fn missing_keys_have_the_defaults_of_transformers() {
    let model = gpt2(resolved(&json!({"model_type": "gpt2"})));
    assert_eq!((model.vocab_size, model.n_positions, model.n_embd, model.n_inner), (Some(50_257), 1024, 768, 3072));
    let of = |kind: &str| llama(&json!({"model_type": kind}));
    let (llama, mistral, qwen2) = (of("llama"), of("mistral"), of("qwen2"));
    let sizes = |m: &Llama| (m.vocab_size, m.intermediate_size, m.num_key_value_heads, m.max_position_embeddings);
    assert_eq!(sizes(&llama), (Some(32_000), 11_008, 32, 2048));
    assert_eq!(sizes(&mistral), (Some(32_000), 14_336, 8, 131_072));
    assert_eq!(sizes(&qwen2), (Some(151_936), 22_016, 32, 32_768));
    assert_eq!([&llama, &mistral, &qwen2].map(|m| m.sliding_window), [None, Some(4096), None]);
    assert_eq!([&llama, &mistral, &qwen2].map(|m| m.qkv_bias), [false, false, true]);
    let (qwen3, smollm3) = (of("qwen3"), of("smollm3"));
    assert_eq!((sizes(&qwen3), qwen3.head_dim, qwen3.qk_norm), ((Some(151_936), 22_016, 32, 32_768), 128, true));
    assert_eq!((sizes(&smollm3), smollm3.head_dim, smollm3.rope_theta), ((Some(128_256), 11_008, 4, 32_768), 128, 2e6));
    assert_eq!((&smollm3.no_rope_layers[..5], smollm3.no_rope_layers.len()), (&[1, 1, 1, 0, 1][..], 36));
    assert!(smollm3.tie_word_embeddings && smollm3.layer_types.is_empty() && !smollm3.qk_norm);
    for model in [llama, mistral, qwen2] {
        assert_eq!((model.hidden_size, model.head_dim, model.rope_theta, model.rms_norm_eps), (4096, 128, 1e4, 1e-6));
        assert!(!model.tie_word_embeddings && !model.attention_bias && !model.mlp_bias && model.rope_scaling.is_none());
    }
}

#[test]
fn written_keys_must_agree_with_the_folder() {
    let config = json!({
        "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": null, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000, "rope_scaling": {"type": "linear", "factor": 2},
    });
    let folder = folder(&config);
    for same in [
        "type: llama, hidden_size: 32, num_key_value_heads: 4, head_dim: 8",
        "rms_norm_eps: 0.00001, rope_theta: 5.0e5, hidden_act: swish",
        "rope_scaling: {factor: 2.0, rope_type: linear}",
    ] {
        with(&folder, same, "").unwrap_or_else(|errors| panic!("{same}\n{errors}"));
    }
    let errors = with(&folder, "type: llama, hidden_size: 64", "").unwrap_err();
    let path = folder.path().join("config.json");
    let text = "\
error: `model.hidden_size` is `64`, but the pretrained model has `32`
  in: model.hidden_size (ds.yaml:2:";
    assert!(errors.starts_with(text), "{errors}");
    assert!(errors.contains(&format!("\n  in: model.hidden_size ({})\n  help: remove it", path.display())), "{errors}");
    for (other, said) in [
        ("type: gpt2", "`model.type` is the string \"gpt2\", but the pretrained model has the string \"llama\""),
        ("head_dim: 16", "`model.head_dim` is `16`, but the pretrained model has `8`"),
        ("sliding_window: 5", "`model.sliding_window` is `5`, but the pretrained model has nothing"),
        ("qkv_bias: true", "`model.qkv_bias` is `true`, but the pretrained model has `false`"),
        ("tie_word_embeddings: true", "`model.tie_word_embeddings` is `true`, but the pretrained model has `false`"),
        (
            "rope_scaling: {rope_type: linear, factor: 4}",
            "the pretrained model has {rope_type: the string \"linear\", factor: `2`}",
        ),
    ] {
        let errors = with(&folder, other, "").unwrap_err();
        assert!(errors.contains(said), "{other}\n{errors}");
    }
    let both = with(&folder, "", "training: {initial_weights: a.safetensors}").unwrap_err();
    assert!(both.contains("`model.pretrained` and `training.initial_weights` both set the initial weights"), "{both}");
}

/// Dropout does not change the weights, so a value in the file takes precedence over the folder's.
#[test]
fn dropout_comes_from_the_file_or_the_folder() {
    let pdrops = |model: &Gpt2| [model.embd_pdrop, model.resid_pdrop, model.attn_pdrop];
    let config = resolved(&json!({"model_type": "gpt2", "resid_pdrop": 0.0, "attn_pdrop": 0.3}));
    assert_eq!(config.warnings, []);
    assert_eq!(config.origins.get("model.attn_pdrop"), Origin::Pretrained);
    // transformers' default is 0.1.
    assert_eq!(pdrops(&gpt2(config)), [0.1, 0.0, 0.3]);
    let folder = folder(&json!({"model_type": "gpt2", "attn_pdrop": 0.3}));
    let config = with(&folder, "attn_pdrop: 0.0, embd_pdrop: 0.2", "").unwrap();
    assert_eq!(config.origins.get("model.attn_pdrop"), Origin::Line(2));
    assert_eq!(pdrops(&gpt2(config)), [0.2, 0.1, 0.0]);
    assert_eq!(llama(&json!({"model_type": "mistral", "attention_dropout": 0.1})).attention_dropout, 0.1);
    assert_eq!(llama(&json!({"model_type": "llama"})).attention_dropout, 0.0);
    let config = Config::parse("ds.yaml", "train_batch_size: 1\nmodel: {type: gpt2}".to_string()).unwrap();
    assert_eq!(pdrops(&gpt2(config)), [0.0; 3]);
    let errors = with(&folder, "attn_pdrop: 1.0", "").unwrap_err();
    assert!(errors.contains("model.attn_pdrop"), "{errors}");
}

#[test]
fn a_folder_that_cannot_be_read_is_one_error() {
    let said = |prepare: &dyn Fn(&TempDir)| {
        let folder = tempfile::tempdir().unwrap();
        prepare(&folder);
        let errors = with(&folder, "", "data: {train: a}").unwrap_err();
        assert!(
            errors.matches("error:").count() == 1 && errors.contains("in: model.pretrained (ds.yaml:2:"),
            "{errors}"
        );
        errors
    };
    let config = |folder: &TempDir| folder.path().join("config.json");
    assert!(said(&|_| ()).contains("config.json does not exist"));
    assert!(said(&|folder| fs::create_dir(config(folder)).unwrap()).contains("it is not a file"));
    for text in ["", "{", "[]", "{\"a\": NaN}", &"[".repeat(1000)] {
        assert!(said(&|folder| fs::write(config(folder), text).unwrap()).contains("is not a JSON object"), "{text}");
    }
    let long = format!("{{\"a\": {:?}}}", "x".repeat(1 << 20));
    assert!(said(&|folder| fs::write(config(folder), &long).unwrap()).contains("is larger than 1024 KiB"));
}

#[test]
fn the_folders_tokenizer_is_the_default() {
    let folder = folder(&json!({"model_type": "gpt2"}));
    let of = |data: &str| with(&folder, "", data).unwrap().data.map(|data| data.tokenizer);
    assert_eq!(of("data: {train: a}"), Some(Tokenizer::Byte));
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, "{}").unwrap();
    let taken = Some(Tokenizer::File(path.display().to_string()));
    assert_eq!((of("data: {train: a}"), of("data: {train: a, tokenizer: null}")), (taken.clone(), taken));
    assert_eq!(of("data: {train: a, tokenizer: byte}"), Some(Tokenizer::Byte));
    assert_eq!(of(""), None);
    let config = with(&folder, "", "data: {train: a}").unwrap();
    assert_eq!(config.origins.get("data.tokenizer"), Origin::Pretrained);
}

#[test]
fn models_without_gpu_kernels_name_the_key_that_lacks_one() {
    let key = |config: Value| resolved(&config).model.unwrap().only_on_the_cpu();
    for kind in ["gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3"] {
        assert_eq!(key(json!({"model_type": kind})), None);
    }
    assert_eq!(key(json!({"model_type": "gemma3_text"})), Some("model.norm_unit_offset"));
    assert_eq!(key(json!({"model_type": "phi3", "partial_rotary_factor": 0.5})), Some("model.partial_rotary_factor"));
    assert_eq!(key(json!({"model_type": "llama", "hidden_act": "gelu_new"})), Some("model.hidden_act"));
}

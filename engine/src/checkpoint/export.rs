//! Exports a checkpoint in Hugging Face's format: weights, `config.json`, tokenizer.

use std::fs;
use std::path::Path;

use candle_core::DType;
use serde_json::{Value, json};
use zero_checkpoint::{Contents, Export, ExportDtype, Exported, FOLDED, Manifest, Merge, is_of_adapter};
use zero_config::{Adapter, Config, Gpt2, Model, Tokenizer};

use zero_optim::Average;

use super::llama::llama;
use crate::configured_model;
use crate::error::Error;

/// The `tokenizer.json` and files that may accompany it.
const TOKENIZER_FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
];

/// How weights are exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// Dtype of the floats.
    pub dtype: ExportDtype,
    /// Maximum bytes of tensors per file.
    pub max_shard_bytes: u64,
    /// Whether to write the averaged weights instead of the trained weights, for a run with `training.ema`. For a
    /// schedule-free optimizer, the export always writes the averaged weights.
    pub averaged: bool,
}

/// Returns the part of the configuration that a checkpoint records.
pub(crate) fn recorded(config: &Config) -> Value {
    // Record the resolved model, so that reading the checkpoint does not need the pretrained folder.
    let model = config.model.clone().map(Model::without_pretrained);
    if model.is_none() && config.adapter.is_none() {
        return Value::Null;
    }
    let tokenizer = match config.data.as_ref().map(|data| &data.tokenizer) {
        None => Value::Null,
        Some(Tokenizer::Byte) => json!("byte"),
        // An absolute path, since an export may run in another working directory.
        Some(Tokenizer::File(path)) => {
            json!(std::path::absolute(path).unwrap_or_else(|_| path.into()).display().to_string())
        }
    };
    let mut recorded = json!({"model": model, "tokenizer": tokenizer});
    if let Some(quantization) = &config.quantization_config {
        recorded["quantization_config"] = json!(quantization);
    }
    if let Some(mup) = &config.mup {
        recorded["mup"] = json!(mup);
    }
    if let Some(adapter) = &config.adapter {
        recorded["adapter"] = json!(adapter);
        recorded["base_model"] = json!(config.model.as_ref().and_then(|model| model.pretrained()));
    }
    recorded
}

/// Adds the recorded base model of µP to `sections`, a configuration that only builds the model.
pub(super) fn add_base(sections: &mut Value, recorded: &Value) {
    if !recorded["mup"].is_null() {
        sections["mup"] = recorded["mup"].clone();
        // The section `mup` requires a µP optimizer, but no optimizer is created.
        sections["optimizer"] = json!({"type": "MuAdam"});
    }
}

/// Exports a checkpoint folder (`…/step-00000100`) to `out` in Hugging Face's format. If the run trained adapters,
/// writes only the adapters, in PEFT's format, with `adapter_config.json`. Otherwise writes all weights, writes
/// `config.json` for a configured GPT-2 or Llama (for the Hugging Face class that has its features), and copies the
/// tokenizer's files. Returns the written files, and for each omitted file a line with the reason.
///
/// # Errors
/// Fails if `out` exists and is not empty, the checkpoint is damaged, or a file cannot be read or written.
pub fn export(folder: &Path, out: &Path, weights: Weights) -> Result<(Exported, Vec<String>), Error> {
    let manifest = Manifest::read(folder)?;
    match trained_adapter(&manifest)? {
        None => write(
            folder,
            out,
            &manifest,
            weights,
            Contents::Model,
            ("config.json", architecture(&manifest, weights.dtype)),
        ),
        Some((adapter, config)) => {
            let settings = Ok((adapter_config(&adapter, &config, &manifest), vec![]));
            write(folder, out, &manifest, weights, Contents::Adapter, ("adapter_config.json", settings))
        }
    }
}

/// Merges the adapters of a checkpoint into the weights of their linear layers and exports the model like [`export`].
///
/// # Errors
/// Fails in the same cases as [`export`], if the checkpoint has no adapters, and if the program built the model in
/// code.
pub fn merge(folder: &Path, out: &Path, weights: Weights) -> Result<(Exported, Vec<String>), Error> {
    let manifest = Manifest::read(folder)?;
    let Some((adapter, config)) = trained_adapter(&manifest)? else {
        let message = format!("{} has no adapters", folder.display());
        return Err(Error::setting("checkpoint merge", message, "use `checkpoint export`"));
    };
    let inputs_first = match config.model {
        Some(Model::Gpt2(_)) => true,
        Some(_) => false,
        None => {
            let message = "the program built the model in code, so the order of a weight's dimensions is unknown";
            return Err(Error::setting(
                "checkpoint merge",
                message,
                "merge the adapters into the weights in your program",
            ));
        }
    };
    let merge = Merge { scale: adapter.scale() as f32, inputs_first };
    let settings = ("config.json", architecture(&manifest, weights.dtype));
    write(folder, out, &manifest, weights, Contents::Merged(merge), settings)
}

/// Returns the adapters that the checkpoint's run trained, and the recorded part of its configuration.
fn trained_adapter(manifest: &Manifest) -> Result<Option<(Adapter, Config)>, Error> {
    let recorded = &manifest.config;
    if recorded["adapter"].is_null() {
        return Ok(None);
    }
    let sections = json!({
        "train_micro_batch_size_per_gpu": 1, "adapter": recorded["adapter"], "model": recorded["model"],
    });
    let config = Config::parse("manifest.json", sections.to_string())?;
    Ok(config.adapter.clone().map(|adapter| (adapter, config)))
}

/// Returns PEFT's `adapter_config.json`.
fn adapter_config(adapter: &Adapter, config: &Config, manifest: &Manifest) -> Value {
    let modules_to_save = (!adapter.modules_to_save.is_empty()).then_some(&adapter.modules_to_save);
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": manifest.config["base_model"],
        "r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "lora_dropout": adapter.lora_dropout,
        "target_modules": match adapter.targets() {
            Some(names) => json!(names),
            None => json!(zero_config::ALL_LINEAR),
        },
        "modules_to_save": modules_to_save,
        "bias": adapter.bias,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "fan_in_fan_out": matches!(config.model, Some(Model::Gpt2(_))),
        "init_lora_weights": true,
        "inference_mode": true,
    })
}

/// Exports a checkpoint with the tokenizer's files and a settings file. `settings` holds the contents of the settings
/// file, or the reason for omitting it.
fn write(
    folder: &Path,
    out: &Path,
    manifest: &Manifest,
    weights: Weights,
    contents: Contents,
    (name, settings): (&str, Result<(Value, Factors), String>),
) -> Result<(Exported, Vec<String>), Error> {
    if weights.averaged
        && manifest.schedule_free.is_none()
        && (manifest.states.first().is_none_or(|state| state != Average::STATE) || manifest.updates == 0)
    {
        let message = format!("{} has no averaged weights", folder.display());
        return Err(Error::setting("--ema", message, "train with `training.ema`, or export the weights themselves"));
    }
    let (mut beside, mut left_out, mut factors) = (vec![], vec![], vec![]);
    let recorded = &manifest.config["mup"];
    let mut mup = (!recorded.is_null()).then(|| recorded.to_string());
    match settings {
        Ok((settings, of_settings)) => {
            factors = of_settings;
            mup = mup.filter(|_| !factors.is_empty()).map(|_| FOLDED.to_string());
            beside.push((name.into(), format!("{settings:#}\n").into_bytes()));
            match tokenizer_files(manifest)? {
                Ok(files) => beside.extend(files),
                Err(reason) => left_out.push(format!("no tokenizer: {reason}")),
            }
        }
        Err(reason) => left_out.push(format!("no {name}: {reason}")),
    }
    let options = Export {
        dtype: weights.dtype,
        max_shard_bytes: weights.max_shard_bytes,
        averaged: weights.averaged && manifest.schedule_free.is_none(),
        contents,
        factors,
        mup,
        beside,
    };
    Ok((zero_checkpoint::export(folder, out, &options)?, left_out))
}

/// Parameters that an export multiplies by a factor, each with its factor.
type Factors = Vec<(&'static str, f32)>;

/// Builds `config.json`, and the factors by which an export multiplies weights so that they match it. Returns a reason
/// if that is impossible.
fn architecture(manifest: &Manifest, dtype: ExportDtype) -> Result<(Value, Factors), String> {
    let section = &manifest.config["model"];
    if section.is_null() {
        return Err("the program built the model in code, not from a `model` section".into());
    }
    let mut sections = json!({"train_micro_batch_size_per_gpu": 1, "model": section});
    add_base(&mut sections, &manifest.config);
    let config = Config::parse("manifest.json", sections.to_string())
        .map_err(|errors| format!("the checkpoint's `model` section is invalid: {errors}"))?;
    let vocabulary = |name: &str| manifest.parameters.get(name).and_then(|entry| entry.shape.first()).copied();
    let (vocabulary, of) = match &config.model {
        Some(Model::Gpt2(_)) => (vocabulary("transformer.wte.weight"), "GPT-2"),
        Some(Model::Llama(_)) => (vocabulary("model.embed_tokens.weight"), "Llama"),
        Some(Model::Mlp(_)) => return Err("Hugging Face has no architecture for an MLP".into()),
        None => return Err("the program built the model in code, not from a `model` section".into()),
    };
    // A program that uses the library can train a model that differs from the configured one.
    let other = || format!("the checkpoint's parameters do not match the {of} in its `model` section");
    let layers = configured_model::from_config(&config, vocabulary).map_err(|_| other())?;
    let model = layers.build(DType::F32).map_err(|_| other())?;
    let is_in = |p: &zero_model::Parameter| {
        manifest.parameters.get(p.name()).is_some_and(|entry| entry.shape == p.shape().dims())
    };
    let of_base = manifest.parameters.keys().filter(|name| !is_of_adapter(name)).count();
    if model.parameters().len() != of_base || !model.parameters().iter().all(is_in) {
        return Err(other());
    }
    let vocabulary = vocabulary.ok_or_else(other)?;
    let factors = readout_factors(&config)?;
    let mut fields = match &config.model {
        Some(Model::Gpt2(model)) => gpt2(model, vocabulary),
        Some(Model::Llama(model)) => llama(model, vocabulary)?,
        _ => return Err(other()),
    };
    // The tokenizer defines the special tokens. Null overrides the defaults of the transformers classes, which are
    // token ids of other vocabularies.
    for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        fields[token] = Value::Null;
    }
    fields["torch_dtype"] = json!(match dtype {
        ExportDtype::F32 => "float32",
        ExportDtype::Bf16 => "bfloat16",
        ExportDtype::F16 => "float16",
    });
    Ok((fields, factors))
}

/// Returns factors for the weights of the last norm. In a model that is wider than its base model, µP divides the
/// inputs of the head; these factors fold that division into the norm. The products are exact if the divisor is a power
/// of two, and otherwise rounded once.
fn readout_factors(config: &Config) -> Result<Factors, String> {
    let none = |of: &str| Err(format!("folding the µP factor of {of} into the weights is not implemented"));
    let (divisor, names): (_, &[&str]) = match (&config.model, config.base_model()) {
        (Some(Model::Gpt2(model)), Some(Model::Gpt2(base))) => {
            if model.n_embd / model.n_head != base.n_embd / base.n_head {
                return none("the attention");
            }
            (model.n_embd as f64 / base.n_embd as f64, &["transformer.ln_f.weight", "transformer.ln_f.bias"])
        }
        (Some(Model::Llama(model)), Some(Model::Llama(base))) => {
            let divisor = model.hidden_size as f64 / base.hidden_size as f64;
            if model.head_dim != base.head_dim {
                return none("the attention");
            }
            if divisor != 1.0 && (model.scale_embeddings || model.norm_unit_offset) {
                return none(if model.scale_embeddings { "the scaled embeddings" } else { "the norm before the head" });
            }
            (divisor, &["model.norm.weight"])
        }
        _ => return Ok(vec![]),
    };
    Ok(names.iter().filter(|_| divisor != 1.0).map(|&name| (name, (1.0 / divisor) as f32)).collect())
}

fn gpt2(model: &Gpt2, vocabulary: usize) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_positions": model.n_positions,
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_inner": model.n_inner,
        "activation_function": model.activation_function,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_word_embeddings,
        "embd_pdrop": model.embd_pdrop,
        "resid_pdrop": model.resid_pdrop,
        "attn_pdrop": model.attn_pdrop,
    })
}

/// Reads the tokenizer's files, or returns the reason why there are none.
#[expect(clippy::type_complexity, reason = "named files, or a reason, or an error")]
fn tokenizer_files(manifest: &Manifest) -> Result<Result<Vec<(String, Vec<u8>)>, String>, Error> {
    let path = match manifest.config["tokenizer"].as_str() {
        None => return Ok(Err("the checkpoint names no tokenizer".into())),
        Some("byte") => return Ok(Err("the byte tokenizer has no file".into())),
        Some(path) => Path::new(path),
    };
    if !path.is_file() {
        return Ok(Err(format!("{} no longer exists", path.display())));
    }
    let read = |path: &Path| fs::read(path).map_err(Error::io(path));
    let mut files = vec![("tokenizer.json".to_string(), read(path)?)];
    for name in &TOKENIZER_FILES[1..] {
        let beside = path.with_file_name(name);
        if beside.is_file() {
            files.push(((*name).to_string(), read(&beside)?));
        }
    }
    if !files.iter().any(|(name, _)| name == "tokenizer_config.json") {
        let config = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
        files.push(("tokenizer_config.json".into(), format!("{config:#}\n").into_bytes()));
    }
    Ok(Ok(files))
}

//! Opens a model to run it, from a checkpoint or a Hugging Face folder, with or without an adapter.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::DType;
use serde_json::{Value, json};
use zero_checkpoint::{CheckpointError, Manifest};
use zero_config::{Config, Warning};
use zero_model::{Layers, Model};

use crate::checkpoint::export::add_base;
use crate::configured_model;
use crate::error::Error;

/// A model with parameter values in f32, and the text settings from its folder.
#[derive(Debug)]
pub struct StoredModel {
    /// The model.
    pub model: Model,
    /// Number of token ids.
    pub vocabulary: usize,
    /// Maximum sequence length.
    pub longest: usize,
    /// Number of tokens beyond which a sequence uses different rotary angles at all positions, as with LongRoPE.
    pub before_other_angles: Option<usize>,
    /// The tokenizer that the folder contains or names.
    pub tokenizer: Option<StoredTokenizer>,
    /// Folders that may have a chat template, `generation_config.json` and `tokenizer_config.json`. Each file is taken
    /// from the first folder that has it.
    pub folders: Vec<PathBuf>,
    /// Keys of a `config.json` that have no effect.
    pub warnings: Vec<Warning>,
}

/// The tokenizer of a stored model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredTokenizer {
    /// Each byte is a token.
    Byte,
    /// A `tokenizer.json`.
    File(PathBuf),
}

impl StoredTokenizer {
    /// Returns the tokenizer that a folder contains or names, without opening its model. Returns `None` for a folder
    /// that [`StoredModel::open`] rejects.
    #[must_use]
    pub fn of_folder(folder: &Path) -> Option<Self> {
        if folder.join("config.json").is_file() {
            return Self::beside(folder);
        }
        let folder = zero_checkpoint::newest_meant(folder).ok()?;
        Self::recorded(&Manifest::read(&folder).ok()?.config)
    }

    /// Returns the tokenizer in a folder.
    fn beside(folder: &Path) -> Option<Self> {
        let path = folder.join("tokenizer.json");
        path.is_file().then_some(Self::File(path))
    }

    /// Returns the tokenizer that the configuration of a run names.
    fn recorded(config: &Value) -> Option<Self> {
        config["tokenizer"].as_str().map(|path| match path {
            "byte" => Self::Byte,
            path => Self::File(path.into()),
        })
    }
}

impl StoredModel {
    /// Opens a folder: a checkpoint, a run folder (its newest checkpoint), or a Hugging Face folder with `config.json`,
    /// safetensors files and `tokenizer.json`. `adapter` is a folder with `adapter_config.json` and
    /// `adapter_model.safetensors`, as PEFT and `checkpoint export` write them.
    ///
    /// # Errors
    /// Fails if the folder has no language model, if the checkpoint's model was built in code rather than by the
    /// configuration, or if files are missing, damaged or do not match each other.
    pub fn open(folder: &Path, adapter: Option<&Path>) -> Result<Self, Error> {
        let is_checkpoint = !folder.join("config.json").is_file();
        if is_checkpoint && folder.join("adapter_config.json").is_file() {
            return Err(adapter_alone(folder));
        }
        let adapter = adapter.map(|adapter| Ok::<_, Error>((adapter, adapter_section(adapter)?))).transpose()?;
        if !is_checkpoint {
            return Self::of_hugging_face(folder, adapter);
        }
        let folder = zero_checkpoint::newest_meant(folder).map_err(|error| {
            Error::from(error).named(
                FOLDER,
                "give a checkpoint, a run, or a folder with config.json, safetensors files and tokenizer.json",
            )
        })?;
        Self::of_checkpoint(&folder, adapter)
    }

    fn of_hugging_face(folder: &Path, adapter: Option<(&Path, Value)>) -> Result<Self, Error> {
        let mut sections = json!({"model": {"pretrained": folder.display().to_string()}});
        if let Some((_, section)) = &adapter {
            sections["adapter"] = section.clone();
        }
        let config = parse(&folder.join("config.json"), sections)?;
        let stored = Self::built(&config, None)?;
        zero_checkpoint::fill_from_pretrained(folder, &stored.model).map_err(|error| {
            Error::from(error).named(FOLDER, "give a folder that `save_pretrained` or `checkpoint export` wrote")
        })?;
        let tokenizer = StoredTokenizer::beside(folder);
        Self { tokenizer, folders: vec![folder.into()], ..stored }.with_adapter(adapter)
    }

    fn of_checkpoint(folder: &Path, adapter: Option<(&Path, Value)>) -> Result<Self, Error> {
        let manifest = Manifest::read(folder)
            .map_err(|error| Error::from(error).named(FOLDER, "give a checkpoint folder or a run folder"))?;
        let recorded = &manifest.config;
        if recorded["model"].is_null() {
            let message = format!("the program that wrote {} built its model in code", folder.display());
            let help = "generate text in your program, with `Generator::of_layers`";
            return Err(Error::setting(FOLDER, message, help));
        }
        let mut sections = json!({"model": recorded["model"], "quantization_config": recorded["quantization_config"]});
        add_base(&mut sections, recorded);
        if let Some(quantization) = sections["quantization_config"].as_object_mut() {
            // A stored model always computes in f32.
            quantization.remove("bnb_4bit_compute_dtype");
        }
        match (&adapter, recorded["adapter"].is_null()) {
            (None, true) => {}
            (Some((_, section)), true) => sections["adapter"] = section.clone(),
            (None, false) => sections["adapter"] = recorded["adapter"].clone(),
            (Some(_), false) => {
                let message = format!("{} already has a trained adapter", folder.display());
                let help =
                    "omit --adapter, or merge the trained adapter into the weights with `zero-train checkpoint merge`";
                return Err(Error::setting("--adapter", message, help));
            }
        }
        let config = parse(&folder.join("manifest.json"), sections)?;
        let embeddings = ["transformer.wte.weight", "model.embed_tokens.weight"];
        let entry = embeddings.iter().find_map(|name| manifest.parameters.get(*name));
        let stored = Self::built(&config, entry.and_then(|entry| entry.shape.first().copied()))?;
        match &adapter {
            None => zero_checkpoint::fill_from_checkpoint(folder, &stored.model),
            Some(_) => zero_checkpoint::fill_base_from_checkpoint(folder, &stored.model),
        }?;
        let tokenizer = StoredTokenizer::recorded(recorded);
        let path = recorded["tokenizer"].as_str();
        let beside = path.map(Path::new).and_then(Path::parent).map(PathBuf::from);
        let base = recorded["base_model"].as_str().map(PathBuf::from);
        Self { tokenizer, folders: beside.into_iter().chain(base).collect(), ..stored }.with_adapter(adapter)
    }

    /// Builds the model of a configuration, without parameter values.
    fn built(config: &Config, vocabulary: Option<usize>) -> Result<Self, Error> {
        let section = config.model.as_ref();
        let Some(longest) = section.and_then(configured_model::longest_sequence) else {
            return Err(Error::setting(
                FOLDER,
                "the model cannot generate text",
                "give the folder of a language model",
            ));
        };
        let layers = configured_model::from_config(config, vocabulary)?;
        let model = configured_model::build(config, layers, DType::F32)?;
        let vocabulary = model.parameters().first().and_then(|p| p.shape().dims().first().copied()).unwrap_or(0);
        let warnings = config.warnings.clone();
        let before_other_angles = section.and_then(configured_model::tokens_before_other_angles);
        Ok(Self { model, vocabulary, longest, before_other_angles, tokenizer: None, folders: vec![], warnings })
    }

    fn with_adapter(mut self, adapter: Option<(&Path, Value)>) -> Result<Self, Error> {
        if let Some((folder, _)) = adapter {
            zero_checkpoint::fill_from_adapter(folder, &self.model).map_err(|error| match error {
                CheckpointError::Mismatch { .. } => Error::setting(
                    "--adapter",
                    error.to_string(),
                    "use the base model that the adapter was trained for",
                ),
                other => Error::from(other).named("--adapter", "give a folder in which PEFT saved a LoRA adapter"),
            })?;
            self.folders.push(folder.into());
            self.tokenizer = self.tokenizer.or_else(|| StoredTokenizer::beside(folder));
        }
        Ok(self)
    }

    /// Returns the tokens that end generated text: `eos_token_id` of the first `generation_config.json` that sets it,
    /// or otherwise of the first `config.json` that sets it. Empty if no file sets it.
    ///
    /// # Errors
    /// Fails if a file is not valid JSON.
    pub fn eos_tokens(&self) -> Result<Vec<u32>, Error> {
        for name in ["generation_config.json", "config.json"] {
            for path in self.folders.iter().map(|folder| folder.join(name)).filter(|path| path.is_file()) {
                let config = read_json(&path)?;
                let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
                let tokens: Vec<u32> = match &config["eos_token_id"] {
                    Value::Array(tokens) => tokens.iter().filter_map(token).collect(),
                    one => token(one).into_iter().collect(),
                };
                if !tokens.is_empty() {
                    return Ok(tokens);
                }
            }
        }
        Ok(vec![])
    }
}

/// Builds the layers of a model that a program defines, and fills them from a checkpoint or from the newest checkpoint
/// of a run.
///
/// # Errors
/// Fails if the layers cannot be built, or if the checkpoint is damaged or belongs to another model.
pub fn fill_layers(layers: Layers, folder: &Path) -> Result<Model, Error> {
    let model = layers.build(DType::F32)?;
    zero_checkpoint::fill_from_checkpoint(&zero_checkpoint::newest_meant(folder)?, &model)?;
    Ok(model)
}

const FOLDER: &str = "<DIR>";

fn parse(origin: &Path, mut sections: Value) -> Result<Config, Error> {
    sections["train_micro_batch_size_per_gpu"] = json!(1);
    Ok(Config::parse(origin.display().to_string(), sections.to_string())?)
}

fn read_json(path: &Path) -> Result<Value, Error> {
    let text = fs::read_to_string(path).map_err(Error::io(path))?;
    serde_json::from_str(&text).map_err(|error| {
        Error::setting(&path.display().to_string(), format!("invalid JSON: {error}"), "correct the file")
    })
}

/// Returns the error for a folder that contains an adapter but no model.
fn adapter_alone(folder: &Path) -> Error {
    let base = read_json(&folder.join("adapter_config.json")).unwrap_or_default();
    let base = base["base_model_name_or_path"].as_str().map_or("BASE".to_string(), String::from);
    let message = format!("{} is an adapter without its base model", folder.display());
    let help = format!(
        "give the folder of the base model, and pass the adapter with --adapter: {base} --adapter {}",
        folder.display()
    );
    Error::setting(FOLDER, message, help)
}

/// Returns the configuration section `adapter` that describes the adapter of a PEFT folder.
fn adapter_section(folder: &Path) -> Result<Value, Error> {
    let path = folder.join("adapter_config.json");
    let refused = |message: String| {
        Error::setting(
            "--adapter",
            format!("{}: {message}", path.display()),
            "give a folder in which PEFT saved a LoRA adapter",
        )
    };
    if !path.is_file() {
        return Err(refused("no such file".into()));
    }
    let saved = read_json(&path)?;
    if saved["peft_type"] != "LORA" {
        return Err(refused(format!("its `peft_type` is {}, not \"LORA\"", saved["peft_type"])));
    }
    let is_set = |key: &&str| is_set(&saved[*key]);
    if let Some(reason) = wrong_type(&saved).or_else(|| other_arithmetic(&saved)) {
        return Err(refused(reason));
    }
    if let Some(key) = UNSUPPORTED.iter().find(|key| is_set(key)) {
        return Err(refused(unsupported(key, &saved)));
    }
    let mut section = json!({"type": "lora"});
    for key in ["r", "lora_alpha", "target_modules", "modules_to_save", "bias", "use_rslora", "use_dora"] {
        if is_set(&key) {
            section[key] = saved[key].clone();
        }
    }
    Ok(section)
}

/// PEFT keys that change the positions or ranks of an adapter's matrices.
const UNSUPPORTED: [&str; 6] = [
    "rank_pattern",
    "layers_to_transform",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
];

/// PEFT keys that change an adapter's arithmetic or the weights of the base model, although the adapter's tensors look
/// the same.
const OTHER_ARITHMETIC: [&str; 4] = ["alpha_pattern", "alora_invocation_tokens", "use_qalora", "kasa_config"];

/// Values of `init_lora_weights` with which PEFT changes the weights of the base model when it loads the adapter.
const CHANGED_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// A JSON type that a value must have.
type Expected = (&'static str, fn(&Value) -> bool);

const INTEGER: Expected = ("an integer", Value::is_u64);
const NUMBER: Expected = ("a number", Value::is_number);
const BOOLEAN: Expected = ("true or false", Value::is_boolean);
const TEXT: Expected = ("a string", Value::is_string);
const LIST: Expected = ("a list", Value::is_array);
const LIST_OR_TEXT: Expected = ("a list or a string", |value| value.is_array() || value.is_string());

/// The keys of an `adapter_config.json` that are read, with their types.
const TYPES: [(&str, Expected); 7] = [
    ("r", INTEGER),
    ("lora_alpha", NUMBER),
    ("use_rslora", BOOLEAN),
    ("use_dora", BOOLEAN),
    ("bias", TEXT),
    ("target_modules", LIST_OR_TEXT),
    ("modules_to_save", LIST),
];

/// Describes the first key of an `adapter_config.json` whose value has a type that PEFT never writes. Returns `None` if
/// there is no such key.
pub(crate) fn wrong_type(saved: &Value) -> Option<String> {
    let (key, (expected, _)) =
        TYPES.into_iter().find(|(key, (_, is_expected))| !saved[*key].is_null() && !is_expected(&saved[*key]))?;
    Some(format!("its `{key}` is {}, not {expected}", saved[key]))
}

/// Returns the reason why an `adapter_config.json` is unsupported: its adapter does more than add the scaled product of
/// A and B to the unchanged weights of the base model. Returns `None` for a supported adapter.
pub(crate) fn other_arithmetic(saved: &Value) -> Option<String> {
    let init = saved["init_lora_weights"].as_str().unwrap_or_default().to_ascii_lowercase();
    let key = OTHER_ARITHMETIC.into_iter().find(|key| is_set(&saved[*key]));
    let changes_base = || CHANGED_BASE.iter().any(|name| init.starts_with(name)).then_some("init_lora_weights");
    key.or_else(changes_base).map(|key| unsupported(key, saved))
}

fn unsupported(key: &str, saved: &Value) -> String {
    format!("its `{key}` is {}, which is unsupported", saved[key])
}

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}

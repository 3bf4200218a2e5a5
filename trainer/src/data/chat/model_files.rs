//! Reads the chat template and the names of special tokens beside a `tokenizer.json`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zero_engine::DataError;

/// The special tokens that transformers passes to a template.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// What a model's folder says about conversations.
#[derive(Default)]
pub(super) struct ModelFiles {
    /// The template's text, and the file that it is from.
    pub(super) template: Option<(String, String)>,
    /// Names of special tokens with their texts.
    pub(super) special_tokens: Map<String, Value>,
}

impl ModelFiles {
    /// Reads the first template and the first special tokens in these folders.
    pub(super) fn read(folders: &[PathBuf]) -> Result<Self, DataError> {
        let mut found = Self::default();
        for folder in folders {
            let config = object(&folder.join("tokenizer_config.json"))?;
            if found.template.is_none() {
                found.template = template(folder, &config)?;
            }
            for tokens in [&config, &object(&folder.join("special_tokens_map.json"))?] {
                if found.special_tokens.is_empty() {
                    found.special_tokens = special_tokens(tokens);
                }
            }
        }
        Ok(found)
    }

    /// Returns the text of a special token such as `eos_token`.
    pub(super) fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name).and_then(Value::as_str)
    }
}

/// Returns the object in a JSON file; an empty one if there is no such file.
fn object(path: &Path) -> Result<Map<String, Value>, DataError> {
    if !path.exists() {
        return Ok(Map::new());
    }
    let bytes = fs::read(path).map_err(DataError::io(path))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        let (path, line) = (path.into(), error.line() as u64);
        DataError::Json { path, line, message: super::super::files::reason(&error, 0) }
    })
}

/// `chat_template.jinja` comes before `tokenizer_config.json`, and of several templates the one named `default` counts.
fn template(folder: &Path, config: &Map<String, Value>) -> Result<Option<(String, String)>, DataError> {
    let path = folder.join("chat_template.jinja");
    if path.exists() {
        let text = fs::read_to_string(&path).map_err(DataError::io(&path))?;
        return Ok(Some((text, path.display().to_string())));
    }
    let text = match config.get("chat_template") {
        Some(Value::String(text)) => Some(text.as_str()),
        Some(Value::Array(list)) => {
            let default = list.iter().find(|template| template.get("name").is_some_and(|name| name == "default"));
            default.and_then(|template| template.get("template")).and_then(Value::as_str)
        }
        _ => None,
    };
    let origin = || format!("chat_template in {}", folder.join("tokenizer_config.json").display());
    Ok(text.map(|text| (text.to_string(), origin())))
}

/// A token is its text, or an object with its text as `content`.
fn special_tokens(config: &Map<String, Value>) -> Map<String, Value> {
    let text = |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(Value::from);
    TOKENS.iter().filter_map(|&name| Some((name.to_string(), text(config.get(name)?)?))).collect()
}

//! Reads the chat template and the names of special tokens from the folder of a `tokenizer.json`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zero_engine::DataError;

/// The special tokens that transformers passes to a template.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The files of a model that matter for conversations.
#[derive(Default)]
pub(super) struct ModelFiles {
    /// The text of the template, and the name of its source file.
    pub(super) template: Option<(String, String)>,
    /// The text of each special token, by name.
    pub(super) special_tokens: Map<String, Value>,
}

impl ModelFiles {
    /// Reads the chat template and the special tokens, each from the first of these folders that has it.
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

/// Reads the object in a JSON file. Returns an empty object if the file does not exist.
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

/// Finds the template of a folder. `chat_template.jinja` takes precedence over `tokenizer_config.json`. If
/// `tokenizer_config.json` has several templates, the template named `default` is used.
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

/// Reads the special tokens. The value of a token is its text, or an object whose `content` is its text.
fn special_tokens(config: &Map<String, Value>) -> Map<String, Value> {
    let text = |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(Value::from);
    TOKENS.iter().filter_map(|&name| Some((name.to_string(), text(config.get(name)?)?))).collect()
}

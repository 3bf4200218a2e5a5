//! `model.pretrained`: merges the `config.json` of a Hugging Face folder into the section. Values that contradict
//! it are errors, except for those that do not change the weights.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value as Json};

use crate::config::{Config, Data, Gpt2, Llama, ROPE_TYPE};
use crate::errors::ErrorKind;
use crate::hugging_face::{Translated, translate};
use crate::path::last;
use crate::read::node::{At, Entry, Node, Value};
use crate::report::Report;
use crate::schema::{TYPE, join};

/// Maximum size of a `config.json` in bytes. The files that transformers writes have a few thousand bytes.
const MAX_BYTES: u64 = 1 << 20;
const KEY: &str = Gpt2::pretrained;

/// Downloads the files that describe a model and returns their folder; the error is a message and advice.
pub type FetchPretrained = fn(&str) -> Result<PathBuf, (String, String)>;

static FETCH: OnceLock<FetchPretrained> = OnceLock::new();

/// Sets the function that downloads a `model.pretrained` given as an address, such as `hf://owner/name`. Only the first
/// call has an effect. This crate itself does not use the network.
pub fn fetch_pretrained_with(fetch: FetchPretrained) {
    let _ = FETCH.set(fetch);
}

/// Returns whether a value begins with a scheme of two or more characters, such as `s3://`, `https://` or `hf://`.
pub fn is_address(text: &str) -> bool {
    let scheme = text.split_once("://").map_or("", |(scheme, _)| scheme);
    scheme.len() > 1 && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

/// Returns whether a relative path has the form `owner/name` of a model on the Hugging Face Hub.
fn is_hub_name(path: &Path) -> bool {
    let is_part = |part: &str| !part.is_empty() && !part.starts_with('.');
    path.to_str()
        .and_then(|path| path.split_once('/'))
        .is_some_and(|(owner, name)| is_part(owner) && is_part(name) && !name.contains('/'))
}

/// Returns the path as text if it is an address.
pub fn address(path: &Path) -> Option<&str> {
    path.to_str().filter(|path| is_address(path))
}

/// Returns the local folder for a value of the key, after downloading it if it is an address.
fn local(folder: &str) -> Result<PathBuf, (String, String)> {
    match FETCH.get() {
        _ if !is_address(folder) => Ok(folder.into()),
        Some(fetch) => fetch(folder),
        None => {
            let message = format!("{folder} is a remote URL, which this program does not download");
            Err((message, "download the folder, and give its local path".into()))
        }
    }
}

/// Adds the keys of `config.json` to the section that names its folder, and the folder's tokenizer if none is set.
/// After an error it removes the section, so that no further errors about it follow.
pub(crate) fn apply(root: &mut Node, report: &mut Report) {
    let Some(model) = section(root, Config::model) else { return };
    let Some(Node { value: Value::Text(folder), at }) = written(model, last(KEY)).cloned() else { return };
    let folder = match local(&folder) {
        Ok(folder) => folder,
        Err((message, help)) => {
            report.error(ErrorKind::Unreadable, KEY, at, message, Some(help));
            return remove(root, Config::model);
        }
    };
    if let Some(entry) = model.iter_mut().find(|entry| entry.key == last(KEY)) {
        entry.value.value = Value::Text(folder.display().to_string());
    }
    let path = folder.join("config.json");
    let has_type = written(model, TYPE).is_some();
    let config = match read(&path) {
        Ok(config) => config,
        Err(Unreadable::Missing) if has_type => {
            let message = format!("{} does not exist: the model is built from the configuration alone", path.display());
            return report.warn(KEY, at, message);
        }
        Err(error) => {
            let (message, mut help) = error.message_and_help(&path);
            if FETCH.get().is_some() && !folder.exists() && is_hub_name(&folder) {
                help = format!("for a model on the Hugging Face Hub, use hf://{}; otherwise {help}", folder.display());
            }
            report.error(ErrorKind::Unreadable, KEY, at, message, Some(help));
            return remove(root, Config::model);
        }
    };
    report.set_pretrained(path.display().to_string());
    match translate(&config) {
        Err(refusals) => {
            for refusal in refusals {
                let kind = ErrorKind::NotImplemented;
                report.error(kind, &refusal.key, At::Pretrained, refusal.message, refusal.help);
            }
            remove(root, Config::model);
        }
        Ok(Translated { keys, ignored }) => {
            if !ignored.is_empty() {
                let message = format!("{} has keys that have no effect here: {}", path.display(), ignored.join(", "));
                report.warn(KEY, at, message);
            }
            for (name, value) in keys {
                merge(model, name, value, report);
            }
            let tokenizer = folder.join("tokenizer.json");
            if tokenizer.is_file()
                && let Some(data) = section(root, Config::data)
                && written(data, last(Data::tokenizer)).is_none()
            {
                insert(data, last(Data::tokenizer), Value::Text(tokenizer.display().to_string()));
            }
        }
    }
}

enum Unreadable {
    Missing,
    File(io::Error),
    TooLarge,
    Syntax(String),
}

impl Unreadable {
    /// Returns the message and the advice.
    fn message_and_help(self, path: &Path) -> (String, String) {
        let path = path.display();
        let help = "give a folder with config.json and model.safetensors, as saved by transformers".to_string();
        match self {
            Self::Missing => {
                let help = format!("{help}; to continue a run without the folder, use the run's resolved.yaml");
                (format!("{path} does not exist"), help)
            }
            Self::File(error) => (format!("{path} cannot be read: {error}"), help),
            Self::TooLarge => (format!("{path} is larger than {} KiB", MAX_BYTES >> 10), help),
            Self::Syntax(message) => (format!("{path} is not a JSON object: {message}"), help),
        }
    }
}

fn read(path: &Path) -> Result<Map<String, Json>, Unreadable> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Unreadable::Missing,
        _ => Unreadable::File(error),
    };
    // Reading anything but a regular file, such as a pipe, might block forever.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(Unreadable::File(io::Error::other("it is not a file")));
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Unreadable::TooLarge);
    }
    serde_json::from_slice(&bytes).map_err(|error| Unreadable::Syntax(error.to_string()))
}

/// Returns the entries of a top-level section of the file.
fn section<'n>(root: &'n mut Node, name: &str) -> Option<&'n mut Vec<Entry>> {
    let Value::Map(entries) = &mut root.value else { return None };
    match &mut entries.iter_mut().find(|entry| entry.key == name)?.value.value {
        Value::Map(entries) => Some(entries),
        _ => None,
    }
}

fn remove(root: &mut Node, name: &str) {
    if let Value::Map(entries) = &mut root.value {
        entries.retain(|entry| entry.key != name);
    }
}

/// Returns the value of a key; null counts as missing.
fn written<'n>(entries: &'n [Entry], name: &str) -> Option<&'n Node> {
    entries.iter().find(|entry| entry.key == name).map(|entry| &entry.value).filter(|node| node.value != Value::Null)
}

/// Inserts a key, replacing any null of the same name.
fn insert(entries: &mut Vec<Entry>, name: &str, value: Value) {
    let at = At::Pretrained;
    entries.retain(|entry| entry.key != name);
    entries.push(Entry { key: name.into(), key_at: at, value: Node { value, at } });
}

/// Keys that do not change the model's weights: a value in the file takes precedence.
const FREE: [&str; 4] = [Gpt2::embd_pdrop, Gpt2::resid_pdrop, Gpt2::attn_pdrop, Llama::attention_dropout];

/// Adds a value of `config.json`. A value in the file must be equal to it, unless the key is one of [`FREE`].
fn merge(entries: &mut Vec<Entry>, name: &'static str, value: Value, report: &mut Report) {
    match written(entries, name).filter(|node| !node.value.says("auto")) {
        None if value == Value::Null => {}
        None => insert(entries, name, value),
        Some(node) if same(&node.value, &value) || FREE.iter().any(|path| last(path) == name) => {}
        Some(node) => {
            let path = join(Config::model, name);
            let message =
                format!("`{path}` is {}, but the pretrained model has {}", described(&node.value), described(&value));
            let help = "remove it: the pretrained model sets it".to_string();
            report.contradiction(&[(&path, node.at), (&path, At::Pretrained)], message, Some(help));
        }
    }
}

fn described(value: &Value) -> String {
    match value {
        Value::Map(entries) => {
            let entry = |entry: &Entry| format!("{}: {}", entry.key, described(&entry.value.value));
            format!("{{{}}}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        other => other.describe(),
    }
}

/// Returns whether two values are equivalent: `1` and `1.0`, sections in different order, or two names of one
/// activation.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Int(a), Value::Float(b)) | (Value::Float(b), Value::Int(a)) => *a as f64 == *b,
        (Value::Text(a), Value::Text(b)) => a == b || is_tanh_gelu(a) && is_tanh_gelu(b) || is_silu(a) && is_silu(b),
        (Value::Map(a), Value::Map(b)) => {
            let one_way = |a: &[Entry], b: &[Entry]| {
                let present = a.iter().filter(|entry| entry.value.value != Value::Null);
                present.into_iter().all(|e| written(b, &e.key).is_some_and(|other| same(&e.value.value, &other.value)))
            };
            one_way(a, b) && one_way(b, a)
        }
        (Value::Map(entries), Value::Null) | (Value::Null, Value::Map(entries)) => {
            // A scaling of type `default` changes nothing.
            entries.iter().all(|entry| entry.key == last(ROPE_TYPE) && entry.value.value.says("default"))
        }
        (Value::List(a), Value::List(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(&a.value, &b.value))
        }
        (a, b) => a == b,
    }
}

fn is_tanh_gelu(name: &str) -> bool {
    matches!(name, "gelu_new" | "gelu_pytorch_tanh")
}

fn is_silu(name: &str) -> bool {
    matches!(name, "silu" | "swish")
}

//! Converts JSON values to YAML nodes and to text for messages.

use serde_json::Value as Json;

use crate::read::node::{At, Entry, Node, Value};

/// transformers' default for a missing key.
pub(super) struct Otherwise(pub(super) Value);

impl From<usize> for Otherwise {
    fn from(value: usize) -> Self {
        Self(Value::Int(value as i128))
    }
}

impl From<f64> for Otherwise {
    fn from(value: f64) -> Self {
        Self(Value::Float(value))
    }
}

impl From<bool> for Otherwise {
    fn from(value: bool) -> Self {
        Self(Value::Bool(value))
    }
}

/// Converts a JSON value to a YAML value, all of it located in `config.json`.
pub(super) fn node(value: &Json) -> Value {
    Node::of_json(value, At::Pretrained).value
}

pub(super) fn map(entries: Vec<(&str, Value)>) -> Value {
    let at = At::Pretrained;
    let entry = |(key, value): (&str, Value)| Entry { key: key.into(), key_at: at, value: Node { value, at } };
    Value::Map(entries.into_iter().map(entry).collect())
}

/// Returns a list of values, all of it located in `config.json`.
pub(super) fn list(values: Vec<Value>) -> Value {
    Value::List(values.into_iter().map(|value| Node { value, at: At::Pretrained }).collect())
}

/// Formats a value for a message.
pub(super) fn short(value: &Json) -> String {
    let text = match value {
        Json::String(text) => text.escape_debug().to_string(),
        Json::Object(_) => "{…}".to_string(),
        Json::Array(_) => "[…]".to_string(),
        other => other.to_string(),
    };
    if text.chars().count() > 60 { text.chars().take(57).chain("…".chars()).collect() } else { text }
}

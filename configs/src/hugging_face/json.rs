//! Values of JSON as those of YAML, and in messages.

use serde_json::Value as Json;

use crate::node::{At, Entry, Node, Value};

/// What transformers takes where a key is not there.
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

/// A value of JSON as one of YAML, all of it at the place of `config.json`.
pub(super) fn node(value: &Json) -> Value {
    match value {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::Int(value.into()),
            (None, Some(value)) => Value::Int(value.into()),
            (None, None) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::Text(text.clone()),
        Json::Array(items) => {
            Value::List(items.iter().map(|item| Node { value: node(item), at: At::Pretrained }).collect())
        }
        Json::Object(entries) => map(entries.iter().map(|(name, value)| (name.as_str(), node(value))).collect()),
    }
}

pub(super) fn map(entries: Vec<(&str, Value)>) -> Value {
    let at = At::Pretrained;
    let entry = |(key, value): (&str, Value)| Entry { key: key.into(), key_at: at, value: Node { value, at } };
    Value::Map(entries.into_iter().map(entry).collect())
}

/// A value in a message.
pub(super) fn short(value: &Json) -> String {
    let text = match value {
        Json::String(text) => text.escape_debug().to_string(),
        Json::Object(_) => "{…}".to_string(),
        Json::Array(_) => "[…]".to_string(),
        other => other.to_string(),
    };
    if text.chars().count() > 60 { text.chars().take(57).chain("…".chars()).collect() } else { text }
}

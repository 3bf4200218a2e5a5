//! The YAML tree, with the location of every key and value.

use serde_json::{Value as Json, json};

/// A value and its location.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) at: At,
}

/// The types of YAML's core schema, which are the same as JSON's.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key with its value. Entries keep the order of the file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_at: At,
    pub(crate) value: Node,
}

/// The location of a key or value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    /// In the file with that index. Line and column are counted from 1, the width in characters.
    File { file: usize, line: usize, column: usize, width: usize },
    /// In the override with that index.
    Set(usize),
    /// Not written: the value is the default.
    Default,
    /// Not written: the value is the number of started ranks.
    Launch(usize),
    /// In the `config.json` of a pretrained model.
    Pretrained,
    /// Set by the program.
    Program,
}

impl Node {
    /// Converts a JSON value. All nodes are located at `at`.
    pub(crate) fn of_json(value: &Json, at: At) -> Self {
        let value = match value {
            Json::Null => Value::Null,
            Json::Bool(value) => Value::Bool(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Value::Int(value.into()),
                (None, Some(value)) => Value::Int(value.into()),
                (None, None) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Value::Text(text.clone()),
            Json::Array(items) => Value::List(items.iter().map(|item| Self::of_json(item, at)).collect()),
            Json::Object(entries) => {
                let entry = |(key, value): (&String, &Json)| Entry {
                    key: key.clone(),
                    key_at: at,
                    value: Self::of_json(value, at),
                };
                Value::Map(entries.iter().map(entry).collect())
            }
        };
        Self { value, at }
    }

    /// Returns the number of nodes in the tree, including this one.
    pub(crate) fn count(&self) -> usize {
        match &self.value {
            Value::List(items) => 1 + items.iter().map(Self::count).sum::<usize>(),
            Value::Map(entries) => 1 + entries.iter().map(|entry| 1 + entry.value.count()).sum::<usize>(),
            _ => 1,
        }
    }
}

impl Value {
    /// Converts to JSON, which has no infinities and whose integers have at most 64 bits.
    pub(crate) fn to_json(&self) -> Json {
        match self {
            Self::Null => Json::Null,
            Self::Bool(value) => json!(value),
            Self::Int(number) => match (u64::try_from(*number), i64::try_from(*number)) {
                (Ok(number), _) => json!(number),
                (_, Ok(number)) => json!(number),
                _ => json!(*number as f64),
            },
            Self::Float(number) => json!(number),
            Self::Text(text) => json!(text),
            Self::List(items) => items.iter().map(|item| item.value.to_json()).collect(),
            Self::Map(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), entry.value.value.to_json())).collect()
            }
        }
    }

    /// Describes the value for messages of the form "expected …, found …".
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Null => "nothing".to_string(),
            Self::Bool(value) => format!("`{value}`"),
            Self::Int(value) => format!("`{value}`"),
            Self::Float(value) if value.is_nan() => "NaN".to_string(),
            Self::Float(value) if value.is_infinite() => "an infinite number".to_string(),
            Self::Float(value) => format!("`{value:?}`"),
            Self::Text(text) if text.is_empty() => "an empty string".to_string(),
            Self::Text(text) if text.chars().count() > 60 => {
                format!("the string \"{}…\"", text.chars().take(57).collect::<String>())
            }
            Self::Text(text) => format!("the string \"{text}\""),
            Self::List(_) => "a list".to_string(),
            Self::Map(_) => "a section".to_string(),
        }
    }

    /// Returns whether the value equals `text`, which is written like the defaults in the schema.
    pub(crate) fn says(&self, text: &str) -> bool {
        match (self, crate::read::scalar::plain(text)) {
            (Self::List(items), _) => items.is_empty() && text == "[]",
            (Self::Map(entries), _) => entries.is_empty() && (text == "{}" || text == "null"),
            (Self::Text(mine), _) => mine.eq_ignore_ascii_case(text),
            (Self::Int(mine), Self::Float(other)) => *mine as f64 == other,
            (Self::Float(mine), Self::Int(other)) => *mine == other as f64,
            (mine, other) => *mine == other,
        }
    }
}

//! Writes values as text: on one line, or as the lines of a block.

use crate::read::node::{Node, Value};
use crate::write::yaml_out;

/// The style in which a text writes its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Yaml,
    Json,
}

impl Style {
    /// Returns JSON if the whole text is JSON, else YAML.
    pub(super) fn of(text: &str) -> Self {
        let is_json = text.trim_start().starts_with('{') && serde_json::from_str::<serde_json::Value>(text).is_ok();
        if is_json { Self::Json } else { Self::Yaml }
    }

    pub(super) fn value(self, value: &Value) -> String {
        match self {
            Self::Yaml => yaml_out::value(value),
            Self::Json => value.to_json().to_string(),
        }
    }

    pub(super) fn key(self, key: &str) -> String {
        self.value(&Value::Text(key.to_string()))
    }

    /// Returns the lines of a key with its value. Sections are written as blocks.
    pub(super) fn lines(self, key: &str, node: &Node) -> Vec<String> {
        match &node.value {
            Value::Map(entries) if !entries.is_empty() => {
                let inner = entries.iter().flat_map(|entry| self.lines(&entry.key, &entry.value));
                std::iter::once(format!("{}:", self.key(key))).chain(inner.map(|line| format!("  {line}"))).collect()
            }
            value => vec![format!("{}: {}", self.key(key), self.value(value))],
        }
    }

    /// Returns the text of the whole file.
    pub(super) fn whole(self, node: &Node) -> String {
        match (self, &node.value) {
            (Self::Json, value) => format!("{:#}\n", value.to_json()),
            (Self::Yaml, Value::Map(entries)) if !entries.is_empty() => entries
                .iter()
                .flat_map(|entry| self.lines(&entry.key, &entry.value))
                .fold(ANEW.to_string(), |mut text, line| {
                    text.push_str(&line);
                    text.push('\n');
                    text
                }),
            (Self::Yaml, value) => format!("{ANEW}{}\n", self.value(value)),
        }
    }
}

const ANEW: &str = "# Rewritten, without comments: the changes could not be made in place.\n";

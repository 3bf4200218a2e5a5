//! What YAML says, with the place of every value and key.

/// A value and where it is written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) at: At,
}

/// The types of YAML's core schema, which are those of JSON.
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

/// A key with its value. Entries stay in the order of the file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_at: At,
    pub(crate) value: Node,
}

/// Where something is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    /// In the file of that index; line and column count from 1, the width is in characters.
    File { file: usize, line: usize, column: usize, width: usize },
    /// In the override of that index.
    Set(usize),
    /// Nowhere: it is the default.
    Default,
    /// Nowhere: it is the number of ranks that were started.
    Launch(usize),
    /// In the `config.json` of a pretrained model.
    Pretrained,
}

impl Node {
    /// How many nodes this is, itself included.
    pub(crate) fn count(&self) -> usize {
        match &self.value {
            Value::List(items) => 1 + items.iter().map(Self::count).sum::<usize>(),
            Value::Map(entries) => 1 + entries.iter().map(|entry| 1 + entry.value.count()).sum::<usize>(),
            _ => 1,
        }
    }
}

impl Value {
    /// What it is, for "expected …, found …".
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Null => "nothing".to_string(),
            Self::Bool(value) => format!("`{value}`"),
            Self::Int(value) => format!("`{value}`"),
            Self::Float(value) if value.is_nan() => "NaN".to_string(),
            Self::Float(value) if value.is_infinite() => "an infinite number".to_string(),
            Self::Float(value) => format!("`{value:?}`"),
            Self::Text(text) if text.is_empty() => "an empty text".to_string(),
            Self::Text(text) if text.chars().count() > 60 => {
                format!("the text \"{}…\"", text.chars().take(57).collect::<String>())
            }
            Self::Text(text) => format!("the text \"{text}\""),
            Self::List(_) => "a list".to_string(),
            Self::Map(_) => "a section".to_string(),
        }
    }

    /// Whether this is what `text` says: how a default or a switched-off value in the schema is compared.
    pub(crate) fn says(&self, text: &str) -> bool {
        match (self, crate::scalar::plain(text)) {
            (Self::List(items), _) => items.is_empty() && text == "[]",
            (Self::Map(entries), _) => entries.is_empty() && (text == "{}" || text == "null"),
            (Self::Text(mine), _) => mine.eq_ignore_ascii_case(text),
            (Self::Int(mine), Self::Float(other)) => *mine as f64 == other,
            (Self::Float(mine), Self::Int(other)) => *mine == other as f64,
            (mine, other) => *mine == other,
        }
    }
}

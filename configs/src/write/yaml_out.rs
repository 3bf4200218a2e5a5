//! Writes values as YAML. Other YAML readers read the same values.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::config::{Dimension, Interval};
use crate::read::node;
use crate::read::parse;
use crate::read::scalar;

/// Serialises `None` as `auto`.
pub(crate) fn auto<T: Serialize, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => value.serialize(serializer),
        None => serializer.serialize_str("auto"),
    }
}

/// Serialises a path as text. Replaces invalid UTF-8 in a path set by the program.
pub(crate) fn path<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

/// Serialises a path as text, like [`path`].
pub(crate) fn folder<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

/// Serialises a search space as `path.to.key: [values]`.
pub(crate) fn space<S: Serializer>(space: &[Dimension], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(space.iter().map(|dimension| (&dimension.path, tried(dimension))))
}

fn tried(dimension: &Dimension) -> Value {
    if let Some(Interval { low, high, log, is_integer }) = dimension.range {
        let number = |number: f64| if is_integer { json!(number as u64) } else { json!(number) };
        return json!({"low": number(low), "high": number(high), "log": log});
    }
    // A program may set a value that is not YAML; it is then written as a string.
    let value = |text: &String| parse::constant(text).map_or_else(|| json!(text), |node| node.value.to_json());
    Value::Array(dimension.values.iter().map(value).collect())
}

/// Formats a value on one line, as for `--set path=VALUE`. Parsing returns the same value.
pub(crate) fn value(value: &node::Value) -> String {
    match value {
        node::Value::Int(number) => number.to_string(),
        node::Value::Float(number) if number.is_nan() => ".nan".to_string(),
        node::Value::Float(number) if number.is_infinite() => {
            (if *number > 0.0 { ".inf" } else { "-.inf" }).to_string()
        }
        node::Value::List(items) => list(items.iter().map(|item| self::value(&item.value))),
        node::Value::Map(entries) => map(entries.iter().map(|entry| (&*entry.key, self::value(&entry.value.value)))),
        scalar => flow(&scalar.to_json()),
    }
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

fn map<'k>(entries: impl Iterator<Item = (&'k str, String)>) -> String {
    format!("{{{}}}", entries.map(|(key, value)| format!("{}: {value}", quoted(key))).collect::<Vec<_>>().join(", "))
}

/// Formats a value on one line.
pub(crate) fn flow(value: &Value) -> String {
    match value {
        Value::Null => "null".to_string(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(number) => float(number),
            None => number.to_string(),
        },
        Value::String(text) => quoted(text),
        Value::Array(items) => list(items.iter().map(flow)),
        Value::Object(entries) => map(entries.iter().map(|(key, value)| (key.as_str(), flow(value)))),
    }
}

/// Formats the shortest digits that parse to the same f64. YAML 1.1 readers require a point before an exponent.
fn float(number: f64) -> String {
    let text = format!("{number:?}");
    match text.split_once('e') {
        Some((digits, exponent)) if !digits.contains('.') => format!("{digits}.0e{exponent}"),
        _ => text,
    }
}

/// Returns the string unquoted if no YAML reader can take it for anything else, else in double quotes with JSON's
/// escapes, which YAML shares.
fn quoted(text: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '/'))
        && text.chars().all(harmless)
        && matches!(scalar::plain(text), node::Value::Text(_))
        && !matches!(text.to_ascii_lowercase().as_str(), "y" | "n" | "yes" | "no" | "on" | "off");
    if plain {
        return text.to_string();
    }
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            // Control characters, and characters that some readers take for a line break or a byte-order mark.
            c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}') => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_round_trip_and_have_a_point() {
        for (number, text) in [(1e-8, "1.0e-8"), (0.001, "0.001"), (1.0, "1.0"), (2.5e-10, "2.5e-10"), (1e16, "1.0e16")]
        {
            assert_eq!(float(number), text);
            assert_eq!(scalar::plain(text), node::Value::Float(number));
        }
    }

    #[test]
    fn ambiguous_strings_are_quoted() {
        for text in ["gelu_new", "runs/quickstart", "a.b-c"] {
            assert_eq!(quoted(text), text);
        }
        for text in ["", "no", "12", "true", "null", "a b", "**/*.rs", "a: b", "- a", "#x", "1.5", "~"] {
            assert!(quoted(text).starts_with('"'), "{text}");
        }
        assert_eq!(quoted("a\"b\\c\n\u{7}"), "\"a\\\"b\\\\c\\n\\u0007\"");
    }
}

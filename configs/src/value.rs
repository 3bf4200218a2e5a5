//! Converts YAML values to the types that keys expect.

use std::collections::BTreeMap;

use crate::bytes::bytes;
use crate::config::{Dimension, LayerPattern, PartitionMethod};
use crate::read::node::{At, Node, Value};
use crate::schema::{Kind, Range};

/// Maximum number of regular expressions in a list. A hostile expression can take milliseconds to compile.
pub(crate) const MAX_PATTERNS: usize = 100;

/// A value of the type that its key expects.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Leaf {
    /// No value, or a value that is computed from other keys.
    Null,
    /// `auto` for a value that is determined later.
    Auto,
    Bool(bool),
    Int(u64),
    Float(f64),
    Pair([f64; 2]),
    Text(String),
    Texts(Vec<String>),
    Ints(Vec<u64>),
    Floats(Vec<f64>),
    /// The dimensions, each with the location of its values.
    Space(Vec<(Dimension, At)>),
}

/// A checked value and its location.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Field {
    pub(crate) leaf: Leaf,
    pub(crate) at: At,
    /// Whether the file says `auto`.
    pub(crate) auto: bool,
}

/// The valid values, by path.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Fields {
    pub(crate) values: BTreeMap<String, Field>,
    /// Sections in the document, including empty ones, with their locations.
    pub(crate) sections: BTreeMap<String, At>,
}

impl Fields {
    /// Returns whether the document sets the key at `path` to `auto`.
    pub(crate) fn is_auto(&self, path: &str) -> bool {
        self.values.get(path).is_some_and(|field| field.auto)
    }
}

/// Converts a value to the type of `kind`. Returns `None` if the value has another type.
pub(crate) fn leaf(kind: &Kind, value: &Value) -> Option<Leaf> {
    match (kind, value) {
        (Kind::Bool, Value::Bool(value)) => Some(Leaf::Bool(*value)),
        (Kind::Int { min, max }, value) => whole(value, *min, *max).map(Leaf::Int),
        (Kind::Multiple { of, max }, value) => {
            whole(value, *of, *max).filter(|number| number.is_multiple_of(*of)).map(Leaf::Int)
        }
        (Kind::Bytes { min }, Value::Text(text)) => bytes(text).filter(|bytes| bytes >= min).map(Leaf::Int),
        (Kind::Bytes { min }, value) => whole(value, *min, u64::MAX).map(Leaf::Int),
        (Kind::Float(range), value) => number(value, *range).map(Leaf::Float),
        (Kind::Pair(range), Value::List(items)) => match items.as_slice() {
            [first, second] => Some(Leaf::Pair([number(&first.value, *range)?, number(&second.value, *range)?])),
            _ => None,
        },
        (Kind::Text, Value::Text(text)) => Some(Leaf::Text(text.clone())),
        (Kind::Path, Value::Text(text)) => (!text.is_empty()).then(|| Leaf::Text(text.clone())),
        (Kind::Choice { names, .. }, Value::Bool(value)) => {
            let text = value.to_string();
            names.contains(&text.as_str()).then_some(Leaf::Text(text))
        }
        (Kind::Choice { names, .. }, Value::Text(text)) => {
            names.contains(&text.as_str()).then(|| Leaf::Text(text.clone()))
        }
        (Kind::Partition, Value::Text(text)) => PartitionMethod::parse(text).is_ok().then(|| Leaf::Text(text.clone())),
        (Kind::Paths | Kind::Names, Value::Text(text)) if !text.is_empty() => Some(Leaf::Texts(vec![text.clone()])),
        (Kind::Paths | Kind::Names, Value::List(items)) if !items.is_empty() => {
            texts(items).filter(|texts| texts.iter().all(|text| !text.is_empty())).map(Leaf::Texts)
        }
        (Kind::Texts, Value::List(items)) => texts(items).map(Leaf::Texts),
        (Kind::Patterns, Value::List(items)) if (1..=MAX_PATTERNS).contains(&items.len()) => texts(items)
            .filter(|patterns| patterns.iter().all(|pattern| LayerPattern::new(pattern).is_ok()))
            .map(Leaf::Texts),
        (Kind::Ints { min, max }, Value::List(items)) => {
            items.iter().map(|item| whole(&item.value, *min, *max)).collect::<Option<_>>().map(Leaf::Ints)
        }
        (Kind::Floats(range), Value::List(items)) => {
            items.iter().map(|item| number(&item.value, *range)).collect::<Option<_>>().map(Leaf::Floats)
        }
        // Spaces with dimensions are checked elsewhere, because they depend on the rest of the file.
        (Kind::Space { .. }, Value::Map(entries)) if entries.is_empty() => Some(Leaf::Space(Vec::new())),
        _ => None,
    }
}

/// Describes what `kind` expects.
pub(crate) fn expected(kind: &Kind) -> String {
    match kind {
        Kind::Bool => "true or false".to_string(),
        Kind::Int { min, max } => format!("an integer{}", bounds(*min, *max)),
        Kind::Multiple { of, max } => format!("a multiple of {of}, at most {max}"),
        Kind::Bytes { min } => format!("a number of bytes of at least {min}, or a size like `6GiB`"),
        Kind::Float(range) => range.describe("a number"),
        Kind::Pair(range) => format!("a list of two numbers, each {}", range.describe("")),
        Kind::Text => "a string".to_string(),
        Kind::Path => "a path".to_string(),
        Kind::Choice { names, .. } => {
            let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
            match names.as_slice() {
                [one] => one.clone(),
                [head @ .., last] => format!("{} or {last}", head.join(", ")),
                [] => "nothing".to_string(),
            }
        }
        Kind::Partition => "`parameters`, `uniform`, `time` or `type:REGEX`".to_string(),
        Kind::Paths => "a path, a glob, or a list of them".to_string(),
        Kind::Texts => "a list of strings".to_string(),
        Kind::Names => "a name, or a list of names".to_string(),
        Kind::Patterns => format!("a list of 1 to {MAX_PATTERNS} regular expressions"),
        Kind::Ints { min, max } => format!("a list of integers{}", bounds(*min, *max)),
        Kind::Floats(range) => format!("a list of numbers, each {}", range.describe("")),
        Kind::Space { .. } => "keys with the values to try".to_string(),
        Kind::Section(_) | Kind::Variants(_) => "a section".to_string(),
        Kind::Sections(_) => "a list of sections".to_string(),
        Kind::Any => "nothing".to_string(),
    }
}

fn bounds(min: u64, max: u64) -> String {
    match (min, max) {
        (0, u64::MAX) => " of at least 0".to_string(),
        (min, max) if max >= u64::from(u32::MAX) => format!(" of at least {min}"),
        (min, max) => format!(" from {min} to {max}"),
    }
}

/// Converts to an integer. Accepts `5e8` and `500000000.0`, since DeepSpeed's own examples write sizes like this.
fn whole(value: &Value, min: u64, max: u64) -> Option<u64> {
    let number = match value {
        Value::Int(value) => u64::try_from(*value).ok()?,
        // 2^64 is the first float that does not fit into a u64.
        Value::Float(value) if value.fract() == 0.0 && *value >= 0.0 && *value < 18_446_744_073_709_551_616.0 => {
            *value as u64
        }
        _ => return None,
    };
    (min..=max).contains(&number).then_some(number)
}

fn number(value: &Value, range: Range) -> Option<f64> {
    let number = match value {
        Value::Int(value) => *value as f64,
        Value::Float(value) => *value,
        _ => return None,
    };
    range.contains(number).then_some(number)
}

fn texts(items: &[Node]) -> Option<Vec<String>> {
    let text = |item: &Node| match &item.value {
        Value::Text(text) => Some(text.clone()),
        _ => None,
    };
    items.iter().map(text).collect()
}

impl Range {
    /// Returns whether the number is in the range. NaN and infinities are in no range.
    fn contains(self, number: f64) -> bool {
        let low = if self.above { number > self.min } else { number >= self.min };
        let high = if self.below { number < self.max } else { number <= self.max };
        low && high
    }

    fn describe(self, what: &str) -> String {
        let low = if self.above { "greater than" } else { "at least" };
        let text = match (self.max == f64::MAX, self.below) {
            (true, _) => format!("{what}, {low} {}", self.min),
            (false, false) if self.min == f64::MIN => format!("{what}, at most {}", self.max),
            (false, true) => format!("{what}, {low} {} and less than {}", self.min, self.max),
            (false, false) => format!("{what}, {low} {} and at most {}", self.min, self.max),
        };
        text.trim_start_matches(", ").to_string()
    }
}

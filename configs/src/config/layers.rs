//! Layers by name: what the configuration says of some layers and not of others.

use regex::{Regex, RegexBuilder};
use serde::Serialize;

/// Names of layers, as a regular expression that is found anywhere in a name, upper or lower case, as in DeepSpeed. Compiled
/// here, so that what was accepted is what is matched.
#[derive(Debug, Clone)]
pub struct LayerPattern(Regex);

impl LayerPattern {
    /// Longest expression and largest compiled one, in bytes: far more than names need, and compiled in no time.
    const MAX_LENGTH: usize = 1000;
    const MAX_COMPILED: usize = 1 << 20;

    /// The pattern that is written like this.
    ///
    /// # Errors
    /// What is wrong with it, as advice.
    pub(crate) fn new(pattern: &str) -> Result<Self, String> {
        if pattern.is_empty() {
            return Err("the regular expression is empty and would be found in every name".to_string());
        }
        if pattern.len() > Self::MAX_LENGTH {
            return Err(format!("the regular expression has more than {} bytes", Self::MAX_LENGTH));
        }
        let regex = RegexBuilder::new(pattern).case_insensitive(true).size_limit(Self::MAX_COMPILED).build();
        regex.map(Self).map_err(|error| format!("the regular expression is wrong: {}", reason(&error)))
    }

    /// The expression, as written.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Whether the name of a layer matches.
    pub fn matches(&self, layer: &str) -> bool {
        self.0.is_match(layer)
    }
}

impl Serialize for LayerPattern {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl PartialEq for LayerPattern {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

/// What is wrong with an expression, on one line: a syntax error is a drawing of several, and says what it is in the last.
fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").unwrap_or(last).to_string()
}

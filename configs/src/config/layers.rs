//! Patterns that select layers by name.

use regex::{Regex, RegexBuilder};
use serde::Serialize;

/// A regular expression on layer names. It matches anywhere in a name and ignores case, as in DeepSpeed. It is compiled
/// once, when the configuration is read, so exactly the accepted expression is matched later.
#[derive(Debug, Clone)]
pub struct LayerPattern(Regex);

impl LayerPattern {
    /// Maximum length of the expression and of its compiled form, in bytes. Layer names need far less, and within these
    /// limits compiling takes no noticeable time.
    const MAX_LENGTH: usize = 1000;
    const MAX_COMPILED: usize = 1 << 20;

    /// Compiles a pattern.
    ///
    /// # Errors
    /// A description of the mistake in the pattern, as advice.
    pub(crate) fn new(pattern: &str) -> Result<Self, String> {
        if pattern.is_empty() {
            return Err("the regular expression is empty and would match every name".to_string());
        }
        if pattern.len() > Self::MAX_LENGTH {
            return Err(format!("the regular expression has more than {} bytes", Self::MAX_LENGTH));
        }
        let regex = RegexBuilder::new(pattern).case_insensitive(true).size_limit(Self::MAX_COMPILED).build();
        regex.map(Self).map_err(|error| format!("the regular expression is invalid: {}", reason(&error)))
    }

    /// Returns the expression as written.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Returns whether the pattern matches the layer's name.
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

/// Returns the reason for an error on one line. `regex` draws a syntax error over several lines and states the reason
/// in the last of them.
fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").unwrap_or(last).to_string()
}

//! The errors of a configuration. All of them are reported together, each with its location in the file.

use std::fmt;

/// All errors of a configuration, in the order of the file; errors without a line come last. Never empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Errors {
    pub(crate) list: Vec<Error>,
    /// Number of errors beyond those listed.
    pub(crate) omitted: usize,
}

/// One error.
#[derive(Debug, Clone, PartialEq)]
pub struct Error {
    /// Kind of the error.
    pub kind: ErrorKind,
    /// One sentence, without location or advice.
    pub message: String,
    /// The keys involved, most important first; several if they contradict each other.
    pub places: Vec<Place>,
    /// Advice on how to fix the error.
    pub help: Option<String>,
}

/// Kinds of errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The file cannot be read, is too large, or is not UTF-8.
    Unreadable,
    /// Not YAML, or above the limits on nesting and number of values.
    Syntax,
    /// A `--set` that is not `path.to.key=value`.
    Override,
    /// A key that does not exist.
    UnknownKey,
    /// A key that appears twice.
    DuplicateKey,
    /// A value of the wrong type or out of its range.
    Value,
    /// A required key is missing.
    Missing,
    /// Keys that contradict each other.
    Contradiction,
    /// A known key that is not implemented yet.
    NotImplemented,
    /// A key that DeepSpeed removed, or that has no possible meaning here.
    Rejected,
}

/// A key and its location.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// Path of the key, such as `zero_optimization.stage`; empty for the file as a whole.
    pub path: String,
    /// Where the value is written.
    pub spot: Spot,
}

/// The location of a value.
#[derive(Debug, Clone, PartialEq)]
pub enum Spot {
    /// A range of characters in the file.
    File {
        /// Name of the file.
        name: String,
        /// Line, counted from 1.
        line: usize,
        /// Column in characters, counted from 1.
        column: usize,
        /// Width of the range, in characters.
        width: usize,
        /// The line, or the part around the column if the line is very long.
        text: String,
        /// Number of characters of `text` before the range.
        indent: usize,
    },
    /// An override on the command line: the whole `path.to.key=value`.
    Set(String),
    /// The key is absent from the named file, so it has its default.
    Default(String),
    /// The number of started ranks, which is not written anywhere.
    Launch(usize),
    /// The program set the value.
    Program,
    /// The named file as a whole.
    Whole(String),
}

impl Errors {
    /// Iterates over the listed errors.
    pub fn iter(&self) -> std::slice::Iter<'_, Error> {
        self.list.iter()
    }

    /// Returns the total number of errors, including those that are not listed.
    pub fn count(&self) -> usize {
        self.list.len() + self.omitted
    }

    pub(crate) fn one(kind: ErrorKind, message: String, places: Vec<Place>, help: Option<String>) -> Self {
        Self { list: vec![Error { kind, message, places, help }], omitted: 0 }
    }
}

impl<'a> IntoIterator for &'a Errors {
    type Item = &'a Error;
    type IntoIter = std::slice::Iter<'a, Error>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl std::error::Error for Errors {}
impl std::error::Error for Error {}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.list.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{error}")?;
        }
        if self.omitted > 0 {
            write!(f, "\nerror: {} more errors are not shown", self.omitted)?;
        }
        Ok(())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", printable(&self.message))?;
        for place in &self.places {
            write!(f, "\n  in: {place}")?;
            place.excerpt(f)?;
        }
        if let Some(help) = &self.help {
            write!(f, "\n  help: {}", printable(help))?;
        }
        Ok(())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spot = match &self.spot {
            Spot::File { name, line, column, .. } => format!("{name}:{line}:{column}"),
            Spot::Set(text) => format!("--set {text}"),
            Spot::Default(name) => format!("not in {name}"),
            Spot::Launch(ranks) => format!("{ranks} ranks started"),
            Spot::Program => "set by the program".to_string(),
            Spot::Whole(name) => name.clone(),
        };
        match self.path.is_empty() {
            true => f.write_str(&printable(&spot)),
            false => write!(f, "{} ({})", printable(&self.path), printable(&spot)),
        }
    }
}

impl Place {
    /// Formats the source line with the range underlined.
    fn excerpt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spot::File { line, text, indent, width, .. } = &self.spot else { return Ok(()) };
        // Tabs stay tabs, so that the marks align with the characters above them.
        let before: String = text.chars().take(*indent).map(|c| if c == '\t' { c } else { ' ' }).collect();
        let marks = "^".repeat((*width).clamp(1, text.chars().count().saturating_sub(*indent).max(1)));
        write!(f, "\n  {line:>5} | {}\n        | {before}{marks}", printable(text))
    }
}

/// Replaces control characters, so that a hostile file cannot send them to the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// A warning about an accepted key without effect.
#[derive(Debug, Clone, PartialEq)]
pub struct Warning {
    /// One sentence.
    pub message: String,
    /// Key and location.
    pub place: Place,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "warning: {}\n  in: {}", printable(&self.message), self.place)
    }
}

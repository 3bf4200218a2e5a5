//! What is wrong with a configuration: everything at once, each with its place in the file.

use std::fmt;

/// All that is wrong with a configuration, in the order of the file as far as it has one. Never empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Errors {
    pub(crate) list: Vec<Error>,
    /// How many more there are than are listed.
    pub(crate) omitted: usize,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq)]
pub struct Error {
    /// What kind of mistake it is.
    pub kind: ErrorKind,
    /// One sentence, without place or advice.
    pub message: String,
    /// The keys that it is about, most important first; several when they contradict each other.
    pub places: Vec<Place>,
    /// What to do about it.
    pub help: Option<String>,
}

/// Kinds of mistakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The file cannot be read, is too large, or is not UTF-8.
    Unreadable,
    /// Not YAML, or more of it than a configuration may hold.
    Syntax,
    /// A `--set` that is not `path.to.key=value`.
    Override,
    /// A key that does not exist.
    UnknownKey,
    /// A key that is written twice.
    DuplicateKey,
    /// A value of the wrong type or out of its range.
    Value,
    /// A required key that is not there.
    Missing,
    /// Keys that contradict each other.
    Contradiction,
    /// A key that exists, and that is not implemented yet.
    NotImplemented,
    /// A key that DeepSpeed removed, or that cannot have a meaning here.
    Rejected,
}

/// Where something is written.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// Path of the key, `zero_optimization.stage`; empty for the file as a whole.
    pub path: String,
    /// Where it is written.
    pub spot: Spot,
}

/// Where something is written.
#[derive(Debug, Clone, PartialEq)]
pub enum Spot {
    /// In the file.
    File {
        /// Name of the file.
        name: String,
        /// Counted from 1.
        line: usize,
        /// In characters, counted from 1.
        column: usize,
        /// How many characters are meant.
        width: usize,
        /// The line, or the part of a very long one around the column.
        text: String,
        /// Characters of `text` before the place.
        indent: usize,
    },
    /// On the command line: the whole `path.to.key=value`.
    Set(String),
    /// Nowhere in the named file: the default.
    Default(String),
    /// Nowhere: it is the number of ranks that were started.
    Launch(usize),
    /// The named file as a whole.
    Whole(String),
}

impl Errors {
    /// The errors that are listed.
    pub fn iter(&self) -> std::slice::Iter<'_, Error> {
        self.list.iter()
    }

    /// How many there are, those that are not listed included.
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
            Spot::Whole(name) => name.clone(),
        };
        match self.path.is_empty() {
            true => f.write_str(&printable(&spot)),
            false => write!(f, "{} ({})", printable(&self.path), printable(&spot)),
        }
    }
}

impl Place {
    /// The source line with the place underlined.
    fn excerpt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spot::File { line, text, indent, width, .. } = &self.spot else { return Ok(()) };
        // Tabs stay tabs, so that the marks stand under what they mean.
        let before: String = text.chars().take(*indent).map(|c| if c == '\t' { c } else { ' ' }).collect();
        let marks = "^".repeat((*width).clamp(1, text.chars().count().saturating_sub(*indent).max(1)));
        write!(f, "\n  {line:>5} | {}\n        | {before}{marks}", printable(text))
    }
}

/// Control characters of a hostile file do not reach the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// Something accepted that has no effect.
#[derive(Debug, Clone, PartialEq)]
pub struct Warning {
    /// One sentence.
    pub message: String,
    /// Where it is written.
    pub place: Place,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "warning: {}\n  in: {}", printable(&self.message), self.place)
    }
}

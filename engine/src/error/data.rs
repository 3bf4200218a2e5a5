//! What can be wrong with data. Every error names the file, and the place in it where there is one.

use std::{fmt, io, path::PathBuf};

/// What is wrong with the data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or directory cannot be read; a missing one is among them.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A directory where a file is expected.
    #[error("{0} is a directory; {0}/**/* means all files in it", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// Not a glob.
    #[error("{pattern}: {message}")]
    Pattern {
        /// As it was written.
        pattern: String,
        /// Why.
        message: String,
    },
    /// A glob that no file matches.
    #[error("no file matches {pattern}")]
    NoMatch {
        /// As it was written.
        pattern: String,
    },
    /// The address of something that is not a file of this machine.
    #[error("{address} is an address, and data are read from files of this machine")]
    Address {
        /// As it was written.
        address: String,
    },
    /// A file that is not text, where the byte tokenizer would train on its bytes.
    #[error("{}: {kind}, not text", path.display())]
    Binary {
        /// The file.
        path: PathBuf,
        /// What it is, by its first bytes.
        kind: &'static str,
    },
    /// Files that cannot be one dataset.
    #[error("{} and {} have different formats and cannot be one dataset", one.display(), other.display())]
    MixedFormats {
        /// A file of one format.
        one: PathBuf,
        /// A file of another.
        other: PathBuf,
    },
    /// No tokens and no rows at all.
    #[error("{} without content", list(sources))]
    Empty {
        /// Where content was expected.
        sources: Vec<String>,
    },
    /// Not one sample.
    #[error(
        "a sequence of {sequence_length} tokens and the one that follows it are longer than the corpus of {tokens} tokens ({})",
        list(sources)
    )]
    SequenceTooLong {
        /// T.
        sequence_length: usize,
        /// In the whole corpus.
        tokens: usize,
        /// Where they came from.
        sources: Vec<String>,
    },
    /// Bytes that are not text, where text is needed.
    #[error("{}, {at}: not UTF-8, which the tokenizer needs", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Its first byte that is not UTF-8.
        at: At,
    },
    /// A token that the model does not know.
    #[error("{}, {at}: token {token} is outside of a vocabulary of {vocabulary}", path.display())]
    Token {
        /// The token.
        token: u32,
        /// How many the model knows.
        vocabulary: usize,
        /// The file.
        path: PathBuf,
        /// Where the token, or its text, is.
        at: At,
    },
    /// A token file that ends within a token.
    #[error("{}: {bytes} bytes are no whole number of tokens of {width} bytes", path.display())]
    PartialToken {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// Of a token.
        width: usize,
    },
    /// A line of a JSON lines file.
    #[error("{}, line {line}: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The first line is 1.
        line: u64,
        /// What is wrong.
        message: String,
    },
    /// A row of a table with more or fewer columns than the first row.
    #[error("{}, line {line}: {found} columns where the first row has {expected}", path.display())]
    Ragged {
        /// The file.
        path: PathBuf,
        /// The first line is 1.
        line: u64,
        /// Columns of the first row.
        expected: usize,
        /// Columns of this one.
        found: usize,
    },
    /// A field of a table that is no finite number.
    #[error("{}, line {line}, column {column}: `{text}` is not a finite number", path.display())]
    Number {
        /// The file.
        path: PathBuf,
        /// The first line is 1.
        line: u64,
        /// The first column is 1.
        column: usize,
        /// The field.
        text: String,
    },
    /// The last field of a row is no class.
    #[error("{}, line {line}: the label `{text}` is not an integer from 0 to {}", path.display(), classes.saturating_sub(1))]
    Label {
        /// The file.
        path: PathBuf,
        /// The first line is 1.
        line: u64,
        /// The field.
        text: String,
        /// How many the model knows.
        classes: usize,
    },
    /// A `tokenizer.json` that cannot be used, or text that it cannot encode or decode.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The tokenizer's file, or the text's.
        path: PathBuf,
        /// The tokenizer's reason.
        message: String,
    },
    /// A part that would leave nothing to train on, or no fraction.
    #[error("a fraction of {eval_fraction} of {samples} samples cannot be set aside for evaluation")]
    Split {
        /// In the whole dataset.
        samples: usize,
        /// Of them.
        eval_fraction: f64,
    },
    /// A sample that does not exist.
    #[error("sample {index} of {samples}")]
    Index {
        /// The first sample is 0.
        index: usize,
        /// How many there are.
        samples: usize,
    },
}

/// A place in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The first byte is 0.
    Byte(u64),
    /// The first line is 1.
    Line(u64),
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Byte(byte) => write!(f, "byte {byte}"),
            At::Line(line) => write!(f, "line {line}"),
        }
    }
}

impl DataError {
    /// An [`io::Error`] is of no use without its file.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }

    /// What to do about it, where that is the same for every key that names files.
    pub(crate) fn help(&self) -> Option<&'static str> {
        match self {
            Self::Address { .. } => Some("copy the files to this machine, or mount the store, and name their paths"),
            Self::Binary { .. } => {
                Some("unpack it or convert it to text; `data.format: bytes` trains on the bytes as they are")
            }
            _ => None,
        }
    }
}

fn list(sources: &[String]) -> String {
    sources.join(", ")
}

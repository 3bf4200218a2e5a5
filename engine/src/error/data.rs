//! Errors of the data set. Each error names the file and, where possible, the position in it.

use std::{fmt, io, path::PathBuf};

/// An error in the data set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or directory does not exist or cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// An image cannot be decoded, or a folder of images is not divided into classes.
    #[error("{}: {message}", path.display())]
    Image {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A source is a directory where a file is expected.
    #[error("{0} is a directory; use {0}/**/* for all files in it", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// A source is not a valid glob pattern.
    #[error("{pattern}: {message}")]
    Pattern {
        /// The pattern as written.
        pattern: String,
        /// Why the pattern is invalid.
        message: String,
    },
    /// No file matches a glob pattern.
    #[error("no file matches {pattern}")]
    NoMatch {
        /// The pattern as written.
        pattern: String,
    },
    /// A URL such as `s3://…` is given where only local files are supported.
    #[error("{address} is a remote URL, but only local files can be used here")]
    Address {
        /// The address as written.
        address: String,
    },
    /// Access to an object store, or the download of one of its objects, failed.
    #[error("{message}")]
    Store {
        /// The reason, with the address, and the byte position if it is known.
        message: String,
        /// What to do.
        help: Option<&'static str>,
    },
    /// A file is binary, but the byte tokenizer would treat it as text.
    #[error("{}: {kind}, not text", path.display())]
    Binary {
        /// The file.
        path: PathBuf,
        /// Its kind, recognized by its first bytes.
        kind: &'static str,
    },
    /// The sources have different formats and cannot form one data set.
    #[error("{} and {} have different formats and cannot form one data set", one.display(), other.display())]
    MixedFormats {
        /// A file of the first format.
        one: PathBuf,
        /// A file of another format.
        other: PathBuf,
    },
    /// The sources contain no tokens and no rows.
    #[error("no tokens or rows in {}", list(sources))]
    Empty {
        /// The sources.
        sources: Vec<String>,
    },
    /// The corpus is too short for one sample.
    #[error(
        "the corpus has {tokens} tokens, too few for one sequence of {sequence_length} tokens and the next token ({})",
        list(sources)
    )]
    SequenceTooLong {
        /// Number of tokens of a sequence.
        sequence_length: usize,
        /// Number of tokens of the whole corpus.
        tokens: usize,
        /// The sources.
        sources: Vec<String>,
    },
    /// The file is not UTF-8, which the tokenizer needs.
    #[error("{}, {at}: not valid UTF-8, which the tokenizer needs", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The first byte that is not UTF-8.
        at: At,
    },
    /// A token is outside the model's vocabulary.
    #[error("{}, {at}: token {token} is outside the vocabulary{}", path.display(), of_tokens(*vocabulary))]
    Token {
        /// The token, as the file stores it.
        token: i64,
        /// Size of the model's vocabulary, or `usize::MAX` if it is not known.
        vocabulary: usize,
        /// The file.
        path: PathBuf,
        /// The position of the token, or of the text that contains the token.
        at: At,
    },
    /// A token file ends within a token.
    #[error("{}: {bytes} bytes are not a multiple of the token size of {width} bytes", path.display())]
    PartialToken {
        /// The file.
        path: PathBuf,
        /// Length of the file in bytes.
        bytes: u64,
        /// Number of bytes of one token.
        width: usize,
    },
    /// A line of a JSON Lines file is invalid.
    #[error("{}, line {line}: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: u64,
        /// Why the line is invalid.
        message: String,
    },
    /// Every second token of a token file is 0, so its tokens are probably wider.
    #[error("{}: every second token of {} bits is 0, so the file probably has wider tokens", path.display(), 8 * width)]
    WideTokens {
        /// The file.
        path: PathBuf,
        /// Number of bytes of a token, by `data.token_dtype`.
        width: usize,
    },
    /// The format of a file differs from `data.format`.
    #[error("{}: {found}, not {wanted}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What the file is.
        found: &'static str,
        /// What it must be.
        wanted: &'static str,
    },
    /// An archive, a binary file or a data set's folder is truncated, damaged or of an unsupported kind.
    #[error("{}{}: {message}", path.display(), at.map(|at| format!(", {at}")).unwrap_or_default())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The position; in an archive, the position in the unpacked bytes.
        at: Option<At>,
        /// What is wrong.
        message: String,
    },
    /// A table has no column of this name.
    #[error("{}: no column `{column}`; the columns are {}", path.display(), list(columns))]
    Column {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// The columns that the table has.
        columns: Vec<String>,
    },
    /// A value of a table is missing or has an unsupported type.
    #[error("{}, {at}, column `{column}`: {message}", path.display())]
    Cell {
        /// The file.
        path: PathBuf,
        /// The row.
        at: At,
        /// The column.
        column: String,
        /// What is wrong.
        message: String,
    },
    /// A folder has several splits of a data set, and none was chosen.
    #[error("{} has the splits {}; choose one of them, as in {}", path.display(), list(splits), path.join(&splits[0]).display())]
    Splits {
        /// The folder.
        path: PathBuf,
        /// The names of its splits, at least one.
        splits: Vec<String>,
    },
    /// A data set has no split of this name.
    #[error("{} has no split `{split}`; it has {}", path.display(), list(splits))]
    NoSplit {
        /// The folder, the file or the address.
        path: PathBuf,
        /// The name.
        split: String,
        /// The names of its splits.
        splits: Vec<String>,
    },
    /// A slice of a split cannot be taken.
    #[error("{}: {message}", list(sources))]
    Slice {
        /// The paths and globs.
        sources: Vec<String>,
        /// Why the slice cannot be taken.
        message: String,
    },
    /// A row of a table has more or fewer columns than the first row.
    #[error("{}, {at}: the row has {found} columns, but the first row has {expected}", path.display())]
    Ragged {
        /// The file.
        path: PathBuf,
        /// The row.
        at: At,
        /// Number of columns of the first row.
        expected: usize,
        /// Number of columns of this row.
        found: usize,
    },
    /// A field of a table is not a finite number.
    #[error("{}, {at}, column {column}: `{text}` is not a finite number", path.display())]
    Number {
        /// The file.
        path: PathBuf,
        /// The row.
        at: At,
        /// Column number, counted from 1.
        column: usize,
        /// The field.
        text: String,
    },
    /// The last field of a row is not a class index.
    #[error("{}, {at}: the label `{text}` is not an integer from 0 to {}", path.display(), classes.saturating_sub(1))]
    Label {
        /// The file.
        path: PathBuf,
        /// The row.
        at: At,
        /// The field.
        text: String,
        /// Number of classes that the model predicts.
        classes: usize,
    },
    /// A conversation cannot become a sample.
    #[error("{}, {at}: {message}\n  help: {help}", path.display())]
    Conversation {
        /// The file.
        path: PathBuf,
        /// Position of the conversation.
        at: At,
        /// The reason, with the rendered text if that explains it.
        message: String,
        /// Advice.
        help: String,
    },
    /// A chat template is missing or unusable, or does not match the tokenizer.
    #[error("{origin}: {message}\n  help: {help}")]
    Template {
        /// The template's file, or the key that holds its text.
        origin: String,
        /// Why it is unusable.
        message: String,
        /// Advice.
        help: String,
    },
    /// A `tokenizer.json` is unusable, or the tokenizer cannot encode or decode a text.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The tokenizer's file, or the file of the text.
        path: PathBuf,
        /// The tokenizer's error.
        message: String,
    },
    /// The evaluation split is not a fraction, or leaves no sample to train on.
    #[error("cannot set aside a fraction of {eval_fraction} of {samples} samples for evaluation")]
    Split {
        /// Number of samples of the whole data set.
        samples: usize,
        /// The fraction of samples to set aside.
        eval_fraction: f64,
    },
    /// The cache folder cannot be used.
    #[error("{}: {source}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// A cache file is damaged. It has been removed.
    #[error(
        "{}, byte {byte}: the cached tokens are damaged\n  help: start again to rebuild the file, which has been removed; check the disk if this happens again",
        path.display()
    )]
    CacheEntry {
        /// The file.
        path: PathBuf,
        /// Start of the damaged part.
        byte: u64,
    },
    /// A file was written to while it was read.
    #[error("{}: the file changed while it was read\n  help: start again when the file is complete", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The program stopped the data preparation, for example after a signal.
    #[error("data preparation was stopped; the next start continues it")]
    Stopped,
    /// A sample index is out of range.
    #[error("sample {index} is out of range: the data set has {samples} samples")]
    Index {
        /// The index, counted from 0.
        index: usize,
        /// Number of samples.
        samples: usize,
    },
}

/// A position in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// Byte offset, counted from 0.
    Byte(u64),
    /// Line number, counted from 1.
    Line(u64),
    /// Number of a record in a JSON array, counted from 1.
    Record(u64),
    /// Number of a row of a Parquet, Arrow or MDS file, counted from 0 as pyarrow, `datasets` and mosaicml-streaming
    /// do.
    Row(u64),
}

impl At {
    /// Returns the position `bytes` bytes after the start of a text that begins at this position. A position that is a
    /// line or a record stays the same.
    #[must_use]
    pub fn after(self, bytes: u64) -> Self {
        match self {
            At::Byte(start) => At::Byte(start + bytes),
            at => at,
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Byte(byte) => write!(f, "byte {byte}"),
            At::Line(line) => write!(f, "line {line}"),
            At::Record(record) => write!(f, "record {record}"),
            At::Row(row) => write!(f, "row {row}"),
        }
    }
}

impl DataError {
    /// Returns a function that adds the path to an [`io::Error`].
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }

    /// Returns a function that turns an [`io::Error`] into a cache error.
    pub fn cache(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Cache { path, source }
    }

    /// Returns the help text of an error whose remedy does not depend on the key that names the file.
    pub(crate) fn help(&self) -> Option<&'static str> {
        match self {
            Self::Address { .. } => Some("copy the files to this machine or mount the store, then use the local paths"),
            Self::Store { help, .. } => *help,
            Self::Binary { .. } => {
                Some("unpack it or convert it to text; `data.format: bytes` trains on the raw bytes")
            }
            Self::WideTokens { .. } => {
                Some("set `data.token_dtype` to the data type of the file's tokens: `u32` or `i64`")
            }
            Self::Format { .. } => Some("correct `data.format`, or remove it to detect the format of each file"),
            Self::NoSplit { .. } => Some("set `split` to another split, or remove the key and specify files"),
            Self::Slice { .. } => {
                Some("set `split` to another slice or a whole split, or remove the key and specify files")
            }
            Self::Column { .. } => Some("set `data.text_key` to the column with the text"),
            _ => None,
        }
    }
}

fn of_tokens(vocabulary: usize) -> String {
    if vocabulary == usize::MAX { " of every model".into() } else { format!(" of {vocabulary} tokens") }
}

fn list(sources: &[String]) -> String {
    sources.join(", ")
}

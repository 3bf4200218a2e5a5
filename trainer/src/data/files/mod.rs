//! Opens files of data: the one place that knows how a file is stored.
//!
//! A [`Source`] is a file with its format. It gives a stream of [`documents`](Source::documents), of
//! [`records`](Source::records) or of [`lines`](Source::lines), each with its position in the file. A stream has a
//! bounded part of the file in memory, besides the item that it returns.

mod lines;
mod records;
pub(super) mod streams;
mod text;

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use zero_engine::DataError;
use zero_engine::files::expand;

use super::options::Format;
use lines::Lines;
pub(super) use records::reason;
use streams::Reader;
pub(crate) use streams::{Document, Documents, Object, Records};

/// A file whose format is known.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) format: Format,
}

impl Source {
    /// Recognizes the format of the file, unless `format` states it.
    pub(super) fn new(path: impl Into<PathBuf>, format: Format) -> Self {
        let path = path.into();
        let format = match (format, path.extension().and_then(|extension| extension.to_str())) {
            (Format::Auto, Some("bin")) => Format::Tokens,
            (Format::Auto, Some("jsonl" | "ndjson")) => Format::Jsonl,
            (Format::Auto, Some("csv")) => Format::Csv,
            (Format::Auto, _) => Format::Text,
            (format, _) => format,
        };
        Self { path, format }
    }

    /// Returns whether the file is read as text for the tokenizer.
    pub(super) fn has_documents(&self) -> bool {
        matches!(self.format, Format::Text | Format::Bytes | Format::Jsonl)
    }

    /// Opens the documents of a text file or of JSON lines. `text_key` names the field with the text.
    ///
    /// A text file is one document. It comes in parts, which end where [`piece_end`](super::tokenizer::piece_end) cuts;
    /// with `is_for_bytes`, for the byte tokenizer, they end anywhere. Empty documents are left out.
    ///
    /// # Errors
    /// Fails if the file cannot be opened. An item fails if the file cannot be read, if it is binary and for the byte
    /// tokenizer, or if a line has no text.
    pub(super) fn documents(&self, text_key: &str, is_for_bytes: bool) -> Result<Documents, DataError> {
        let reader = self.reader()?;
        Ok(match self.format {
            Format::Jsonl => Box::new(records::texts(self.lines()?, &self.path, text_key)),
            format => Box::new(text::Parts::new(reader, &self.path, is_for_bytes, format == Format::Bytes)),
        })
    }

    /// Opens the records of JSON lines or of a JSON array.
    ///
    /// # Errors
    /// Fails if the file cannot be opened. An item fails if the file cannot be read, or names the line that is no JSON
    /// object.
    pub(super) fn records(&self) -> Result<Records, DataError> {
        records::open(self.reader()?, &self.path)
    }

    /// Opens the lines of the file.
    ///
    /// # Errors
    /// Fails if the file cannot be opened or read.
    pub(super) fn lines(&self) -> Result<Lines, DataError> {
        Ok(Lines::new(self.reader()?, &self.path))
    }

    fn reader(&self) -> Result<Reader, DataError> {
        Ok(Box::new(BufReader::new(File::open(&self.path).map_err(DataError::io(&self.path))?)))
    }
}

/// Returns the files that `sources` name, each with its format.
///
/// # Errors
/// Fails if a file is missing or unreadable.
pub(super) fn sources(sources: &[String], format: Format) -> Result<Vec<Source>, DataError> {
    Ok(expand(sources)?.into_iter().map(|path| Source::new(path, format)).collect())
}

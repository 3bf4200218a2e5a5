//! Items that are read from data files: bytes, documents and records.

use std::io::{self, BufRead, Cursor, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zero_engine::{At, DataError};

/// The byte order mark, which some programs write at the start of a file in UTF-8.
const MARK: &[u8] = "\u{feff}".as_bytes();

/// A text that is tokenized on its own, or the next part of a long text.
#[derive(Debug, PartialEq)]
pub(crate) struct Document {
    /// The position of the first byte.
    pub(crate) at: At,
    pub(crate) text: Vec<u8>,
    /// Whether the text continues the previous document.
    pub(crate) is_continued: bool,
}

/// The fields of a record.
pub(crate) type Object = Map<String, Value>;

pub(crate) type Documents = Box<dyn Iterator<Item = Result<Document, DataError>> + Send>;
pub(crate) type Records = Box<dyn Iterator<Item = Result<(At, Object), DataError>> + Send>;

/// The decompressed bytes of a file.
pub(super) struct Reader {
    pub(super) bytes: Box<dyn BufRead + Send>,
    pub(super) path: PathBuf,
    /// The name of the archive format, if the file is an archive.
    archive: Option<&'static str>,
}

impl Reader {
    pub(super) fn new(bytes: impl BufRead + Send + 'static, path: &Path, archive: Option<&'static str>) -> Self {
        Self { bytes: Box::new(bytes), path: path.into(), archive }
    }

    /// Skips the byte order mark at the start of the file, if it has one.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub(super) fn without_mark(mut self) -> Result<Self, DataError> {
        let mut start = vec![];
        if let Err(error) = self.bytes.by_ref().take(MARK.len() as u64).read_to_end(&mut start) {
            return Err(self.failed(At::Line(1), error));
        }
        if start != MARK {
            self.bytes = Box::new(Cursor::new(start).chain(self.bytes));
        }
        Ok(self)
    }

    /// Returns whether the file is an archive.
    pub(super) fn is_unpacked(&self) -> bool {
        self.archive.is_some()
    }

    /// Returns the error for a failed read at this position in the decompressed bytes.
    pub(super) fn failed(&self, at: At, error: io::Error) -> DataError {
        match self.archive {
            None => DataError::io(&self.path)(error),
            Some(kind) => DataError::Damaged {
                path: self.path.clone(),
                at: Some(at),
                message: format!("the {kind} is truncated or damaged: {error}"),
            },
        }
    }
}

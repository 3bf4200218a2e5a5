//! What a file of data gives: documents or records, one after the other.

use std::io::BufRead;

use serde_json::{Map, Value};
use zero_engine::{At, DataError};

/// A text that is tokenized on its own, or the next part of a long one.
#[derive(Debug, PartialEq)]
pub(crate) struct Document {
    /// The position of the first byte.
    pub(crate) at: At,
    pub(crate) text: Vec<u8>,
    /// Whether the text continues the document before it.
    pub(crate) is_continued: bool,
}

/// The fields of a record.
pub(crate) type Object = Map<String, Value>;

pub(crate) type Documents = Box<dyn Iterator<Item = Result<Document, DataError>> + Send>;
pub(crate) type Records = Box<dyn Iterator<Item = Result<(At, Object), DataError>> + Send>;

pub(super) type Reader = Box<dyn BufRead + Send>;

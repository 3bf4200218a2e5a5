//! Options for a data set that is read from files.

use std::ops::Range;
use std::path::PathBuf;

use zero_config::SplitPart;
pub use zero_config::{DataFormat as Format, TokenDtype};
use zero_engine::DataError;

use super::chat::options::ChatOptions;

/// Selects the files of a data set, and how they are split into samples.
#[derive(Debug, Clone, PartialEq)]
pub struct DataOptions {
    /// Paths or globs, relative to the working directory, in the order in which they are read. The files that match a
    /// glob are read in sorted order. Globs skip `target`, hidden files and hidden directories. A file that is listed
    /// twice is read once.
    pub sources: Vec<String>,
    /// The split of a folder, or the slice of a split, to read. `None` reads all files. File names determine the splits
    /// of a folder, as in Hugging Face's `datasets`.
    pub split: Option<SplitPart>,
    /// How the files are read.
    pub format: Format,
    /// The key of the text in a JSON line, or the name of the column with the text.
    pub text_key: String,
    /// Token width in token files.
    pub token_dtype: TokenDtype,
    /// T, the number of tokens per sample. Tables ignore it.
    pub sequence_length: usize,
    /// Size of the model's vocabulary, or number of classes of a table. Every token or label must be below it.
    pub vocabulary: usize,
    /// Whether a sample may contain several conversations. Other formats ignore it.
    pub sample_packing: bool,
    /// How conversations become samples. Other formats ignore it.
    pub chat: ChatOptions,
    /// Where the tokens of text and conversations are kept between runs. Other formats ignore it.
    pub cache: CacheOptions,
}

impl DataOptions {
    /// Returns the range of records to use out of `count` records. Records are counted in the order of the files.
    ///
    /// # Errors
    /// Fails if the slice is empty.
    pub(super) fn records(&self, count: u64) -> Result<Range<u64>, DataError> {
        let range = self.split.as_ref().map_or(Ok(0..count), |split| split.range(count));
        range.map_err(|message| DataError::Slice { sources: self.sources.clone(), message })
    }

    /// Creates options for `format`: JSON text under the key `text`, two bytes per token, one token per sample, and no
    /// limit on the vocabulary.
    pub fn new<S: Into<String>>(sources: impl IntoIterator<Item = S>, format: Format) -> Self {
        Self {
            sources: sources.into_iter().map(Into::into).collect(),
            split: None,
            format,
            text_key: "text".into(),
            token_dtype: TokenDtype::U16,
            sequence_length: 1,
            vocabulary: usize::MAX,
            sample_packing: false,
            chat: ChatOptions::default(),
            cache: CacheOptions::default(),
        }
    }
}

/// Selects the cache folder, and the data to keep in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// The folder. `None` stands for `$ZERO_TRAIN_CACHE`, or else `zero-train` in `$XDG_CACHE_HOME`, or else
    /// `~/.cache/zero-train`.
    pub folder: Option<PathBuf>,
    /// Minimum total size in bytes of sources whose tokens are cached. Each rank tokenizes smaller sources in memory.
    pub least_bytes: u64,
    /// Maximum total size in bytes of the downloaded objects that stay in the cache. `None` sets no limit.
    pub limit: Option<u64>,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { folder: None, least_bytes: 4 << 20, limit: None }
    }
}

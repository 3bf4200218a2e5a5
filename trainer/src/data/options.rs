//! Options of a data set that is read from files.

use std::ops::Range;
use std::path::PathBuf;

use zero_config::SplitPart;
use zero_engine::DataError;

use super::chat::options::ChatOptions;

/// Which files a data set is read from, and how they are cut into samples.
#[derive(Debug, Clone, PartialEq)]
pub struct DataOptions {
    /// Paths or globs, relative to the working directory, in the order in which they are read. The files of a glob are
    /// sorted. Globs skip `target`, hidden files and hidden directories. A file that is named twice is read once.
    pub sources: Vec<String>,
    /// The split of a folder to read, or a slice of it; `None` reads all files. Folders are split as Hugging Face's
    /// `datasets` does, by the names of files.
    pub split: Option<SplitPart>,
    /// How the files are read.
    pub format: Format,
    /// The key under which a JSON line has its text, or the column with the text.
    pub text_key: String,
    /// Width of the tokens of token files.
    pub token_dtype: TokenDtype,
    /// T, the number of tokens per sample. Tables ignore it.
    pub sequence_length: usize,
    /// Size of the model's vocabulary, or number of classes of a table. Every token or label must be below it.
    pub vocabulary: usize,
    /// Whether a sample contains several conversations; other formats ignore it.
    pub sample_packing: bool,
    /// How conversations become samples; other formats ignore it.
    pub chat: ChatOptions,
    /// Where the tokens of text are kept between runs; other formats ignore it.
    pub cache: CacheOptions,
}

impl DataOptions {
    /// Returns the records to use of all `count`, in the order of the files.
    ///
    /// # Errors
    /// Fails if the slice has no record.
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

/// Where the cache is, and what goes into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// The folder. `None` is `$ZERO_TRAIN_CACHE`, or else `zero-train` in `$XDG_CACHE_HOME`, or else
    /// `~/.cache/zero-train`.
    pub folder: Option<PathBuf>,
    /// Sources with fewer bytes together are tokenized in memory, by each rank.
    pub least_bytes: u64,
    /// Maximum number of bytes of objects that are kept after they were downloaded from a store; `None` for no limit.
    pub limit: Option<u64>,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { folder: None, least_bytes: 4 << 20, limit: None }
    }
}

/// The format of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Recognizes Parquet, Arrow and MDS by their content, and other files by the extension, also before `.gz` or
    /// `.zst`: `.bin` is a token file, `.jsonl` and `.ndjson` are JSON lines, `.csv` is a table, and everything else is
    /// text.
    #[default]
    Auto,
    /// Text for the tokenizer. The byte tokenizer rejects binary files, which it recognizes by their first bytes.
    Text,
    /// Any file, byte by byte, for the byte tokenizer.
    Bytes,
    /// Raw tokens.
    Tokens,
    /// One JSON object per line.
    Jsonl,
    /// Rows of numbers, comma-separated or in a Parquet or Arrow file; the last one is an integer label.
    Csv,
    /// Conversations, as JSON lines, a JSON array, or a Parquet, Arrow or MDS file.
    Chat,
    /// Parquet files, with documents in a column.
    Parquet,
    /// Arrow files and streams, with documents in a column; or a folder that Hugging Face's `datasets` saved.
    Arrow,
    /// A folder of mosaicml-streaming's shards, with documents or tokens in a column.
    Mds,
}

/// Width of a little-endian token in a token file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenDtype {
    /// Two bytes.
    #[default]
    U16,
    /// Four bytes.
    U32,
    /// Eight bytes with a sign, as PyTorch has tokens.
    I64,
}

//! What files a data set is read from, and how they are cut into samples.

/// Where data come from and how they are cut into samples.
#[derive(Debug, Clone, PartialEq)]
pub struct DataOptions {
    /// Paths or globs, relative to the working directory, in the order in which they are read. The files of a glob are
    /// sorted; `target`, hidden files and hidden directories are left out of it; a file named twice is read once.
    pub sources: Vec<String>,
    /// How the files are read.
    pub format: Format,
    /// Under which key of a JSON line its text is.
    pub text_key: String,
    /// Width of the tokens of token files.
    pub token_dtype: TokenDtype,
    /// T, the tokens of a sample. Tables do not use it.
    pub sequence_length: usize,
    /// How many different tokens the model knows, or classes with a table: a token or label must be below it.
    pub vocabulary: usize,
}

impl DataOptions {
    /// Files of a format, with a JSON line's text under `text`, tokens of two bytes, samples of one token and any vocabulary.
    pub fn new<S: Into<String>>(sources: impl IntoIterator<Item = S>, format: Format) -> Self {
        Self {
            sources: sources.into_iter().map(Into::into).collect(),
            format,
            text_key: "text".into(),
            token_dtype: TokenDtype::U16,
            sequence_length: 1,
            vocabulary: usize::MAX,
        }
    }
}

/// The format of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// By the file's extension: `.bin` token files, `.jsonl` and `.ndjson` JSON lines, `.csv` tables, all others text.
    #[default]
    Auto,
    /// Text for the tokenizer. The byte tokenizer rejects binary files, which it recognizes by their first bytes.
    Text,
    /// Any file, byte by byte, for the byte tokenizer.
    Bytes,
    /// Raw tokens.
    Tokens,
    /// A JSON object a line.
    Jsonl,
    /// Numbers separated by commas, the last one an integer label.
    Csv,
}

/// Width of a token in a token file, which is little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenDtype {
    /// Two bytes.
    #[default]
    U16,
    /// Four bytes.
    U32,
}

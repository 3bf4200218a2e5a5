//! A list of samples, and what it is made with.

use zero_engine::DataError;

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

/// The format of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// By the file's extension: `.bin` token files, `.jsonl` and `.ndjson` JSON lines, `.csv` tables, all others text.
    #[default]
    Auto,
    /// Text for the tokenizer. The byte tokenizer refuses what is not text by its first bytes.
    Text,
    /// Any file at all, for the byte tokenizer.
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

/// A list of samples. Reading one neither changes anything nor waits for other readers.
pub trait Dataset: Send + Sync {
    /// Number of samples, at least 1.
    fn samples(&self) -> usize;

    /// What each sample has.
    fn shape(&self) -> SampleShape;

    /// Appends sample `index`.
    ///
    /// # Errors
    /// If there is no such sample, or it cannot be read. `samples` is then as it was.
    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError>;
}

/// What the samples of a dataset have; all have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleShape {
    /// So many tokens, and as many targets.
    Tokens(usize),
    /// So many features, and one target.
    Features(usize),
}

/// Samples one after the other, row by row: the storage of a batch's tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples {
    /// T tokens a sample, or none.
    pub tokens: Vec<u32>,
    /// So many features a sample as a row has, or none.
    pub features: Vec<f32>,
    /// T next tokens a sample, or one label.
    pub targets: Vec<u32>,
}

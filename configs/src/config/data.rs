//! `data`: which files are read, and how they become samples.

use serde::Serialize;

use crate::choice::choice;
use crate::reader::Resolver;

/// `data`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Data {
    /// Files and globs to train on, relative to the working directory.
    pub train: Vec<String>,
    /// Files and globs to evaluate on.
    pub eval: Option<Vec<String>>,
    /// Fraction at the end of the training text that is kept for evaluation if `eval` is not given.
    pub eval_fraction: f64,
    /// How files are read.
    pub format: DataFormat,
    /// Tokenizer for text.
    pub tokenizer: Tokenizer,
    /// Tokens per sample. `None` if it is not given and no `model` with a maximum sequence length provides it.
    pub sequence_length: Option<usize>,
    /// Field of a JSON line that holds the text.
    pub text_key: String,
    /// Integer type of a token file.
    pub token_dtype: TokenDtype,
    /// Draw samples in a random order that depends only on the seed.
    pub shuffle: bool,
}

choice! {
    /// How files are read.
    pub enum DataFormat {
        /// Chosen by the file name: `.jsonl` and `.ndjson`, `.csv`, `.bin` and `.tokens`; any other file is text.
        Auto = "auto",
        /// Plain text.
        Text = "text",
        /// Any bytes, for the byte tokenizer.
        Bytes = "bytes",
        /// Consecutive little-endian tokens of type `token_dtype`.
        Tokens = "tokens",
        /// One JSON object per line.
        Jsonl = "jsonl",
        /// Comma-separated numbers.
        Csv = "csv",
    }
}

/// Tokenizer for text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokenizer {
    /// One token per byte, 256 in all.
    Byte,
    /// A Hugging Face `tokenizer.json`.
    File(String),
}

impl Serialize for Tokenizer {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Byte => serializer.serialize_str("byte"),
            Self::File(path) => serializer.serialize_str(path),
        }
    }
}

choice! {
    /// Integer type of a token file.
    pub enum TokenDtype {
        /// 16 bits: vocabularies up to 65,536 tokens.
        U16 = "u16",
        /// 32 bits.
        U32 = "u32",
    }
}

impl Data {
    /// Reads the section for a model with maximum sequence length `longest`. Returns `None` if the section is
    /// missing.
    pub(crate) fn read(resolver: &mut Resolver<'_>, longest: Option<usize>) -> Option<Self> {
        if !resolver.has_section("data") {
            return None;
        }
        let mut keys = resolver.section("data");
        let tokenizer = match keys.text("tokenizer").as_str() {
            "byte" => Tokenizer::Byte,
            path => Tokenizer::File(path.to_string()),
        };
        let data = Self {
            train: keys.texts("train").unwrap_or_default(),
            eval: keys.texts("eval"),
            eval_fraction: keys.float("eval_fraction"),
            format: keys.choice("format", DataFormat::Auto),
            tokenizer,
            sequence_length: keys.optional_int("sequence_length").or(longest),
            text_key: keys.text("text_key"),
            token_dtype: keys.choice("token_dtype", TokenDtype::U16),
            shuffle: keys.bool("shuffle"),
        };
        if data.eval.is_some() && data.eval_fraction > 0.0 {
            let message = "`data.eval` and `data.eval_fraction` both say what to evaluate on".to_string();
            resolver.contradiction(
                &["data.eval", "data.eval_fraction"],
                message,
                Some("keep one of the two".to_string()),
            );
        }
        if data.format == DataFormat::Bytes && data.tokenizer != Tokenizer::Byte {
            let message = "`data.format: bytes` is for the byte tokenizer".to_string();
            let help = Some("leave `data.tokenizer` out, or write `format: text`".to_string());
            resolver.contradiction(&["data.format", "data.tokenizer"], message, help);
        }
        if let (Some(length), Some(longest)) = (data.sequence_length, longest)
            && length > longest
        {
            let message =
                format!("samples of {length} tokens are longer than the model's longest sequence of {longest}");
            let help = Some(format!("write {longest} or less, or give the model more positions"));
            resolver.contradiction(&["data.sequence_length", "model"], message, help);
        }
        Some(data)
    }

    /// Returns whether evaluation data is configured.
    pub fn has_eval(&self) -> bool {
        self.eval.is_some() || self.eval_fraction > 0.0
    }
}

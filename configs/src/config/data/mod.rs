//! `data`: which files are read, and how they become samples.

pub(super) mod chat;
pub(super) mod data_efficiency;
pub(super) mod datasets;
pub(super) mod preference;
pub(super) mod split;

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::{Chat, MixedDataset, Model};
use crate::path::last;
use crate::read::reader::{Read as _, Resolver, read_as};
use crate::schema::*;
use crate::table::section;
use crate::value::Leaf;

section! {
    /// `data`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Data(keys) in "data" {
        /// Files and globs to train on, relative to the working directory; `None` if `datasets` is given.
        pub train: Option<Vec<String>> = key(Kind::Paths, "= required without datasets", "File, glob, remote URL, or a list of them; paths are relative to the working directory");
        pub datasets: Option<Vec<MixedDataset>> = sections(&MixedDataset::SECTION, "Several data sets that replace data.train, each with its share of an epoch");
        pub eval: Option<Vec<String>> = key(Kind::Paths, "null", "Evaluation data, in the same form as train");
        pub eval_fraction: f64 = key(Kind::Float(FRACTION), "0.0", "Fraction at the end of the training data that is held out for evaluation if `eval` is not set");
        pub format: DataFormat = key(DataFormat::KIND, "auto", "File format. auto: detected from the first bytes, or for text from the file extension; bytes: any file, unchanged, with the byte tokenizer; chat: conversations in JSON, Parquet, Arrow or MDS");
        pub tokenizer: Tokenizer = key(Kind::Text, "byte", "byte: each byte is a token; otherwise the path or URL of a Hugging Face tokenizer.json");
        /// Tokens per sample. `None` if neither this key nor a `model` with a maximum sequence length gives it.
        pub sequence_length: Option<usize> = key(POSITIONS, "= the model's longest", "Tokens per sample") [or keys.facts().longest];
        pub text_key: String = key(Kind::Text, "text", "JSON field or table column that holds the text");
        pub token_dtype: TokenDtype = key(TokenDtype::KIND, "u16", "Integer type of the tokens in a token file");
        /// How conversations become samples; `None` if no format is `chat`.
        pub chat: Option<Chat> = section(&Chat::SECTION, "How conversations become samples, with `format: chat`") [or MixedDataset::formats(datasets.as_ref(), format).contains(&DataFormat::Chat).then(|| Chat::read(keys, last(Data::chat)))];
        pub sample_packing: bool = key(Kind::Bool, "false", "Pack several conversations into each sample, with `format: chat`; conversations do not attend to each other, and positions restart in each");
        /// Maximum number of positions of a micro-batch, padding included; `None`: all micro-batches
        /// have the same number of samples.
        pub max_tokens: Option<usize> = key(COUNT, "null", "Maximum number of positions per micro-batch, including padding, with `format: chat`. The samples of a step are sorted by length and divided into as few micro-batches as possible, each padded to its longest sample");
        pub cache_dir: Option<String> = key(Kind::Path, "= the user's cache", "Folder that keeps tokenized text between runs; default: $ZERO_TRAIN_CACHE, else $XDG_CACHE_HOME/zero-train, else ~/.cache/zero-train");
        /// Maximum number of bytes of downloaded objects in the cache; `None` for no limit.
        pub cache_limit: Option<u64> = key(Kind::Bytes { min: 0 }, "= no limit", "Maximum size of downloaded objects in the cache; the least recently used ones are removed first");
        pub shuffle: bool = key(Kind::Bool, "true", "Draw samples in a random order that depends only on the seed");
    }
}

choice! {
    /// How files are read.
    pub enum DataFormat {
        /// Recognizes Parquet, Arrow and MDS by their content, and `.json`, `.jsonl`, `.ndjson`, `.csv` and `.bin` by
        /// the file name. Any other file is text. gzip and zstd are unpacked.
        Auto = "auto",
        /// Plain text.
        Text = "text",
        /// Any bytes, for the byte tokenizer.
        Bytes = "bytes",
        /// Consecutive little-endian tokens of type `token_dtype`.
        Tokens = "tokens",
        /// One JSON object per line, or one JSON array of objects.
        Jsonl = "jsonl",
        /// Comma-separated numbers.
        Csv = "csv",
        /// Conversations, as JSON lines, a JSON array, Parquet, Arrow or MDS.
        Chat = "chat",
        /// Parquet, with the text in the column `text_key`.
        Parquet = "parquet",
        /// Arrow, with the text in the column `text_key`; files, streams, and folders that `datasets` saved.
        Arrow = "arrow",
        /// Folders of mosaicml-streaming's shards, with text in the column `text_key` or tokens in `tokens`.
        Mds = "mds",
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

read_as! {
    Tokenizer: Leaf::Text(text) => if text == "byte" { Self::Byte } else { Self::File(text) }, else Self::Byte;
}

choice! {
    /// Integer type of a token file.
    pub enum TokenDtype {
        /// 16 bits: vocabularies up to 65,536 tokens.
        U16 = "u16",
        /// 32 bits.
        U32 = "u32",
        /// 64 bits with a sign.
        I64 = "i64",
    }
}

impl Data {
    /// Checks the keys against each other, for a model with maximum sequence length `longest`.
    pub(crate) fn check(&self, longest: Option<usize>, resolver: &mut Resolver<'_>) {
        MixedDataset::check(self, resolver);
        if self.eval.is_some() && self.eval_fraction > 0.0 {
            let message = format!("`{}` and `{}` both set the evaluation data", Self::eval, Self::eval_fraction);
            resolver.contradiction(
                &[Self::eval, Self::eval_fraction],
                message,
                Some("keep one of the two".to_string()),
            );
        }
        let formats = MixedDataset::formats(self.datasets.as_ref(), self.format);
        if formats.contains(&DataFormat::Bytes) && self.tokenizer != Tokenizer::Byte {
            let message = format!("`{}: bytes` needs the byte tokenizer", Self::format);
            let help = Some(format!("remove `{}`, or set `format: text`", Self::tokenizer));
            resolver.contradiction(&[Self::format, Self::tokenizer], message, help);
        }
        let is_chat = formats.contains(&DataFormat::Chat);
        if is_chat && self.tokenizer == Tokenizer::Byte {
            let message = format!(
                "`{}: chat` needs a tokenizer with special tokens, and the byte tokenizer has none",
                Self::format
            );
            let help = Some(format!("set `{}` to the tokenizer.json of the model", Self::tokenizer));
            resolver.contradiction(&[Self::format, Self::tokenizer], message, help);
        }
        if !is_chat && self.sample_packing {
            let message = format!("`{}` has no effect on `{}: {}`", Self::sample_packing, Self::format, self.format);
            let help =
                Some("set `format: chat`, or remove `sample_packing`: only conversations are packed".to_string());
            resolver.contradiction(&[Self::sample_packing, Self::format], message, help);
        }
        if !is_chat && self.max_tokens.is_some() {
            let message = format!("`{}` has no effect on `{}: {}`", Self::max_tokens, Self::format, self.format);
            let help = Some("set `format: chat`, or remove the key: all text samples have the same length".into());
            resolver.contradiction(&[Self::max_tokens, Self::format], message, help);
        }
        if !is_chat && resolver.has_section(Self::chat) {
            let message = format!("`{}` has no effect on `{}: {}`", Self::chat, Self::format, self.format);
            let help = Some("set `format: chat`, or remove the section".to_string());
            resolver.contradiction(&[Self::chat, Self::format], message, help);
        }
        if let (Some(length), Some(longest)) = (self.sequence_length, longest)
            && length > longest
        {
            let message =
                format!("samples of {length} tokens are longer than the model's maximum sequence length of {longest}");
            let help = Some(format!("use {longest} or less, or increase the model's maximum sequence length"));
            resolver.contradiction(&[Self::sequence_length, Model::PATH], message, help);
        }
    }

    /// Returns whether evaluation data is configured.
    pub fn has_eval(&self) -> bool {
        let of_sets = self.datasets.iter().flatten().any(|set| set.eval.is_some());
        self.eval.is_some() || self.eval_fraction > 0.0 || of_sets
    }
}

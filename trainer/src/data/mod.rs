//! Data sets: text, token files, JSON lines, tables, images, tensors in memory, and functions.
//!
//! A [`Dataset`] is a list of samples that can be read in any order and from any number of threads. [`open`], [`text`],
//! [`tokens`](fn@tokens) and [`csv`] read files, [`InMemory`] holds tensors, and [`from_fn`] computes each sample with
//! a function. For other data, implement the trait. This module does not depend on ranks or configuration files. The
//! pure function [`sample_index`] decides which sample a rank trains on at a step. The order of the samples therefore
//! does not depend on the number of ranks, and a resumed run continues with the next sample.
//!
//! | format | files | sample i |
//! |---|---|---|
//! | text, bytes | read in parts, tokenized in memory | tokens `i·T .. i·T + T`; the targets are shifted by one token |
//! | JSON lines | the string under a key, one document per line | as for text |
//! | Parquet, Arrow, MDS | a column of texts, one document per row | as for text |
//! | tokens | raw little-endian u16 or u32, read in pieces as needed | as for text; files joined without a separator |
//! | conversations | JSON lines, a JSON array, or rows of Parquet, Arrow or MDS, rendered with the model's chat template | conversation i, padded; untrained targets are −100 |
//! | pairs of answers | the same files, with a `preference` section | two texts of pair i, padded: the prompt with each answer |
//! | CSV, Parquet, Arrow | rows of numbers | the row's features, with the last column as the target |
//!
//! bzip2, gzip and zstd files are decompressed while they are read. Documents (a text file, a line or a row) are joined
//! by newlines in the order of the files. Empty documents are skipped.

mod binary;
mod cache;
mod cache_folder;
mod chat;
mod dataset;
mod files;
mod fingerprint;
mod guard;
mod images;
mod in_memory;
mod joined;
mod mixture;
mod options;
mod order;
mod records;
mod rows;
mod split;
mod tokens;
mod watch;

pub use chat::options::ChatOptions;
pub(crate) use chat::pairs::PairDataset;
pub(crate) use chat::prompt::{eos_token, prompts};
#[cfg(test)]
pub(crate) use chat::tests::{templates::CHATML, tokenizer::Folder};
pub use dataset::{BoxError, Dataset};
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use files::fuzzing;
pub(crate) use files::remote;
pub(crate) use fingerprint::DocumentFacts;
pub use images::{ImageFolder, images};
pub use in_memory::{FromFn, InMemory, from_fn};
pub(crate) use joined::join;
pub(crate) use mixture::{MixedPart, Mixture, apportion};
pub use options::{CacheOptions, DataOptions, Format, TokenDtype};
pub use order::sample_index;
pub use records::{FileDataset, SampleShape};
pub use split::{Subset, shuffled_split, split};
pub use tokens::tokenizer::Tokenizer;
pub(crate) use watch::{Phase, Unwatched, Watch};
pub use zero_engine::{At, DataError};

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use files::{Access, Source};
use zero_engine::Error;

/// Opens the files that the options name.
///
/// Text and conversations are tokenized into the token cache. If they have few bytes (see [`CacheOptions`]), each rank
/// instead keeps their tokens in memory. A token then takes 1 byte if the vocabulary has at most 256 tokens, and 2 or 4
/// bytes otherwise. Token files stay on disk: opening checks the first tokens of each file against the vocabulary, and
/// the rest are checked when they are read.
///
/// # Errors
/// Returns a [`DataError`] with the file and the position in it, if a file is missing, unreadable, malformed or empty,
/// is too short for one sample, or has a token outside the vocabulary.
pub fn open(options: &DataOptions, tokenizer: &Tokenizer) -> Result<FileDataset, DataError> {
    open_watched(options, tokenizer, &Unwatched)
}

/// Does the same as [`open`], but reports the progress to `watch`, which can stop the work.
pub(crate) fn open_watched(
    options: &DataOptions,
    tokenizer: &Tokenizer,
    watch: &dyn Watch,
) -> Result<FileDataset, DataError> {
    let split = options.split.as_ref().map(|split| split.name.as_str());
    let sources = files::sources((&options.sources, split), options.format, &Access::new(&options.cache, watch))?;
    let text_key = &options.text_key;
    let fits = |other: &Source| {
        other.format == sources[0].format || other.has_documents(text_key) && sources[0].has_documents(text_key)
    };
    if let Some(other) = sources.iter().find(|other| !fits(other)) {
        return Err(DataError::MixedFormats { one: sources[0].path.clone(), other: other.path.clone() });
    }
    let tokens = match sources[0].format {
        Format::Chat => return Ok(FileDataset::new(chat::Conversations::open(&sources, options, tokenizer, watch)?)),
        Format::Csv => return Ok(FileDataset::new(rows::Rows::read(&sources, options)?)),
        Format::Tokens => {
            if options.split.as_ref().is_some_and(|split| !split.is_whole()) {
                let message = "token files have no records, so `split` cannot select a slice of them".into();
                return Err(DataError::Slice { sources: options.sources.clone(), message });
            }
            let paths: Vec<PathBuf> = sources.into_iter().map(|source| source.path).collect();
            tokens::token_files::TokenFiles::open(&paths, options.token_dtype, options.vocabulary)?.into()
        }
        Format::Mds if sources[0].has_tokens(text_key) => tokens::Tokens::of_shards(&sources, options)?,
        _ => tokens::Tokens::Documents(tokens::documents::tokenized(&sources, options, tokenizer, watch)?),
    };
    Ok(FileDataset::new(tokens::TokenCorpus::new(tokens, options.sequence_length, &options.sources)?))
}

/// Opens text files and splits them into samples of `sequence_length` tokens.
///
/// # Errors
/// Returns the same errors as [`open`].
pub fn text<S: Into<String>>(
    sources: impl IntoIterator<Item = S>,
    tokenizer: &Tokenizer,
    sequence_length: usize,
) -> Result<FileDataset, DataError> {
    let vocabulary = tokenizer.vocabulary();
    open(&DataOptions { vocabulary, sequence_length, ..DataOptions::new(sources, Format::Text) }, tokenizer)
}

/// Opens token files and splits them into samples of `sequence_length` tokens. Each token must be below `vocabulary`.
///
/// # Errors
/// Returns the same errors as [`open`].
pub fn tokens<S: Into<String>>(
    sources: impl IntoIterator<Item = S>,
    token_dtype: TokenDtype,
    vocabulary: usize,
    sequence_length: usize,
) -> Result<FileDataset, DataError> {
    let options = DataOptions::new(sources, Format::Tokens);
    open(&DataOptions { token_dtype, vocabulary, sequence_length, ..options }, &Tokenizer::Byte)
}

/// Opens tables of comma-separated numbers. The last column is a class index below `classes`.
///
/// # Errors
/// Returns the same errors as [`open`].
pub fn csv<S: Into<String>>(sources: impl IntoIterator<Item = S>, classes: usize) -> Result<FileDataset, DataError> {
    open(&DataOptions { vocabulary: classes, ..DataOptions::new(sources, Format::Csv) }, &Tokenizer::Byte)
}

/// Opens tables of comma-separated numbers for regression. The last `targets` columns are the targets, a tensor
/// `[samples, targets]`. The columns before them are the input.
///
/// # Errors
/// Returns the same errors as [`open`]. Also fails if a table has no column before the targets.
pub fn csv_regression<S: Into<String>>(
    sources: impl IntoIterator<Item = S>,
    targets: usize,
) -> Result<InMemory, Error> {
    let options = DataOptions::new(sources, Format::Csv);
    let sources = files::sources((&options.sources, None), options.format, &Access::new(&options.cache, &Unwatched))?;
    let (numbers, width) = rows::Rows::numbers(&sources)?;
    if targets == 0 || targets >= width {
        let message = format!("a table with {width} columns cannot have {targets} target columns");
        return Err(Error::setting("csv_regression", message, "leave at least one column for the input"));
    }
    let table = Tensor::from_vec(numbers, ((), width), &Device::Cpu)?;
    let inputs = table.narrow(1, 0, width - targets)?;
    InMemory::new(inputs, table.narrow(1, width - targets, targets)?)
}

/// Opens conversations and truncates or pads each to `sequence_length` tokens. The chat template is read from the
/// tokenizer's folder.
///
/// # Errors
/// Returns the same errors as [`open`]. Also fails if the template does not show which tokens the assistant generates.
pub fn chat<S: Into<String>>(
    sources: impl IntoIterator<Item = S>,
    tokenizer: &Tokenizer,
    sequence_length: usize,
) -> Result<FileDataset, DataError> {
    let vocabulary = tokenizer.vocabulary();
    open(&DataOptions { vocabulary, sequence_length, ..DataOptions::new(sources, Format::Chat) }, tokenizer)
}

/// A record of a file: its position and its fields.
pub type PlacedRecord = (At, serde_json::Map<String, serde_json::Value>);

/// Reads the records of a JSON Lines file or a JSON array. Each record comes with its position.
///
/// # Errors
/// Fails if the file cannot be read, or if a record is not a JSON object. In the second case, the error names the
/// record's line.
pub fn read_records(path: impl AsRef<Path>) -> Result<Vec<PlacedRecord>, DataError> {
    Source::new(path.as_ref(), Format::Chat)?.records(&[])?.collect()
}

/// Returns whether these sources are token files, or shards with tokens and without a text under `text_key`. Looks only
/// at the first file of the split.
///
/// # Errors
/// Fails if no file matches, or if a folder or file cannot be read.
pub(crate) fn have_tokens(
    names: (&[String], Option<&str>),
    format: Format,
    text_key: &str,
    (cache, watch): (&CacheOptions, &dyn Watch),
) -> Result<bool, DataError> {
    Ok(files::first(names, format, &Access::new(cache, watch))?.is_some_and(|source| source.has_tokens(text_key)))
}

/// Returns the format that the name of a source implies. Returns `None` for a folder, and for a glob without an
/// extension.
pub(crate) fn format_of_source(source: &str) -> Option<Format> {
    let is_open = |text: &str| text.contains(['*', '?', '[']);
    let path = Path::new(source);
    let name = path.file_name()?.to_str()?;
    let end = path.extension().and_then(|extension| extension.to_str());
    let is_known = end.map_or(!is_open(name), |end| !is_open(end));
    (is_known && !path.is_dir()).then(|| files::format_by_name(path))
}

#[cfg(test)]
mod tests;

//! Data sets: text, token files, JSON lines, tables, tensors in memory, functions.
//!
//! A [`Dataset`] is a list of samples that can be read in any order, by any number of threads. [`open`], [`text`], [`tokens`](fn@tokens) and
//! [`csv`] read files; [`InMemory`] has tensors, [`from_fn`] makes each sample by a function, and programs implement the trait for data
//! of their own. Nothing here knows of ranks or configuration files: which sample a rank trains on at a step is [`sample_index`], a pure
//! function, so that the data do not depend on the layout and a resumed run goes on with the next sample.
//!
//! | format | files | sample i |
//! |---|---|---|
//! | text, bytes | read whole, tokenised in memory | tokens `i·T .. i·T + T`, and as targets the same moved by one |
//! | JSON lines | the string under a key, one document a line | as text |
//! | tokens | raw little-endian u16 or u32, read piece by piece as needed | as text, over the files joined without separator |
//! | CSV | read whole | the row's features, and its last column as target |
//!
//! Documents (a text file, or a line of JSON lines) are joined by a newline, in the order of the files; empty ones are
//! left out.

mod binary;
mod dataset;
mod documents;
mod in_memory;
mod options;
mod order;
mod records;
mod rows;
mod split;
mod token_files;
mod tokenizer;
mod tokens;

pub use dataset::{BoxError, Dataset};
pub use in_memory::{FromFn, InMemory, from_fn};
pub use options::{DataOptions, Format, TokenDtype};
pub use order::sample_index;
pub use records::{FileDataset, SampleShape};
pub use split::{Part, split};
pub use tokenizer::Tokenizer;
pub use zero_engine::{At, DataError};

use std::path::Path;

use zero_engine::files::expand;

/// Opens the files that the options name.
///
/// Text is tokenised here and kept in memory, in 1 byte a token with the byte tokenizer, else in 2 or 4. Token files
/// stay on disk; a part of each is checked against the vocabulary here, all that is read later is checked then.
///
/// # Errors
/// [`DataError`] with the file and the place in it: what is missing, unreadable, malformed, empty, too short for one
/// sample, or has a token outside of the vocabulary.
pub fn open(options: &DataOptions, tokenizer: &Tokenizer) -> Result<FileDataset, DataError> {
    let files = expand(&options.sources)?;
    let formats: Vec<Format> = files.iter().map(|file| resolve(options.format, file)).collect();
    let is_text = |format| matches!(format, Format::Text | Format::Bytes | Format::Jsonl);
    let fits = |&other: &Format| other == formats[0] || is_text(other) && is_text(formats[0]);
    if let Some(other) = formats.iter().position(|format| !fits(format)) {
        return Err(DataError::MixedFormats { one: files[0].clone(), other: files[other].clone() });
    }
    let tokens = match formats[0] {
        Format::Csv => return Ok(FileDataset::new(rows::Rows::read(&files, options.vocabulary)?)),
        Format::Tokens => token_files::TokenFiles::open(&files, options.token_dtype, options.vocabulary)?.into(),
        _ => documents::tokenize(files.iter().zip(formats), &options.text_key, tokenizer, options.vocabulary)?,
    };
    Ok(FileDataset::new(tokens::TokenCorpus::new(tokens, options.sequence_length, &options.sources)?))
}

/// Text files, cut into samples of `sequence_length` tokens.
///
/// # Errors
/// As [`open`].
pub fn text<S: Into<String>>(
    sources: impl IntoIterator<Item = S>,
    tokenizer: &Tokenizer,
    sequence_length: usize,
) -> Result<FileDataset, DataError> {
    let vocabulary = tokenizer.vocabulary();
    open(&DataOptions { vocabulary, sequence_length, ..DataOptions::new(sources, Format::Text) }, tokenizer)
}

/// Token files, cut into samples of `sequence_length` tokens, each below `vocabulary`.
///
/// # Errors
/// As [`open`].
pub fn tokens<S: Into<String>>(
    sources: impl IntoIterator<Item = S>,
    token_dtype: TokenDtype,
    vocabulary: usize,
    sequence_length: usize,
) -> Result<FileDataset, DataError> {
    let options = DataOptions::new(sources, Format::Tokens);
    open(&DataOptions { token_dtype, vocabulary, sequence_length, ..options }, &Tokenizer::Byte)
}

/// Tables of numbers separated by commas, whose last column is a class below `classes`.
///
/// # Errors
/// As [`open`].
pub fn csv<S: Into<String>>(sources: impl IntoIterator<Item = S>, classes: usize) -> Result<FileDataset, DataError> {
    open(&DataOptions { vocabulary: classes, ..DataOptions::new(sources, Format::Csv) }, &Tokenizer::Byte)
}

/// Whether [`Format::Auto`] reads these sources as token files; of files that do not go together the first says.
///
/// # Errors
/// No such files, or a folder that cannot be read.
pub(crate) fn are_token_files(sources: &[String]) -> Result<bool, DataError> {
    let files = expand(sources)?;
    Ok(files.first().is_some_and(|file| resolve(Format::Auto, file) == Format::Tokens))
}

/// How [`Format::Auto`] reads the files of a source; `None` where a glob leaves the end of their names open.
pub(crate) fn format_of_source(source: &str) -> Option<Format> {
    let is_open = |text: &str| text.contains(['*', '?', '[']);
    let path = Path::new(source);
    let name = path.file_name()?.to_str()?;
    let end = path.extension().and_then(|extension| extension.to_str());
    let is_known = end.map_or(!is_open(name), |end| !is_open(end));
    is_known.then(|| resolve(Format::Auto, path))
}

fn resolve(format: Format, file: &Path) -> Format {
    match (format, file.extension().and_then(|extension| extension.to_str())) {
        (Format::Auto, Some("bin")) => Format::Tokens,
        (Format::Auto, Some("jsonl" | "ndjson")) => Format::Jsonl,
        (Format::Auto, Some("csv")) => Format::Csv,
        (Format::Auto, _) => Format::Text,
        (format, _) => format,
    }
}

#[cfg(test)]
mod tests;

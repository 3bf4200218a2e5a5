//! Reads the samples of MDS shards as documents, as records and as tokens.

use std::sync::Arc;

use serde_json::Value;
use zero_engine::{At, DataError};

use super::encoding::Encoding;
use super::shard::{Samples, Shard};
use super::streams::{Document, Documents, Object, Records};
use crate::data::options::TokenDtype;
use crate::data::tokens::token_files::{CHECK_CHUNK, are_halves};
use crate::data::tokens::width::Width;

/// The name of the column with the tokens of a sample. LLM Foundry uses the same name.
const TOKENS: &str = "tokens";

/// Returns whether the samples consist of tokens: whether a column is named `tokens`, and no column has the name in
/// `text_key`.
pub(super) fn has_tokens(shard: &Shard, text_key: &str) -> bool {
    let has = |name| shard.columns().any(|(column, _)| column == name);
    has(TOKENS) && !has(text_key)
}

/// Opens the texts of a column.
pub(super) fn documents(shard: Arc<Shard>, column: &str) -> Result<Documents, DataError> {
    let index = shard.column(column)?;
    if let Some((column, _)) = shard.columns().nth(index).filter(|(_, encoding)| **encoding != Encoding::Text) {
        return Err(cell(&shard, 0, column, format!("has the encoding `{}`, not `str`", shard.encoding_name(index))));
    }
    let column = column.to_string();
    each(shard, move |samples, shard, row| {
        let text = samples.value(row, index)?.to_vec();
        match std::str::from_utf8(&text) {
            Err(error) => Err(cell(shard, row, &column, format!("is not UTF-8: {error}"))),
            Ok(_) if text.is_empty() => Ok(None),
            Ok(_) => Ok(Some(Document { at: At::Row(row as u64), text, is_continued: false })),
        }
    })
}

/// Opens the samples as records. If they have some of `columns`, only these columns are decoded.
pub(super) fn records(shard: Arc<Shard>, columns: &[&str]) -> Result<Records, DataError> {
    let all: Vec<(usize, String)> = shard.columns().map(|(name, _)| name.to_string()).enumerate().collect();
    let known: Vec<_> = all.iter().filter(|(_, name)| columns.contains(&name.as_str())).cloned().collect();
    let chosen = if known.is_empty() { all } else { known };
    each(shard, move |samples, shard, row| {
        let mut record = Object::new();
        for (index, name) in &chosen {
            let bytes = samples.value(row, *index)?;
            match shard.encoding(*index).value(bytes).map_err(|message| cell(shard, row, name, message))? {
                Value::Null => {}
                value => drop(record.insert(name.clone(), value)),
            }
        }
        Ok(Some((At::Row(row as u64), record)))
    })
}

/// Reads all samples of a shard, and calls `push` with the tokens of each.
pub(super) fn tokens(
    shard: &Shard,
    dtype: TokenDtype,
    vocabulary: usize,
    mut push: impl FnMut(&[u32]) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let column = shard.column(TOKENS)?;
    let bytes = Encoding::tokens(dtype);
    let mut first = vec![];
    let encoding = match shard.encoding(column) {
        Encoding::Bytes => &bytes,
        encoding => encoding,
    };
    let samples = shard.load()?;
    for row in 0..samples.len() {
        let failed = |message| cell(shard, row, TOKENS, message);
        let Value::Array(values) = encoding.value(samples.value(row, column)?).map_err(failed)? else {
            return Err(failed("is neither bytes nor an array of tokens".into()));
        };
        let token = |value: &Value| {
            let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
            let token = token.ok_or_else(|| failed(format!("{value} is not a token")))?;
            match (token as usize) < vocabulary {
                true => Ok(token),
                false => {
                    let (path, at) = (shard.path.clone(), At::Row(row as u64));
                    Err(DataError::Token { token: token.into(), vocabulary, path, at })
                }
            }
        };
        let tokens = values.iter().map(token).collect::<Result<Vec<u32>, _>>()?;
        if *encoding == bytes && first.len() < CHECK_CHUNK {
            first.extend(&tokens);
        }
        push(&tokens)?;
    }
    match are_halves(&first) {
        true => Err(DataError::WideTokens { path: shard.path.clone(), width: Width::from(dtype).bytes() }),
        false => Ok(()),
    }
}

fn cell(shard: &Shard, row: usize, column: &str, message: String) -> DataError {
    DataError::Cell { path: shard.path.clone(), at: At::Row(row as u64), column: column.into(), message }
}

/// Reads the shard. Returns an iterator over the result of `item` for each sample.
fn each<T: Send + 'static>(
    shard: Arc<Shard>,
    item: impl Fn(&Samples, &Shard, usize) -> Result<Option<T>, DataError> + Send + 'static,
) -> Result<Box<dyn Iterator<Item = Result<T, DataError>> + Send>, DataError> {
    let samples = shard.load()?;
    let rows = 0..samples.len();
    Ok(Box::new(rows.filter_map(move |row| item(&samples, &shard, row).transpose())))
}

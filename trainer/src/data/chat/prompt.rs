//! Tokenizes prompts: plain texts, or conversations that the model continues with an answer.

use std::path::{Path, PathBuf};

use zero_config::ChatType;
use zero_engine::{At, DataError};

use super::model_files::ModelFiles;
use super::options::ChatOptions;
use super::record::{self, Object, Problem, Record};
use super::renderer::Renderer;
use crate::data::tokens::tokenizer::Tokenizer;

/// Returns the tokens of each record. A record has a text `prompt`, or a conversation `messages`, which is rendered
/// with the chat template and the generation prompt.
///
/// # Errors
/// Fails if a record has neither field, if a record has messages and there is no chat template, or if the template
/// rejects a conversation.
pub(crate) fn prompts(
    records: Vec<(At, Object)>,
    path: &Path,
    options: &ChatOptions,
    tokenizer: &Tokenizer,
) -> Result<Vec<Vec<u32>>, DataError> {
    let mut renderer = None;
    let mut prompt = |at: At, record: Object| {
        if let Some(text) = record.get("prompt").and_then(|prompt| prompt.as_str()) {
            return tokenizer.encode_with_special(text);
        }
        if !record.contains_key("messages") && !record.contains_key("conversations") {
            let fields: Vec<&str> = record.keys().map(String::as_str).collect();
            let message = format!(
                "a record must have `prompt` (a string) or `messages` (a conversation); the fields of this record are {}",
                fields.join(", ")
            );
            return Err(Problem::new(message, "write {\"prompt\": \"…\"} on each line").at(path, at));
        }
        let conversation = record::conversation(record, ChatType::Messages, options);
        let Record::Conversation(conversation) = conversation.map_err(|problem| problem.at(path, at))? else {
            return Ok(vec![]);
        };
        let renderer = match &mut renderer {
            Some(renderer) => renderer,
            none => none.insert(Renderer::new(options, tokenizer, usize::MAX)?),
        };
        renderer.prompt(&conversation, path, at)
    };
    records.into_iter().map(|(at, record)| prompt(at, record)).collect()
}

/// Returns the token that ends a text. It is named in the first `tokenizer_config.json` in the folder of the tokenizer
/// or in `folders`.
///
/// # Errors
/// Fails if a file is not JSON, or the tokenizer cannot encode the token's text.
pub(crate) fn eos_token(tokenizer: &Tokenizer, folders: &[PathBuf]) -> Result<Option<u32>, DataError> {
    let Tokenizer::HuggingFace(tokenizer) = tokenizer else { return Ok(None) };
    let folders: Vec<PathBuf> =
        tokenizer.folder().map(PathBuf::from).into_iter().chain(folders.iter().cloned()).collect();
    match ModelFiles::read(&folders)?.special_token("eos_token") {
        Some(text) => tokenizer.single(text),
        None => Ok(None),
    }
}

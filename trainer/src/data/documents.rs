//! Tokenizes text files and JSON lines into one list of tokens in memory.

use std::{
    fs,
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use super::binary;
use super::options::Format;
use super::tokenizer::Tokenizer;
use super::tokens::{Memory, Tokens};
use zero_engine::{At, DataError};

/// Reads and tokenizes all files, which are text or JSON lines, and joins the documents by newlines.
pub(super) fn tokenize<'a>(
    files: impl Iterator<Item = (&'a PathBuf, Format)>,
    text_key: &str,
    tokenizer: &Tokenizer,
    vocabulary: usize,
) -> Result<Tokens, DataError> {
    let mut corpus = Corpus {
        tokens: Memory::for_vocabulary(tokenizer.vocabulary()),
        newline: tokenizer.encode("\n")?,
        tokenizer,
        vocabulary,
    };
    for (path, format) in files {
        if format == Format::Jsonl {
            corpus.add_json_lines(path, text_key)?;
            continue;
        }
        let content = fs::read(path).map_err(DataError::io(path))?;
        // Other tokenizers require UTF-8 and report the position of an invalid byte themselves.
        if let (Format::Text, Tokenizer::Byte, Some(kind)) = (format, tokenizer, binary::kind(&content)) {
            return Err(DataError::Binary { path: path.clone(), kind });
        }
        corpus.add_document(&content, path, At::Byte(0))?;
    }
    Ok(Tokens::Memory(corpus.tokens))
}

struct Corpus<'a> {
    tokens: Memory,
    /// The tokens between two documents.
    newline: Vec<u32>,
    tokenizer: &'a Tokenizer,
    vocabulary: usize,
}

impl Corpus<'_> {
    /// Adds a document that begins at `at` in its file.
    fn add_document(&mut self, document: &[u8], path: &Path, at: At) -> Result<(), DataError> {
        if document.is_empty() {
            return Ok(());
        }
        if !self.tokens.is_empty() {
            for &token in &self.newline {
                if token as usize >= self.vocabulary {
                    return Err(DataError::Token { token, vocabulary: self.vocabulary, path: path.into(), at });
                }
                self.tokens.push(token);
            }
        }
        match self.tokenizer {
            Tokenizer::Byte => self.add_bytes(document, path, at),
            Tokenizer::HuggingFace(tokenizer) => {
                let text = std::str::from_utf8(document).map_err(|error| {
                    let at = moved(at, error.valid_up_to());
                    DataError::NotUtf8 { path: path.into(), at }
                })?;
                let (tokens, vocabulary) = (&mut self.tokens, self.vocabulary);
                tokenizer.encode_document(text, path, at, |token| {
                    if token as usize >= vocabulary {
                        return Err(vocabulary);
                    }
                    tokens.push(token);
                    Ok(())
                })
            }
        }
    }

    fn add_bytes(&mut self, document: &[u8], path: &Path, at: At) -> Result<(), DataError> {
        if let Some(outside) = document.iter().position(|&byte| usize::from(byte) >= self.vocabulary) {
            let (token, at) = (u32::from(document[outside]), moved(at, outside));
            return Err(DataError::Token { token, vocabulary: self.vocabulary, path: path.into(), at });
        }
        self.tokens.extend_bytes(document);
        Ok(())
    }

    /// Adds each line as a document; blank lines are skipped.
    fn add_json_lines(&mut self, path: &Path, text_key: &str) -> Result<(), DataError> {
        let file = File::open(path).map_err(DataError::io(path))?;
        for (i, line) in BufReader::new(file).split(b'\n').enumerate() {
            let (line, number) = (line.map_err(DataError::io(path))?, i as u64 + 1);
            if line.trim_ascii().is_empty() {
                continue;
            }
            let failed = |message: String| DataError::Json { path: path.into(), line: number, message };
            let value: serde_json::Value = serde_json::from_slice(&line).map_err(|error| failed(reason(&error)))?;
            let Some(text) = value.get(text_key).and_then(serde_json::Value::as_str) else {
                return Err(failed(format!("the key `{text_key}` is missing or not a string")));
            };
            self.add_document(text.as_bytes(), path, At::Line(number))?;
        }
        Ok(())
    }
}

/// Formats the error with its column, but without serde_json's line, which is always 1 here.
pub(super) fn reason(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or(&message);
    format!("column {}: {message}", error.column())
}

fn moved(at: At, bytes: usize) -> At {
    match at {
        At::Byte(start) => At::Byte(start + bytes as u64),
        At::Line(_) | At::Record(_) => at,
    }
}

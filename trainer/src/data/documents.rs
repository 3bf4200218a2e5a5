//! Tokenizes the documents of files into one list of tokens in memory.

use std::path::Path;

use super::files::{Document, Source};
use super::tokenizer::Tokenizer;
use super::tokens::{Memory, Tokens};
use zero_engine::{At, DataError};

/// Reads and tokenizes the documents of all files, and joins them by newlines.
pub(super) fn tokenize(
    sources: &[Source],
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
    for source in sources {
        for document in source.documents(text_key, matches!(tokenizer, Tokenizer::Byte))? {
            corpus.add_document(document?, &source.path)?;
        }
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
    fn add_document(&mut self, document: Document, path: &Path) -> Result<(), DataError> {
        let Document { at, text, is_continued } = document;
        if !self.tokens.is_empty() && !is_continued {
            for &token in &self.newline {
                if token as usize >= self.vocabulary {
                    return Err(DataError::Token { token, vocabulary: self.vocabulary, path: path.into(), at });
                }
                self.tokens.push(token);
            }
        }
        match self.tokenizer {
            Tokenizer::Byte => self.add_bytes(&text, path, at),
            Tokenizer::HuggingFace(tokenizer) => {
                let text = std::str::from_utf8(&text).map_err(|error| {
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
}

fn moved(at: At, bytes: usize) -> At {
    match at {
        At::Byte(start) => At::Byte(start + bytes as u64),
        at => at,
    }
}

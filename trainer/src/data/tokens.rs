//! A long list of tokens that is cut into samples of T inputs and T targets.

use std::path::PathBuf;

use super::cache::entry::Entry;
use super::documents::Store;
use super::records::{Records, SampleShape, Samples};
use super::token_files::TokenFiles;
use super::width::Width;
use zero_engine::{At, DataError};

/// The storage of the tokens.
pub(super) enum Tokens {
    Documents(Documents),
    Files(TokenFiles),
}

impl Tokens {
    fn len(&self) -> usize {
        match self {
            Tokens::Documents(documents) => documents.len,
            Tokens::Files(files) => files.len(),
        }
    }

    /// Appends the tokens `start..start + count`. Appends nothing on error.
    fn read(&self, start: usize, count: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        match self {
            Tokens::Documents(documents) => documents.read(start, count, out),
            Tokens::Files(files) => files.read(start, count, out),
        }
    }
}

/// The tokens of one file: its documents, joined by newlines.
pub(super) struct TokenizedFile {
    pub(super) path: PathBuf,
    pub(super) storage: Storage,
    /// Number of documents that are not empty.
    pub(super) documents: u64,
    /// Number of tokens, all between documents, before the first document that has any.
    pub(super) leading: u64,
}

/// Where the tokens of a file are.
pub(super) enum Storage {
    Memory(Memory),
    Entry(Entry),
}

impl Storage {
    fn len(&self) -> usize {
        match self {
            Storage::Memory(memory) => memory.len(),
            Storage::Entry(entry) => entry.footer().tokens as usize,
        }
    }
}

/// The tokens of several files, joined by newlines.
pub(super) struct Documents {
    parts: Vec<Part>,
    newline: Vec<u32>,
    len: usize,
}

/// Consecutive tokens.
struct Part {
    /// Position of the first token.
    start: usize,
    /// The number of newlines' tokens before those of the file.
    newline: usize,
    /// Number of tokens of the file that are left out.
    skipped: usize,
    storage: Storage,
}

impl Documents {
    /// Joins files. A newline is between documents, but not before the first token of all.
    ///
    /// # Errors
    /// Fails if a token of a newline that is used is not below `vocabulary`.
    pub(super) fn new(
        files: impl IntoIterator<Item = TokenizedFile>,
        newline: Vec<u32>,
        vocabulary: usize,
    ) -> Result<Self, DataError> {
        let mut all = Self { parts: vec![], newline, len: 0 };
        let outside = all.newline.iter().copied().find(|&token| token as usize >= vocabulary);
        for TokenizedFile { path, storage, documents, leading } in files.into_iter().filter(|file| file.documents > 0) {
            if let Some(token) = outside
                && (documents > 1 || all.len > 0)
            {
                return Err(DataError::Token { token, vocabulary, path, at: At::Byte(0) });
            }
            let (newline, skipped) = if all.len == 0 { (0, leading as usize) } else { (all.newline.len(), 0) };
            let tokens = newline + storage.len() - skipped;
            if tokens > 0 {
                all.parts.push(Part { start: all.len, newline, skipped, storage });
                all.len += tokens;
            }
        }
        Ok(all)
    }

    /// Appends tokens, which must exist. Appends nothing on error.
    fn read(&self, mut start: usize, mut count: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        let before = out.len();
        let mut part = self.parts.partition_point(|part| part.start <= start).saturating_sub(1);
        while count > 0 {
            let Part { start: first, newline, skipped, storage } = &self.parts[part];
            let end = self.parts.get(part + 1).map_or(self.len, |next| next.start);
            let (from, to) = (start - first, end.min(start + count) - first);
            out.extend(&self.newline[from.min(*newline)..to.min(*newline)]);
            if to > *newline {
                let (from, to) = (from.max(*newline) - newline + skipped, to - newline + skipped);
                match storage {
                    Storage::Memory(memory) => memory.read(from, to - from, out),
                    Storage::Entry(entry) => entry.read(from, to - from, out).inspect_err(|_| out.truncate(before))?,
                }
            }
            (start, count, part) = (first + to, count - (to - from), part + 1);
        }
        Ok(())
    }
}

impl From<TokenFiles> for Tokens {
    fn from(files: TokenFiles) -> Self {
        Tokens::Files(files)
    }
}

/// Tokens in memory, with as few bytes per token as the vocabulary allows.
pub(super) struct Memory {
    width: Width,
    bytes: Vec<u8>,
}

impl Memory {
    pub(super) fn new(width: Width) -> Self {
        Self { width, bytes: vec![] }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len() / self.width.bytes()
    }

    fn read(&self, start: usize, count: usize, out: &mut Vec<u32>) {
        let width = self.width.bytes();
        self.width.decode(&self.bytes[start * width..(start + count) * width], out);
    }
}

impl Store for Memory {
    fn begin(&mut self) -> Result<(), DataError> {
        Ok(())
    }

    fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        self.width.encode(tokens, &mut self.bytes);
        Ok(())
    }
}

/// Sample i has the tokens `i·T .. i·T + T` as inputs and `i·T + 1 .. i·T + T + 1` as targets. The remainder at the end
/// is not used.
pub(super) struct TokenCorpus {
    tokens: Tokens,
    sequence_length: usize,
    samples: usize,
}

impl TokenCorpus {
    /// Creates a corpus. Fails if there are no tokens, or too few for one sample; the error names `sources`.
    pub(super) fn new(tokens: Tokens, sequence_length: usize, sources: &[String]) -> Result<Self, DataError> {
        let sources = sources.to_vec();
        if tokens.len() == 0 {
            return Err(DataError::Empty { sources });
        }
        // A sequence length of 0 gives no samples either.
        match (tokens.len() - 1).checked_div(sequence_length) {
            None | Some(0) => Err(DataError::SequenceTooLong { sequence_length, tokens: tokens.len(), sources }),
            Some(samples) => Ok(TokenCorpus { tokens, sequence_length, samples }),
        }
    }
}

impl Records for TokenCorpus {
    fn samples(&self) -> usize {
        self.samples
    }

    fn shape(&self) -> SampleShape {
        SampleShape::Tokens(self.sequence_length)
    }

    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
        if index >= self.samples {
            return Err(DataError::Index { index, samples: self.samples });
        }
        let inputs = &mut samples.tokens;
        let first = inputs.len();
        self.tokens.read(index * self.sequence_length, self.sequence_length + 1, inputs)?;
        samples.targets.extend_from_slice(&inputs[first + 1..]);
        inputs.pop();
        Ok(())
    }
}

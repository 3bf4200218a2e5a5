//! A long list of tokens, split into samples of T inputs and T targets.

pub(super) mod documents;
pub(super) mod pieces;
pub(super) mod token_files;
pub(super) mod tokenizer;
pub(super) mod width;
pub(super) mod words;

use std::ops::Range;
use std::path::PathBuf;

use super::cache::Store;
use super::cache::entry::Entry;
use super::files::Source;
use super::fingerprint::{DocumentFacts, Facts};
use super::options::DataOptions;
use super::records::{Records, SampleShape, Samples, TokenizedWhere};
use super::watch::Watch;
use token_files::TokenFiles;
use width::Width;
use zero_engine::{At, DataError};

/// The storage of the tokens.
pub(super) enum Tokens {
    Documents(Documents),
    Files(TokenFiles),
}

impl Tokens {
    /// Reads the tokens of shards, which have no text.
    ///
    /// # Errors
    /// Fails if a shard cannot be read or a token is not below `vocabulary`.
    pub(super) fn of_shards(shards: &[Source], options: &DataOptions) -> Result<Self, DataError> {
        let (dtype, vocabulary) = (options.token_dtype, options.vocabulary);
        let mut memory = Memory::new(Width::for_vocabulary(vocabulary), 0);
        for shard in shards {
            shard.tokens(dtype, vocabulary, |row| memory.begin(&[]).and_then(|()| memory.push(row)))?;
        }
        let (path, storage) = (shards[0].path.clone(), Storage::Memory(memory));
        let joined = TokenizedFile { path, storage, leading: 0, is_new: false };
        Ok(Self::Documents(Documents::new(vec![joined], vec![], options)?))
    }

    fn len(&self) -> usize {
        match self {
            Tokens::Documents(documents) => documents.len,
            Tokens::Files(files) => files.len(),
        }
    }

    fn verify(&self, watch: &dyn Watch) -> Result<(), DataError> {
        match self {
            Tokens::Documents(documents) => documents.entries().try_for_each(|entry| entry.verify(watch)),
            Tokens::Files(files) => files.verify(watch),
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

/// The tokens of one file, whose documents are joined by newlines.
pub(super) struct TokenizedFile {
    pub(super) path: PathBuf,
    pub(super) storage: Storage,
    /// Number of separator tokens before the first document that is not empty.
    pub(super) leading: u64,
    /// Whether this process has just tokenized the file.
    pub(super) is_new: bool,
}

impl TokenizedFile {
    pub(super) fn described(&self) -> TokenizedWhere {
        let (documents, tokens) = (self.storage.documents(), self.storage.len() as u64);
        TokenizedWhere { documents, tokens, is_cached: self.storage.entry().is_some(), is_new: self.is_new }
    }
}

/// Where the tokens of a file are stored.
pub(super) enum Storage {
    Memory(Memory),
    Entry(Entry),
}

impl Storage {
    /// Returns the entry, if the tokens are in the cache.
    pub(super) fn entry(&self) -> Option<&Entry> {
        match self {
            Storage::Entry(entry) => Some(entry),
            Storage::Memory(_) => None,
        }
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> usize {
        match self {
            Storage::Memory(memory) => memory.len(),
            Storage::Entry(entry) => entry.footer().tokens as usize,
        }
    }

    /// Returns the number of documents that are not empty.
    pub(super) fn documents(&self) -> u64 {
        match self {
            Storage::Memory(memory) => (memory.rows.len() / (1 + memory.facts)) as u64,
            Storage::Entry(entry) => entry.footer().documents,
        }
    }

    /// Appends the tokens `start..start + count`, which must exist. Appends nothing on error.
    pub(super) fn read(&self, start: usize, count: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        match self {
            Storage::Memory(memory) => memory.read(start, count, out),
            Storage::Entry(entry) => entry.read(start, count, out)?,
        }
        Ok(())
    }

    /// Returns the concatenated rows of these documents. A row holds the index of the document's first token, and the
    /// document's additional values.
    pub(super) fn rows(&self, documents: Range<u64>) -> Result<Vec<u64>, DataError> {
        match self {
            Storage::Memory(memory) => {
                let [start, end] = [documents.start, documents.end].map(|at| at as usize * (1 + memory.facts));
                Ok(memory.rows[start..end].to_vec())
            }
            Storage::Entry(entry) => entry.rows(documents),
        }
    }
}

/// The tokens of several files, joined by newlines.
pub(super) struct Documents {
    parts: Vec<FileTokens>,
    files: Vec<TokenizedWhere>,
    newline: Vec<u32>,
    len: usize,
}

/// Consecutive tokens of one file.
struct FileTokens {
    /// Position of the part's first token in the joined tokens.
    start: usize,
    /// Number of newline tokens before the tokens of the file.
    newline: usize,
    /// Number of tokens at the start of the file that are not used.
    skipped: usize,
    storage: Storage,
    /// Range of the documents that are used.
    documents: Range<u64>,
}

impl Documents {
    /// Number of documents or tokens that are read at a time.
    const BLOCK: u64 = 1 << 16;

    /// Joins files. A newline separates documents. No newline comes before the first token.
    ///
    /// # Errors
    /// Fails if a newline is needed and a token of the newline is not below `vocabulary`.
    pub(super) fn new(files: Vec<TokenizedFile>, newline: Vec<u32>, options: &DataOptions) -> Result<Self, DataError> {
        let vocabulary = options.vocabulary;
        let mut all = Self { parts: vec![], files: vec![], newline, len: 0 };
        let outside = all.newline.iter().copied().find(|&token| token as usize >= vocabulary);
        let used = options.records(files.iter().map(|file| file.storage.documents()).sum())?;
        let mut before = 0;
        for file in files.into_iter().filter(|file| file.storage.documents() > 0) {
            let count = file.storage.documents();
            let here = |document: u64| document.saturating_sub(before).min(count);
            let documents = here(used.start)..here(used.end);
            before += count;
            all.files.push(file.described());
            let TokenizedFile { path, storage, leading, .. } = file;
            if documents.is_empty() {
                continue;
            }
            if let Some(token) = outside
                && (documents.end - documents.start > 1 || all.len > 0)
            {
                return Err(DataError::Token { token: token.into(), vocabulary, path, at: At::Byte(0) });
            }
            // A row begins with the index of the document's first token.
            let first = |document: u64| Ok::<_, DataError>(storage.rows(document..document + 1)?[0] as usize);
            let start = match (documents.start, all.len) {
                (0, 0) => leading as usize,
                (0, _) => 0,
                (document, _) => first(document)?,
            };
            let end = if documents.end == count { storage.len() } else { first(documents.end)? - all.newline.len() };
            let newline = if all.len == 0 { 0 } else { all.newline.len() };
            let tokens = newline + end.saturating_sub(start);
            if tokens > 0 {
                all.parts.push(FileTokens { start: all.len, newline, skipped: start, storage, documents });
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
            let FileTokens { start: first, newline, skipped, storage, .. } = &self.parts[part];
            let end = self.parts.get(part + 1).map_or(self.len, |next| next.start);
            let (from, to) = (start - first, end.min(start + count) - first);
            out.extend(&self.newline[from.min(*newline)..to.min(*newline)]);
            if to > *newline {
                let (from, to) = (from.max(*newline) - newline + skipped, to - newline + skipped);
                storage.read(from, to - from, out).inspect_err(|_| out.truncate(before))?;
            }
            (start, count, part) = (first + to, count - (to - from), part + 1);
        }
        Ok(())
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.parts.iter().filter_map(|part| part.storage.entry())
    }

    /// Calls `visit` with the facts of each document. Only a part of a document is in memory at a time.
    fn each_document(&self, visit: &mut dyn FnMut(DocumentFacts)) -> Result<(), DataError> {
        let mut tokens = vec![];
        for FileTokens { storage, documents, .. } in &self.parts {
            let all = storage.documents();
            for first in documents.clone().step_by(Self::BLOCK as usize) {
                let last = documents.end.min(first + Self::BLOCK);
                let mut starts = storage.rows(first..all.min(last + 1))?;
                if last == all {
                    starts.push((storage.len() + self.newline.len()) as u64);
                }
                for document in starts.windows(2) {
                    let (start, end) = (document[0], document[1] - self.newline.len() as u64);
                    let mut facts = Facts::default();
                    for start in (start..end).step_by(Self::BLOCK as usize) {
                        tokens.clear();
                        storage.read(start as usize, Self::BLOCK.min(end - start) as usize, &mut tokens)?;
                        facts.push(&tokens);
                    }
                    visit(facts.finish());
                }
            }
        }
        Ok(())
    }
}

impl From<TokenFiles> for Tokens {
    fn from(files: TokenFiles) -> Self {
        Tokens::Files(files)
    }
}

/// Tokens in memory. Each token has as few bytes as the vocabulary allows.
pub(super) struct Memory {
    width: Width,
    bytes: Vec<u8>,
    facts: usize,
    /// One row per document: the index of its first token, and its additional values.
    rows: Vec<u64>,
}

impl Memory {
    /// Creates an empty storage for documents with `facts` additional values each.
    pub(super) fn new(width: Width, facts: usize) -> Self {
        Self { width, bytes: vec![], facts, rows: vec![] }
    }

    fn len(&self) -> usize {
        self.bytes.len() / self.width.bytes()
    }

    fn read(&self, start: usize, count: usize, out: &mut Vec<u32>) {
        let width = self.width.bytes();
        self.width.decode(&self.bytes[start * width..(start + count) * width], out);
    }
}

impl Store for Memory {
    fn begin(&mut self, facts: &[u64]) -> Result<(), DataError> {
        debug_assert_eq!(facts.len(), self.facts);
        self.rows.push(self.len() as u64);
        self.rows.extend(facts);
        Ok(())
    }

    fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        self.width.encode(tokens, &mut self.bytes);
        Ok(())
    }
}

/// Sample i has the tokens `i·T .. i·T + T` as inputs and `i·T + 1 .. i·T + T + 1` as targets. Tokens at the end that
/// do not fill a sample are not used.
pub(super) struct TokenCorpus {
    tokens: Tokens,
    sequence_length: usize,
    samples: usize,
}

impl TokenCorpus {
    /// Creates a corpus. Fails if there are fewer tokens than one sample needs. The error names `sources`.
    pub(super) fn new(tokens: Tokens, sequence_length: usize, sources: &[String]) -> Result<Self, DataError> {
        let sources = sources.to_vec();
        if tokens.len() == 0 {
            return Err(DataError::Empty { sources });
        }
        // A sequence length of 0 is reported as an error too.
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

    fn each_document(&self, visit: &mut dyn FnMut(DocumentFacts)) -> Result<(), DataError> {
        match &self.tokens {
            Tokens::Documents(documents) => documents.each_document(visit),
            Tokens::Files(_) => Ok(()),
        }
    }

    fn verify(&self, watch: &dyn Watch) -> Result<(), DataError> {
        self.tokens.verify(watch)
    }

    fn tokenized(&self) -> Vec<TokenizedWhere> {
        match &self.tokens {
            Tokens::Documents(documents) => documents.files.clone(),
            Tokens::Files(_) => vec![],
        }
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

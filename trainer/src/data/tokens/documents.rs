//! Tokenizes the documents of files in parallel. Only a bounded part of the documents is in memory.
//!
//! A thread reads documents and cuts long ones into pieces. Groups of pieces are encoded in parallel and written in
//! order. A group may have pieces of several files. The tokens do not depend on the grouping.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rayon::ThreadPool;
use rayon::prelude::*;
use zero_engine::DataError;

use super::Documents;
use super::pieces::pieces;
use super::tokenizer::Tokenizer;
use super::width::Width;
use crate::data::cache::{self, Sink, Store, Work};
use crate::data::files::{Document, Source};
use crate::data::fingerprint::hash_of;
use crate::data::options::DataOptions;
use crate::data::watch::Watch;

/// Number of bytes of text per thread in a group. The pieces of a group are encoded in parallel.
const GROUP_PER_THREAD: usize = 1 << 20;
/// Number of groups that are read ahead.
const AHEAD: usize = 2;

/// Part of every cache key. Change it whenever the same file gets different tokens than before.
const VERSION: &[u8] = b"zero-train tokens 3";

/// Tokenizes the documents of files, or opens their tokens in the cache.
pub(crate) fn tokenized(
    sources: &[Source],
    options: &DataOptions,
    tokenizer: &Tokenizer,
    watch: &dyn Watch,
) -> Result<Documents, DataError> {
    let newline = tokenizer.encode("\n")?;
    let DataOptions { text_key, vocabulary, .. } = options;
    let work = Tokenizing { text_key, tokenizer, vocabulary: *vocabulary, newline: &newline };
    let files = cache::tokenized(sources, &options.cache, &work, watch)?;
    Documents::new(files, newline, options)
}

/// The inputs of the tokenization.
struct Tokenizing<'a> {
    text_key: &'a str,
    tokenizer: &'a Tokenizer,
    vocabulary: usize,
    /// The tokens between two documents.
    newline: &'a [u32],
}

/// The documents of a file, joined by newlines.
struct Joined<S> {
    store: S,
    documents: u64,
    /// Number of separator tokens before the first document that is not empty.
    leading: u64,
    tokens: u64,
    /// Whether any document has tokens.
    has_content: bool,
}

impl<S: Store> Joined<S> {
    fn new(store: S) -> Self {
        Self { store, documents: 0, leading: 0, tokens: 0, has_content: false }
    }

    /// Begins a document. Appends `newline` first, except before the first document.
    fn begin(&mut self, newline: &[u32]) -> Result<(), DataError> {
        if self.documents > 0 {
            self.push(newline)?;
        }
        if !self.has_content {
            self.leading = self.tokens;
        }
        self.documents += 1;
        self.store.begin(&[])
    }

    fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        self.tokens += tokens.len() as u64;
        self.store.push(tokens)
    }
}

/// Pieces of text, each with the index of its file. If reading failed, `error` is set and this is the last group.
#[derive(Default)]
struct Group {
    pieces: Vec<(usize, Document)>,
    bytes: usize,
    error: Option<DataError>,
}

impl Work for Tokenizing<'_> {
    const FACTS: usize = 0;

    fn width(&self) -> Width {
        Width::for_vocabulary(self.tokenizer.vocabulary())
    }

    fn name(&self, source: &Source, content: &str) -> String {
        let key = source.key(self.text_key);
        hash_of(&[VERSION, content.as_bytes(), self.tokenizer.fingerprint().as_bytes(), key.as_bytes()])
    }

    fn fits(&self, largest: u32) -> bool {
        (largest as usize) < self.vocabulary
    }

    fn run(&self, files: &[&Source], threads: Option<&ThreadPool>, sink: &mut impl Sink) -> Result<(), DataError> {
        let size = GROUP_PER_THREAD * threads.map_or_else(rayon::current_num_threads, ThreadPool::current_num_threads);
        std::thread::scope(|scope| {
            let (sender, groups) = sync_channel(AHEAD);
            scope.spawn(move || self.read(files, size, &sender));
            self.write(files, threads, groups, sink)
        })
    }
}

impl Tokenizing<'_> {
    /// Sends the pieces of all files in groups of about `size` bytes, until the receiver is gone.
    fn read(&self, files: &[&Source], size: usize, groups: &SyncSender<Group>) {
        let mut group = Group::default();
        let cuts = self.tokenizer.cuts();
        for (file, source) in files.iter().enumerate() {
            let documents = source.documents(self.text_key, cuts);
            for document in documents.unwrap_or_else(|error| Box::new(std::iter::once(Err(error)))) {
                let document = match document {
                    Ok(document) => document,
                    Err(error) => {
                        group.error = Some(error);
                        let _ = groups.send(group);
                        return;
                    }
                };
                for piece in pieces(document, cuts) {
                    group.bytes += piece.text.len();
                    group.pieces.push((file, piece));
                    if group.bytes >= size && groups.send(std::mem::take(&mut group)).is_err() {
                        return;
                    }
                }
            }
        }
        let _ = groups.send(group);
    }

    /// Encodes the groups and passes their tokens to the sink.
    fn write(
        &self,
        files: &[&Source],
        threads: Option<&ThreadPool>,
        groups: Receiver<Group>,
        sink: &mut impl Sink,
    ) -> Result<(), DataError> {
        let (mut file, mut bytes) = (0, 0);
        let mut joined = Joined::new(sink.begin(file)?);
        let encode =
            |(file, piece): &(usize, Document)| self.tokenizer.encode_piece(piece, &files[*file].path, self.vocabulary);
        for group in groups {
            sink.goes_on(file, bytes)?;
            let encode = || group.pieces.par_iter().map(encode).collect::<Vec<_>>();
            let encoded = threads.map_or_else(encode, |threads| threads.install(encode));
            for ((of, piece), tokens) in group.pieces.iter().zip(encoded) {
                while file < *of {
                    sink.end(file, joined.store, joined.leading)?;
                    (file, bytes) = (file + 1, 0);
                    joined = Joined::new(sink.begin(file)?);
                }
                let tokens = tokens?;
                if !piece.is_continued {
                    joined.begin(self.newline)?;
                }
                joined.push(&tokens)?;
                joined.has_content |= !tokens.is_empty();
                bytes += piece.text.len() as u64;
            }
            if let Some(error) = group.error {
                return Err(error);
            }
        }
        // The last files may have no documents.
        sink.end(file, joined.store, joined.leading)?;
        (file + 1..files.len()).try_for_each(|file| {
            let store = sink.begin(file)?;
            sink.end(file, store, 0)
        })
    }
}

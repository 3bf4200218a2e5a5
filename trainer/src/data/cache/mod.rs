//! The token cache: files are tokenized once, for all ranks of a host and for later runs.
//!
//! Each source file has an [`Entry`]. `Work::name` computes the entry's name. It is a hash of everything that the
//! tokens depend on: the bytes of the file, the tokenizer, the format, and the chat template or the key that holds the
//! text. If a corpus grows, only its new files are tokenized. After an interruption, the next run tokenizes only the
//! missing files. Entries are immutable and never become outdated. Any file of the cache may be deleted while no run
//! uses it.
//!
//! One rank takes the [`Lock`] and tokenizes; the others wait and open the entries that it wrote.

pub(super) mod entry;
mod identity;
mod lock;
pub(super) mod writer;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rayon::ThreadPool;
use zero_engine::DataError;

use super::cache_folder::folder_of;
use super::files::Source;
use super::options::CacheOptions;
use super::tokens::width::Width;
use super::tokens::{Memory, Storage, TokenizedFile};
use super::watch::{Phase, Watch};
use crate::process::pool_of_host;
use entry::Entry;
use identity::{Identity, Stamp};
use lock::Lock;
use writer::Writer;

/// Turns files into tokens.
pub(super) trait Work {
    /// Number of additional `u64` values per document.
    const FACTS: usize;

    /// Returns the width of a stored token.
    fn width(&self) -> Width;

    /// Returns a hash of everything that the stored tokens of a file depend on. `content` is a hash of its bytes.
    fn name(&self, source: &Source, content: &str) -> String;

    /// Returns whether the model's vocabulary contains all stored tokens. `largest` is the largest stored token.
    fn fits(&self, largest: u32) -> bool;

    /// Reads and tokenizes files on `threads`, or on rayon's global pool if `threads` is `None`.
    ///
    /// # Errors
    /// Returns the first error in the order of the files.
    fn run(&self, files: &[&Source], threads: Option<&ThreadPool>, sink: &mut impl Sink) -> Result<(), DataError>;
}

/// Receives the tokens of files, one file after the other.
pub(super) trait Sink {
    /// Receives the tokens of one file.
    type Store: Store;

    /// Begins the file with this index.
    fn begin(&mut self, file: usize) -> Result<Self::Store, DataError>;

    /// Ends the file. `leading` is the number of tokens before the first document that is not empty.
    fn end(&mut self, file: usize, store: Self::Store, leading: u64) -> Result<(), DataError>;

    /// Reports that `bytes` bytes of the text of `file` have been read. Called before each group of documents. An error
    /// stops the work.
    fn goes_on(&mut self, file: usize, bytes: u64) -> Result<(), DataError>;
}

/// Receives the tokens of one file in order.
pub(super) trait Store {
    /// Begins a document at the next token. `facts` are its additional values.
    fn begin(&mut self, facts: &[u64]) -> Result<(), DataError>;

    /// Appends tokens.
    fn push(&mut self, tokens: &[u32]) -> Result<(), DataError>;
}

/// Tokenizes files, or opens their entries in the cache.
pub(super) fn tokenized<W: Work>(
    sources: &[Source],
    options: &CacheOptions,
    work: &W,
    watch: &dyn Watch,
) -> Result<Vec<TokenizedFile>, DataError> {
    let sizes = sources.iter().map(|source| fs::metadata(&source.path).map_or(0, |metadata| metadata.len()));
    match sizes.sum::<u64>() < options.least_bytes {
        true => in_memory(sources, work, watch),
        false => Cache::new(options, work)?.files(sources, watch),
    }
}

/// Tokenizes files and keeps their tokens in memory.
fn in_memory<W: Work>(sources: &[Source], work: &W, watch: &dyn Watch) -> Result<Vec<TokenizedFile>, DataError> {
    struct InMemory<'a> {
        sources: &'a [Source],
        width: Width,
        facts: usize,
        files: Vec<TokenizedFile>,
        watch: &'a dyn Watch,
    }

    impl Sink for InMemory<'_> {
        type Store = Memory;

        fn begin(&mut self, _: usize) -> Result<Memory, DataError> {
            Ok(Memory::new(self.width, self.facts))
        }

        fn end(&mut self, file: usize, store: Memory, leading: u64) -> Result<(), DataError> {
            let (path, storage) = (self.sources[file].path.clone(), Storage::Memory(store));
            self.files.push(TokenizedFile { path, storage, leading, is_new: true });
            Ok(())
        }

        fn goes_on(&mut self, _: usize, _: u64) -> Result<(), DataError> {
            self.watch.goes_on()
        }
    }

    let mut sink = InMemory { sources, width: work.width(), facts: W::FACTS, files: vec![], watch };
    work.run(&sources.iter().collect::<Vec<_>>(), None, &mut sink)?;
    Ok(sink.files)
}

/// The folder of the cache, and the settings that its files depend on.
struct Cache<'a, W> {
    entries: PathBuf,
    memos: PathBuf,
    work: &'a W,
}

impl<'a, W: Work> Cache<'a, W> {
    fn new(options: &CacheOptions, work: &'a W) -> Result<Self, DataError> {
        let folder = folder_of(options)?;
        Ok(Self { entries: folder.join("tokens"), memos: folder.join("files"), work })
    }

    /// Opens the entries of all files. Builds the missing entries first.
    fn files(&self, sources: &[Source], watch: &dyn Watch) -> Result<Vec<TokenizedFile>, DataError> {
        let known = |source: &Source| match Identity::remembered(&source.path, &self.memos)? {
            Some(identity) => self.entry(&self.path(source, &identity)),
            None => Ok(None),
        };
        let known = || sources.iter().map(known).collect::<Result<Option<Vec<Entry>>, _>>();
        let entries = match known()? {
            Some(entries) => entries.into_iter().map(|entry| (entry, false)).collect(),
            None => {
                let lock = self.lock(watch)?;
                self.build(sources, watch, &lock)?
            }
        };
        let file = |(source, (entry, is_new)): (&Source, (Entry, bool))| TokenizedFile {
            path: source.path.clone(),
            leading: entry.footer().leading,
            storage: Storage::Entry(entry),
            is_new,
        };
        Ok(sources.iter().zip(entries).map(file).collect())
    }

    /// Takes the lock after creating the folders. Removes the unfinished files of killed processes.
    fn lock(&self, watch: &dyn Watch) -> Result<Lock, DataError> {
        for folder in [&self.entries, &self.memos] {
            fs::create_dir_all(folder).map_err(DataError::cache(folder))?;
        }
        let unusable = || DataError::cache(&self.entries);
        let lock = Lock::wait(&self.entries, watch).map_err(unusable())?.ok_or(DataError::Stopped)?;
        if lock.is_exclusive() {
            for file in fs::read_dir(&self.entries).map_err(unusable())?.flatten() {
                if file.path().extension() == Some(OsStr::new(writer::UNFINISHED)) {
                    let _ = fs::remove_file(file.path());
                }
            }
        }
        Ok(lock)
    }

    /// Builds the missing entries and opens all entries. Returns each entry with a flag that tells whether it is new.
    fn build(&self, sources: &[Source], watch: &dyn Watch, lock: &Lock) -> Result<Vec<(Entry, bool)>, DataError> {
        let identities = self.identities(sources, watch)?;
        let paths: Vec<PathBuf> = sources.iter().zip(&identities).map(|(source, id)| self.path(source, id)).collect();
        let entries = paths.iter().map(|path| self.entry(path)).collect::<Result<Vec<_>, _>>()?;
        // Two files with the same content share an entry.
        let is_first = |&file: &usize| !paths[..file].contains(&paths[file]);
        let missing: Vec<usize> = (0..sources.len()).filter(|&file| entries[file].is_none()).filter(is_first).collect();
        if !missing.is_empty() {
            let threads = pool_of_host().map_err(|error| DataError::cache(&self.entries)(io::Error::other(error)))?;
            let files: Vec<&Source> = missing.iter().map(|&file| &sources[file]).collect();
            let total = missing.iter().map(|&file| identities[file].stamp.length).sum();
            let (width, facts) = (self.work.width(), W::FACTS);
            let to: Vec<(&Path, &Identity)> = missing.iter().map(|&file| (&*paths[file], &identities[file])).collect();
            let mut building = Building { files: &files, to: &to, width, facts, lock, watch, done: 0, total };
            self.work.run(&files, Some(&threads), &mut building)?;
        }
        let open = |(path, entry): (&PathBuf, Option<Entry>)| match entry {
            Some(entry) => Ok((entry, false)),
            None => match self.entry(path)? {
                Some(entry) => Ok((entry, true)),
                None => Err(DataError::CacheEntry { path: path.clone(), byte: 0 }),
            },
        };
        paths.iter().zip(entries).map(open).collect()
    }

    /// Identifies all files. Hashes the files that have no valid memo.
    fn identities(&self, sources: &[Source], watch: &dyn Watch) -> Result<Vec<Identity>, DataError> {
        let known = |source: &Source| Identity::remembered(&source.path, &self.memos);
        let mut known = sources.iter().map(known).collect::<Result<Vec<_>, _>>()?;
        let (mut done, mut total) = (0, 0);
        for (source, _) in sources.iter().zip(&known).filter(|(_, known)| known.is_none()) {
            total += Stamp::of(&source.path)?.length;
        }
        for (source, known) in sources.iter().zip(&mut known).filter(|(_, known)| known.is_none()) {
            let identity = Identity::of(&source.path, &self.memos, |bytes| {
                watch.progress(Phase::Hashing, done + bytes, total);
                watch.goes_on()
            })?;
            done += identity.stamp.length;
            *known = Some(identity);
        }
        Ok(known.into_iter().flatten().collect())
    }

    /// Returns the path of the entry for a file.
    fn path(&self, source: &Source, identity: &Identity) -> PathBuf {
        self.entries.join(self.work.name(source, &identity.hash))
    }

    /// Opens the entry. Returns `None` if it does not exist, is damaged, or has a token outside the model's vocabulary.
    /// The caller then tokenizes the file again, which returns an error with the position of an unknown token.
    fn entry(&self, path: &Path) -> Result<Option<Entry>, DataError> {
        let entry = Entry::open(path).map_err(DataError::cache(path))?;
        Ok(entry.filter(|entry| self.work.fits(entry.footer().largest)))
    }
}

/// Writes the entries of files.
struct Building<'a> {
    files: &'a [&'a Source],
    /// The path of each entry, and the identity of its source file.
    to: &'a [(&'a Path, &'a Identity)],
    width: Width,
    facts: usize,
    lock: &'a Lock,
    watch: &'a dyn Watch,
    /// Number of bytes of the completed files, and of all files.
    done: u64,
    total: u64,
}

impl Sink for Building<'_> {
    type Store = Writer;

    fn begin(&mut self, file: usize) -> Result<Writer, DataError> {
        Writer::new(self.to[file].0, self.width, self.facts)
    }

    fn end(&mut self, file: usize, store: Writer, leading: u64) -> Result<(), DataError> {
        let (path, (_, identity)) = (&self.files[file].path, self.to[file]);
        identity.is_unchanged(path)?;
        self.done += identity.stamp.length;
        store.finish(path, leading)
    }

    fn goes_on(&mut self, file: usize, bytes: u64) -> Result<(), DataError> {
        // The text of a compressed file may be longer than the file.
        let done = self.done + bytes.min(self.to[file].1.stamp.length);
        self.lock.note(done, self.total);
        self.watch.progress(Phase::Tokenizing, done, self.total);
        self.watch.goes_on()
    }
}

#[cfg(test)]
mod tests;

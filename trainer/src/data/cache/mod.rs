//! The token cache: files of text are tokenized once, for all ranks of a host and for later runs.
//!
//! Each source file has an [`Entry`]. Its name is a hash of everything that its tokens depend on: the bytes of the
//! file, the tokenizer, the format and the key of the text. A corpus that grows therefore tokenizes only its new files,
//! and a preparation that was interrupted continues with the files that are missing. Entries are immutable; nothing
//! needs to be deleted for correctness, and any file of the cache may be deleted while no run uses it.
//!
//! One rank takes the [`Lock`] and tokenizes; the others wait and open what it wrote.

pub(super) mod entry;
mod folder;
mod identity;
mod lock;
pub(super) mod writer;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use zero_engine::DataError;

use super::documents::{Joined, Sink, Tokenizing};
use super::files::Source;
use super::fingerprint::hash_of;
use super::options::DataOptions;
use super::tokenizer::Tokenizer;
use super::tokens::{Documents, Memory, Storage, TokenizedFile};
use super::watch::{Phase, Watch};
use super::width::Width;
use crate::process::pool_of_host;
use entry::Entry;
use identity::{Identity, Stamp};
use lock::Lock;
use writer::Writer;

/// Part of every key. Change it whenever the same file gets other tokens than before.
const VERSION: &[u8] = b"zero-train tokens 1";

/// Tokenizes the documents of files, or opens their tokens in the cache.
pub(super) fn tokenized(
    sources: &[Source],
    options: &DataOptions,
    tokenizer: &Tokenizer,
    watch: &dyn Watch,
) -> Result<Documents, DataError> {
    let newline = tokenizer.encode("\n")?;
    let DataOptions { text_key, vocabulary, .. } = options;
    let work = Tokenizing { text_key, tokenizer, vocabulary: *vocabulary, newline: &newline, threads: None };
    let sizes = sources.iter().map(|source| fs::metadata(&source.path).map_or(0, |metadata| metadata.len()));
    let files = match sizes.sum::<u64>() < options.cache.least_bytes {
        true => in_memory(sources, &work, watch)?,
        false => Cache::new(options, tokenizer)?.files(sources, work, watch)?,
    };
    Documents::new(files, newline, *vocabulary)
}

/// Tokenizes files and keeps their tokens in memory.
fn in_memory(sources: &[Source], work: &Tokenizing<'_>, watch: &dyn Watch) -> Result<Vec<TokenizedFile>, DataError> {
    struct InMemory<'a> {
        sources: &'a [Source],
        width: Width,
        files: Vec<TokenizedFile>,
        watch: &'a dyn Watch,
    }

    impl Sink for InMemory<'_> {
        type Store = Memory;

        fn begin(&mut self, _: usize) -> Result<Memory, DataError> {
            Ok(Memory::new(self.width))
        }

        fn end(&mut self, file: usize, joined: Joined<Memory>) -> Result<(), DataError> {
            let Joined { store, documents, leading, .. } = joined;
            let path = self.sources[file].path.clone();
            self.files.push(TokenizedFile { path, storage: Storage::Memory(store), documents, leading, is_new: true });
            Ok(())
        }

        fn goes_on(&mut self, _: usize, _: u64) -> Result<(), DataError> {
            self.watch.goes_on()
        }
    }

    let width = Width::for_vocabulary(work.tokenizer.vocabulary());
    let mut sink = InMemory { sources, width, files: vec![], watch };
    work.run(&sources.iter().collect::<Vec<_>>(), &mut sink)?;
    Ok(sink.files)
}

/// The folder of the cache, and the part of the keys that all files share.
struct Cache<'a> {
    entries: PathBuf,
    memos: PathBuf,
    options: &'a DataOptions,
    tokenizer: String,
}

impl<'a> Cache<'a> {
    fn new(options: &'a DataOptions, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let folder = match &options.cache.folder {
            Some(folder) => folder.clone(),
            None => folder::default_folder(|name| std::env::var_os(name)).ok_or_else(|| DataError::Cache {
                path: "~/.cache/zero-train".into(),
                source: io::Error::other("the environment has no HOME"),
            })?,
        };
        let tokenizer = tokenizer.fingerprint().to_string();
        Ok(Self { entries: folder.join("tokens"), memos: folder.join("files"), options, tokenizer })
    }

    /// Opens the entries of all files, after building those that are missing.
    fn files(
        &self,
        sources: &[Source],
        work: Tokenizing<'_>,
        watch: &dyn Watch,
    ) -> Result<Vec<TokenizedFile>, DataError> {
        let known = |source: &Source| match Identity::remembered(&source.path, &self.memos)? {
            Some(identity) => self.entry(&self.path(source, &identity)),
            None => Ok(None),
        };
        let known = || sources.iter().map(known).collect::<Result<Option<Vec<Entry>>, _>>();
        let entries = match known()? {
            Some(entries) => entries.into_iter().map(|entry| (entry, false)).collect(),
            None => {
                let lock = self.lock(watch)?;
                self.build(sources, work, watch, &lock)?
            }
        };
        let file = |(source, (entry, is_new)): (&Source, (Entry, bool))| TokenizedFile {
            path: source.path.clone(),
            documents: entry.footer().documents,
            leading: entry.footer().leading,
            storage: Storage::Entry(entry),
            is_new,
        };
        Ok(sources.iter().zip(entries).map(file).collect())
    }

    /// Takes the lock, creating the folders, and removes what killed processes left unfinished.
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

    /// Builds the entries that are missing, and opens all. Returns with each whether it is new.
    fn build(
        &self,
        sources: &[Source],
        work: Tokenizing<'_>,
        watch: &dyn Watch,
        lock: &Lock,
    ) -> Result<Vec<(Entry, bool)>, DataError> {
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
            let width = Width::for_vocabulary(work.tokenizer.vocabulary());
            let to: Vec<(&Path, &Identity)> = missing.iter().map(|&file| (&*paths[file], &identities[file])).collect();
            let mut building = Building { files: &files, to: &to, width, lock, watch, done: 0, total };
            Tokenizing { threads: Some(&threads), ..work }.run(&files, &mut building)?;
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

    /// Identifies all files, and hashes those that no memo knows.
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
        let key = source.key(&self.options.text_key);
        let parts = [VERSION, identity.hash.as_bytes(), self.tokenizer.as_bytes(), key.as_bytes()];
        self.entries.join(hash_of(&parts))
    }

    /// Opens an entry if it exists, and if the model has all its tokens. If the model has not, the file is tokenized
    /// again, which finds the position of the token.
    fn entry(&self, path: &Path) -> Result<Option<Entry>, DataError> {
        let entry = Entry::open(path).map_err(DataError::cache(path))?;
        Ok(entry.filter(|entry| (entry.footer().largest as usize) < self.options.vocabulary))
    }
}

/// Writes the entries of files.
struct Building<'a> {
    files: &'a [&'a Source],
    /// The path of each entry, and the content of the file.
    to: &'a [(&'a Path, &'a Identity)],
    width: Width,
    lock: &'a Lock,
    watch: &'a dyn Watch,
    /// Bytes of the files that are complete, and of all files.
    done: u64,
    total: u64,
}

impl Sink for Building<'_> {
    type Store = Writer;

    fn begin(&mut self, file: usize) -> Result<Writer, DataError> {
        Writer::new(self.to[file].0, self.width)
    }

    fn end(&mut self, file: usize, joined: Joined<Writer>) -> Result<(), DataError> {
        let (path, (_, identity)) = (&self.files[file].path, self.to[file]);
        identity.is_unchanged(path)?;
        self.done += identity.stamp.length;
        joined.store.finish(path, joined.leading)
    }

    fn goes_on(&mut self, file: usize, bytes: u64) -> Result<(), DataError> {
        // The text of a file may be longer than the file, if that is compressed.
        let done = self.done + bytes.min(self.to[file].1.stamp.length);
        self.lock.note(done, self.total);
        self.watch.progress(Phase::Tokenizing, done, self.total);
        self.watch.goes_on()
    }
}

#[cfg(test)]
mod tests;

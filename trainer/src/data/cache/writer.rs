//! Writes an entry of the token cache. The entry has a temporary name until it is complete.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Seek, Write};
use std::path::{Path, PathBuf};

use zero_engine::DataError;

use super::Store;
use super::entry::{CHUNK, Footer, MAGIC};
use crate::data::tokens::width::Width;

/// The extension of unfinished files.
pub(super) const UNFINISHED: &str = "tmp";

/// An entry that is being written. Dropping it before [`finish`](Self::finish) deletes its files.
pub(in super::super) struct Writer {
    /// Path of the complete entry.
    path: PathBuf,
    body: Checksummed,
    width: Width,
    tokens: u64,
    largest: u32,
    /// The rows of the documents, which follow the tokens. They are buffered in a file, because there may be many.
    rows: BufWriter<File>,
    documents: u64,
    facts: usize,
    /// Paths of the unfinished entry and of the file with the rows.
    unfinished: [PathBuf; 2],
}

/// A file, with a checksum for each chunk that is written to it.
struct Checksummed {
    file: BufWriter<File>,
    checksums: Vec<u32>,
    crc: u32,
    /// Number of bytes in the current chunk, which is not full.
    filled: usize,
}

impl Writer {
    pub(super) fn new(path: &Path, width: Width, facts: usize) -> Result<Self, DataError> {
        Self::create(path, width, facts).map_err(DataError::cache(path))
    }

    fn create(path: &Path, width: Width, facts: usize) -> io::Result<Self> {
        // On a file system without locks, two processes may write the same entry.
        let name = |part: &str| path.with_extension(format!("{}.{part}{UNFINISHED}", std::process::id()));
        let unfinished = [name(""), name("rows.")];
        let file = File::create(&unfinished[0])?;
        let rows = File::options().read(true).write(true).create(true).truncate(true).open(&unfinished[1])?;
        let mut body = Checksummed { file: BufWriter::new(file), checksums: vec![], crc: 0, filled: 0 };
        body.write(&MAGIC)?;
        let rows = BufWriter::new(rows);
        Ok(Self { path: path.into(), body, width, tokens: 0, largest: 0, rows, documents: 0, facts, unfinished })
    }

    /// Completes the entry without waiting for the disk. A crash of the machine may therefore truncate it.
    /// [`Entry::open`](super::entry::Entry::open) detects this.
    pub(super) fn finish(mut self, source: &Path, leading: u64) -> Result<(), DataError> {
        self.complete(source, leading).map_err(DataError::cache(&self.path))
    }

    fn complete(&mut self, source: &Path, leading: u64) -> io::Result<()> {
        self.rows.rewind()?;
        let mut rows = BufReader::new(self.rows.get_ref());
        io::copy(&mut rows, &mut Through(&mut self.body))?;
        let Checksummed { file, checksums, crc, filled } = &mut self.body;
        let last = (*filled > 0).then_some(*crc);
        let checksums: Vec<u8> = checksums.iter().chain(&last).flat_map(|crc| crc.to_le_bytes()).collect();
        let footer = Footer {
            source: source.into(),
            tokens: self.tokens,
            width: self.width,
            documents: self.documents,
            facts: self.facts as u64,
            leading,
            largest: self.largest,
        };
        let footer = serde_json::to_vec(&footer)?;
        file.write_all(&checksums)?;
        file.write_all(&footer)?;
        file.write_all(&crc32c::crc32c_append(crc32c::crc32c(&checksums), &footer).to_le_bytes())?;
        file.write_all(&(footer.len() as u32).to_le_bytes())?;
        file.write_all(&MAGIC)?;
        file.flush()?;
        fs::rename(&self.unfinished[0], &self.path)
    }
}

impl Store for Writer {
    fn begin(&mut self, facts: &[u64]) -> Result<(), DataError> {
        debug_assert_eq!(facts.len(), self.facts);
        self.documents += 1;
        let row: Vec<u8> = [self.tokens].iter().chain(facts).flat_map(|value| value.to_le_bytes()).collect();
        self.rows.write_all(&row).map_err(DataError::cache(&self.path))
    }

    fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        self.tokens += tokens.len() as u64;
        self.largest = tokens.iter().copied().fold(self.largest, u32::max);
        let mut bytes = Vec::with_capacity(tokens.len() * self.width.bytes());
        self.width.encode(tokens, &mut bytes);
        self.body.write(&bytes).map_err(DataError::cache(&self.path))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.unfinished.iter().for_each(|path| drop(fs::remove_file(path)));
    }
}

impl Checksummed {
    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK as usize - self.filled));
            (self.crc, self.filled, bytes) = (crc32c::crc32c_append(self.crc, now), self.filled + now.len(), later);
            if self.filled == CHUNK as usize {
                self.checksums.push(self.crc);
                (self.crc, self.filled) = (0, 0);
            }
        }
        Ok(())
    }
}

/// Adapts `Checksummed` to [`io::copy`].
struct Through<'a>(&'a mut Checksummed);

impl Write for Through<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

//! One entry of the token cache: the tokens of one source file, on disk.
//!
//! | part | bytes |
//! |---|---|
//! | [`MAGIC`] | 8 |
//! | tokens, little-endian | `tokens` × `width` |
//! | a row of u64 for each document: the index of its first token, then its `facts` values | 8 × (1 + `facts`) each |
//! | u32 CRC-32C of each [`CHUNK`] of the parts above | 4 per chunk |
//! | [`Footer`] as JSON | |
//! | CRC-32C of the checksums and the footer, u32; length of the footer, u32; [`MAGIC`] | 16 |
//!
//! [`Entry::open`] checks everything except the chunks, so opening a large entry takes no longer than opening a small
//! one. Each chunk is checked when it is first read, so damaged bytes are never used. `token_files.rs` explains why
//! reads are positioned and files are not memory-mapped.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use zero_engine::DataError;

use super::super::watch::Watch;
use crate::data::tokens::width::Width;

/// The first and the last bytes of an entry. The digit is the version of the layout.
pub(super) const MAGIC: [u8; 8] = *b"ZTCACHE1";
/// Number of bytes per checksum.
pub(super) const CHUNK: u64 = 1 << 16;
/// Number of bytes after the footer.
pub(super) const TAIL: u64 = 16;

/// Describes the tokens of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Footer {
    /// Path of the source file when the entry was written, for people who inspect the cache.
    pub(in super::super) source: PathBuf,
    /// Number of tokens, including the separators between documents.
    pub(in super::super) tokens: u64,
    /// Width of a stored token in bytes.
    pub(in super::super) width: Width,
    /// Number of documents that are not empty.
    pub(in super::super) documents: u64,
    /// Number of additional `u64` values that a document has, such as its number of trained tokens.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(in super::super) facts: u64,
    /// Number of tokens before the first document that is not empty.
    pub(in super::super) leading: u64,
    /// The largest token ID.
    pub(in super::super) largest: u32,
}

/// An open entry.
#[derive(Debug)]
pub(in super::super) struct Entry {
    path: PathBuf,
    file: File,
    footer: Footer,
    checksums: Vec<u32>,
    /// One bit per chunk, set once its checksum has been verified.
    checked: Vec<AtomicU64>,
}

impl Entry {
    /// Opens an entry. Returns `None` if the entry does not exist, or if it is truncated or damaged.
    ///
    /// # Errors
    /// Fails if the entry exists but cannot be read.
    pub(super) fn open(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let length = file.metadata()?.len();
        let Some(end) = length.checked_sub(TAIL) else { return Ok(None) };
        let mut tail = [0; TAIL as usize];
        file.read_exact_at(&mut tail, end)?;
        let [crc, json, magic @ ..] = &tail.as_chunks::<4>().0 else { return Ok(None) };
        let (crc, json) = (u32::from_le_bytes(*crc), u64::from(u32::from_le_bytes(*json)));
        let Some(start) = end.checked_sub(json).filter(|_| magic.as_flattened() == MAGIC) else { return Ok(None) };
        let mut text = vec![0; json as usize];
        file.read_exact_at(&mut text, start)?;
        let Ok(footer) = serde_json::from_slice::<Footer>(&text) else { return Ok(None) };
        let checksums = footer.body().map(|body| body.div_ceil(CHUNK));
        let Some(first) = checksums.and_then(|count| start.checked_sub(count.checked_mul(4)?)) else { return Ok(None) };
        if footer.body() != Some(first) {
            return Ok(None);
        }
        let mut bytes = vec![0; (start - first) as usize];
        file.read_exact_at(&mut bytes, first)?;
        if crc32c::crc32c_append(crc32c::crc32c(&bytes), &text) != crc {
            return Ok(None);
        }
        let checksums: Vec<u32> = bytes.as_chunks().0.iter().map(|&crc| u32::from_le_bytes(crc)).collect();
        let checked = (0..checksums.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Some(Self { path: path.into(), file, footer, checksums, checked }))
    }

    pub(in super::super) fn footer(&self) -> &Footer {
        &self.footer
    }

    /// Appends the tokens `start..start + count`, which must exist. Appends nothing on error.
    pub(in super::super) fn read(&self, start: usize, count: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        let width = self.footer.width.bytes();
        let mut bytes = vec![0; count * width];
        self.read_bytes(MAGIC.len() as u64 + (start * width) as u64, &mut bytes)?;
        self.footer.width.decode(&bytes, out);
        Ok(())
    }

    /// Returns the concatenated rows of a range of documents. A row holds the index of the document's first token, and
    /// the document's facts.
    pub(in super::super) fn rows(&self, documents: Range<u64>) -> Result<Vec<u64>, DataError> {
        let row = 8 * (1 + self.footer.facts);
        let mut bytes = vec![0; (row * (documents.end - documents.start)) as usize];
        self.read_bytes(self.footer.rows() + row * documents.start, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|&value| u64::from_le_bytes(value)).collect())
    }

    /// Reads everything and compares the checksums.
    ///
    /// # Errors
    /// Fails at the first damaged chunk, or if `watch` stops the check.
    pub(in super::super) fn verify(&self, watch: &dyn Watch) -> Result<(), DataError> {
        (0..self.checksums.len()).try_for_each(|chunk| watch.goes_on().and_then(|()| self.chunk(chunk).map(drop)))
    }

    /// Reads bytes before the checksums. A chunk that was not read before is read completely and checked.
    fn read_bytes(&self, offset: u64, out: &mut [u8]) -> Result<(), DataError> {
        let end = offset + out.len() as u64;
        let chunks = (offset / CHUNK) as usize..end.div_ceil(CHUNK) as usize;
        if chunks.clone().all(|chunk| self.is_checked(chunk)) {
            return self.file.read_exact_at(out, offset).map_err(DataError::io(&self.path));
        }
        for chunk in chunks {
            let bytes = self.chunk(chunk)?;
            let first = chunk as u64 * CHUNK;
            let (from, to) = (offset.max(first), end.min(first + CHUNK));
            let part = &bytes[(from - first) as usize..(to - first) as usize];
            out[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
        }
        Ok(())
    }

    /// Reads a chunk and checks it. Deletes a damaged entry, so that the next start rebuilds it.
    fn chunk(&self, chunk: usize) -> Result<Vec<u8>, DataError> {
        let first = chunk as u64 * CHUNK;
        let body = self.footer.body().unwrap_or(first);
        let mut bytes = vec![0; CHUNK.min(body - first) as usize];
        let read = self.file.read_exact_at(&mut bytes, first);
        match read {
            Ok(()) if crc32c::crc32c(&bytes) == self.checksums[chunk] => {
                self.checked[chunk / 64].fetch_or(1 << (chunk % 64), Ordering::Relaxed);
                Ok(bytes)
            }
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(DataError::io(&self.path)(error)),
            // The checksum is wrong, or the file was truncated after it was opened.
            _ => {
                let _ = fs::remove_file(&self.path);
                Err(DataError::CacheEntry { path: self.path.clone(), byte: first })
            }
        }
    }

    fn is_checked(&self, chunk: usize) -> bool {
        self.checked[chunk / 64].load(Ordering::Relaxed) >> (chunk % 64) & 1 == 1
    }
}

impl Footer {
    /// Returns the byte offset of the document rows.
    fn rows(&self) -> u64 {
        MAGIC.len() as u64 + self.tokens * self.width.bytes() as u64
    }

    /// Returns the number of bytes before the checksums, or `None` if it overflows.
    fn body(&self) -> Option<u64> {
        let tokens = self.tokens.checked_mul(self.width.bytes() as u64)?;
        let rows = self.documents.checked_mul(self.facts.checked_add(1)?.checked_mul(8)?)?;
        tokens.checked_add(rows)?.checked_add(MAGIC.len() as u64)
    }
}

fn is_zero(facts: &u64) -> bool {
    *facts == 0
}

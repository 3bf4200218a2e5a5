//! Token files that stay on disk.
//!
//! Each sample is one positioned read ([`FileExt::read_exact_at`]), which needs no lock and no seek, so threads share
//! the files. The operating system caches the pages in use, as for a memory mapping. A mapping would avoid copying a
//! few kilobytes per sample. However, if a mapped file shrinks during training, a signal kills the process. A
//! positioned read returns an error instead.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use super::width::Width;
use crate::data::binary;
use crate::data::files::is_archive;
use crate::data::options::TokenDtype;
use crate::data::watch::{Unwatched, Watch};
use zero_engine::{At, DataError};

/// Number of tokens at the start of each file that are checked against the vocabulary before training begins. This
/// detects a file of another tokenizer at once. Later tokens are checked when they are read.
const CHECKED_AT_OPEN: usize = 1 << 24;
/// The beginning of a file that `numpy.save` wrote. Its header would otherwise become tokens.
const NUMPY: &[u8; 6] = b"\x93NUMPY";
/// Minimum number of tokens at which zeros in every second place cannot be a coincidence.
const ENOUGH: usize = 64;
/// Number of tokens that a check reads at a time.
pub(crate) const CHECK_CHUNK: usize = 1 << 18;

/// Files of raw tokens, joined without a separator.
pub(crate) struct TokenFiles {
    files: Vec<TokenFile>,
    vocabulary: usize,
}

struct TokenFile {
    path: PathBuf,
    file: File,
    width: Width,
    /// Position of the file's first token in the whole corpus.
    start: usize,
    tokens: usize,
}

impl TokenFiles {
    pub(crate) fn open(paths: &[PathBuf], dtype: TokenDtype, vocabulary: usize) -> Result<Self, DataError> {
        let mut files = TokenFiles { files: Vec::with_capacity(paths.len()), vocabulary };
        for path in paths {
            let file = TokenFile::open(path, dtype.into(), files.len())?;
            file.check(CHECKED_AT_OPEN, vocabulary, &Unwatched)?;
            file.is_narrow()?;
            files.files.push(file);
        }
        Ok(files)
    }

    /// Checks all tokens against the vocabulary.
    pub(crate) fn verify(&self, watch: &dyn Watch) -> Result<(), DataError> {
        self.files.iter().try_for_each(|file| file.check(file.tokens, self.vocabulary, watch))
    }

    pub(crate) fn len(&self) -> usize {
        self.files.last().map_or(0, |file| file.start + file.tokens)
    }

    /// Appends the tokens `start..start + count`, which must exist. Appends nothing on error.
    pub(crate) fn read(&self, mut start: usize, mut count: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        let before = out.len();
        let first = self.files.partition_point(|file| file.start + file.tokens <= start);
        for file in &self.files[first..] {
            if count == 0 {
                break;
            }
            let here = count.min(file.start + file.tokens - start);
            if let Err(error) = file.read(start - file.start, here, self.vocabulary, out) {
                out.truncate(before);
                return Err(error);
            }
            (start, count) = (start + here, count - here);
        }
        Ok(())
    }
}

/// Returns whether `tokens` look like wider numbers that were read as numbers of half the width: every second number is
/// 0.
pub(crate) fn are_halves(tokens: &[u32]) -> bool {
    let is_zero = |token: &u32| *token == 0;
    let [even, odd] = [0, 1].map(|first| tokens.iter().skip(first).step_by(2).all(is_zero));
    tokens.len() >= ENOUGH && odd && !even
}

impl TokenFile {
    fn open(path: &Path, width: Width, start: usize) -> Result<Self, DataError> {
        let file = File::open(path).map_err(DataError::io(path))?;
        let bytes = file.metadata().map_err(DataError::io(path))?.len();
        let each = width.bytes();
        let mut header = [0; NUMPY.len()];
        let is_read = file.read_exact_at(&mut header, 0).is_ok();
        let kind = || if is_archive(&header) { binary::kind(&header) } else { None };
        let kind = || if header == *NUMPY { Some("a NumPy array with a header") } else { kind() };
        if let Some(found) = is_read.then(kind).flatten() {
            let wanted = "raw tokens, which `tofile` of NumPy writes";
            return Err(DataError::Format { path: path.into(), found, wanted });
        }
        if bytes % each as u64 != 0 {
            return Err(DataError::PartialToken { path: path.into(), bytes, width: each });
        }
        Ok(TokenFile { path: path.into(), file, width, start, tokens: (bytes / each as u64) as usize })
    }

    /// Checks the first `count` tokens against the vocabulary.
    fn check(&self, count: usize, vocabulary: usize, watch: &dyn Watch) -> Result<(), DataError> {
        let mut chunk = Vec::new();
        for first in (0..self.tokens.min(count)).step_by(CHECK_CHUNK) {
            watch.goes_on()?;
            chunk.clear();
            self.read(first, CHECK_CHUNK.min(self.tokens - first), vocabulary, &mut chunk)?;
        }
        Ok(())
    }

    /// Checks that the file does not have wider numbers.
    fn is_narrow(&self) -> Result<(), DataError> {
        let mut tokens = vec![];
        self.read(0, CHECK_CHUNK.min(self.tokens), usize::MAX, &mut tokens)?;
        match are_halves(&tokens) {
            true => Err(DataError::WideTokens { path: self.path.clone(), width: self.width.bytes() }),
            false => Ok(()),
        }
    }

    /// Appends tokens of this file. On error, some of them may have been appended.
    fn read(&self, first: usize, count: usize, vocabulary: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        let width = self.width.bytes();
        let offset = first as u64 * width as u64;
        let mut bytes = vec![0; count * width];
        self.file.read_exact_at(&mut bytes, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let message = "the file was shortened after it was opened, and no longer contains these tokens".into();
                DataError::Damaged { path: self.path.clone(), at: Some(At::Byte(offset)), message }
            }
            _ => DataError::io(&self.path)(error),
        })?;
        let before = out.len();
        self.width.decode(&bytes, out);
        let is_outside = |&token: &u32| token as usize >= vocabulary || token == u32::MAX;
        match out[before..].iter().position(is_outside) {
            None => Ok(()),
            Some(outside) => {
                let at = At::Byte(offset + (outside * width) as u64);
                let token = match bytes[outside * width..].first_chunk() {
                    Some(stored) if self.width == Width::I64 => i64::from_le_bytes(*stored),
                    _ => out[before + outside].into(),
                };
                Err(DataError::Token { token, vocabulary, path: self.path.clone(), at })
            }
        }
    }
}

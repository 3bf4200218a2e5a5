//! Appends pieces to a file, each one completely or not at all, even if the disk is full.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use zero_engine::Error;

/// An append-only file without incomplete pieces.
#[derive(Debug)]
pub(crate) struct Appended {
    path: PathBuf,
    file: File,
    /// Number of bytes of all complete pieces.
    written: u64,
}

impl Appended {
    /// Opens a file, creating it if needed, and truncates it to its first `keep` bytes.
    ///
    /// # Errors
    /// Fails if the file cannot be opened for writing, or if another run writes to it.
    pub(crate) fn open(path: &Path, keep: u64) -> Result<Self, Error> {
        let opened = OpenOptions::new().create(true).write(true).truncate(false).open(path);
        let file = opened.map_err(Error::io(path))?;
        // Not every file system supports locks.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            let used = io::Error::new(io::ErrorKind::ResourceBusy, "another run writes to this file");
            return Err(Error::io(path)(used));
        }
        let length = file.metadata().map_err(Error::io(path))?.len();
        let mut opened = Self { path: path.to_path_buf(), file, written: length };
        opened.truncate(keep)?;
        Ok(opened)
    }

    /// Truncates the file to its first `keep` bytes.
    ///
    /// # Errors
    /// Fails if the file cannot be truncated.
    pub(crate) fn truncate(&mut self, keep: u64) -> Result<(), Error> {
        if self.written > keep {
            self.file.set_len(keep).map_err(Error::io(&self.path))?;
            self.written = keep;
        }
        Ok(())
    }

    /// Appends a piece, or leaves the file unchanged on error.
    ///
    /// # Errors
    /// Fails if the piece cannot be written.
    pub(crate) fn append(&mut self, piece: &[u8]) -> Result<(), Error> {
        let written = self.file.write_all_at(piece, self.written);
        match written {
            Ok(()) => self.written += piece.len() as u64,
            // Removes the bytes that were written before the disk was full.
            Err(_) => self.file.set_len(self.written).unwrap_or(()),
        }
        written.map_err(Error::io(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_after_the_kept_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        Appended::open(&path, u64::MAX).and_then(|mut file| file.append(b"one\ntwo\n")).expect("a new file");
        let mut again = Appended::open(&path, 4).expect("the same file");
        again.append(b"three\n").and_then(|()| again.append(b"four\n")).expect("more");
        let second = Appended::open(&path, 0).unwrap_err();
        assert!(second.to_string().ends_with("/file: another run writes to this file"), "{second}");
        assert_eq!(std::fs::read(&path).expect("the file"), b"one\nthree\nfour\n");
        let full = Appended::open(Path::new("/dev/full"), 0).and_then(|mut file| file.append(b"x")).unwrap_err();
        assert!(full.to_string().starts_with("/dev/full: No space left"), "{full}");
    }
}

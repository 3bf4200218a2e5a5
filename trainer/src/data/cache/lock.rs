//! The lock of the token cache: one process, and one thread in it, builds entries at a time, for all others of the host.
//!
//! It is a kernel lock on an open file. The kernel releases it when the process ends, however it ends. Waiting polls, so
//! that a signal can end it. The holder writes its progress into the file, and those who wait can show it.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use super::super::watch::{Phase, Watch};

/// Name of the lock file in the folder of the entries.
const NAME: &str = ".lock";
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The right to write entries, until it is dropped.
pub(super) struct Lock {
    file: File,
    is_exclusive: bool,
}

impl Lock {
    /// Waits for the lock of a folder. Returns `None` if `watch` ended the wait.
    ///
    /// # Errors
    /// Fails if the lock file cannot be opened or locked.
    pub(super) fn wait(folder: &Path, watch: &dyn Watch) -> io::Result<Option<Self>> {
        let path = folder.join(NAME);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        while !watch.is_stopped() {
            match file.try_lock() {
                Ok(()) => {
                    let lock = Self { file, is_exclusive: true };
                    lock.note(0, 0);
                    return Ok(Some(lock));
                }
                Err(TryLockError::WouldBlock) => {
                    if let Some((done, total)) = noted(&file) {
                        watch.progress(Phase::Waiting, done, total);
                    }
                    std::thread::sleep(PAUSE);
                }
                // This file system has no locks: ranks build the same entries, and the last one to finish replaces
                // those of the others.
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    return Ok(Some(Self { file, is_exclusive: false }));
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Returns whether no other process writes entries. On a file system without locks, others may.
    pub(super) fn is_exclusive(&self) -> bool {
        self.is_exclusive
    }

    /// Tells those who wait that `done` of `total` bytes are tokenized. A failure only keeps them from showing it.
    pub(super) fn note(&self, done: u64, total: u64) {
        let bytes = [done, total].map(u64::to_le_bytes);
        let _ = self.file.write_all_at(bytes.as_flattened(), 0);
    }
}

/// Returns what the holder noted, unless it has not begun.
fn noted(file: &File) -> Option<(u64, u64)> {
    let mut bytes = [[0; 8]; 2];
    file.read_exact_at(bytes.as_flattened_mut(), 0).ok()?;
    let [done, total] = bytes.map(u64::from_le_bytes);
    (total > 0).then_some((done, total))
}

//! The lock of the token cache. One thread of one process builds entries, and all other processes of this host wait for
//! it.
//!
//! It is a kernel lock on an open file. The kernel releases it when the process ends, however it ends. A waiting
//! process polls, so that a signal can stop it. The holder writes its progress into the file, so that waiting processes
//! can show it.

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

/// The right to write entries. Dropping it releases the lock.
pub(super) struct Lock {
    file: File,
    is_exclusive: bool,
}

impl Lock {
    /// Waits for the lock of a folder. Returns `None` if `watch` stopped the wait.
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
                // This file system does not support locks. Several ranks may then build the same entries, and the last
                // rank to finish replaces the entries of the others.
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    return Ok(Some(Self { file, is_exclusive: false }));
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Returns whether no other process writes entries. This is false on a file system without locks.
    pub(super) fn is_exclusive(&self) -> bool {
        self.is_exclusive
    }

    /// Tells waiting processes that `done` of `total` bytes are tokenized. If the write fails, they show no progress.
    pub(super) fn note(&self, done: u64, total: u64) {
        let bytes = [done, total].map(u64::to_le_bytes);
        let _ = self.file.write_all_at(bytes.as_flattened(), 0);
    }
}

/// Returns the progress that the holder wrote, or `None` if it has not written any.
fn noted(file: &File) -> Option<(u64, u64)> {
    let mut bytes = [[0; 8]; 2];
    file.read_exact_at(bytes.as_flattened_mut(), 0).ok()?;
    let [done, total] = bytes.map(u64::from_le_bytes);
    (total > 0).then_some((done, total))
}

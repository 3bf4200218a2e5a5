//! A lock that admits one run at a time to a folder.
//!
//! The lock is a kernel lock on an open file, which the kernel releases when the process ends, even after a crash. Some
//! file systems have no locks or do not share them between hosts. On these, a run relies on a *fencing token*, a number
//! in the lock file. Each run writes a higher number than the previous run, and commits a checkpoint only while the
//! file still holds its own number.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;

/// Name of the lock file in a run's folder.
const NAME: &str = ".lock";

/// Exclusive write access to a run's folder, until it is dropped.
#[derive(Debug)]
pub struct RunLock {
    path: PathBuf,
    /// Open file that holds the kernel's lock.
    _file: File,
    holder: Holder,
}

/// Contents of the lock file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    /// Fencing token, higher than that of every earlier run.
    token: u64,
    pid: u32,
    host: String,
    /// Seconds since the Unix epoch.
    since: u64,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}", self.pid, self.host)
    }
}

impl RunLock {
    /// Takes the lock of a run's folder, creating the folder if necessary.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Locked`] if another run holds the lock. Fails if the folder cannot be written.
    pub fn take(folder: &Path) -> Result<Self, CheckpointError> {
        fs::create_dir_all(folder).map_err(CheckpointError::io(folder))?;
        let path = folder.join(NAME);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(CheckpointError::io(&path))?;
        let before = read(&file);
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = before.map_or_else(|| "another process".into(), |holder| holder.to_string());
                return Err(CheckpointError::Locked { folder: folder.to_path_buf(), holder });
            }
            // This file system has no locks; only the token protects the folder.
            Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(e)) => return Err(CheckpointError::io(&path)(e)),
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let holder = Holder {
            token: before.map_or(0, |before| before.token) + 1,
            pid: std::process::id(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            since: now.map_or(0, |now| now.as_secs()),
        };
        let text = serde_json::to_string(&holder).map_err(|e| CheckpointError::io(&path)(e.into()))? + "\n";
        let written =
            file.set_len(0).and_then(|()| file.write_all_at(text.as_bytes(), 0)).and_then(|()| file.sync_all());
        written.map_err(CheckpointError::io(&path))?;
        Ok(Self { path, _file: file, holder })
    }

    /// Checks that this run still holds the folder.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Locked`] if another run has taken the folder, or if the lock file was moved or
    /// removed.
    pub fn check(&self) -> Result<(), CheckpointError> {
        let now = File::open(&self.path).ok().and_then(|file| read(&file));
        if now.as_ref() == Some(&self.holder) {
            return Ok(());
        }
        let holder = now
            .map_or_else(|| "an unknown run: the lock file was moved or removed".into(), |holder| holder.to_string());
        Err(CheckpointError::Locked { folder: self.path.parent().unwrap_or(&self.path).to_path_buf(), holder })
    }
}

/// Reads a lock file. Returns `None` if it is new or only partly written.
fn read(file: &File) -> Option<Holder> {
    let mut text = [0; 1024];
    let length = file.read_at(&mut text, 0).ok()?;
    serde_json::from_slice(&text[..length]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let first = RunLock::take(&run).unwrap();
        let error = RunLock::take(&run).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        first.check().unwrap();
        drop(first);
        let second = RunLock::take(&run).unwrap();
        assert_eq!(second.holder.token, 2, "the token increases with each run");
        second.check().unwrap();
    }

    /// Without kernel locks, the later run's token revokes the earlier run's access.
    #[test]
    fn a_later_run_fences_off_an_earlier_one() {
        let folder = tempfile::tempdir().unwrap();
        let first = RunLock::take(folder.path()).unwrap();
        let later = Holder { token: first.holder.token + 1, pid: 1, host: "elsewhere".into(), since: 0 };
        fs::write(folder.path().join(NAME), serde_json::to_vec(&later).unwrap()).unwrap();
        let error = first.check().unwrap_err().to_string();
        assert!(error.contains("process 1 on elsewhere"), "{error}");
        fs::remove_file(folder.path().join(NAME)).unwrap();
        assert!(first.check().unwrap_err().to_string().contains("moved or removed"));
    }

    #[test]
    fn a_damaged_lock_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{", "null", &"x".repeat(5000)] {
            fs::write(folder.path().join(NAME), text).unwrap();
            let lock = RunLock::take(folder.path()).unwrap();
            assert_eq!(lock.holder.token, 1);
            lock.check().unwrap();
        }
    }
}

//! Identifies a source file by a hash of its content. A memo on disk keeps the hash until the file changes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use zero_engine::DataError;

use super::super::fingerprint::{hash_of, hex};

/// Two changes within this time may leave a file with the same time stamp.
const CLOCK_TICK: Duration = Duration::from_millis(100);
/// Number of bytes read and hashed at a time.
const BLOCK: usize = 1 << 20;

/// The metadata of a file, which differs after every change of its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    pub(super) length: u64,
    device: u64,
    inode: u64,
    /// Time of the last change of the content: seconds and nanoseconds.
    modified: (i64, i64),
    /// Time of the last change of the content or the attributes: seconds and nanoseconds. Programs cannot set it back.
    changed: (i64, i64),
}

/// The content of a file, by its SHA-256 in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) stamp: Stamp,
    pub(super) hash: String,
}

impl Stamp {
    pub(super) fn of(path: &Path) -> Result<Self, DataError> {
        let metadata = fs::metadata(path).map_err(DataError::io(path))?;
        Ok(Self {
            length: metadata.len(),
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

impl Identity {
    /// Returns the identity from the memo in `memos`, if the file has not changed since the memo was written.
    pub(super) fn remembered(path: &Path, memos: &Path) -> Result<Option<Self>, DataError> {
        let stamp = Stamp::of(path)?;
        let memo = fs::read(memos.join(memo_name(path))).ok();
        let memo = memo.and_then(|memo| serde_json::from_slice::<Self>(&memo).ok());
        Ok(memo.filter(|memo| memo.stamp == stamp))
    }

    /// Hashes a file and writes a memo. Calls `read` with the number of bytes hashed so far. An error from `read` stops
    /// the hashing.
    pub(super) fn of(
        path: &Path,
        memos: &Path,
        mut read: impl FnMut(u64) -> Result<(), DataError>,
    ) -> Result<Self, DataError> {
        let modified = fs::metadata(path).and_then(|metadata| metadata.modified()).map_err(DataError::io(path))?;
        if let Ok(age) = SystemTime::now().duration_since(modified) {
            std::thread::sleep(CLOCK_TICK.saturating_sub(age));
        }
        let stamp = Stamp::of(path)?;
        let (mut file, mut hash) = (File::open(path).map_err(DataError::io(path))?, Sha256::new());
        let (mut block, mut bytes) = (vec![0; BLOCK], 0);
        loop {
            let count = match file.read(&mut block) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                count => count.map_err(DataError::io(path))?,
            };
            if count == 0 {
                break;
            }
            hash.update(&block[..count]);
            bytes += count as u64;
            read(bytes)?;
        }
        let identity = Self { stamp, hash: hex(&hash.finalize()) };
        identity.is_unchanged(path)?;
        // A failure to write the memo is ignored: the next start hashes the file again.
        let memo = memos.join(memo_name(path));
        let unfinished = memo.with_extension(std::process::id().to_string());
        let written = serde_json::to_vec(&identity).map_err(io::Error::from);
        let written = written.and_then(|text| fs::write(&unfinished, text));
        if written.and_then(|()| fs::rename(&unfinished, &memo)).is_err() {
            let _ = fs::remove_file(unfinished);
        }
        Ok(identity)
    }

    /// Checks that the file still has this content.
    ///
    /// # Errors
    /// Returns [`DataError::Changed`] if the file has changed.
    pub(super) fn is_unchanged(&self, path: &Path) -> Result<(), DataError> {
        match Stamp::of(path)? == self.stamp {
            true => Ok(()),
            false => Err(DataError::Changed { path: path.into() }),
        }
    }
}

/// Returns the file name of the memo for a path.
fn memo_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.into());
    hash_of(&[path.as_os_str().as_encoded_bytes()]) + ".json"
}

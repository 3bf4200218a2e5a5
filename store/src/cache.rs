//! Downloaded objects on this machine. All processes of the host share them, and their total size is limited.
//!
//! Each version of an object has a slot. A slot is a folder with the downloaded file, under the object's own name.
//! Beside the folder are a lock file and the part of an unfinished download. A process writes or removes the downloaded
//! file only while it holds the slot's lock exclusively. A process that reads the file holds the lock shared.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use crate::{Error, Object, Stores, Watch};

const LOCK: &str = "lock";
const PART: &str = "part";
/// Pause between two attempts to get a lock.
const PAUSE: Duration = Duration::from_millis(50);

/// An object on this machine. The file is kept until this value and all its clones are dropped. The file may disappear
/// earlier only if it belongs to another program, or if its file system has no locks.
#[derive(Debug, Clone)]
pub struct Local {
    /// The file.
    pub path: PathBuf,
    /// `None` on a file system without locks, and for a file of another program.
    _lock: Option<Arc<File>>,
}

impl Local {
    /// Returns a file that belongs to another program.
    pub(crate) fn of_others(path: &Path) -> Self {
        Self { path: path.into(), _lock: None }
    }
}

impl PartialEq for Local {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

/// The place of an object in the cache, whether or not it has been downloaded.
pub(crate) struct Slot {
    folder: PathBuf,
    name: String,
}

/// The exclusive right to change a slot, until it is dropped.
pub(crate) struct Lock(Option<File>);

impl Slot {
    pub(crate) fn new(folder: &Path, object: &Object) -> Self {
        let hash = hash_of([object]);
        let name = object.key.filename().unwrap_or("object").to_string();
        Self { folder: folder.join(object.location.local(&object.key)).join(hash), name }
    }

    /// The complete file.
    pub(crate) fn content(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    /// The unfinished part of a download.
    pub(crate) fn part(&self) -> PathBuf {
        self.folder.with_extension(PART)
    }

    /// Returns the file if it is complete and no process holds the exclusive lock.
    pub(crate) fn present(&self, object: &Object) -> Result<Option<Local>, Error> {
        if !self.is_complete(object) {
            return Ok(None);
        }
        let path = self.folder.with_extension(LOCK);
        // A cache on a read-only file system has no locks, and no process removes files from it.
        let Ok(file) = File::options().read(true).write(true).open(&path) else { return Ok(Some(self.local(None))) };
        match file.try_lock_shared() {
            Ok(()) => self.used(Some(file), object),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => self.used(None, object),
            Err(TryLockError::Error(error)) => Err(Error::local(&path)(error)),
        }
    }

    /// Waits until no other process uses the slot, and locks it.
    pub(crate) fn lock(&self, watch: &dyn Watch) -> Result<Lock, Error> {
        fs::create_dir_all(&self.folder).map_err(Error::local(&self.folder))?;
        let path = self.folder.with_extension(LOCK);
        let options = || File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let file = options().map_err(Error::local(&path))?;
        while !watch.is_stopped() {
            match file.try_lock() {
                Ok(()) => {
                    // Another process may have removed the object, and the folder with it.
                    fs::create_dir_all(&self.folder).map_err(Error::local(&self.folder))?;
                    return Ok(Lock(Some(file)));
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => return Ok(Lock(None)),
                Err(TryLockError::Error(error)) => return Err(Error::local(&path)(error)),
            }
        }
        Err(Error::Stopped)
    }

    /// Returns the file if it is complete, and turns the exclusive lock into a shared one.
    pub(crate) fn shared(&self, lock: &Lock, object: &Object) -> Result<Option<Local>, Error> {
        if !self.is_complete(object) {
            return Ok(None);
        }
        let path = self.folder.with_extension(LOCK);
        let Some(file) = &lock.0 else { return self.used(None, object) };
        let file = file.try_clone().map_err(Error::local(&path))?;
        file.lock_shared().map_err(Error::local(&path))?;
        self.used(Some(file), object)
    }

    fn is_complete(&self, object: &Object) -> bool {
        fs::metadata(self.content()).is_ok_and(|metadata| metadata.is_file() && metadata.len() == object.size)
    }

    /// Records that the object is used now. Returns `None` if another process has just removed it.
    fn used(&self, lock: Option<File>, object: &Object) -> Result<Option<Local>, Error> {
        if let Some(file) = &lock {
            let _ = file.set_modified(SystemTime::now());
        }
        Ok(self.is_complete(object).then(|| self.local(lock)))
    }

    fn local(&self, lock: Option<File>) -> Local {
        Local { path: self.content(), _lock: lock.map(Arc::new) }
    }
}

/// Returns a name for the content of objects: 16 hexadecimal digits, which depend on their addresses, versions and
/// sizes.
pub(crate) fn hash_of<'o>(objects: impl IntoIterator<Item = &'o Object>) -> String {
    let mut hash = Sha256::new();
    for object in objects {
        let folder = object.location.local(&object.key);
        let folder = folder.as_os_str().as_encoded_bytes();
        for part in [folder, object.key.as_ref().as_bytes(), object.version.as_deref().unwrap_or("").as_bytes()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.update(object.size.to_le_bytes());
    }
    hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Stores {
    /// Removes the least recently used objects until the new object fits within the limit. If several processes
    /// download at the same time, their objects together may exceed the limit.
    pub(crate) fn make_room(&self, object: &Object, own: &Slot) -> Result<(), Error> {
        let Some(limit) = self.limit else { return Ok(()) };
        let mut slots = BTreeMap::new();
        find_slots(&self.folder, &mut slots).map_err(Error::local(&self.folder))?;
        let mut used: u64 = slots.iter().filter(|(_, slot)| *slot.0 != own.folder).map(|(_, (_, size))| size).sum();
        for (folder, size) in slots.values() {
            if used.saturating_add(object.size) <= limit {
                return Ok(());
            }
            let lock = folder.with_extension(LOCK);
            if *folder == own.folder || *size == 0 {
                continue;
            }
            let Ok(file) = File::options().read(true).write(true).open(&lock) else { continue };
            if file.try_lock().is_ok() {
                let _ = fs::remove_file(folder.with_extension(PART));
                if fs::remove_dir_all(folder).is_ok() {
                    used -= size;
                }
            }
        }
        match used.saturating_add(object.size) <= limit {
            true => Ok(()),
            false => Err(Error::Limit { address: object.address.clone(), size: object.size, used, limit }),
        }
    }
}

/// Finds the slots in a folder and the size of each in bytes. The least recently used slot comes first.
fn find_slots(folder: &Path, slots: &mut BTreeMap<(SystemTime, PathBuf), (PathBuf, u64)>) -> io::Result<()> {
    let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            match path.with_extension(LOCK).is_file() {
                true => continue,
                // Another process may have removed the folder.
                false => find_slots(&path, slots).or_else(|error| match error.kind() {
                    io::ErrorKind::NotFound => Ok(()),
                    _ => Err(error),
                })?,
            }
        }
        if path.extension().is_some_and(|extension| extension == LOCK) {
            let used = fs::metadata(&path).and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            let own = path.with_extension("");
            let files = fs::read_dir(&own).into_iter().flatten().flatten();
            let bytes = files.map(|file| size(&file.path())).sum::<u64>() + size(&own.with_extension(PART));
            slots.insert((used, path), (own, bytes));
        }
    }
    Ok(())
}

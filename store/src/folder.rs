//! Downloads the objects of a folder, such as a model on the Hub, as a folder on this machine.
//!
//! The name of the local folder depends on the objects in the store, so that a local folder never mixes files of two
//! versions.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::cache::hash_of;
use crate::location::{Location, Service};
use crate::{Error, Object, Stores, Watch};

/// The name of the file that states the origin of a local folder.
const SOURCE: &str = ".source.json";

/// The origin of a local folder.
#[derive(Serialize, Deserialize)]
struct Source {
    address: String,
    /// The folder with downloads.
    stores: PathBuf,
    is_complete: bool,
}

impl Stores {
    /// Downloads those objects of a folder whose relative names `is_wanted` accepts, and returns a local folder with
    /// them. [`complete`] adds further objects. The size limit of the cache does not apply to these objects.
    ///
    /// # Errors
    /// Fails if the folder has no objects, and for the reasons of [`fetch`](Stores::fetch).
    pub fn fetch_folder(
        &self,
        address: &str,
        is_wanted: impl Fn(&str) -> bool,
        watch: &dyn Watch,
    ) -> Result<PathBuf, Error> {
        self.fetch_listed(address, &self.list_folder(address, watch)?, is_wanted, watch)
    }

    /// Does the same as [`fetch_folder`](Stores::fetch_folder) with the objects that [`find`](Stores::find) or
    /// [`list_folder`](Stores::list_folder) returned for the address.
    ///
    /// # Errors
    /// Returns the errors of [`fetch_folder`](Stores::fetch_folder).
    pub fn fetch_listed(
        &self,
        address: &str,
        objects: &[Object],
        is_wanted: impl Fn(&str) -> bool,
        watch: &dyn Watch,
    ) -> Result<PathBuf, Error> {
        let location = Location::parse(address)?;
        let named = objects.iter().map(|object| (relative(&location, object), object));
        let all: Vec<(&str, &Object)> = named.filter(|(name, _)| !name.is_empty()).collect();
        if all.is_empty() {
            return Err(Error::Missing { address: address.into() });
        }
        let hash = hash_of(all.iter().map(|(_, object)| *object));
        let name = address.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or("folder");
        let folder = self.folder.join("folders").join(hash).join(name.split('@').next().unwrap_or(name));
        let wanted: Vec<_> = all.iter().copied().filter(|(name, _)| is_wanted(name)).collect();
        let without_limit = Self { limit: None, ..self.clone() };
        for (name, object) in &wanted {
            let path = folder.join(name);
            if path.is_file() {
                continue;
            }
            let local = without_limit.fetch(object, watch)?;
            let parent = path.parent().unwrap_or(&folder);
            fs::create_dir_all(parent).map_err(Error::local(parent))?;
            place(&local.path, &path).map_err(Error::local(&path))?;
        }
        if !folder.join(SOURCE).is_file() {
            let (address, stores) = (pinned(address, &all), self.folder.clone());
            write(&folder, &Source { address, stores, is_complete: false })?;
        }
        Ok(folder)
    }
}

/// Adds the files that `is_wanted` accepts to a folder that [`Stores::fetch_folder`] returned. Does nothing if the
/// folder came from elsewhere or was completed before.
///
/// # Errors
/// Fails if the content of the store has changed since the first download, and for the reasons of [`Stores::fetch`].
pub fn complete(folder: &Path, is_wanted: impl Fn(&str) -> bool, watch: &dyn Watch) -> Result<(), Error> {
    let Ok(text) = fs::read(folder.join(SOURCE)) else { return Ok(()) };
    let Ok(source) = serde_json::from_slice::<Source>(&text) else { return Ok(()) };
    if source.is_complete {
        return Ok(());
    }
    let stores = Stores::new(source.stores.clone(), None);
    match stores.fetch_folder(&source.address, is_wanted, watch)? == folder {
        true => write(folder, &Source { is_complete: true, ..source }),
        false => Err(Error::Changed { address: source.address, byte: 0 }),
    }
}

/// Returns the name of an object relative to a folder.
fn relative<'o>(folder: &Location, object: &'o Object) -> &'o str {
    let name = object.key.as_ref();
    name.strip_prefix(folder.folder()).unwrap_or(name).trim_start_matches('/')
}

/// Returns the address. In an address of the Hub, the commit whose files were listed replaces the revision.
fn pinned(address: &str, objects: &[(&str, &Object)]) -> String {
    let Ok(location) = Location::parse(address) else { return address.into() };
    let (Service::Hub { kind, repo, .. }, Some((_, first))) = (&location.service, objects.first()) else {
        return address.into();
    };
    let Service::Hub { revision, .. } = &first.location.service else { return address.into() };
    format!("hf://{}/{repo}@{revision}/{}", kind.plural(), location.key).trim_end_matches('/').into()
}

/// Makes a downloaded file available at another path; other threads and processes may do the same at the same time.
fn place(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let unfinished = unfinished(to);
            fs::copy(from, &unfinished).and_then(|_| fs::rename(&unfinished, to))
        }
        _ => Ok(()),
    }
}

/// Returns the path of a temporary file that no other thread uses.
fn unfinished(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{}-{count}.part", std::process::id()))
}

fn write(folder: &Path, source: &Source) -> Result<(), Error> {
    let path = folder.join(SOURCE);
    fs::create_dir_all(folder).map_err(Error::local(folder))?;
    let unfinished = unfinished(&path);
    let text = serde_json::to_vec(source).map_err(|error| Error::local(&path)(error.into()))?;
    fs::write(&unfinished, text).and_then(|()| fs::rename(&unfinished, &path)).map_err(Error::local(&path))
}

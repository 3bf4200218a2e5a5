//! Downloads files in object stores and on the Hub before they are opened.

use std::cell::Cell;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use zero_engine::DataError;
use zero_store::{Found, Local, Object, Stores};

use super::super::cache_folder::folder_of;
use super::super::options::CacheOptions;
use super::super::watch::{Phase, Unwatched, Watch};
use super::folder::DESCRIPTIONS;
use super::splits;

/// Access to files that are not on this machine.
pub(in super::super) struct Access<'a> {
    options: &'a CacheOptions,
    watch: &'a dyn Watch,
}

/// The files of an address.
pub(super) enum Downloaded<'a> {
    /// Files. Each file is downloaded when the iterator reaches it.
    Files(Box<dyn Iterator<Item = Result<Local, DataError>> + 'a>),
    /// The local folder of a downloaded data set.
    Folder(PathBuf),
    /// The local folder of a downloaded split of a data set.
    Split(PathBuf),
}

impl<'a> Access<'a> {
    pub(in super::super) fn new(options: &'a CacheOptions, watch: &'a dyn Watch) -> Self {
        Self { options, watch }
    }

    /// Finds the object at an address, the objects that match a pattern, or the files of a folder's split. Downloads a
    /// folder with a saved data set or with shards immediately.
    ///
    /// # Errors
    /// Fails if no object is found, if the split does not exist, if the store fails, or if the watch stops the
    /// download. An item of the iterator fails if its download fails or is stopped.
    pub(super) fn download(&self, address: &str, split: Option<&str>) -> Result<Downloaded<'a>, DataError> {
        let stores = stores(self.options)?;
        let shown = Download::of(self.watch);
        let objects = match stores.find(address, &shown).map_err(failed)? {
            Found::Objects(objects) => {
                split.map_or(Ok(()), |split| splits::is_train(Path::new(address), split))?;
                objects
            }
            Found::Folder(objects) if split.is_some_and(|split| is_data_set(&below(address, split), &objects)) => {
                let address = below(address, split.unwrap_or_default());
                let objects: Vec<Object> =
                    objects.into_iter().filter(|object| object.address.starts_with(&format!("{address}/"))).collect();
                let folder = stores.fetch_listed(&address, &objects, |_| true, &shown);
                return folder.map(Downloaded::Split).map_err(failed);
            }
            Found::Folder(objects) if is_data_set(address, &objects) => {
                let folder = stores.fetch_listed(address, &objects, |_| true, &shown);
                return folder.map(Downloaded::Folder).map_err(failed);
            }
            Found::Folder(objects) => {
                let Some(split) = split else {
                    return Err(failed(zero_store::Error::Folder { address: address.into(), objects: objects.len() }));
                };
                let start = below(address, "").len();
                let names: Vec<String> = objects.iter().map(|object| object.address[start..].to_string()).collect();
                let card = names.iter().position(|name| name == splits::CARD);
                let card = card.map(|index| stores.fetch(&objects[index], &shown).map_err(failed)).transpose()?;
                let card = card.map(|card| std::fs::read_to_string(&card.path).map_err(DataError::io(&card.path)));
                let files = splits::select(Path::new(address), &names, card.transpose()?.as_deref(), split)?;
                files.into_iter().map(|index| objects[index].clone()).collect()
            }
        };
        let shown = Download { total: objects.iter().map(|object| object.size).sum(), ..shown };
        Ok(Downloaded::Files(Box::new(objects.into_iter().map(move |object| {
            let local = stores.fetch(&object, &shown).map_err(failed);
            shown.before.set(shown.before.get() + object.size);
            local
        }))))
    }
}

/// Returns the address of `name` in a folder.
fn below(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

/// Returns whether a folder contains a file that describes a data set.
fn is_data_set(address: &str, objects: &[Object]) -> bool {
    let describes = |name: &str| objects.iter().any(|object| object.address == below(address, name));
    DESCRIPTIONS.into_iter().any(describes)
}

/// Returns the stores, which keep their downloads in the cache.
pub(crate) fn stores(options: &CacheOptions) -> Result<Stores, DataError> {
    Ok(Stores::new(folder_of(options)?.join("stores"), options.limit))
}

/// Returns whether a file is at the top of a model's folder and may describe the model or its tokenizer.
pub(crate) fn describes(name: &str) -> bool {
    let ends = [".json", ".jinja", ".txt", ".model"];
    !name.contains('/') && ends.iter().any(|end| name.ends_with(end))
}

/// Downloads the file at an address, and the files in the same folder that describe a model. A web server does not list
/// its folders, so only the file itself is downloaded from one. Returns the path of the file.
///
/// # Errors
/// Fails if the store fails.
pub(in super::super) fn with_its_folder(address: &str) -> Result<PathBuf, DataError> {
    let (folder, name) = address.rsplit_once('/').unwrap_or((address, ""));
    let stores = stores(&CacheOptions::default())?;
    if address.starts_with("http://") || address.starts_with("https://") {
        let shown = Download::of(&Unwatched);
        let objects = stores.list(address, &shown).map_err(failed)?;
        let Some(object) = objects.first() else {
            return Err(failed(zero_store::Error::Missing { address: address.into() }));
        };
        return Ok(stores.fetch(object, &shown).map_err(failed)?.path);
    }
    Ok(stores.fetch_folder(folder, describes, &Download::of(&Unwatched)).map_err(failed)?.join(name))
}

/// Reports a store's downloads and waits to the program's `Watch`, which can also stop them.
pub(crate) struct Download<'a> {
    watch: &'a dyn Watch,
    /// Number of bytes of the objects before the current object, and of all objects.
    before: Cell<u64>,
    total: u64,
}

impl<'a> Download<'a> {
    /// Shows the progress of each object separately.
    pub(crate) fn of(watch: &'a dyn Watch) -> Self {
        Self { watch, before: Cell::new(0), total: 0 }
    }
}

impl zero_store::Watch for Download<'_> {
    fn progress(&self, done: u64, total: u64) {
        self.watch.progress(Phase::Downloading, self.before.get() + done, self.total.max(total));
    }

    fn waits(&self, problem: &zero_store::Error, left: Duration) {
        let _ = writeln!(io::stderr(), "warning: {}", waiting(problem, left));
    }

    fn is_stopped(&self) -> bool {
        self.watch.is_stopped()
    }
}

/// Formats the message about a wait for a store.
pub(crate) fn waiting(problem: &zero_store::Error, left: Duration) -> String {
    format!("{problem}; retrying for at most {} s", left.as_secs())
}

pub(crate) fn failed(error: zero_store::Error) -> DataError {
    match error {
        zero_store::Error::Stopped => DataError::Stopped,
        zero_store::Error::Local { path, source } => DataError::Cache { path, source },
        error => DataError::Store { help: error.help(), message: error.to_string() },
    }
}

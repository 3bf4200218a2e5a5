//! Finds, downloads, uploads and removes checkpoints in an object store.
//!
//! A store has the same checkpoint folders as the run has on disk, such as `step-00000100`. The manifest of a
//! checkpoint is uploaded last and removed first, so a checkpoint with a manifest is complete.

mod uploads;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use zero_checkpoint::{MANIFEST, Retention, patiently};
use zero_comm::Communicator;
use zero_config::Config;
use zero_engine::Error;
use zero_store::{Object, Stores, Watch};

use super::first_rank::on_first_rank;
use super::options::{Resume, RunOptions};
use crate::data::CacheOptions;
use crate::data::remote::{self, Download};
pub(super) use uploads::{Begun, Uploads};

/// The configuration key of the store.
const KEY: &str = "training.checkpoint_store";
const HELP: &str = "use a URL such as s3://bucket/run, gs://bucket/run or az://container/run";

/// The folder of checkpoints at an address.
#[derive(Debug, Clone)]
struct CheckpointStore {
    address: String,
    stores: Stores,
}

/// The checkpoints and folders at the address of a store.
#[derive(Default)]
struct Listed {
    /// The objects of each folder named `step-…`, including incomplete uploads.
    steps: BTreeMap<u64, Vec<Object>>,
    /// The names of all folders.
    folders: BTreeSet<String>,
    /// Whether the address itself is a checkpoint.
    is_checkpoint: bool,
}

impl Listed {
    /// Returns the steps of complete checkpoints, oldest first.
    fn complete(&self) -> Vec<u64> {
        self.steps.iter().filter(|(_, objects)| is_complete(objects)).map(|(&step, _)| step).collect()
    }
}

impl CheckpointStore {
    fn new(address: &str) -> Result<Self, Error> {
        let stores = remote::stores(&CacheOptions::default())?;
        Ok(Self { address: address.trim_end_matches('/').into(), stores })
    }

    /// Returns the address of a folder in the store.
    fn at(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    /// Returns whether an address is that of this folder or lies in this folder.
    fn holds(&self, address: &str) -> bool {
        address.strip_prefix(&self.address).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    fn list(&self, watch: &dyn Watch) -> Result<Listed, zero_store::Error> {
        let mut listed = Listed::default();
        for object in self.stores.list_folder(&self.address, watch)? {
            let name = object.address.strip_prefix(&self.address).unwrap_or_default().trim_start_matches('/');
            listed.is_checkpoint |= name == MANIFEST;
            let Some((folder, _)) = name.split_once('/') else { continue };
            listed.folders.insert(folder.to_string());
            if let Some(step) = zero_checkpoint::step(Path::new(folder)) {
                listed.steps.entry(step).or_default().push(object);
            }
        }
        Ok(listed)
    }

    /// Uploads the checkpoint of a step from a folder, then removes old checkpoints.
    fn upload(
        &self,
        (step, folder): (u64, &Path),
        retention: Retention,
        watch: &dyn Watch,
    ) -> Result<(), zero_store::Error> {
        let address = self.at(&zero_checkpoint::name(step));
        // Objects that are already at this address belong to an older checkpoint with the same name, which the upload
        // replaces.
        remove(&self.stores, &self.stores.list_folder(&address, watch)?, watch)?;
        self.stores.upload_folder(folder, &address, |name| name == MANIFEST, watch)?;
        let listed = self.list(watch)?;
        let old = retention.superfluous(&listed.complete(), step);
        let is_left_over = |other: u64, objects: &[Object]| other < step && !is_complete(objects);
        let mut all =
            listed.steps.iter().filter(|(other, objects)| old.contains(other) || is_left_over(**other, objects));
        all.try_for_each(|(_, objects)| remove(&self.stores, objects, watch))
    }

    /// Renames the checkpoints after `step`, because a run that resumes after `step` repeats their steps. Returns their
    /// new addresses.
    fn set_back(&self, listed: Listed, step: u64, watch: &dyn Watch) -> Result<Vec<String>, zero_store::Error> {
        let Listed { steps, folders, .. } = listed;
        let mut aside = vec![];
        for (later, mut objects) in steps.into_iter().filter(|(other, _)| *other > step) {
            let name = zero_checkpoint::name(later);
            let (from, to) =
                (self.at(&name), self.at(&zero_checkpoint::superseded(&name, |name| folders.contains(name))));
            // Renames the manifest first: a checkpoint that lacks some of its files must not have a manifest.
            objects.sort_by_key(|object| !is_manifest(object));
            for object in &objects {
                self.stores.rename(object, &object.address.replacen(&from, &to, 1), watch)?;
            }
            aside.push(to);
        }
        Ok(aside)
    }
}

fn is_manifest(object: &Object) -> bool {
    object.address.rsplit('/').next() == Some(MANIFEST)
}

fn is_complete(objects: &[Object]) -> bool {
    objects.iter().any(is_manifest)
}

/// Removes objects, the manifest first.
fn remove(stores: &Stores, objects: &[Object], watch: &dyn Watch) -> Result<(), zero_store::Error> {
    let (manifests, others): (Vec<&Object>, Vec<&Object>) = objects.iter().partition(|object| is_manifest(object));
    manifests.into_iter().chain(others).try_for_each(|object| stores.remove(object, watch))
}

fn failed(key: &'static str) -> impl Fn(zero_store::Error) -> Error {
    move |error| Error::from(remote::failed(error)).named(key, HELP)
}

/// Checks the address of the store without network requests.
///
/// # Errors
/// Fails if the address is invalid, or if its store is read-only.
pub(super) fn check(config: &Config) -> Result<(), Error> {
    match &config.training.checkpoint_store {
        Some(address) => {
            zero_store::check_writable(address).map_err(|error| Error::setting(KEY, error.to_string(), HELP))
        }
        None => Ok(()),
    }
}

/// Completes `--resume auto` for a run whose folder has no checkpoint: selects the newest checkpoint in its store. A
/// collective.
pub(super) fn completed(
    options: &RunOptions,
    config: &Config,
    comm: &dyn Communicator,
    watch: &dyn crate::data::Watch,
) -> Result<RunOptions, Error> {
    let root = Path::new(&config.training.output_dir).join("checkpoints");
    let Some(address) = &config.training.checkpoint_store else { return Ok(options.clone()) };
    if options.resume != Some(Resume::Auto)
        || !options.restarts.from.is_empty()
        || !zero_checkpoint::committed(&root)?.is_empty()
    {
        return Ok(options.clone());
    }
    let store = CheckpointStore::new(address)?;
    let newest = on_first_rank(comm, || Ok(store.list(&Download::of(watch)).map_err(failed(KEY))?.complete().pop()))?;
    let resume = newest.map_or(Resume::Auto, |step| Resume::From(store.at(&zero_checkpoint::name(step)).into()));
    Ok(RunOptions { resume: Some(resume), ..options.clone() })
}

/// Downloads the checkpoint at an address on every rank. If a run is at the address, downloads its newest checkpoint. A
/// collective.
pub(super) fn fetch(address: &str, comm: &dyn Communicator, watch: &dyn crate::data::Watch) -> Result<PathBuf, Error> {
    let download = Download::of(watch);
    let found = on_first_rank(comm, || newest(address, "--resume", &download))?;
    patiently(comm, || fetch_step(address, found, "--resume", &download))?
}

/// Downloads the checkpoint at a store URL. If the URL is that of a run, downloads the run's newest checkpoint. Errors
/// name `key` as the source of the URL. Returns the checkpoint's folder.
///
/// # Errors
/// Fails if there is no checkpoint, or if the store fails.
pub fn fetch_checkpoint(address: &str, key: &'static str) -> Result<PathBuf, Error> {
    let download = Download::of(&crate::data::Unwatched);
    let found = newest(address, key, &download)?;
    fetch_step(address, found, key, &download)
}

/// Returns the store URLs of all complete checkpoints of a run, oldest first, or the URL of the checkpoint itself. Errors
/// name `key` as the source of the URL.
///
/// # Errors
/// Fails if there is no checkpoint, or if the store fails.
pub fn checkpoints_in_store(address: &str, key: &'static str) -> Result<Vec<String>, Error> {
    let steps = steps(address, key, &Download::of(&crate::data::Unwatched))?;
    let store = CheckpointStore::new(address)?;
    Ok(match steps.is_empty() {
        true => vec![store.address],
        false => steps.into_iter().map(|step| store.at(&zero_checkpoint::name(step))).collect(),
    })
}

/// Returns the step of the newest checkpoint below an address. Returns `None` if the address itself is a checkpoint.
fn newest(address: &str, key: &'static str, download: &Download<'_>) -> Result<Option<u64>, Error> {
    Ok(steps(address, key, download)?.pop())
}

/// Returns the steps of the complete checkpoints below an address, oldest first. Returns no steps if the address itself
/// is a checkpoint.
fn steps(address: &str, key: &'static str, download: &Download<'_>) -> Result<Vec<u64>, Error> {
    let listed = CheckpointStore::new(address)?.list(download).map_err(failed(key))?;
    let steps = listed.complete();
    if steps.is_empty() && !listed.is_checkpoint {
        let help = "give a checkpoint folder, or a folder that contains `step-…` folders";
        return Err(Error::setting(key, format!("there is no checkpoint at {address}"), help));
    }
    Ok(steps)
}

fn fetch_step(address: &str, step: Option<u64>, key: &'static str, download: &Download<'_>) -> Result<PathBuf, Error> {
    let store = CheckpointStore::new(address)?;
    let folder = step.map_or(store.address.clone(), |step| store.at(&zero_checkpoint::name(step)));
    store.stores.fetch_folder(&folder, |_| true, download).map_err(failed(key))
}

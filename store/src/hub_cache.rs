//! The cache of Hugging Face's Python tools. With `HF_HUB_OFFLINE=1`, repositories are read from it.
//!
//! `models--owner--name/refs/main` holds a commit, and `snapshots/COMMIT` holds the files of that commit as links to
//! `blobs`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use object_store::path::Path as Key;

use crate::files::find;
use crate::location::{Location, RepoKind, Service};
use crate::{Error, Object};

/// Returns the value of an environment variable, unless it is empty.
pub(crate) fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns whether the environment forbids requests to the Hub.
pub(crate) fn is_offline() -> bool {
    let is_true = |value: String| ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str());
    ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().filter_map(variable).any(is_true)
}

/// Returns the folder of Hugging Face's tools.
pub(crate) fn home() -> Option<PathBuf> {
    let cache = || variable("XDG_CACHE_HOME").or_else(|| Some(format!("{}/.cache", variable("HOME")?)));
    variable("HF_HOME").map(PathBuf::from).or_else(|| Some(Path::new(&cache()?).join("huggingface")))
}

fn folder() -> Option<PathBuf> {
    let named = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE"));
    named.map(PathBuf::from).or_else(|| Some(home()?.join("hub")))
}

/// Lists the files in a folder of a repository, including those in its subfolders.
///
/// # Errors
/// Fails if the cache does not have the revision, or if it cannot be read.
pub(crate) fn list(
    location: &Location,
    (kind, repo, revision): (RepoKind, &str, &str),
    within: &str,
) -> Result<Vec<Object>, Error> {
    let cache = folder().unwrap_or_default();
    let repository = cache.join(format!("{}--{}", kind.plural(), repo.replace('/', "--")));
    let commit = fs::read_to_string(repository.join("refs").join(revision));
    let commit = commit.map_or_else(|_| revision.to_string(), |commit| commit.trim().to_string());
    let snapshot = repository.join("snapshots").join(&commit);
    if commit.contains('/') || !snapshot.is_dir() {
        let problem = format!("HF_HUB_OFFLINE is set, and {} does not have the revision `{revision}`", cache.display());
        return Err(Error::Answer { address: location.to_string(), problem });
    }
    let mut names = vec![];
    find(&snapshot, Path::new(""), &mut names)?;
    let within = Key::from(within);
    let mut objects = vec![];
    for name in names {
        let path = snapshot.join(&name);
        let path = path.canonicalize().map_err(Error::local(&path))?;
        let size = path.metadata().map_err(Error::local(&path))?.len();
        let Ok(key) = Key::parse(name.to_string_lossy()) else { continue };
        if !key.prefix_matches(&within) {
            continue;
        }
        let mut location = location.clone();
        location.service = Service::Hub { kind, repo: repo.into(), revision: commit.clone() };
        // The name of a blob is its checksum.
        let version = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let address = location.address(key.as_ref());
        objects.push(Object { address, location, key, size, version, checksum: None, local: Some(path) });
    }
    Ok(objects)
}

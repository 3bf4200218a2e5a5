//! Finds the folder in which tokens and downloads are kept between runs.

use std::io;
use std::path::{Path, PathBuf};

use zero_engine::DataError;

use super::options::CacheOptions;

/// The environment variable with the folder of the cache.
const VARIABLE: &str = "ZERO_TRAIN_CACHE";

/// Returns the folder of the cache.
///
/// # Errors
/// Fails if neither the options nor the environment name a folder.
pub(super) fn folder_of(options: &CacheOptions) -> Result<PathBuf, DataError> {
    match &options.folder {
        Some(folder) => Ok(folder.clone()),
        None => default_folder(|name| std::env::var_os(name)).ok_or_else(|| DataError::Cache {
            path: "~/.cache/zero-train".into(),
            source: io::Error::other("the environment variable HOME is not set"),
        }),
    }
}

/// Returns the folder that is used without `data.cache_dir`: `$ZERO_TRAIN_CACHE`, or else `zero-train` in
/// `$XDG_CACHE_HOME`, or else `~/.cache/zero-train`. Returns `None` if neither these variables nor `HOME` are set.
fn default_folder(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    // An empty variable counts as unset. Relative paths are ignored, as the XDG specification demands.
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path(VARIABLE)
        .or_else(|| path("XDG_CACHE_HOME").filter(|path| path.is_absolute()).map(|path| path.join("zero-train")))
        .or_else(|| path("HOME").map(|home| home.join(Path::new(".cache/zero-train"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_that_is_set_decides() {
        let folder = |set: &[(&str, &str)]| {
            default_folder(|name| set.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into()))
        };
        let (own, xdg, home) = (("ZERO_TRAIN_CACHE", "c"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h"));
        assert_eq!(folder(&[home, xdg, own]).unwrap(), Path::new("c"));
        assert_eq!(folder(&[home, xdg, ("ZERO_TRAIN_CACHE", "")]).unwrap(), Path::new("/x/zero-train"));
        assert_eq!(folder(&[home, ("XDG_CACHE_HOME", "x")]).unwrap(), Path::new("/h/.cache/zero-train"));
        assert_eq!(folder(&[]), None);
    }
}

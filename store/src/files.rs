//! The files of a folder on this machine, including those in the folders below it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;

/// Finds the files in a folder, by their names relative to `root`.
pub(crate) fn find(root: &Path, relative: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    let folder = root.join(relative);
    for entry in fs::read_dir(&folder).map_err(Error::local(&folder))? {
        let entry = entry.map_err(Error::local(&folder))?;
        let name = relative.join(entry.file_name());
        match root.join(&name).is_dir() {
            true => find(root, &name, files)?,
            false => files.push(name),
        }
    }
    Ok(())
}

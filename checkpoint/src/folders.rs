//! Finds checkpoints on disk.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::error::CheckpointError;
use crate::manifest::MANIFEST;

/// Lists the committed checkpoints under `root`, oldest step first. Returns an empty list if the folder does not exist.
///
/// # Errors
/// Fails if the folder cannot be listed.
pub fn committed(root: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let mut found = numbered(root)?;
    found.retain(|(_, path)| path.join(MANIFEST).is_file());
    Ok(found)
}

/// Returns the newest committed checkpoint under `root`, if any.
///
/// # Errors
/// Fails if the folder cannot be listed.
pub fn newest(root: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    Ok(committed(root)?.pop().map(|(_, path)| path))
}

/// Resolves a path given by the user to checkpoints, oldest step first: the path itself, or all `step-…` folders in it
/// or in its `checkpoints` folder. Includes folders without a manifest, which were never committed or have lost it.
///
/// # Errors
/// Fails if the path has no checkpoint or a folder cannot be listed.
pub fn meant(path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    // Follow a link such as `checkpoints/best` now, because it may point to another checkpoint later.
    if step(path).is_none()
        && let Ok(target) = fs::read_link(path)
        && step(&target).is_some()
    {
        return meant(&path.with_file_name(target));
    }
    if path.join(MANIFEST).is_file() || step(path).is_some() && path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    for root in [path.to_path_buf(), path.join("checkpoints")] {
        let found = numbered(&root)?;
        if !found.is_empty() {
            return Ok(found.into_iter().map(|(_, path)| path).collect());
        }
    }
    let reason = match path.is_dir() {
        true => io::Error::other("the folder contains no checkpoint (no `step-…` folder)"),
        false => io::Error::new(io::ErrorKind::NotFound, "no such folder"),
    };
    Err(CheckpointError::io(path)(reason))
}

/// Returns the newest folder in the result of [`meant`] that has a manifest, or the oldest folder if none has a
/// manifest.
///
/// # Errors
/// See [`meant`].
pub fn newest_meant(path: &Path) -> Result<PathBuf, CheckpointError> {
    let mut found = meant(path)?;
    // Skip folders that were never committed.
    while found.len() > 1 && found.last().is_some_and(|folder| !folder.join(MANIFEST).is_file()) {
        found.pop();
    }
    Ok(found.pop().unwrap_or_else(|| path.to_path_buf()))
}

/// Renames the checkpoints after `step` to `superseded-step-…`, because a run resumes from `step` and will save their
/// steps again. Their contents stay the same. Returns their new paths.
///
/// # Errors
/// Fails if a folder cannot be renamed.
pub fn set_back(root: &Path, step: u64) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut aside = vec![];
    for (_, later) in numbered(root)?.into_iter().filter(|&(other, _)| other > step) {
        let name = later.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let free = root.join(superseded(&name, |other| root.join(other).exists()));
        fs::rename(&later, &free).map_err(CheckpointError::io(&later))?;
        aside.push(free);
    }
    Ok(aside)
}

/// Returns a free name `superseded-…` for the checkpoint folder `name`, whose step a run will save again.
pub fn superseded(name: &str, is_taken: impl Fn(&str) -> bool) -> String {
    let name = format!("superseded-{name}");
    match is_taken(&name) {
        false => name,
        true => (1..).map(|n| format!("{name}.{n}")).find(|name| !is_taken(name)).unwrap_or(name),
    }
}

/// Measures the write rate of a disk in bytes per second by writing and syncing `bytes` bytes, at most 8 MiB.
///
/// # Errors
/// Fails if the probe file cannot be written.
pub fn write_rate(root: &Path, bytes: u64) -> Result<f64, CheckpointError> {
    fs::create_dir_all(root).map_err(CheckpointError::io(root))?;
    let path = root.join(".probe");
    let bytes = bytes.clamp(1, 8 << 20);
    let started = Instant::now();
    let write = |mut file: File| {
        io::copy(&mut io::repeat(0).take(bytes), &mut file)?;
        file.sync_all()
    };
    let written = File::create(&path).and_then(write);
    let rate = bytes as f64 / started.elapsed().as_secs_f64();
    let removed = fs::remove_file(&path);
    written.and(removed).map(|()| rate).map_err(CheckpointError::io(&path))
}

/// Lists the folders named `step-…`, by step.
fn numbered(root: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let entries = match fs::read_dir(root) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        other => other.map_err(CheckpointError::io(root))?,
    };
    let mut found = vec![];
    for entry in entries {
        let path = entry.map_err(CheckpointError::io(root))?.path();
        if let Some(step) = step(&path)
            && path.is_dir()
        {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the name of the folder with the checkpoint of a step.
#[must_use]
pub fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Parses the step from a folder's name.
#[must_use]
pub fn step(folder: &Path) -> Option<u64> {
    folder.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

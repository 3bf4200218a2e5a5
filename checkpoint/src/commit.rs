//! Commits a checkpoint atomically: a process killed at any time leaves either a complete checkpoint or none.
//!
//! A save writes into `.unfinished-step-…`. Once every shard is synced, the manifest is written, then the folder is
//! renamed, then `latest` is replaced, and finally old checkpoints are removed. Each phase is synced to disk before the
//! next begins.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use zero_comm::{Buffer, Communicator};

use crate::error::CheckpointError;
use crate::failpoint;
use crate::folders::{committed, name};
use crate::manifest::{MANIFEST, Manifest, ShardEntry, shard_file};
use crate::save::Save;
use crate::shard::Written;

/// Returns the temporary folder of a save.
pub(crate) fn unfinished(root: &Path, step: u64) -> PathBuf {
    root.join(format!(".unfinished-{}", name(step)))
}

/// Creates the temporary folder, new and empty.
pub(crate) fn begin(root: &Path, unfinished: &Path) -> Result<(), CheckpointError> {
    remove(unfinished)?;
    fs::create_dir_all(root).map_err(CheckpointError::io(root))?;
    fs::create_dir(unfinished).map_err(CheckpointError::io(unfinished))?;
    failpoint::at("save::begun", unfinished)
}

/// Removes a folder if it exists.
pub(crate) fn remove(folder: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(CheckpointError::io(folder)(e)),
        _ => Ok(()),
    }
}

/// Gathers the size and checksums of every rank's shard into the manifest. Collective.
pub(crate) fn exchange(
    comm: &dyn Communicator,
    written: &Written,
    manifest: &mut Manifest,
) -> Result<(), CheckpointError> {
    let states = manifest.states.len();
    let mut mine = vec![written.bytes as i64, i64::from(written.crc32)];
    mine.extend(written.tensors.iter().map(|&crc32| i64::from(crc32)));
    let mut counts = vec![2; comm.size()];
    for entry in manifest.parameters.values() {
        entry.pieces.iter().for_each(|piece| counts[piece.shard] += entry.tensors_per_piece(states));
        entry.local.iter().for_each(|piece| counts[piece.shard] += 1);
    }
    let all = Buffer::I64(vec![0; counts.iter().sum()]);
    let all = comm.all_gather(Buffer::I64(mine), all, &counts).wait()?.output.into_i64()?;
    let mut rest = all.as_slice();
    let mut of_ranks = vec![];
    for &count in &counts {
        let (of_rank, after) = rest.split_at(count);
        of_ranks.push(of_rank.iter().copied());
        rest = after;
    }
    let mut next = |rank: usize| of_ranks[rank].next().unwrap_or_default();
    let entry =
        |rank| ShardEntry { file: shard_file(rank, comm.size()), bytes: next(rank) as u64, crc32: next(rank) as u32 };
    manifest.shards = (0..comm.size()).map(entry).collect();
    for entry in manifest.parameters.values_mut() {
        let tensors = entry.tensors_per_piece(states);
        for piece in &mut entry.pieces {
            piece.crc32 = (0..tensors).map(|_| next(piece.shard) as u32).collect();
        }
        entry.local.iter_mut().for_each(|piece| piece.crc32 = next(piece.shard) as u32);
    }
    Ok(())
}

/// Turns synced shards into a checkpoint.
pub(crate) fn commit(root: &Path, manifest: &Manifest, save: &Save) -> Result<(), CheckpointError> {
    let unfinished = unfinished(root, manifest.step);
    let folder = root.join(name(manifest.step));
    manifest.write(&unfinished)?;
    sync(&unfinished)?;
    failpoint::at("save::manifest-written", &unfinished)?;
    if let Some(lock) = &save.lock {
        lock.check()?;
    }
    // A run that resumed from an earlier step may save this step a second time. The folder of the first save is moved
    // aside and kept until the new folder is in place.
    let replaced = root.join(format!(".replaced-{}", name(manifest.step)));
    if folder.exists() {
        remove(&replaced)?;
        fs::rename(&folder, &replaced).map_err(CheckpointError::io(&folder))?;
    }
    failpoint::at("save::moved-aside", &folder)?;
    fs::rename(&unfinished, &folder).map_err(CheckpointError::io(&folder))?;
    failpoint::at("save::renamed", &folder)?;
    sync(root)?;
    failpoint::at("save::synced", &folder)?;
    point(root, &folder)?;
    // Also removes the folder that a killed save has moved aside.
    remove(&replaced)?;
    retain(root, manifest.step, save)?;
    failpoint::at("save::retained", root)
}

/// Writes the name of the newest checkpoint into the file `latest`. A rename replaces the file, so that it is never
/// half written.
fn point(root: &Path, folder: &Path) -> Result<(), CheckpointError> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (temporary, latest) = (root.join(".latest"), root.join("latest"));
    fs::write(&temporary, format!("{name}\n")).map_err(CheckpointError::io(&temporary))?;
    sync(&temporary)?;
    failpoint::at("save::pointer-written", &temporary)?;
    fs::rename(&temporary, &latest).map_err(CheckpointError::io(&latest))?;
    sync(root)?;
    failpoint::at("save::pointed", &latest)
}

/// Removes old checkpoints.
fn retain(root: &Path, step: u64, save: &Save) -> Result<(), CheckpointError> {
    let all = committed(root)?;
    let steps: Vec<u64> = all.iter().map(|&(step, _)| step).collect();
    let old = save.retention.superfluous(&steps, step);
    all.iter().filter(|(step, _)| old.contains(step)).try_for_each(|(_, old)| {
        // Remove the manifest first: if the process is killed here, the rest does not count as a checkpoint.
        let manifest = old.join(MANIFEST);
        fs::remove_file(&manifest).map_err(CheckpointError::io(&manifest))?;
        remove(old)
    })
}

fn sync(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(CheckpointError::io(path))
}

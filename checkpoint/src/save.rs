//! Writing a checkpoint.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use zero_comm::{Buffer, Communicator};
use zero_partition::{Kind, Range, Zero};
use zero_pipeline::Coordinates;

use crate::error::CheckpointError;
use crate::folders::committed;
use crate::manifest::{FORMAT, Manifest, ParameterEntry, PieceEntry, ShardEntry, VERSION, shard_file, tensor_name};
use crate::together::together;
use crate::writer::TensorWriter;

/// What a checkpoint records besides parameters and optimizer state.
#[derive(Debug, Clone, PartialEq)]
pub struct Save {
    /// Optimizer steps of the run, skipped ones included.
    pub step: u64,
    /// ZeRO stage, for the record.
    pub zero_stage: u8,
    /// What the engine keeps besides.
    pub engine: serde_json::Value,
    /// What the configuration says of model and tokenizer, for an export.
    pub config: serde_json::Value,
    /// How many checkpoints stay; 0 keeps all.
    pub keep_last: usize,
}

/// Writes `root/step-…` and returns its path; a collective. It is there whole or not at all.
///
/// # Errors
/// On every rank if one of them fails; then no folder named `step-…` has appeared.
pub fn save(root: &Path, zero: &Zero, comm: &dyn Communicator, save: &Save) -> Result<PathBuf, CheckpointError> {
    let name = format!("step-{:08}", save.step);
    let folder = root.join(&name);
    let unfinished = root.join(format!(".unfinished-{name}"));
    if comm.rank() == 0 {
        together(comm, fresh(root, &unfinished))?;
    } else {
        together(comm, Ok(()))?;
    }
    let mut parameters = parameters(zero);
    let entry = together(comm, write_shard(&unfinished, zero, comm, &mut parameters))?;
    let shards = exchange(comm, &entry, &mut parameters, zero.kinds().len())?;
    let manifest = Manifest {
        format: FORMAT.into(),
        version: VERSION,
        step: save.step,
        updates: zero.updates(),
        world_size: comm.size(),
        zero_stage: save.zero_stage,
        states: zero.state_names().iter().map(ToString::to_string).collect(),
        engine: save.engine.clone(),
        config: save.config.clone(),
        shards,
        parameters,
    };
    let committing =
        if comm.rank() == 0 { commit(root, &unfinished, &folder, &manifest, save.keep_last) } else { Ok(()) };
    together(comm, committing)?;
    Ok(folder)
}

fn fresh(root: &Path, unfinished: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(unfinished) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(CheckpointError::io(unfinished)(e)),
        _ => {}
    }
    fs::create_dir_all(root).map_err(CheckpointError::io(root))?;
    fs::create_dir(unfinished).map_err(CheckpointError::io(unfinished))
}

/// Writes this rank's shard, one piece after the other, so that it is never in memory as a whole; the checksums of its pieces
/// are put into `parameters`.
fn write_shard(
    folder: &Path,
    zero: &Zero,
    comm: &dyn Communicator,
    parameters: &mut BTreeMap<String, ParameterEntry>,
) -> Result<ShardEntry, CheckpointError> {
    let (kinds, states) = (zero.kinds(), zero.state_names());
    let state = |kind: Kind| match kind {
        Kind::Parameter => None,
        Kind::State(index) => states.get(index).copied(),
    };
    let file = shard_file(comm.rank(), comm.size());
    let mut tensors = vec![];
    for (name, entry) in &*parameters {
        for piece in entry.pieces.iter().filter(|piece| piece.shard == comm.rank()) {
            let tensor =
                |&kind| (tensor_name(name, piece.start, state(kind)), Dtype::F32, vec![piece.end - piece.start]);
            tensors.extend(kinds.iter().map(tensor));
        }
    }
    let mut writer = TensorWriter::create(&folder.join(&file), tensors, None)?;
    let named = zero.model().parameters().iter().enumerate();
    let ids: BTreeMap<&str, usize> = named.map(|(id, parameter)| (parameter.name(), id)).collect();
    for (name, entry) in parameters {
        for piece in entry.pieces.iter_mut().filter(|piece| piece.shard == comm.rank()) {
            let range = Range { parameter: ids[name.as_str()], elements: piece.start..piece.end };
            for &kind in &kinds {
                piece.crc32.push(writer.write(bytemuck::cast_slice(&zero.read(kind, &range)?))?);
            }
        }
    }
    let (bytes, crc32) = writer.finish()?;
    Ok(ShardEntry { file, bytes, crc32 })
}

/// Every rank's size and checksum, in rank order; and the checksums of all pieces.
fn exchange(
    comm: &dyn Communicator,
    entry: &ShardEntry,
    parameters: &mut BTreeMap<String, ParameterEntry>,
    kinds: usize,
) -> Result<Vec<ShardEntry>, CheckpointError> {
    let mut mine = vec![entry.bytes as i64, i64::from(entry.crc32)];
    let mut counts = vec![2; comm.size()];
    for piece in parameters.values().flat_map(|entry| &entry.pieces) {
        counts[piece.shard] += kinds;
        if piece.shard == comm.rank() {
            mine.extend(piece.crc32.iter().map(|&crc32| i64::from(crc32)));
        }
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
    let shards = (0..comm.size()).map(entry).collect();
    for piece in parameters.values_mut().flat_map(|entry| &mut entry.pieces) {
        piece.crc32 = (0..kinds).map(|_| next(piece.shard) as u32).collect();
    }
    Ok(shards)
}

fn commit(
    root: &Path,
    unfinished: &Path,
    folder: &Path,
    manifest: &Manifest,
    keep_last: usize,
) -> Result<(), CheckpointError> {
    manifest.write(unfinished)?;
    sync(unfinished)?;
    // A run that was set back writes a step anew: the old folder makes room, and is still there under another name
    // until the new one is.
    let replaced = root.join(format!(".replaced-step-{:08}", manifest.step));
    let replaces = folder.exists();
    if replaces {
        fs::rename(folder, &replaced).map_err(CheckpointError::io(folder))?;
    }
    fs::rename(unfinished, folder).map_err(CheckpointError::io(folder))?;
    sync(root)?;
    if replaces {
        fs::remove_dir_all(&replaced).map_err(CheckpointError::io(&replaced))?;
    }
    point(root, folder)?;
    retain(root, keep_last)
}

/// What is where; checksums are still to come.
fn parameters(zero: &Zero) -> BTreeMap<String, ParameterEntry> {
    let model = zero.model();
    let mut entries: BTreeMap<String, ParameterEntry> = model
        .parameters()
        .iter()
        .map(|p| (p.name().to_string(), ParameterEntry { shape: p.shape().dims().to_vec(), pieces: vec![] }))
        .collect();
    let mesh = zero.groups().mesh();
    for (id, segment) in zero.layout().segments().iter().enumerate() {
        for replica in 0..zero.layout().ranks() {
            let shard = mesh.rank(Coordinates { stage: zero.stages().owner(id), replica });
            for (parameter, elements, _) in segment.overlaps(segment.shard(replica)) {
                if let Some(entry) = entries.get_mut(model.parameters()[parameter].name()) {
                    let portions = Range { parameter, elements }.portions().map(|range| range.elements);
                    let piece =
                        |at: ops::Range<usize>| PieceEntry { shard, start: at.start, end: at.end, crc32: vec![] };
                    entry.pieces.extend(portions.map(piece));
                }
            }
        }
    }
    entries
}

/// `latest` names the newest checkpoint; replaced by rename, so that it is never half written.
fn point(root: &Path, folder: &Path) -> Result<(), CheckpointError> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (temporary, latest) = (root.join(".latest"), root.join("latest"));
    fs::write(&temporary, format!("{name}\n")).map_err(CheckpointError::io(&temporary))?;
    sync(&temporary)?;
    fs::rename(&temporary, &latest).map_err(CheckpointError::io(&latest))?;
    sync(root)
}

fn retain(root: &Path, keep_last: usize) -> Result<(), CheckpointError> {
    let all = committed(root)?;
    let excess = if keep_last == 0 { 0 } else { all.len().saturating_sub(keep_last) };
    for (_, old) in &all[..excess] {
        fs::remove_dir_all(old).map_err(CheckpointError::io(old))?;
    }
    Ok(())
}

fn sync(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(CheckpointError::io(path))
}

//! Writing a checkpoint.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, View, serialize_to_file};
use zero_comm::{Buffer, Communicator};
use zero_partition::{Kind, Range, Zero, ZeroError};
use zero_pipeline::Coordinates;

use crate::error::CheckpointError;
use crate::load::committed;
use crate::manifest::{FORMAT, Manifest, ParameterEntry, PieceEntry, ShardEntry, VERSION, shard_file, tensor_name};
use crate::together::together;

/// What a checkpoint records besides parameters and optimizer state.
#[derive(Debug, Clone, PartialEq)]
pub struct Save {
    /// Optimizer steps of the run, skipped ones included.
    pub step: u64,
    /// ZeRO stage, for the record.
    pub zero_stage: u8,
    /// What the engine keeps besides.
    pub engine: serde_json::Value,
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
    let entry = together(comm, write_shard(&unfinished, zero, comm))?;
    let entries = exchange(comm, &entry)?;
    let committing =
        if comm.rank() == 0 { commit(root, &unfinished, &folder, zero, comm, save, entries) } else { Ok(()) };
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

/// One tensor of a shard: f32, little endian. It is read when it is written, so that a shard is never in memory as a whole.
struct Values<'a> {
    zero: &'a Zero,
    kind: Kind,
    range: Range,
    shape: [usize; 1],
    /// Why a tensor of the shard could not be read, if one could not.
    failed: &'a RefCell<Option<ZeroError>>,
}

impl View for Values<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        match self.zero.read(self.kind, &self.range) {
            Ok(values) => Cow::Owned(bytemuck::cast_slice(&values).to_vec()),
            Err(error) => {
                self.failed.borrow_mut().get_or_insert(error);
                Cow::Owned(vec![0; self.data_len()])
            }
        }
    }
    fn data_len(&self) -> usize {
        self.range.elements.len() * 4
    }
}

fn write_shard(folder: &Path, zero: &Zero, comm: &dyn Communicator) -> Result<ShardEntry, CheckpointError> {
    let file = shard_file(comm.rank(), comm.size());
    let path = folder.join(&file);
    let failed = RefCell::new(None);
    let mut tensors = vec![];
    for range in zero.saved_ranges() {
        let parameter = zero.model().parameters()[range.parameter].name();
        for kind in zero.kinds() {
            let state = match kind {
                Kind::Parameter => None,
                Kind::State(index) => zero.state_names().get(index).copied(),
            };
            let shape = [range.elements.len()];
            let values = Values { zero, kind, range: range.clone(), shape, failed: &failed };
            tensors.push((tensor_name(parameter, range.elements.start, state), values));
        }
    }
    serialize_to_file(tensors, None, &path).map_err(|e| match e {
        safetensors::SafeTensorError::IoError(source) => CheckpointError::io(&path)(source),
        other => CheckpointError::damaged(&path, other.to_string()),
    })?;
    if let Some(error) = failed.into_inner() {
        return Err(error.into());
    }
    sync(&path)?;
    let (bytes, crc32) = checksum(&path)?;
    Ok(ShardEntry { file, bytes, crc32 })
}

/// Size and CRC-32 of a file.
pub(crate) fn checksum(path: &Path) -> Result<(u64, u32), CheckpointError> {
    let mut file = File::open(path).map_err(CheckpointError::io(path))?;
    let (mut hasher, mut bytes) = (crc32fast::Hasher::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(CheckpointError::io(path))?;
        if read == 0 {
            return Ok((bytes, hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
        bytes += read as u64;
    }
}

/// Every rank's size and checksum, in rank order.
fn exchange(comm: &dyn Communicator, entry: &ShardEntry) -> Result<Vec<ShardEntry>, CheckpointError> {
    let mine = Buffer::I64(vec![entry.bytes as i64, i64::from(entry.crc32)]);
    let all = Buffer::I64(vec![0; 2 * comm.size()]);
    let all = comm.all_gather(mine, all, &vec![2; comm.size()]).wait()?.output;
    let Buffer::I64(all) = all else { return Ok(vec![]) };
    let entry = |(rank, pair): (usize, &[i64])| ShardEntry {
        file: shard_file(rank, comm.size()),
        bytes: pair[0] as u64,
        crc32: pair[1] as u32,
    };
    Ok(all.chunks(2).enumerate().map(entry).collect())
}

fn commit(
    root: &Path,
    unfinished: &Path,
    folder: &Path,
    zero: &Zero,
    comm: &dyn Communicator,
    save: &Save,
    shards: Vec<ShardEntry>,
) -> Result<(), CheckpointError> {
    let manifest = Manifest {
        format: FORMAT.into(),
        version: VERSION,
        step: save.step,
        updates: zero.updates(),
        world_size: comm.size(),
        zero_stage: save.zero_stage,
        states: zero.state_names().iter().map(ToString::to_string).collect(),
        engine: save.engine.clone(),
        shards,
        parameters: parameters(zero),
    };
    let text = serde_json::to_vec_pretty(&manifest)
        .map_err(|e| CheckpointError::damaged(unfinished, format!("manifest: {e}")))?;
    let path = unfinished.join("manifest.json");
    fs::write(&path, text).map_err(CheckpointError::io(&path))?;
    sync(&path)?;
    sync(unfinished)?;
    // A run that was set back writes a step anew: the old folder makes room, and is still there under another name
    // until the new one is.
    let replaced = root.join(format!(".replaced-step-{:08}", save.step));
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
    retain(root, save.keep_last)
}

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
                    entry.pieces.extend(portions.map(|at| PieceEntry { shard, start: at.start, end: at.end }));
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

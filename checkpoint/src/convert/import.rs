//! Imports a Hugging Face folder as a checkpoint at step 0, with parameters only and no optimizer state.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use zero_model::Model;
use zero_partition::Range;

use crate::commit;
use crate::convert::pretrained;
use crate::error::CheckpointError;
use crate::folders::{committed, name};
use crate::manifest::{FORMAT, Manifest, ParameterEntry, PieceEntry, ShardEntry, VERSION, shard_file, tensor_name};
use crate::retention::Retention;
use crate::save::Save;
use crate::weights::Weights;
use crate::writer::TensorWriter;

/// Writes the weights of a Hugging Face folder as the checkpoint `root/step-00000000` of a model, atomically, and
/// returns its path. `config` holds the model and tokenizer settings that the checkpoint records for an export.
///
/// Values are converted to f32 and copied 16 MiB at a time.
///
/// # Errors
/// Fails if `root` already has checkpoints, the folder cannot be read (see
/// [`load_pretrained`](crate::load_pretrained)), or a file cannot be written.
pub fn import(
    folder: &Path,
    model: &Model,
    root: &Path,
    config: serde_json::Value,
) -> Result<PathBuf, CheckpointError> {
    let weights = pretrained::open(folder, model)?;
    if !committed(root)?.is_empty() {
        return Err(CheckpointError::refused(root, "the folder already contains checkpoints; choose another folder"));
    }
    let unfinished = commit::unfinished(root, 0);
    commit::begin(root, &unfinished)?;
    let written = write(&weights, model, &unfinished, config.clone());
    if written.is_err() {
        // Report the write error even if the leftovers cannot be removed; the next import removes them.
        let _ = commit::remove(&unfinished);
    }
    let save = Save {
        step: 0,
        samples: 0,
        loss_scale: None,
        zero_stage: 0,
        engine: serde_json::Value::Null,
        config,
        retention: Retention::default(),
        lock: None,
    };
    commit::commit(root, &written?, &save)?;
    Ok(root.join(name(save.step)))
}

/// Writes the only shard. Returns the manifest, which the commit writes.
fn write(
    weights: &Weights,
    model: &Model,
    folder: &Path,
    config: serde_json::Value,
) -> Result<Manifest, CheckpointError> {
    // The tensors of a shard are ordered by parameter name.
    let parameters: BTreeMap<&str, Range> = model
        .parameters()
        .iter()
        .enumerate()
        .map(|(parameter, p)| (p.name(), Range { parameter, elements: 0..p.elements() }))
        .collect();
    let ranges =
        || parameters.iter().flat_map(|(name, range)| range.clone().portions().map(move |range| (*name, range)));
    let tensors = ranges()
        .map(|(name, range)| (tensor_name(name, range.elements.start, None), Dtype::F32, vec![range.elements.len()]));
    let file = shard_file(0, 1);
    let mut writer = TensorWriter::create(&folder.join(&file), tensors, None)?;
    let mut entries = BTreeMap::new();
    for (name, range) in ranges() {
        let crc32 = writer.write(bytemuck::cast_slice(&weights.read(&range)?))?;
        let piece =
            PieceEntry { shard: 0, slice: 0, start: range.elements.start, end: range.elements.end, crc32: vec![crc32] };
        let shape = || model.parameters()[range.parameter].shape().dims().to_vec();
        let new = || ParameterEntry { shape: shape(), ..ParameterEntry::default() };
        let entry = entries.entry(name.to_string()).or_insert_with(new);
        entry.pieces.push(piece);
    }
    let (bytes, crc32) = writer.finish()?;
    Ok(Manifest {
        format: FORMAT.into(),
        version: VERSION,
        step: 0,
        updates: 0,
        samples: 0,
        loss_scale: None,
        local_steps: None,
        schedule_free: None,
        world_size: 1,
        zero_stage: 0,
        states: vec![],
        engine: serde_json::Value::Null,
        config,
        buffers: BTreeMap::new(),
        shards: vec![ShardEntry { file, bytes, crc32 }],
        parameters: entries,
    })
}

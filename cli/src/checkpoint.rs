//! `zero-train checkpoint`: inspects and verifies checkpoints, imports pretrained weights, and exports weights.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zero_checkpoint::{CheckpointError, Manifest, ParameterEntry};
use zero_engine::{Error, ExportDtype, Exported, Weights, bytes, counted};
use zero_train::train::{checkpoints_in_store, fetch_checkpoint, write_folder};

use crate::arguments::{ExportArgs, Floats};
use crate::printed::{show, tell};

/// Returns the newest checkpoint of `path` with its manifest. `path` is a checkpoint, a run, or a run's `checkpoints`
/// folder.
fn newest(path: &Path) -> Result<(PathBuf, Manifest), Error> {
    let folder = zero_checkpoint::newest_meant(&local(path)?).map_err(of_folder)?;
    let manifest = Manifest::read(&folder).map_err(of_folder)?;
    Ok((folder, manifest))
}

/// Returns a local folder for `path`. Downloads the checkpoint if `path` is an address of a store.
fn local(path: &Path) -> Result<PathBuf, Error> {
    match zero_engine::config::address(path) {
        Some(address) => fetch_checkpoint(address, "<DIR>"),
        None => Ok(path.to_path_buf()),
    }
}

/// Adds the command-line argument to an error about its folder.
fn of_folder(error: CheckpointError) -> Error {
    Error::from(error).named("<DIR>", "give the folder of a checkpoint or of a run")
}

/// Prints the contents of a checkpoint. Returns the exit status.
///
/// # Errors
/// Fails if `path` contains no checkpoint, or if its manifest is damaged.
pub(crate) fn inspect(path: &Path, as_json: bool) -> anyhow::Result<u8> {
    let (folder, manifest) = newest(path)?;
    if as_json {
        show(&format!("{:#}\n", value(&folder, &manifest)));
    } else {
        show(&summary(&folder, &manifest));
    }
    Ok(0)
}

fn elements(parameter: &ParameterEntry) -> usize {
    parameter.shape.iter().product()
}

/// Returns the format of a quantized parameter, or the dtype of any other parameter.
fn dtype(parameter: &ParameterEntry) -> &str {
    parameter.quantized.as_ref().map_or("F32", |quantized| &quantized.format)
}

/// Returns the number of bytes of a parameter and its optimizer states.
fn stored_bytes(parameter: &ParameterEntry, states: usize) -> usize {
    match &parameter.quantized {
        Some(quantized) => quantized.bytes,
        None => parameter.stored_values(states).saturating_mul(4),
    }
}

/// Returns the indices of the shards that contain a piece of the parameter.
fn shards(parameter: &ParameterEntry) -> BTreeSet<usize> {
    parameter.pieces.iter().map(|piece| piece.shard).collect()
}

fn summary(folder: &Path, manifest: &Manifest) -> String {
    let Manifest { step, updates, world_size, zero_stage, states, parameters, .. } = manifest;
    let total: usize = parameters.values().map(elements).sum();
    let size: u64 = manifest.shards.iter().map(|shard| shard.bytes).sum();
    let with = if states.is_empty() { String::new() } else { format!(" with optimizer states {}", states.join(", ")) };
    let dtypes: BTreeSet<&str> = parameters.values().map(dtype).collect();
    let dtypes: Vec<&str> = dtypes.into_iter().collect();
    let mut text = format!(
        "{}\nstep {step}, {}, saved by {} at ZeRO stage {zero_stage}\n\
         {total} elements in {}{with}, {}{}: {}\n",
        folder.display(),
        counted(*updates as usize, "update", "updates"),
        counted(*world_size, "rank", "ranks"),
        counted(parameters.len(), "parameter", "parameters"),
        if dtypes.len() == 1 { "all " } else { "" },
        dtypes.join(" and "),
        bytes(size),
    );
    let mut rows = vec![["shard", "bytes", "parameters", "crc32"].map(String::from)];
    for (index, shard) in manifest.shards.iter().enumerate() {
        let held = parameters.values().filter(|parameter| shards(parameter).contains(&index)).count();
        rows.push([shard.file.clone(), bytes(shard.bytes), held.to_string(), format!("{:08x}", shard.crc32)]);
    }
    text += &table(&rows);
    let mut rows = vec![["parameter", "shape", "bytes", "shards"].map(String::from)];
    for (name, parameter) in parameters {
        let size = bytes(stored_bytes(parameter, states.len()) as u64);
        rows.push([name.clone(), format!("{:?}", parameter.shape), size, ranges(&shards(parameter))]);
    }
    text + &table(&rows)
}

/// Formats the indices as ranges, such as `0-3, 7`.
fn ranges(of: &BTreeSet<usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = vec![];
    for &index in of {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == index => *last = index,
            _ => ranges.push((index, index)),
        }
    }
    let word = |(first, last)| if first == last { format!("{first}") } else { format!("{first}-{last}") };
    ranges.into_iter().map(word).collect::<Vec<_>>().join(", ")
}

/// Formats an aligned table that starts with an empty line.
fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("\n{}", cells.join("  ").trim_end())
    };
    format!("{}\n", rows.iter().map(line).collect::<String>())
}

fn value(folder: &Path, manifest: &Manifest) -> Value {
    let parameters = manifest.parameters.iter().map(|(name, parameter)| {
        json!({
            "name": name, "shape": parameter.shape, "dtype": dtype(parameter), "frozen": parameter.frozen, "elements": elements(parameter),
            "bytes": stored_bytes(parameter, manifest.states.len()), "shards": shards(parameter),
        })
    });
    json!({
        "folder": folder.display().to_string(), "version": manifest.version, "step": manifest.step,
        "updates": manifest.updates, "world_size": manifest.world_size, "zero_stage": manifest.zero_stage,
        "states": manifest.states, "elements": manifest.parameters.values().map(elements).sum::<usize>(),
        "bytes": manifest.shards.iter().map(|shard| shard.bytes).sum::<u64>(), "shards": manifest.shards,
        "parameters": parameters.collect::<Vec<_>>(), "engine": manifest.engine,
    })
}

/// Reads every byte of the checkpoints in `path` and prints any damage. Returns the exit status: 1 if a checkpoint is
/// damaged.
///
/// # Errors
/// Fails if `path` contains no checkpoint.
pub(crate) fn verify(path: &Path) -> anyhow::Result<u8> {
    let meant: Vec<PathBuf> = match zero_engine::config::address(path) {
        Some(address) => checkpoints_in_store(address, "<DIR>")?.into_iter().map(PathBuf::from).collect(),
        None => zero_checkpoint::meant(path).map_err(of_folder)?,
    };
    let (mut intact, mut damaged) = (None, 0);
    for checkpoint in &meant {
        let folder = local(checkpoint)?;
        let mut found = zero_checkpoint::verify(&folder);
        if found.is_empty() {
            show(&format!("{}: intact\n", checkpoint.display()));
            intact = Some(checkpoint);
        }
        for damage in &mut found {
            // The folder of a checkpoint from a store is a download.
            if let Ok(file) = damage.path.strip_prefix(&folder) {
                damage.path = checkpoint.join(file);
            }
            show(&format!("damaged: {damage}\n"));
        }
        damaged += usize::from(!found.is_empty());
    }
    if damaged == 0 {
        return Ok(0);
    }
    let help = match intact {
        Some(newest) => format!("resume from the newest intact checkpoint: --resume {}", newest.display()),
        None => earlier(path)?,
    };
    show(&format!("help: {help}; a damaged checkpoint can only be repaired from copies of its files\n"));
    Ok(1)
}

/// Returns advice on how to continue when all verified checkpoints are damaged.
fn earlier(path: &Path) -> Result<String, Error> {
    let root = path.parent().unwrap_or(path);
    let committed: Vec<PathBuf> = match zero_engine::config::address(root) {
        Some(run) if zero_checkpoint::step(path).is_some() => {
            checkpoints_in_store(run, "<DIR>")?.into_iter().map(PathBuf::from).collect()
        }
        Some(_) => vec![],
        None => zero_checkpoint::committed(root)?.into_iter().map(|(_, folder)| folder).collect(),
    };
    Ok(match committed.iter().filter(|other| *other != path).count() {
        0 => "start from the beginning, or from another run's checkpoint".into(),
        _ => format!("verify the other checkpoints next to it: zero-train checkpoint verify {}", root.display()),
    })
}

/// Converts pretrained weights to a checkpoint, and prints its path. Returns the exit status.
///
/// # Errors
/// See [`zero_engine::import`].
pub(crate) fn import(folder: &Path, out: &Path) -> anyhow::Result<u8> {
    let (checkpoint, warnings) = zero_engine::import(folder, out)?;
    warnings.iter().for_each(|warning| tell(&warning.to_string()));
    let manifest = Manifest::read(&checkpoint).map_err(Error::from)?;
    let size: u64 = manifest.shards.iter().map(|shard| shard.bytes).sum();
    show(&format!(
        "{} -> {}\n{} parameters, {}; train it with --resume {}\n",
        folder.display(),
        checkpoint.display(),
        manifest.parameters.len(),
        bytes(size),
        checkpoint.display(),
    ));
    Ok(0)
}

/// Writes the weights of a checkpoint with `write`, which is [`zero_engine::export`] or [`zero_engine::merge`]. Prints
/// what was written and what was omitted. Returns the exit status.
///
/// # Errors
/// Returns the errors of `write`.
pub(crate) fn export(
    args: &ExportArgs,
    write: impl FnOnce(&Path, &Path, Weights) -> Result<(Exported, Vec<String>), Error>,
) -> anyhow::Result<u8> {
    let ExportArgs { folder, out, dtype, ema, max_shard_size } = args;
    let (folder, _) = newest(folder)?;
    let dtype = match dtype {
        Floats::F32 => ExportDtype::F32,
        Floats::Bf16 => ExportDtype::Bf16,
        Floats::F16 => ExportDtype::F16,
    };
    let weights = Weights { dtype, max_shard_bytes: *max_shard_size, averaged: *ema };
    let (exported, left_out) = write_folder(out, &folder, |out| write(&folder, out, weights))?;
    show(&format!(
        "{} -> {}\n{} tensors, {}: {}\n",
        folder.display(),
        out.display(),
        exported.tensors,
        bytes(exported.bytes),
        exported.files.join(", "),
    ));
    left_out.iter().for_each(|line| show(&format!("{line}\n")));
    Ok(0)
}

//! Exports consolidated weights for Hugging Face's libraries: one safetensors file, or several with an index.
//!
//! Tensors are read, checked and written in portions, so peak memory depends on neither the number of ranks nor the
//! size of a tensor. The files depend only on the values, not on the layout of the checkpoint.

mod portions;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::Dtype;
use serde_json::json;

use crate::commit;
use crate::convert::merge::{Merge, is_of_adapter, peft_name};
use crate::error::CheckpointError;
use crate::manifest::{Manifest, ParameterEntry};
use crate::source::Source;
use crate::writer::TensorWriter;

/// Floating-point type of the exported tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportDtype {
    /// The checkpoint's own type.
    F32,
    /// Rounded to nearest, ties to even. A finite value that would round to infinity is an error.
    Bf16,
    /// Rounded to nearest, ties to even. A finite value that would round to infinity is an error.
    F16,
}

impl ExportDtype {
    fn of_file(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }

    /// Converts little-endian f32 to little-endian values of this type. Returns `None` if a finite value would become
    /// infinite.
    fn convert(self, bytes: &[u8], out: &mut Vec<u8>) -> Option<()> {
        out.clear();
        let values = bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        match self {
            Self::F32 => out.extend_from_slice(bytes),
            Self::Bf16 => narrow(values, |x| (bf16::from_f32(x).to_le_bytes(), bf16::from_f32(x).is_finite()), out)?,
            Self::F16 => narrow(values, |x| (f16::from_f32(x).to_le_bytes(), f16::from_f32(x).is_finite()), out)?,
        }
        Some(())
    }
}

/// Appends each value in two bytes. Returns `None` if a finite value would become infinite.
fn narrow(values: impl Iterator<Item = f32>, round: impl Fn(f32) -> ([u8; 2], bool), out: &mut Vec<u8>) -> Option<()> {
    for x in values {
        let (bytes, is_finite) = round(x);
        if x.is_finite() && !is_finite {
            return None;
        }
        out.extend(bytes);
    }
    Some(())
}

/// The parameters that an export writes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Contents {
    /// All.
    Model,
    /// The parameters that were not frozen (adapters and modules trained with them), in PEFT's format:
    /// `adapter_model.safetensors`.
    Adapter,
    /// The base model, with adapters folded into its weights.
    Merged(Merge),
}

impl Contents {
    fn include(self, name: &str, entry: &ParameterEntry) -> bool {
        match self {
            Self::Model => true,
            Self::Adapter => !entry.frozen,
            Self::Merged(_) => !is_of_adapter(name),
        }
    }

    /// Returns the name of a parameter in the exported file.
    fn name(self, manifest: &Manifest, name: &str) -> String {
        if self == Self::Adapter { peft_name(manifest, name) } else { name.to_string() }
    }
}

/// The key under which the metadata of a safetensors file stores [`Export::mup`].
pub(crate) const MUP: &str = "mup";
/// Value of [`Export::mup`] for weights into which the factors of the section `mup` are folded. A model with these
/// weights gives the right results without the section.
pub const FOLDED: &str = "folded";

/// Options of an export.
#[derive(Debug, Clone, PartialEq)]
pub struct Export {
    /// Floating-point type of the tensors.
    pub dtype: ExportDtype,
    /// Maximum bytes of tensors per file. A larger tensor gets a file of its own.
    pub max_shard_bytes: u64,
    /// Whether to write the averages of the weights instead of the weights. They are the first optimizer state.
    pub averaged: bool,
    /// Which parameters are written, and how.
    pub contents: Contents,
    /// Factors by which parameters are multiplied, by parameter name.
    pub factors: Vec<(&'static str, f32)>,
    /// The section `mup` that the configuration of a model with these weights needs, or [`FOLDED`].
    pub mup: Option<String>,
    /// Other files to write into the folder, by name: `config.json` and the like.
    pub beside: Vec<(String, Vec<u8>)>,
}

/// Summary of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// Names of all files.
    pub files: Vec<String>,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of bytes of tensors.
    pub bytes: u64,
}

/// Writes the parameters of the checkpoint in `folder` into the folder `out` atomically: `model.safetensors`, or
/// `model-00001-of-0000n.safetensors` and so on with `model.safetensors.index.json`. Parameters keep their names.
///
/// # Errors
/// Fails if `out` exists and is not empty, the checkpoint is damaged, a value is too large for the type, or a file
/// operation fails.
pub fn export(folder: &Path, out: &Path, options: &Export) -> Result<Exported, CheckpointError> {
    let manifest = Manifest::read(folder)?;
    let is_used = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some());
    if is_used || out.is_file() {
        let reason = "the folder already exists and is not empty; choose a new or an empty folder";
        return Err(CheckpointError::io(out)(std::io::Error::other(reason)));
    }
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = out.with_file_name(format!(".unfinished-{name}"));
    commit::remove(&unfinished)?;
    fs::create_dir_all(&unfinished).map_err(CheckpointError::io(&unfinished))?;
    let written = write(folder, &manifest, &unfinished, options);
    if written.is_err() {
        // Report the write error even if the leftovers cannot be removed; the next export removes them.
        let _ = commit::remove(&unfinished);
    }
    let exported = written?;
    if out.is_dir() {
        fs::remove_dir(out).map_err(CheckpointError::io(out))?;
    }
    fs::rename(&unfinished, out).map_err(CheckpointError::io(out))?;
    Ok(exported)
}

fn write(folder: &Path, manifest: &Manifest, out: &Path, options: &Export) -> Result<Exported, CheckpointError> {
    let size = |entry: &ParameterEntry| (elements(entry) * options.dtype.of_file().bitsize() / 8) as u64;
    let contents = options.contents;
    // PEFT reads one file.
    let most = if contents == Contents::Adapter { u64::MAX } else { options.max_shard_bytes };
    let included = || manifest.parameters.iter().filter(|(name, entry)| contents.include(name, entry));
    if let Some((name, _)) = included().find(|(_, entry)| entry.quantized.is_some()) {
        let reason = format!(
            "`{name}` is quantized, so the checkpoint does not have its original values\n  help: export an adapter \
             (`checkpoint export`) and merge it into the original model with PEFT's `merge_and_unload`"
        );
        return Err(CheckpointError::refused(folder, reason));
    }
    let parts = distribute(included(), most, size);
    let file_name = |part: usize| match parts.len() {
        1 if contents == Contents::Adapter => "adapter_model.safetensors".to_string(),
        1 => "model.safetensors".to_string(),
        n => format!("model-{:05}-of-{n:05}.safetensors", part + 1),
    };
    // Running statistics are small, so they go into the last file, after its parameters.
    let buffers = match contents {
        Contents::Model | Contents::Merged(_) => manifest.buffers.iter().collect(),
        Contents::Adapter => vec![],
    };
    let mut source = Source::evaluated(folder, manifest);
    if options.averaged {
        source.instead = manifest.states.first().map(String::as_str);
    }
    let (mut files, mut weight_map) = (vec![], serde_json::Map::new());
    for (index, part) in parts.iter().enumerate() {
        let file = file_name(index);
        let buffers = if index + 1 == parts.len() { &buffers[..] } else { &[] };
        let tensors = part
            .iter()
            .map(|&(name, entry)| (contents.name(manifest, name), options.dtype.of_file(), entry.shape.clone()));
        let statistics =
            buffers.iter().map(|(name, values)| ((*name).clone(), options.dtype.of_file(), vec![values.len()]));
        // Hugging Face's library requires this key to know the layout of the tensors.
        let mut metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        metadata.extend(options.mup.iter().map(|mup| (MUP.to_string(), mup.clone())));
        let mut writer = TensorWriter::create(&out.join(&file), tensors.chain(statistics), Some(metadata))?;
        for (name, entry) in part {
            source.copy(name, entry, options, &mut writer)?;
            weight_map.insert((*name).clone(), json!(file));
        }
        for (name, values) in buffers {
            let (bytes, mut converted): (Vec<u8>, _) = (values.iter().flat_map(|x| x.to_le_bytes()).collect(), vec![]);
            let converted_all = options.dtype.convert(&bytes, &mut converted);
            converted_all.ok_or_else(|| too_large(folder, name, options.dtype))?;
            writer.write(&converted)?;
            weight_map.insert((*name).clone(), json!(file));
        }
        writer.finish()?;
        files.push(file);
    }
    let statistics: usize =
        buffers.iter().map(|(_, values)| values.len() * options.dtype.of_file().bitsize() / 8).sum();
    let bytes = included().map(|(_, entry)| size(entry)).sum::<u64>() + statistics as u64;
    let tensors = included().count() + buffers.len();
    let mut beside = options.beside.clone();
    if parts.len() > 1 {
        let index = json!({"metadata": {"total_size": bytes}, "weight_map": weight_map});
        beside.push(("model.safetensors.index.json".into(), format!("{index:#}\n").into_bytes()));
    }
    for (name, content) in beside {
        let path = out.join(&name);
        let mut file = File::create(&path).map_err(CheckpointError::io(&path))?;
        file.write_all(&content).and_then(|()| file.sync_all()).map_err(CheckpointError::io(&path))?;
        files.push(name);
    }
    Ok(Exported { files, tensors, bytes })
}

fn too_large(file: &Path, name: &str, dtype: ExportDtype) -> CheckpointError {
    let reason = format!("a value of `{name}` is too large for {dtype:?}; export with --dtype f32");
    CheckpointError::io(file)(std::io::Error::other(reason))
}

fn elements(entry: &ParameterEntry) -> usize {
    entry.shape.iter().product()
}

/// Distributes the parameters over files, in the order of their names. Starts a new file when the next tensor would
/// exceed `most` bytes.
fn distribute<'a>(
    parameters: impl Iterator<Item = (&'a String, &'a ParameterEntry)>,
    most: u64,
    size: impl Fn(&ParameterEntry) -> u64,
) -> Vec<Vec<(&'a String, &'a ParameterEntry)>> {
    let mut parts = vec![vec![]];
    let mut held = 0;
    for (name, entry) in parameters {
        if held > 0 && held + size(entry) > most {
            parts.push(vec![]);
            held = 0;
        }
        held += size(entry);
        if let Some(part) = parts.last_mut() {
            part.push((name, entry));
        }
    }
    parts
}

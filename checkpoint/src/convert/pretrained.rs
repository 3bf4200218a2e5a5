//! Reads the weights of a Hugging Face folder: finds its files and maps their tensors to parameters.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use zero_comm::Communicator;
use zero_model::{Model, Parameter};
use zero_partition::ShardedState;

use crate::error::CheckpointError;
use crate::together::together;
use crate::weights::{Meaning, Weights, is_of_base};

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of an index in bytes. Larger files are rejected before parsing.
const MAX_INDEX: u64 = 64 << 20;
/// Prefixes of parameter names. Files lack them if a model was saved without its head.
const PREFIXES: [&str; 2] = ["transformer.", "model."];
/// The name of a head that may be tied to the embeddings, and the possible names of the embeddings.
const HEAD: &str = "lm_head.weight";
const EMBEDDINGS: [&str; 2] = ["transformer.wte.weight", "model.embed_tokens.weight"];
/// Suffixes of tensors that older versions of transformers saved although the configuration determines them: masks and
/// angles.
const COMPUTED: [&str; 3] = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];
/// Weight files in other formats, recognized for the error message.
const OTHER_FORMATS: [&str; 5] =
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "consolidated.00.pth"];

/// Overwrites the parameters with the values in a Hugging Face folder. Each rank reads only the ranges that it holds.
/// Collective: every rank must call it.
///
/// The folder contains `model.safetensors`, or several files and `model.safetensors.index.json`. Each parameter appears
/// once as f32, bf16 or f16, under its name in `transformers`, with or without the prefix `transformer.` or `model.`.
/// The folder may also contain a tied head, if its values are identical to the embeddings.
///
/// # Errors
/// Fails on every rank if one rank fails: a file is missing, damaged, in another format or outside the folder, or
/// tensors are missing, unknown or of a different shape. The parameters are then unchanged, unless reading a tensor
/// failed.
pub fn load_pretrained(folder: &Path, zero: &mut ShardedState, comm: &dyn Communicator) -> Result<(), CheckpointError> {
    let weights = together(comm, open(folder, zero.model()))?;
    together(comm, weights.fill(zero))
}

/// Checks that a Hugging Face folder has the weights of a model, without reading the values.
///
/// # Errors
/// Fails as [`load_pretrained`] does, but only on this rank.
pub fn check_pretrained(folder: &Path, model: &Model) -> Result<(), CheckpointError> {
    open(folder, model).map(drop)
}

/// Opens the files of a folder and checks them against a model.
pub(crate) fn open(folder: &Path, model: &Model) -> Result<Weights, CheckpointError> {
    let (files, index) = files(folder)?;
    let parameters = model.parameters();
    let weights = Weights::open(&files, folder, parameters, is_of_base, |name| meaning(name, parameters))?;
    if let Some(index) = index {
        for (tensor, file) in index {
            if !weights.has(&folder.join(&file), &tensor) {
                let reason = format!("the index lists `{tensor}` in {file}, which has no such tensor");
                return Err(CheckpointError::damaged(&folder.join(INDEX), reason));
            }
        }
    }
    Ok(weights)
}

/// Maps a tensor name to one of the model's parameters.
fn meaning(name: &str, parameters: &[Parameter]) -> Meaning {
    let is_known = |name: &str| parameters.iter().any(|parameter| parameter.name() == name);
    if is_known(name) {
        return Meaning::Parameter(name.into());
    }
    if let Some(full) = PREFIXES.iter().map(|prefix| format!("{prefix}{name}")).find(|full| is_known(full)) {
        return Meaning::Parameter(full);
    }
    if name == HEAD
        && let Some(embedding) = EMBEDDINGS.into_iter().find(|name| is_known(name))
    {
        return Meaning::Copy(embedding.into());
    }
    match COMPUTED.iter().any(|end| name.ends_with(end)) {
        true => Meaning::Computed,
        false => Meaning::Parameter(name.into()),
    }
}

/// File name by tensor name.
type WeightMap = BTreeMap<String, String>;

/// Returns the safetensors files of a folder, and its index if it has one.
fn files(folder: &Path) -> Result<(Vec<PathBuf>, Option<WeightMap>), CheckpointError> {
    if !fs::metadata(folder).map_err(CheckpointError::io(folder))?.is_dir() {
        return Err(CheckpointError::refused(folder, "not a folder"));
    }
    let whole = folder.join(WHOLE);
    if fs::symlink_metadata(&whole).is_ok() {
        inside(folder, &whole)?;
        return Ok((vec![whole], None));
    }
    let path = folder.join(INDEX);
    if fs::symlink_metadata(&path).is_err() {
        return Err(CheckpointError::refused(folder, no_weights(folder)));
    }
    inside(folder, &path)?;
    let map = weight_map(&path)?;
    let mut names: Vec<&String> = map.values().collect();
    names.sort();
    names.dedup();
    let mut files = vec![];
    for name in names {
        let mut components = Path::new(name).components();
        if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
            let reason = format!("the index lists the file `{}`, which is outside this folder", name.escape_debug());
            return Err(CheckpointError::refused(&path, reason));
        }
        let file = folder.join(name);
        inside(folder, &file)?;
        files.push(file);
    }
    Ok((files, Some(map)))
}

fn weight_map(path: &Path) -> Result<WeightMap, CheckpointError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: WeightMap,
    }
    let mut bytes = vec![];
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    file.take(MAX_INDEX + 1).read_to_end(&mut bytes).map_err(CheckpointError::io(path))?;
    if bytes.len() as u64 > MAX_INDEX {
        return Err(CheckpointError::damaged(path, "the index is larger than 64 MiB"));
    }
    let index: Index = serde_json::from_slice(&bytes).map_err(|e| CheckpointError::damaged(path, e.to_string()))?;
    Ok(index.weight_map)
}

/// Explains why a folder without safetensors files cannot be read, with advice.
fn no_weights(folder: &Path) -> String {
    match OTHER_FORMATS.iter().find(|name| folder.join(name).exists()) {
        None => format!("the folder contains neither {WHOLE} nor {INDEX}"),
        Some(name) => format!(
            "the folder contains {name} but no safetensors file, which is the only supported format; convert it with \
             Python: transformers.AutoModelForCausalLM.from_pretrained({:?}).save_pretrained(\"another folder\")",
            folder.display().to_string()
        ),
    }
}

/// Fails unless a file is inside the folder after all links are followed. Files in Hugging Face's cache may also be
/// links to `blobs`, a sibling of `snapshots`.
fn inside(folder: &Path, file: &Path) -> Result<(), CheckpointError> {
    let real = |path: &Path| fs::canonicalize(path).map_err(CheckpointError::io(path));
    let (root, target) = (real(folder)?, real(file)?);
    let snapshots = root.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
    if target.starts_with(&root) || blobs.is_some_and(|blobs| target.parent() == Some(&blobs)) {
        return Ok(());
    }
    let reason =
        format!("the file is a link to {}, outside the folder; copy the file itself into the folder", target.display());
    Err(CheckpointError::refused(file, reason))
}

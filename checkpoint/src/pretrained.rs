//! The weights of a Hugging Face folder: which files they are in, and what their tensors are to a model.

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
use crate::weights::{Meaning, Weights};

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// An index larger than this is refused before it is parsed.
const MAX_INDEX: u64 = 64 << 20;
/// What models are saved under without their head: tensors then lack it.
const PREFIXES: [&str; 2] = ["transformer.", "model."];
/// A head that is tied, and what it can be tied to.
const HEAD: &str = "lm_head.weight";
const EMBEDDINGS: [&str; 2] = ["transformer.wte.weight", "model.embed_tokens.weight"];
/// Ends of tensors that older versions of transformers saved although they follow from the configuration: masks and angles.
const COMPUTED: [&str; 3] = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];
/// Where weights are in folders that have no safetensors files.
const OTHER_FORMATS: [&str; 5] =
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "consolidated.00.pth"];

/// Overwrites the parameters with those of a Hugging Face folder, of which each rank reads what it holds; a collective.
///
/// The folder has `model.safetensors`, or several files and `model.safetensors.index.json`, with each parameter once under its name
/// in `transformers`, with or without `transformer.` or `model.` before it, as f32, bf16 or f16. A tied head may be there too, if
/// it has the same values.
///
/// # Errors
/// On every rank if one of them fails: a file is missing, damaged, in another format, or outside of the folder, or tensors are
/// missing, too many or of another shape. The parameters are still the old ones then, unless reading a tensor failed.
pub fn load_pretrained(folder: &Path, zero: &mut ShardedState, comm: &dyn Communicator) -> Result<(), CheckpointError> {
    let weights = together(comm, open(folder, zero.model()))?;
    together(comm, weights.fill(zero))
}

/// Whether a Hugging Face folder has the weights of a model, without a look at the values.
///
/// # Errors
/// As [`load_pretrained`], on this rank.
pub fn check_pretrained(folder: &Path, model: &Model) -> Result<(), CheckpointError> {
    open(folder, model).map(drop)
}

/// The files of a folder, held against a model.
pub(crate) fn open(folder: &Path, model: &Model) -> Result<Weights, CheckpointError> {
    let (files, index) = files(folder)?;
    let parameters = model.parameters();
    let weights = Weights::open(&files, folder, parameters, |name| meaning(name, parameters))?;
    if let Some(index) = index {
        for (tensor, file) in index {
            if !weights.has(&folder.join(&file), &tensor) {
                let reason = format!("it says that `{tensor}` is in {file}, which has no such tensor");
                return Err(CheckpointError::damaged(&folder.join(INDEX), reason));
            }
        }
    }
    Ok(weights)
}

/// What a tensor of that name is to a model with these parameters.
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

/// Which tensor is in which file, by tensor.
type WeightMap = BTreeMap<String, String>;

/// The safetensors files of a folder, and what its index says of them.
fn files(folder: &Path) -> Result<(Vec<PathBuf>, Option<WeightMap>), CheckpointError> {
    if !fs::metadata(folder).map_err(CheckpointError::io(folder))?.is_dir() {
        return Err(CheckpointError::refused(folder, "it is not a folder"));
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
            let reason = format!("its file `{}` is not one of this folder", name.escape_debug());
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
        return Err(CheckpointError::damaged(path, "it has more than 64 MiB"));
    }
    let index: Index = serde_json::from_slice(&bytes).map_err(|e| CheckpointError::damaged(path, e.to_string()))?;
    Ok(index.weight_map)
}

/// Why a folder without safetensors files cannot be read, and what to do.
fn no_weights(folder: &Path) -> String {
    match OTHER_FORMATS.iter().find(|name| folder.join(name).exists()) {
        None => format!("it has neither {WHOLE} nor {INDEX}"),
        Some(name) => format!(
            "it has {name} and no safetensors file, and no other format is read; convert it with Python: \
             transformers.AutoModelForCausalLM.from_pretrained({:?}).save_pretrained(\"another folder\")",
            folder.display().to_string()
        ),
    }
}

/// An error unless a file lies in the folder, with all links followed. Files of Hugging Face's cache are links to `blobs` beside
/// its `snapshots`.
fn inside(folder: &Path, file: &Path) -> Result<(), CheckpointError> {
    let real = |path: &Path| fs::canonicalize(path).map_err(CheckpointError::io(path));
    let (root, target) = (real(folder)?, real(file)?);
    let snapshots = root.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
    if target.starts_with(&root) || blobs.is_some_and(|blobs| target.parent() == Some(&blobs)) {
        return Ok(());
    }
    let reason = format!("it is a link to {}, out of its folder; copy the file itself there", target.display());
    Err(CheckpointError::refused(file, reason))
}

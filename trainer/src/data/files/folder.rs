//! Recognizes folders that hold a data set: folders saved by Hugging Face's `datasets`, and folders of MDS shards.

use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use zero_engine::DataError;

use super::shard::Shard;

/// The files that describe a folder of MDS shards, a saved Arrow data set, and a folder of several saved data sets.
pub(super) const DESCRIPTIONS: [&str; 3] = ["index.json", "state.json", "dataset_dict.json"];

/// The content of a folder.
pub(super) enum Folder {
    /// The Arrow files of a data set that `datasets` saved, or the files of a split, in order.
    Files(Vec<PathBuf>),
    /// The shards of mosaicml-streaming, in order.
    Mds(Vec<Shard>),
}

/// The fields of `state.json` that are read.
#[derive(Deserialize)]
struct SavedState {
    #[serde(rename = "_data_files")]
    data_files: Vec<DataFile>,
    #[serde(rename = "_split")]
    split: Option<String>,
}

#[derive(Deserialize)]
struct DataFile {
    filename: String,
}

#[derive(Deserialize)]
struct Splits {
    splits: Vec<String>,
}

#[derive(Deserialize)]
struct Index {
    version: u32,
    shards: Vec<super::shard::Entry>,
}

impl Folder {
    /// Recognizes a folder by its description file. Returns `None` for any other folder.
    ///
    /// # Errors
    /// Fails if the description file is malformed, or if the folder contains splits instead of one data set.
    pub(super) fn open(folder: &Path) -> Result<Option<Self>, DataError> {
        let [index, state, splits] = DESCRIPTIONS.map(|name| folder.join(name));
        if index.is_file() {
            let Index { version, shards } = read(&index)?;
            if version != 2 {
                return Err(damaged(
                    &index,
                    format!("MDS version {version} is unsupported; only version 2 is supported"),
                ));
            }
            let shard = |entry| Shard::new(folder, entry).map_err(|message| damaged(&index, message));
            return Ok(Some(Self::Mds(shards.into_iter().map(shard).collect::<Result<_, _>>()?)));
        }
        if state.is_file() {
            let SavedState { data_files, .. } = read(&state)?;
            let path = |DataFile { filename }| inside(folder, &filename).map_err(|message| damaged(&state, message));
            return Ok(Some(Self::Files(data_files.into_iter().map(path).collect::<Result<_, _>>()?)));
        }
        if splits.is_file() {
            let Splits { splits: names } = read(&splits)?;
            return Err(match names.is_empty() {
                true => damaged(&splits, "the data set has no splits".into()),
                false => DataError::Splits { path: folder.into(), splits: names },
            });
        }
        Ok(None)
    }
}

/// Returns the name of the split that a saved data set comes from. Returns `None` if the folder is not a saved data
/// set, or if its description names no split.
pub(super) fn saved_split(folder: &Path) -> Result<Option<String>, DataError> {
    let state = folder.join(DESCRIPTIONS[1]);
    if state.is_file() { Ok(read::<SavedState>(&state)?.split) } else { Ok(None) }
}

/// Returns the path of the file `name` in a folder. Fails if `name` leads out of the folder.
pub(super) fn inside(folder: &Path, name: &str) -> Result<PathBuf, String> {
    let is_inside = |part: Component| matches!(part, Component::Normal(_) | Component::CurDir);
    match !name.is_empty() && Path::new(name).components().all(is_inside) {
        true => Ok(folder.join(name)),
        false => Err(format!("`{name}` is not a path in the folder")),
    }
}

fn damaged(path: &Path, message: String) -> DataError {
    DataError::Damaged { path: path.into(), at: None, message }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, DataError> {
    let bytes = fs::read(path).map_err(DataError::io(path))?;
    serde_json::from_slice(&bytes).map_err(|error| damaged(path, error.to_string()))
}

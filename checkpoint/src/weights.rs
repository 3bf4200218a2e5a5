//! Initial weights from safetensors files: a pretrained model, or the start that another trainer had.
//!
//! The files hold each of the model's parameters once, under its name, in its shape, as f32, bf16 or f16, and nothing
//! else: what does not fit is refused, so that no parameter keeps its random values without a word.

use std::collections::BTreeMap;
use std::path::PathBuf;

use zero_comm::Communicator;
use zero_partition::{Kind, Zero};

use crate::error::CheckpointError;
use crate::tensors::TensorFile;
use crate::together::together;

/// Overwrites the parameters with those of the files, of which each rank reads what it holds; a collective.
///
/// # Errors
/// On every rank if one of them fails: a file is missing or damaged, or the files are of another model. The parameters
/// are still the old ones then, unless reading a tensor failed.
pub fn load_weights(files: &[PathBuf], zero: &mut Zero, comm: &dyn Communicator) -> Result<(), CheckpointError> {
    let weights = together(comm, Weights::open(files, zero))?;
    together(comm, weights.read(zero))
}

struct Weights {
    files: Vec<TensorFile>,
    /// Index of the file that has a parameter, by the parameter's index.
    file_of: Vec<usize>,
}

impl Weights {
    fn open(paths: &[PathBuf], zero: &Zero) -> Result<Self, CheckpointError> {
        let files = paths.iter().map(|path| TensorFile::open(path)).collect::<Result<Vec<_>, _>>()?;
        let mut by_name = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.metadata.offset_keys() {
                if let Some(other) = by_name.insert(name.clone(), index) {
                    let reason = format!("its `{name}` is in {} too", files[other].path.display());
                    return Err(CheckpointError::mismatch(&file.path, reason));
                }
            }
        }
        let mut file_of = vec![];
        for parameter in zero.model().parameters() {
            let (name, shape) = (parameter.name(), parameter.shape().dims());
            let Some(index) = by_name.remove(name) else {
                let all: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
                let reason = format!("the model's `{name}` is not in it");
                return Err(CheckpointError::mismatch(all.join(", ").as_ref(), reason));
            };
            let theirs = &files[index].info(name)?.shape;
            if theirs != shape {
                let reason = format!("`{name}` is {theirs:?} in it and {shape:?} in the model");
                return Err(CheckpointError::mismatch(&files[index].path, reason));
            }
            file_of.push(index);
        }
        if let Some((name, index)) = by_name.pop_first() {
            let reason = format!("its `{name}` is not in the model");
            return Err(CheckpointError::mismatch(&files[index].path, reason));
        }
        Ok(Self { files, file_of })
    }

    fn read(&self, zero: &mut Zero) -> Result<(), CheckpointError> {
        for range in zero.held_ranges(Kind::Parameter) {
            let mut values = vec![0.0; range.elements.len()];
            let name = zero.model().parameters()[range.parameter].name();
            self.files[self.file_of[range.parameter]].read(name, range.elements.start, &mut values)?;
            zero.write(Kind::Parameter, &range, &values)?;
        }
        Ok(())
    }
}

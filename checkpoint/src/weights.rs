//! Loads parameters from safetensors files of other programs: a pretrained model, or initial values from another
//! trainer.
//!
//! The files must hold each of the model's parameters once, in its shape, as f32, bf16 or f16, and nothing else. Any
//! other content is rejected, so that no parameter silently keeps its random values. Each rank reads only the ranges
//! that it holds, never whole files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use zero_comm::Communicator;
use zero_model::{Model, ModuleBuffer, Parameter};
use zero_partition::{Kind, Range, ShardedState};

use crate::convert::export::{FOLDED, MUP};
use crate::convert::merge::of_peft_name;
use crate::error::CheckpointError;
use crate::tensors::TensorFile;
use crate::together::together;

/// Maximum number of problems listed in an error.
const MAX_NAMED: usize = 10;

/// Overwrites the parameters with the values in the files. Each rank reads only the ranges that it holds. Collective:
/// every rank must call it. `mup` is the section `mup` of the configuration. If the files were exported from a model in
/// µP, it must be the section of that model.
///
/// # Errors
/// Fails on every rank if one rank fails: a file is missing or damaged, or the files belong to another model. The
/// parameters are then unchanged, unless reading a tensor failed.
pub fn load_weights(
    files: &[PathBuf],
    mup: Option<&str>,
    zero: &mut ShardedState,
    comm: &dyn Communicator,
) -> Result<(), CheckpointError> {
    let all: Vec<String> = files.iter().map(|path| path.display().to_string()).collect();
    let all = all.join(", ");
    let model = zero.model().clone();
    let buffers = model.buffers();
    let meaning = |name: &str| match is_of_buffer(name, buffers) {
        true => Meaning::Computed,
        false => Meaning::Parameter(name.into()),
    };
    let weights = Weights::open(files, all.as_ref(), model.parameters(), is_of_base, meaning).and_then(|weights| {
        weights.files.iter().try_for_each(|file| is_of_base_model(file, mup))?;
        Ok((weights.buffers(all.as_ref(), buffers)?, weights))
    });
    let (values, weights) = together(comm, weights)?;
    together(comm, weights.fill(zero))?;
    for (buffer, values) in buffers.iter().zip(values) {
        buffer.set(&values).map_err(zero_partition::ZeroError::from)?;
    }
    Ok(())
}

/// Checks that the weights in a file fit a model with this section `mup`. A file of another program does not record a
/// section and is accepted.
fn is_of_base_model(file: &TensorFile, mup: Option<&str>) -> Result<(), CheckpointError> {
    let reason = match (file.metadata.metadata().as_ref().and_then(|metadata| metadata.get(MUP)), mup) {
        (None, _) => return Ok(()),
        (Some(written), None) if written == FOLDED => return Ok(()),
        (Some(written), Some(mup)) if written == mup => return Ok(()),
        (Some(written), Some(_)) if written == FOLDED => {
            "the last norm in these exported weights already scales the inputs of the head, as `mup` would; remove \
             the section, or resume from the checkpoint"
                .to_string()
        }
        (Some(written), _) => {
            format!("these weights are from a model with `mup: {written}`; use the same section")
        }
    };
    Err(CheckpointError::mismatch(&file.path, reason))
}

/// Overwrites the parameters of adapters, and of the modules that were trained with them, with the values in a folder
/// that PEFT has saved. Each rank reads only the ranges that it holds. Collective: every rank must call it.
///
/// # Errors
/// Fails on every rank if one rank fails: `adapter_model.safetensors` is missing or damaged, or does not have exactly
/// the trainable parameters of the model.
pub fn load_adapter(folder: &Path, zero: &mut ShardedState, comm: &dyn Communicator) -> Result<(), CheckpointError> {
    let weights = together(comm, of_adapter(folder, zero.model()))?;
    together(comm, weights.fill(zero))
}

/// Opens the file of a folder that PEFT has saved and checks it against the trainable parameters of a model.
pub(crate) fn of_adapter(folder: &Path, model: &Model) -> Result<Weights, CheckpointError> {
    let file = folder.join("adapter_model.safetensors");
    let meaning = |name: &str| Meaning::Parameter(of_peft_name(name));
    Weights::open(&[file], folder, model.parameters(), Parameter::is_trainable, meaning)
}

/// Returns whether a parameter belongs to the base model.
pub(crate) fn is_of_base(parameter: &Parameter) -> bool {
    !parameter.is_adapter()
}

/// Returns whether a tensor is a buffer of the model, or PyTorch's count of the batches that such a buffer has seen.
/// The count is not used.
fn is_of_buffer(name: &str, buffers: &[ModuleBuffer]) -> bool {
    let counted = name.strip_suffix("num_batches_tracked").map(|prefix| format!("{prefix}running_mean"));
    let name = counted.as_deref().unwrap_or(name);
    buffers.iter().any(|buffer| buffer.name() == name)
}

/// The role of a file's tensor in the model.
pub(crate) enum Meaning {
    /// The parameter of this name, if the model has it.
    Parameter(String),
    /// A duplicate of the parameter of this name.
    Copy(String),
    /// Not a parameter: the model computes these values.
    Computed,
}

/// The location of a parameter's values.
struct Tensor {
    /// Index of the file.
    file: usize,
    name: String,
    /// File index and name of a duplicate.
    copy: Option<(usize, String)>,
}

/// Open files that hold all parameters of a model.
pub(crate) struct Weights {
    files: Vec<TensorFile>,
    /// Locations by parameter index; `None` for parameters that the files do not have.
    tensors: Vec<Option<Tensor>>,
}

impl Weights {
    /// Opens files and checks them against a model. The files must have the parameters that `is_needed` selects.
    /// `meaning` maps a tensor name to its role; `of` is the path shown in errors.
    pub(crate) fn open(
        paths: &[PathBuf],
        of: &Path,
        parameters: &[Parameter],
        is_needed: impl Fn(&Parameter) -> bool,
        meaning: impl Fn(&str) -> Meaning,
    ) -> Result<Self, CheckpointError> {
        let files = paths.iter().map(|path| TensorFile::open(path)).collect::<Result<Vec<_>, _>>()?;
        if files.iter().all(|file| file.metadata.offset_keys().is_empty()) {
            return Err(CheckpointError::refused(of, "the safetensors files contain no tensors"));
        }
        let mut found: BTreeMap<String, (usize, String)> = BTreeMap::new();
        let mut copies: BTreeMap<String, (usize, String)> = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.metadata.offset_keys() {
                let (place, parameter) = match meaning(&name) {
                    Meaning::Parameter(parameter) => (&mut found, parameter),
                    Meaning::Copy(parameter) => (&mut copies, parameter),
                    Meaning::Computed => continue,
                };
                if let Some((other, first)) = place.insert(parameter, (index, name.clone())) {
                    let reason =
                        format!("`{name}` is the same parameter as `{first}` in {}", files[other].path.display());
                    return Err(CheckpointError::mismatch(&file.path, reason));
                }
            }
        }
        let mut problems = vec![];
        let mut tensors = vec![];
        for parameter in parameters {
            let (name, shape) = (parameter.name(), parameter.whole_shape());
            let Some((file, tensor)) = found.remove(name) else {
                if is_needed(parameter) {
                    problems.push(format!("`{name}` is missing"));
                }
                tensors.push(None);
                continue;
            };
            let copy = copies.remove(name);
            for (file, tensor) in std::iter::once(&(file, tensor.clone())).chain(&copy) {
                problems.extend(unfit(&files[*file], tensor, shape)?);
            }
            tensors.push(Some(Tensor { file, name: tensor, copy }));
        }
        let others = found.into_values().chain(copies.into_values());
        problems.extend(others.map(|(_, name)| format!("`{name}` is not in the model")));
        if !problems.is_empty() {
            return Err(CheckpointError::mismatch(of, listed(problems)));
        }
        Ok(Self { files, tensors })
    }

    /// Returns whether the files have a parameter.
    pub(crate) fn has_parameter(&self, parameter: usize) -> bool {
        self.tensors[parameter].is_some()
    }

    /// Returns whether the file at `path` is one of these files and has a tensor named `tensor`.
    pub(crate) fn has(&self, path: &Path, tensor: &str) -> bool {
        self.files.iter().any(|file| file.path == path && file.metadata.info(tensor).is_some())
    }

    /// Reads a range of a parameter. Fails if the files hold a duplicate with different values.
    pub(crate) fn read(&self, range: &Range) -> Result<Vec<f32>, CheckpointError> {
        let Some(tensor) = &self.tensors[range.parameter] else {
            return Err(zero_partition::ZeroError::Internal("the files do not have the parameter".into()).into());
        };
        let mut values = vec![0.0; range.elements.len()];
        self.files[tensor.file].read(&tensor.name, range.elements.start, &mut values)?;
        if let Some((file, name)) = &tensor.copy {
            let mut again = vec![0.0; values.len()];
            self.files[*file].read(name, range.elements.start, &mut again)?;
            if values.iter().zip(&again).any(|(a, b)| a.to_bits() != b.to_bits()) {
                let reason = format!("`{name}` differs from `{}`, but the model ties the two", tensor.name);
                return Err(CheckpointError::mismatch(&self.files[*file].path, reason));
            }
        }
        Ok(values)
    }

    /// Reads a range of this rank's part of a parameter. Padding is zero.
    fn read_own(&self, parameter: &Parameter, range: &Range) -> Result<Vec<f32>, CheckpointError> {
        let Range { parameter: index, elements } = range;
        if parameter.cut().is_none() {
            return self.read(range);
        }
        let mut values = vec![0.0; elements.len()];
        parameter.fill_from_whole(elements.start, &mut values, |whole, out| {
            let elements = whole..whole + out.len();
            out.copy_from_slice(&self.read(&Range { parameter: *index, elements })?);
            Ok::<_, CheckpointError>(())
        })?;
        Ok(values)
    }

    /// Returns all values of every buffer.
    fn buffers(&self, of: &Path, buffers: &[ModuleBuffer]) -> Result<Vec<Vec<f32>>, CheckpointError> {
        let values = |buffer: &ModuleBuffer| {
            let name = buffer.name();
            let Some(file) = self.files.iter().find(|file| file.metadata.info(name).is_some()) else {
                return Err(CheckpointError::mismatch(of, format!("`{name}` is missing")));
            };
            if let Some(problem) = unfit(file, name, buffer.shape().dims())? {
                return Err(CheckpointError::mismatch(of, problem));
            }
            let mut values = vec![0.0; buffer.shape().elem_count()];
            file.read(name, 0, &mut values)?;
            Ok(values)
        };
        buffers.iter().map(values).collect()
    }

    /// Overwrites all parameter ranges that a rank holds.
    pub(crate) fn fill(&self, zero: &mut ShardedState) -> Result<(), CheckpointError> {
        let held =
            zero.held_ranges(Kind::Parameter).into_iter().filter(|range| self.tensors[range.parameter].is_some());
        for range in held.collect::<Vec<_>>() {
            let parameter = range.parameter;
            let quantized = zero.quantize(parameter, |start, out| {
                out.copy_from_slice(&self.read(&Range { parameter, elements: start..start + out.len() })?);
                Ok::<_, CheckpointError>(())
            })?;
            if quantized {
                continue;
            }
            for range in range.portions() {
                let values = self.read_own(&zero.model().parameters()[parameter], &range)?;
                zero.write(Kind::Parameter, &range, &values)?;
            }
        }
        Ok(())
    }
}

/// Returns why a tensor cannot be a parameter of this shape, or `None` if it can.
fn unfit(file: &TensorFile, name: &str, shape: &[usize]) -> Result<Option<String>, CheckpointError> {
    let info = file.info(name)?;
    if info.shape != shape {
        return Ok(Some(format!("`{name}` has shape {:?} in the file and {shape:?} in the model", info.shape)));
    }
    let is_float = matches!(info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
    Ok((!is_float).then(|| format!("`{name}` has dtype {:?}; only F32, BF16 and F16 are supported", info.dtype)))
}

/// Joins the problems into one reason that lists the first few.
fn listed(mut problems: Vec<String>) -> String {
    let more = problems.len().saturating_sub(MAX_NAMED);
    problems.truncate(MAX_NAMED);
    let told = problems.join("; ");
    if more == 0 { told } else { format!("{told}; and {more} more") }
}

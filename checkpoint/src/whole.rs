//! Fills whole parameters of a model, in one process and without optimizer state, in order to run the model.

use std::path::Path;

use zero_model::ops::quantized_storage;
use zero_model::{Model, Parameter};
use zero_partition::{Range, ZeroError};

use crate::convert::pretrained;
use crate::error::CheckpointError;
use crate::load::parameters_fit;
use crate::manifest::Manifest;
use crate::source::Source;
use crate::verify::intact;
use crate::weights::{Weights, is_of_base, of_adapter};

/// Fills all parameters and buffers of a model from a checkpoint, after verifying the checksums of all shards. If a
/// schedule-free optimizer trained the model, fills in the weights that this optimizer uses for evaluation.
///
/// # Errors
/// Fails if a file is missing or damaged, or the checkpoint belongs to another model.
pub fn fill_from_checkpoint(folder: &Path, model: &Model) -> Result<(), CheckpointError> {
    fill_some(folder, model, |_| true)
}

/// Does the same as [`fill_from_checkpoint`] for a model whose adapters are not in the checkpoint. The adapters get no
/// values.
///
/// # Errors
/// See [`fill_from_checkpoint`].
pub fn fill_base_from_checkpoint(folder: &Path, model: &Model) -> Result<(), CheckpointError> {
    fill_some(folder, model, is_of_base)
}

fn fill_some(folder: &Path, model: &Model, is_stored: fn(&Parameter) -> bool) -> Result<(), CheckpointError> {
    let manifest = Manifest::read(folder)?;
    parameters_fit(folder, &manifest, model, is_stored)?;
    for shard in 0..manifest.shards.len() {
        intact(folder, &manifest, shard)?;
    }
    let mut source = Source::evaluated(folder, &manifest);
    for parameter in model.parameters().iter().filter(|parameter| is_stored(parameter)) {
        let stored = 0..parameter.stored_elements();
        if parameter.quantization().is_some() {
            let bytes = source.assemble_bytes(parameter.name(), stored)?;
            parameter.fill(quantized_storage(bytes)).map_err(ZeroError::from)?;
            continue;
        }
        fill(parameter, source.assemble_evaluated(parameter.name(), stored)?)?;
    }
    for buffer in model.buffers() {
        buffer.set(&manifest.buffers[buffer.name()]).map_err(ZeroError::from)?;
    }
    Ok(())
}

/// Fills the parameters of the base model from a Hugging Face folder.
///
/// # Errors
/// See [`load_pretrained`](crate::load_pretrained).
pub fn fill_from_pretrained(folder: &Path, model: &Model) -> Result<(), CheckpointError> {
    fill_from(&pretrained::open(folder, model)?, model)
}

/// Fills the parameters of an adapter, and of the modules that were trained with it, from a folder that PEFT has saved.
///
/// # Errors
/// See [`load_adapter`](crate::load_adapter).
pub fn fill_from_adapter(folder: &Path, model: &Model) -> Result<(), CheckpointError> {
    fill_from(&of_adapter(folder, model)?, model)
}

fn fill_from(weights: &Weights, model: &Model) -> Result<(), CheckpointError> {
    for (index, parameter) in model.parameters().iter().enumerate() {
        if weights.has_parameter(index) {
            fill(parameter, weights.read(&Range { parameter: index, elements: 0..parameter.elements() })?)?;
        }
    }
    Ok(())
}

fn fill(parameter: &Parameter, values: Vec<f32>) -> Result<(), CheckpointError> {
    Ok(parameter.fill_from_floats(values).map_err(ZeroError::from)?)
}

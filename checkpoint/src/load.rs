//! Loads a checkpoint into any layout.

use std::path::Path;

use zero_comm::Communicator;
use zero_model::{Model, Parameter};
use zero_optim::AverageSums;
use zero_partition::{Kind, ShardedState};

use crate::error::CheckpointError;
use crate::layout;
use crate::manifest::{MANIFEST, MOMENTUM, Manifest, QuantizedEntry};
use crate::source::{Source, Wanted};
use crate::together::together;
use crate::verify::intact;

/// Reads a checkpoint and loads the ranges that this rank holds. Collective: every rank must call it. The ranks divide
/// the shards among themselves and verify the checksums before any rank changes its state.
///
/// A checkpoint with parameters only, as [`import`](crate::import()) writes it, resets the optimizer state to zeros.
///
/// # Errors
/// Fails on every rank if one rank fails: a file is missing or damaged, or the checkpoint belongs to another model. The
/// state is then unchanged, unless reading a verified file failed.
pub fn load(folder: &Path, zero: &mut ShardedState, comm: &dyn Communicator) -> Result<Manifest, CheckpointError> {
    load_part(folder, zero, comm, fits)
}

/// Loads a checkpoint as [`load`] does, to evaluate its weights. The checkpoint may come from a run with another
/// optimizer. States that `zero` does not have are not read.
///
/// # Errors
/// Fails in the same cases as [`load`], and if the checkpoint lacks a state that `zero` has, such as the average of the
/// weights.
pub fn load_to_evaluate(
    folder: &Path,
    zero: &mut ShardedState,
    comm: &dyn Communicator,
) -> Result<Manifest, CheckpointError> {
    load_part(folder, zero, comm, weights_fit)
}

/// Checks that a checkpoint fits the state of a rank.
type Fits = fn(&Path, &Manifest, &ShardedState) -> Result<(), CheckpointError>;

fn load_part(
    folder: &Path,
    zero: &mut ShardedState,
    comm: &dyn Communicator,
    fits: Fits,
) -> Result<Manifest, CheckpointError> {
    let manifest = together(comm, verify(folder, zero, comm, fits))?;
    together(comm, read(folder, &manifest, zero))?;
    for buffer in zero.model().buffers() {
        buffer.set(&manifest.buffers[buffer.name()]).map_err(zero_partition::ZeroError::from)?;
    }
    let sums = manifest
        .schedule_free
        .map_or(AverageSums::default(), |sums| AverageSums { weights: sums.weights, largest_lr: sums.largest_lr });
    let updates = manifest.local_steps.as_ref().and_then(|local| local.updates.get(saved_replicate(&manifest, zero)));
    zero.set_progress(updates.copied().unwrap_or(manifest.updates), sums);
    Ok(manifest)
}

/// Reads the manifest, checks that it fits the model, and verifies this rank's share of the shards.
fn verify(
    folder: &Path,
    zero: &ShardedState,
    comm: &dyn Communicator,
    fits: Fits,
) -> Result<Manifest, CheckpointError> {
    let manifest = Manifest::read(folder)?;
    fits(folder, &manifest, zero)?;
    for shard in (0..manifest.shards.len()).skip(comm.rank()).step_by(comm.size()) {
        intact(folder, &manifest, shard)?;
    }
    Ok(manifest)
}

fn read(folder: &Path, manifest: &Manifest, zero: &mut ShardedState) -> Result<(), CheckpointError> {
    let mut source = Source::new(folder, manifest);
    let model = zero.model().clone();
    let replicate = saved_replicate(manifest, zero);
    let has_momentum = manifest.local_steps.as_ref().is_some_and(|local| local.momentum);
    for kind in zero.kinds().into_iter().chain([Kind::OuterMomentum]) {
        let is_saved = match kind {
            Kind::Parameter => true,
            Kind::State(_) => !has_parameters_alone(manifest),
            Kind::OuterMomentum => has_momentum,
        };
        for range in zero.held_ranges(kind).into_iter().flat_map(zero_partition::Range::portions) {
            let parameter = &model.parameters()[range.parameter];
            let state = match kind {
                Kind::Parameter => None,
                Kind::OuterMomentum => Some(MOMENTUM),
                Kind::State(index) => zero.state_names().get(index).copied(),
            };
            if parameter.quantization().is_some() {
                let bytes = source.assemble_own_bytes(parameter, range.elements.clone())?;
                zero.write_bytes(&range, &bytes)?;
                continue;
            }
            let elements = range.elements.clone();
            let values = match (is_saved, kind, state) {
                (true, Kind::State(_), Some(state)) if replicate > 0 => {
                    source.assemble_own(parameter, Wanted::Local(state, replicate), elements)?
                }
                (true, Kind::OuterMomentum, Some(state)) => {
                    source.assemble_own(parameter, Wanted::Local(state, 0), elements)?
                }
                (true, ..) => source.assemble_own(parameter, Wanted::Whole(state), elements)?,
                (false, ..) => vec![0.0; elements.len()],
            };
            zero.write(kind, &range, &values)?;
        }
    }
    Ok(())
}

/// Returns the index of the saved replicate whose optimizer states this rank continues with: the index of its own
/// replicate modulo the number of saved replicates.
fn saved_replicate(manifest: &Manifest, zero: &ShardedState) -> usize {
    let saved = manifest.local_steps.as_ref().map_or(1, |local| local.updates.len());
    zero.outer().map_or(0, |outer| outer.share.replicate % saved.max(1))
}

fn fits(folder: &Path, manifest: &Manifest, zero: &ShardedState) -> Result<(), CheckpointError> {
    parameters_fit(folder, manifest, zero.model(), |_| true)?;
    let path = folder.join(MANIFEST);
    let mismatch = |reason: String| Err(CheckpointError::mismatch(&path, reason));
    for parameter in zero.model().parameters() {
        let name = parameter.name();
        if manifest.parameters[name].frozen && parameter.is_trainable() {
            return mismatch(format!(
                "`{name}` was frozen, so the checkpoint has no optimizer state for it, but this run trains it"
            ));
        }
    }
    // The names are in the order of the optimizers in the configuration. The saved run may have had a different order.
    if !are_same(&manifest.states, &zero.state_names()) && !has_parameters_alone(manifest) {
        return mismatch(format!(
            "the checkpoint has optimizer states {:?}, but the configured optimizer has {:?}",
            manifest.states,
            zero.state_names()
        ));
    }
    let is_trained = |p: &&Parameter| p.is_trainable() && !has_parameters_alone(manifest);
    let differs =
        |p: &&Parameter| is_trained(p) && manifest.parameters[p.name()].state_values != layout::state_values(zero, p);
    if let Some(parameter) = zero.model().parameters().iter().find(differs) {
        return mismatch(format!(
            "the optimizer states of `{}` differ in size: the checkpoint comes from a run that updated other matrices as a whole",
            parameter.name()
        ));
    }
    for parameter in zero.model().parameters().iter().filter(is_trained) {
        let (own, saved) =
            (zero.state_names_of(parameter), manifest.parameters[parameter.name()].own_states(&manifest.states));
        if !are_same(saved, &own) {
            let name = parameter.name();
            return mismatch(format!(
                "the checkpoint has optimizer states {saved:?} for `{name}`, but the parameter's optimizer has {own:?}"
            ));
        }
    }
    Ok(())
}

fn weights_fit(folder: &Path, manifest: &Manifest, zero: &ShardedState) -> Result<(), CheckpointError> {
    parameters_fit(folder, manifest, zero.model(), |_| true)?;
    match zero.state_names().into_iter().find(|name| !manifest.states.iter().any(|saved| saved == name)) {
        Some(name) if !has_parameters_alone(manifest) => {
            let reason = format!("the checkpoint has the optimizer states {:?}, but not `{name}`", manifest.states);
            Err(CheckpointError::mismatch(&folder.join(MANIFEST), reason))
        }
        _ => Ok(()),
    }
}

/// Returns whether two lists have the same names, in any order.
fn are_same(saved: &[String], own: &[&str]) -> bool {
    saved.len() == own.len() && saved.iter().all(|name| own.contains(&name.as_str()))
}

/// Checks that a checkpoint has exactly those parameters of a model that `is_stored` selects, and the model's buffers.
pub(crate) fn parameters_fit(
    folder: &Path,
    manifest: &Manifest,
    model: &Model,
    is_stored: fn(&Parameter) -> bool,
) -> Result<(), CheckpointError> {
    let path = folder.join(MANIFEST);
    let mismatch = |reason: String| Err(CheckpointError::mismatch(&path, reason));
    for parameter in model.parameters().iter().filter(|parameter| is_stored(parameter)) {
        let (name, shape) = (parameter.name(), parameter.whole_shape());
        match manifest.parameters.get(name) {
            None => return mismatch(format!("the model's parameter `{name}` is not in the checkpoint")),
            Some(entry) if entry.shape != shape => {
                return mismatch(format!(
                    "`{name}` has shape {:?} in the checkpoint and {shape:?} in the model",
                    entry.shape
                ));
            }
            Some(entry) if entry.quantized != QuantizedEntry::of(parameter) => {
                let format = |entry: Option<&QuantizedEntry>| match entry {
                    Some(entry) => format!("stored as {}", entry.format),
                    None => "not quantized".into(),
                };
                let (saved, here) = (format(entry.quantized.as_ref()), format(QuantizedEntry::of(parameter).as_ref()));
                return mismatch(format!(
                    "`{name}` is {saved} in the checkpoint and {here} in the model; `quantization_config` must be the same"
                ));
            }
            Some(_) => {}
        }
    }
    if let Some(name) = manifest.parameters.keys().find(|name| !model.parameters().iter().any(|p| p.name() == *name)) {
        return mismatch(format!("the checkpoint's parameter `{name}` is not in the model"));
    }
    for buffer in model.buffers() {
        let (name, elements) = (buffer.name(), buffer.shape().elem_count());
        match manifest.buffers.get(name).map(Vec::len) {
            None => return mismatch(format!("the model's buffer `{name}` is not in the checkpoint")),
            Some(len) if len != elements => {
                return mismatch(format!(
                    "the buffer `{name}` has {len} elements in the checkpoint and {elements} in the model"
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Returns whether the checkpoint is an import: no optimizer has updated its parameters, so it has no optimizer state.
fn has_parameters_alone(manifest: &Manifest) -> bool {
    manifest.states.is_empty() && manifest.step == 0 && manifest.updates == 0
}

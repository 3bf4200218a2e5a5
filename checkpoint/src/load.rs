//! Loads a checkpoint into any layout.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Dtype;
use zero_comm::Communicator;
use zero_model::ops::Run;
use zero_model::{Model, Parameter};
use zero_optim::AverageSums;
use zero_partition::{Kind, ShardedState};

use crate::error::CheckpointError;
use crate::layout;
use crate::local;
use crate::manifest::{CutEntry, MANIFEST, Manifest, ParameterEntry, QuantizedEntry, tensor_name};
use crate::tensors::TensorFile;
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
    let manifest = together(comm, verify(folder, zero, comm))?;
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
fn verify(folder: &Path, zero: &ShardedState, comm: &dyn Communicator) -> Result<Manifest, CheckpointError> {
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
                Kind::OuterMomentum => Some(local::MOMENTUM),
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
                    source.assemble_local(parameter.name(), (state, replicate), elements)?
                }
                (true, Kind::OuterMomentum, Some(state)) => {
                    source.assemble_local(parameter.name(), (state, 0), elements)?
                }
                (true, ..) => source.assemble_own(parameter, state, elements)?,
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
                "`{name}` was frozen, so the checkpoint has no optimizer state for it, and the model trains it"
            ));
        }
    }
    // The names are in the order of the optimizers in the configuration. The saved run may have had another order.
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
            "the optimizer states of `{}` differ in size: the checkpoint is of a run that updated other matrices as a whole",
            parameter.name()
        ));
    }
    for parameter in zero.model().parameters().iter().filter(is_trained) {
        let (own, saved) =
            (zero.state_names_of(parameter), manifest.parameters[parameter.name()].own_states(&manifest.states));
        if !are_same(saved, &own) {
            let name = parameter.name();
            return mismatch(format!(
                "the checkpoint has optimizer states {saved:?} of `{name}`, but the optimizer of the parameter has {own:?}"
            ));
        }
    }
    Ok(())
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

/// A checkpoint that is being read.
pub(crate) struct Source<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) manifest: &'a Manifest,
    /// Optimizer state to read instead of a trainable parameter; `None` reads the parameter itself.
    pub(crate) instead: Option<&'a str>,
    /// Optimizer state to add to a trainable parameter.
    pub(crate) added: Option<&'a str>,
    /// Open shards by index.
    open: HashMap<usize, TensorFile>,
    /// Shards whose whole files have been compared with their checksums.
    pub(crate) intact: BTreeSet<usize>,
}

impl<'a> Source<'a> {
    pub(crate) fn new(folder: &'a Path, manifest: &'a Manifest) -> Self {
        Self { folder, manifest, instead: None, added: None, open: HashMap::new(), intact: BTreeSet::new() }
    }

    /// Opens a checkpoint to read the weights that are used for evaluation.
    pub(crate) fn evaluated(folder: &'a Path, manifest: &'a Manifest) -> Self {
        Self { added: manifest.offset(), ..Self::new(folder, manifest) }
    }

    /// Returns the optimizer states to read in place of a parameter, and to add to it.
    pub(crate) fn evaluated_states(&self, entry: &ParameterEntry) -> (Option<&'a str>, Option<&'a str>) {
        if entry.frozen { (None, None) } else { (self.instead, self.added) }
    }

    /// Reads a range of a parameter in the form that is used for evaluation.
    pub(crate) fn assemble_evaluated(
        &mut self,
        name: &str,
        elements: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let (state, added) = self.evaluated_states(&self.manifest.parameters[name]);
        let mut values = self.assemble(name, state, elements.clone())?;
        if let Some(added) = added {
            let added = self.assemble(name, Some(added), elements)?;
            values.iter_mut().zip(added).for_each(|(value, added)| *value += added);
        }
        Ok(values)
    }

    /// Returns a shard's file, and opens it at the first call.
    pub(crate) fn shard(&mut self, index: usize) -> Result<&mut TensorFile, CheckpointError> {
        match self.open.entry(index) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                Ok(entry.insert(TensorFile::open_own(&self.folder.join(&self.manifest.shards[index].file))?))
            }
        }
    }

    /// Reads one range of a parameter, or of one of its optimizer states, from the pieces that the range overlaps.
    pub(crate) fn assemble(
        &mut self,
        name: &str,
        state: Option<&str>,
        elements: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let mut values = vec![0.0f32; elements.len()];
        self.overlaps(name, state, elements, |file, tensor, start, to| {
            file.piece(tensor, Dtype::F32, to.1)?;
            file.read(tensor, start, &mut values[to.0])
        })?;
        Ok(values)
    }

    /// Reads one range of this rank's part of a parameter or of an optimizer state. Padding is zero.
    fn assemble_own(
        &mut self,
        parameter: &Parameter,
        state: Option<&str>,
        elements: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let mut values = vec![0.0; elements.len()];
        self.overlaps_of_own(parameter, state, elements, |file, tensor, start, to| {
            file.piece(tensor, Dtype::F32, to.1)?;
            file.read(tensor, start, &mut values[to.0])
        })?;
        Ok(values)
    }

    /// Reads one range of the bytes of this rank's part of a quantized parameter.
    fn assemble_own_bytes(&mut self, parameter: &Parameter, bytes: Range<usize>) -> Result<Vec<u8>, CheckpointError> {
        let mut values = vec![0; bytes.len()];
        self.overlaps_of_own(parameter, None, bytes, |file, tensor, start, to| {
            let info = file.piece(tensor, Dtype::U8, to.1)?;
            file.read_bytes(info, start, &mut values[to.0])
        })?;
        Ok(values)
    }

    /// Does the same as [`Source::overlaps`] for a range of this rank's part of a parameter.
    fn overlaps_of_own(
        &mut self,
        parameter: &Parameter,
        state: Option<&str>,
        elements: Range<usize>,
        mut read: impl FnMut(&TensorFile, &str, usize, (Range<usize>, usize)) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let name = parameter.name();
        let Some(cut) = parameter.stored_cut() else { return self.overlaps(name, state, elements, read) };
        if self.manifest.parameters[name].cut == CutEntry::of(parameter) {
            return self.overlaps_of_slice(name, (state, cut.index()), elements, read);
        }
        for Run { local, whole } in cut.runs(elements.clone()) {
            let at = local.start - elements.start;
            self.overlaps(name, state, whole..whole + local.len(), |file, tensor, start, to| {
                read(file, tensor, start, (to.0.start + at..to.0.end + at, to.1))
            })?;
        }
        Ok(())
    }

    /// Reads one range of a replicate's optimizer state, or of the outer momentum.
    fn assemble_local(
        &mut self,
        name: &str,
        (state, replicate): (&str, usize),
        elements: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let mut values = vec![0.0f32; elements.len()];
        let entry = &self.manifest.parameters[name];
        for piece in entry.local.iter().filter(|piece| piece.state == state && piece.replicate == replicate) {
            let stored = piece.stored(entry, &self.manifest.states);
            let (start, end) = (stored.start.max(elements.start), stored.end.min(elements.end));
            if start < end {
                let (file, tensor) = (self.shard(piece.shard)?, piece.tensor_name(name));
                file.piece(&tensor, Dtype::F32, stored.len())?;
                file.read(&tensor, start - stored.start, &mut values[start - elements.start..end - elements.start])?;
            }
        }
        Ok(values)
    }

    /// Reads a range of the bytes of a quantized parameter.
    pub(crate) fn assemble_bytes(&mut self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>, CheckpointError> {
        let mut values = vec![0; bytes.len()];
        self.overlaps(name, None, bytes, |file, tensor, start, to| {
            let info = file.piece(tensor, Dtype::U8, to.1)?;
            file.read_bytes(info, start, &mut values[to.0])
        })?;
        Ok(values)
    }

    /// Calls `read` for each piece that a range overlaps. Passes the file, the tensor's name, the first element to read
    /// from it, the positions in the range that these elements fill, and the tensor's number of elements.
    fn overlaps(
        &mut self,
        name: &str,
        state: Option<&str>,
        elements: Range<usize>,
        mut read: impl FnMut(&TensorFile, &str, usize, (Range<usize>, usize)) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let entry = &self.manifest.parameters[name];
        let damaged = |reason| CheckpointError::damaged(&self.folder.join(MANIFEST), reason);
        let slices = 0..entry.cut.as_ref().map_or(1, |cut| cut.ranks);
        let cuts = slices.map(|slice| entry.slice(slice)).collect::<Result<Vec<_>, _>>().map_err(damaged)?;
        for (slice, cut) in cuts.into_iter().enumerate() {
            let Some(cut) = cut else {
                self.overlaps_of_slice(name, (state, slice), elements.clone(), &mut read)?;
                continue;
            };
            for Run { local, whole } in cut.runs_of_whole(elements.clone()) {
                let at = whole - elements.start;
                self.overlaps_of_slice(name, (state, slice), local, |file, tensor, start, to| {
                    read(file, tensor, start, (to.0.start + at..to.0.end + at, to.1))
                })?;
            }
        }
        Ok(())
    }

    /// Does the same as [`Source::overlaps`] for a range of one slice of a parameter.
    fn overlaps_of_slice(
        &mut self,
        name: &str,
        (state, slice): (Option<&str>, usize),
        elements: Range<usize>,
        mut read: impl FnMut(&TensorFile, &str, usize, (Range<usize>, usize)) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let entry = &self.manifest.parameters[name];
        let states = entry.own_states(&self.manifest.states);
        let index = state.and_then(|state| states.iter().position(|name| name == state));
        for piece in entry.pieces.iter().filter(|piece| piece.slice == slice) {
            let stored = entry.stored(index, piece.start..piece.end);
            let start = stored.start.max(elements.start);
            let end = stored.end.min(elements.end);
            if start >= end {
                continue;
            }
            let shard = self.shard(piece.shard)?;
            let to = (start - elements.start..end - elements.start, stored.len());
            read(shard, &tensor_name(name, piece.start, state), start - piece.start, to)?;
        }
        Ok(())
    }
}

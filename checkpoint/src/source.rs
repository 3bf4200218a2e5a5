//! Reads ranges of parameters and optimizer states from a checkpoint's shards.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Dtype;
use zero_model::Parameter;
use zero_model::ops::Run;

use crate::error::CheckpointError;
use crate::manifest::{CutEntry, LocalPiece, MANIFEST, Manifest, ParameterEntry, PieceEntry, tensor_name};
use crate::tensors::TensorFile;

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

    /// Returns the optimizer state to read instead of a parameter, and the one to add to it.
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
        self.overlaps(name, Wanted::Whole(state), elements, floats(&mut values))?;
        Ok(values)
    }

    /// Reads one range of this rank's part of a parameter or of an optimizer state. Padding is zero.
    pub(crate) fn assemble_own(
        &mut self,
        parameter: &Parameter,
        wanted: Wanted<'_>,
        elements: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let mut values = vec![0.0; elements.len()];
        self.overlaps_of_own(parameter, wanted, elements, floats(&mut values))?;
        Ok(values)
    }

    /// Reads one range of the bytes of this rank's part of a quantized parameter.
    pub(crate) fn assemble_own_bytes(
        &mut self,
        parameter: &Parameter,
        bytes: Range<usize>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let mut values = vec![0; bytes.len()];
        self.overlaps_of_own(parameter, Wanted::Whole(None), bytes, bytes_of(&mut values))?;
        Ok(values)
    }

    /// Does the same as [`Source::overlaps`] for a range of this rank's part of a parameter.
    fn overlaps_of_own(
        &mut self,
        parameter: &Parameter,
        wanted: Wanted<'_>,
        elements: Range<usize>,
        mut read: impl FnMut(&TensorFile, &str, usize, (Range<usize>, usize)) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let name = parameter.name();
        let Some(cut) = parameter.stored_cut() else { return self.overlaps(name, wanted, elements, read) };
        if self.manifest.parameters[name].cut == CutEntry::of(parameter) {
            return self.overlaps_of_slice(name, (wanted, cut.index()), elements, read);
        }
        for Run { local, whole } in cut.runs(elements.clone()) {
            let at = local.start - elements.start;
            self.overlaps(name, wanted, whole..whole + local.len(), |file, tensor, start, to| {
                read(file, tensor, start, (to.0.start + at..to.0.end + at, to.1))
            })?;
        }
        Ok(())
    }

    /// Reads a range of the bytes of a quantized parameter.
    pub(crate) fn assemble_bytes(&mut self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>, CheckpointError> {
        let mut values = vec![0; bytes.len()];
        self.overlaps(name, Wanted::Whole(None), bytes, bytes_of(&mut values))?;
        Ok(values)
    }

    /// Calls `read` for each piece that a range overlaps. Passes the file, the tensor's name, the first element to read
    /// from it, the positions in the range that these elements fill, and the tensor's number of elements.
    fn overlaps(
        &mut self,
        name: &str,
        wanted: Wanted<'_>,
        elements: Range<usize>,
        mut read: impl FnMut(&TensorFile, &str, usize, (Range<usize>, usize)) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let entry = &self.manifest.parameters[name];
        let damaged = |reason| CheckpointError::damaged(&self.folder.join(MANIFEST), reason);
        let slices = 0..entry.cut.as_ref().map_or(1, |cut| cut.ranks);
        let cuts = slices.map(|slice| entry.slice(slice)).collect::<Result<Vec<_>, _>>().map_err(damaged)?;
        for (slice, cut) in cuts.into_iter().enumerate() {
            let Some(cut) = cut else {
                self.overlaps_of_slice(name, (wanted, slice), elements.clone(), &mut read)?;
                continue;
            };
            for Run { local, whole } in cut.runs_of_whole(elements.clone()) {
                let at = whole - elements.start;
                self.overlaps_of_slice(name, (wanted, slice), local, |file, tensor, start, to| {
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
        (wanted, slice): (Wanted<'_>, usize),
        elements: Range<usize>,
        mut read: impl FnMut(&TensorFile, &str, usize, (Range<usize>, usize)) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let entry = &self.manifest.parameters[name];
        let states = entry.own_states(&self.manifest.states);
        let tensors: Vec<(usize, String, Range<usize>)> = match wanted {
            Wanted::Whole(state) => {
                let index = state.and_then(|state| states.iter().position(|name| name == state));
                let pieces = entry.pieces.iter().filter(|piece| piece.slice == slice);
                let tensor = |piece: &PieceEntry| {
                    let stored = entry.stored(index, piece.start..piece.end);
                    (piece.shard, tensor_name(name, piece.start, state), stored)
                };
                pieces.map(tensor).collect()
            }
            Wanted::Local(state, replicate) => {
                let is_wanted =
                    |piece: &&LocalPiece| piece.slice == slice && piece.state == state && piece.replicate == replicate;
                let pieces = entry.local.iter().filter(is_wanted);
                let stored = |piece: &LocalPiece| piece.stored(entry, &self.manifest.states);
                pieces.map(|piece| (piece.shard, piece.tensor_name(name), stored(piece))).collect()
            }
        };
        for (shard, tensor, stored) in tensors {
            let (start, end) = (stored.start.max(elements.start), stored.end.min(elements.end));
            if start < end {
                let to = (start - elements.start..end - elements.start, stored.len());
                read(self.shard(shard)?, &tensor, start - stored.start, to)?;
            }
        }
        Ok(())
    }
}

/// Which values of a parameter to read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wanted<'s> {
    /// The parameter, or an optimizer state of the first replicate.
    Whole(Option<&'s str>),
    /// An optimizer state of another replicate, or the outer momentum (of replicate 0).
    Local(&'s str, usize),
}

/// Returns a function that reads f32 into positions of `values`; see [`Source::overlaps`].
fn floats(
    values: &mut [f32],
) -> impl FnMut(&TensorFile, &str, usize, (Range<usize>, usize)) -> Result<(), CheckpointError> + '_ {
    |file, tensor, start, (to, elements)| {
        file.piece(tensor, Dtype::F32, elements)?;
        file.read(tensor, start, &mut values[to])
    }
}

/// Does the same as [`floats`] for bytes.
fn bytes_of(
    values: &mut [u8],
) -> impl FnMut(&TensorFile, &str, usize, (Range<usize>, usize)) -> Result<(), CheckpointError> + '_ {
    |file, tensor, start, (to, elements)| {
        let info = file.piece(tensor, Dtype::U8, elements)?;
        file.read_bytes(info, start, &mut values[to])
    }
}

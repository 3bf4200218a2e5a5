//! The layout of a checkpoint: the pieces of every parameter, and the tensors of each rank's shard.

use std::collections::BTreeMap;
use std::ops;

use safetensors::tensor::Dtype;
use zero_model::Parameter;
use zero_partition::{Kind, Range, ShardedState};
use zero_pipeline::Coordinates;

use crate::error::CheckpointError;
use crate::local;
use crate::manifest::{CutEntry, ParameterEntry, PieceEntry, QuantizedEntry, shard_file, tensor_name};

/// Returns the number of values of each state of a parameter that is updated as a whole matrix.
pub(crate) fn state_values(zero: &ShardedState, parameter: &Parameter) -> Option<Vec<usize>> {
    let averages = (zero.widths().average > 0).then(|| parameter.elements());
    Some(averages.into_iter().chain(parameter.matrix()?.values.iter().copied()).collect())
}

/// Returns the names of a parameter's states, or `None` if it has the usual states. A parameter usually has all states
/// of the run; a matrix may instead have only the first few of them.
pub(crate) fn states(zero: &ShardedState, parameter: &Parameter) -> Option<Vec<String>> {
    let (own, all) = (zero.state_names_of(parameter), zero.state_names());
    let is_usual = !parameter.is_trainable()
        || match parameter.is_matrix() {
            true => all.starts_with(&own),
            false => all == own,
        };
    (!is_usual).then(|| own.into_iter().map(String::from).collect())
}

/// Returns the pieces of every parameter, with empty checksums.
pub(crate) fn entries(zero: &ShardedState) -> BTreeMap<String, ParameterEntry> {
    let model = zero.model();
    let mut entries: BTreeMap<String, ParameterEntry> = model
        .parameters()
        .iter()
        .map(|p| {
            let (shape, frozen) = (p.whole_shape().to_vec(), !p.is_trainable());
            let entry = ParameterEntry {
                shape,
                frozen,
                state_values: state_values(zero, p),
                states: states(zero, p),
                quantized: QuantizedEntry::of(p),
                cut: CutEntry::of(p),
                pieces: vec![],
                local: vec![],
            };
            (p.name().to_string(), entry)
        })
        .collect();
    for (id, segment) in zero.layout().segments().iter().enumerate() {
        let first = Coordinates::first(zero.stages().owner(id));
        let slices = zero.groups().tensor().map_or(1, |group| group.size());
        for (slice, place) in (0..slices).flat_map(|slice| (0..zero.layout().ranks()).map(move |place| (slice, place)))
        {
            let shard = zero.groups().rank_of(Coordinates { shard: place, ..first }, 0, slice);
            for (parameter, elements, _) in segment.overlaps(segment.shard(place)) {
                let of = &model.parameters()[parameter];
                let Some(stored) = stored_elements(of, slice) else { continue };
                let Some(entry) = entries.get_mut(of.name()) else { continue };
                let elements = elements.start.min(stored)..elements.end.min(stored);
                let portions = Range { parameter, elements }.portions().map(|range| range.elements);
                let piece =
                    |at: ops::Range<usize>| PieceEntry { shard, slice, start: at.start, end: at.end, crc32: vec![] };
                entry.pieces.extend(portions.map(piece));
            }
        }
    }
    local::add(zero, &mut entries);
    entries
}

/// Returns the number of elements of a slice that are stored, without the padding of an uneven cut; `None` if the slice
/// stores nothing, because the parameter is not cut and slice 0 stores all of it.
pub(crate) fn stored_elements(parameter: &Parameter, slice: usize) -> Option<usize> {
    match parameter.stored_cut() {
        Some(cut) => Some(cut.of(slice).elements()),
        None => (slice == 0).then_some(usize::MAX),
    }
}

/// The contents of one rank's shard.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    /// File name.
    pub(crate) file: String,
    /// Tensors in file order: by parameter, then by piece. Each piece has the parameter's values first, then its
    /// states.
    pub(crate) tensors: Vec<ShardTensor>,
}

/// One tensor of a shard.
#[derive(Debug, Clone)]
pub(crate) struct ShardTensor {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) range: Range,
    /// F32, or U8 for the bytes of a quantized parameter.
    pub(crate) dtype: Dtype,
}

impl ShardTensor {
    /// Returns the size of the tensor in f32 elements, rounded up.
    pub(crate) fn words(&self) -> usize {
        match self.dtype {
            Dtype::U8 => self.range.elements.len().div_ceil(size_of::<f32>()),
            _ => self.range.elements.len(),
        }
    }

    /// Reads this tensor's values from a rank's state into `into`, which has [`ShardTensor::words`] elements, and
    /// returns them as bytes.
    pub(crate) fn read<'a>(&self, zero: &ShardedState, into: &'a mut [f32]) -> Result<&'a [u8], CheckpointError> {
        if self.dtype == Dtype::U8 {
            let bytes = &mut bytemuck::cast_slice_mut(into)[..self.range.elements.len()];
            zero.read_bytes_into(&self.range, bytes)?;
            return Ok(bytes);
        }
        zero.read_into(self.kind, &self.range, into)?;
        Ok(bytemuck::cast_slice(into))
    }
}

impl Shard {
    /// Returns the shard of `rank` out of `ranks`.
    pub(crate) fn of(
        zero: &ShardedState,
        entries: &BTreeMap<String, ParameterEntry>,
        (rank, ranks): (usize, usize),
    ) -> Self {
        let all: Vec<String> = zero.state_names().into_iter().map(String::from).collect();
        let named = zero.model().parameters().iter().enumerate();
        let ids: BTreeMap<&str, usize> = named.map(|(id, parameter)| (parameter.name(), id)).collect();
        let mut tensors = vec![];
        for (name, entry) in entries {
            for piece in entry.pieces.iter().filter(|piece| piece.shard == rank) {
                let states = entry.own_states(&all).iter().enumerate();
                tensors.extend(std::iter::once(None).chain(states.map(Some)).map(|state| {
                    let elements = entry.stored(state.map(|(own, _)| own), piece.start..piece.end);
                    let index = state.and_then(|(_, state)| all.iter().position(|name| name == state));
                    ShardTensor {
                        name: tensor_name(name, piece.start, state.map(|(_, state)| state.as_str())),
                        kind: index.map_or(Kind::Parameter, Kind::State),
                        dtype: entry.dtype(),
                        range: Range { parameter: ids[name.as_str()], elements },
                    }
                }));
            }
            let own = entry.local.iter().filter(|piece| piece.shard == rank);
            tensors.extend(own.map(|piece| local::tensor(piece, (name, ids[name.as_str()]), entry, &all)));
        }
        Self { file: shard_file(rank, ranks), tensors }
    }

    /// Returns the size of all tensors together in f32 elements.
    pub(crate) fn words(&self) -> usize {
        self.tensors.iter().map(ShardTensor::words).sum()
    }
}

//! The layout of a checkpoint: the pieces of every parameter, and the tensors of each rank's shard.

use std::collections::BTreeMap;
use std::ops;

use zero_partition::{Kind, Range, ShardedState};
use zero_pipeline::Coordinates;

use crate::manifest::{ParameterEntry, PieceEntry, shard_file, tensor_name};

/// Returns the pieces of every parameter, with empty checksums.
pub(crate) fn entries(zero: &ShardedState) -> BTreeMap<String, ParameterEntry> {
    let model = zero.model();
    let mut entries: BTreeMap<String, ParameterEntry> = model
        .parameters()
        .iter()
        .map(|p| {
            let entry = ParameterEntry { shape: p.shape().dims().to_vec(), frozen: !p.is_trainable(), pieces: vec![] };
            (p.name().to_string(), entry)
        })
        .collect();
    let mesh = zero.groups().mesh();
    for (id, segment) in zero.layout().segments().iter().enumerate() {
        for replica in 0..zero.layout().ranks() {
            let shard = mesh.rank(Coordinates { stage: zero.stages().owner(id), replica });
            for (parameter, elements, _) in segment.overlaps(segment.shard(replica)) {
                if let Some(entry) = entries.get_mut(model.parameters()[parameter].name()) {
                    let portions = Range { parameter, elements }.portions().map(|range| range.elements);
                    let piece =
                        |at: ops::Range<usize>| PieceEntry { shard, start: at.start, end: at.end, crc32: vec![] };
                    entry.pieces.extend(portions.map(piece));
                }
            }
        }
    }
    entries
}

/// The contents of one rank's shard.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    /// File name.
    pub(crate) file: String,
    /// Tensors in file order: by parameter, piece and kind.
    pub(crate) tensors: Vec<ShardTensor>,
}

/// One tensor of a shard.
#[derive(Debug, Clone)]
pub(crate) struct ShardTensor {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) range: Range,
}

impl Shard {
    /// Returns the shard of `rank` out of `ranks`.
    pub(crate) fn of(
        zero: &ShardedState,
        entries: &BTreeMap<String, ParameterEntry>,
        (rank, ranks): (usize, usize),
    ) -> Self {
        let (kinds, states) = (zero.kinds(), zero.state_names());
        let named = zero.model().parameters().iter().enumerate();
        let ids: BTreeMap<&str, usize> = named.map(|(id, parameter)| (parameter.name(), id)).collect();
        let mut tensors = vec![];
        for (name, entry) in entries {
            for piece in entry.pieces.iter().filter(|piece| piece.shard == rank) {
                let kinds = &kinds[..entry.tensors_per_piece(states.len())];
                tensors.extend(kinds.iter().map(|&kind| ShardTensor {
                    name: tensor_name(name, piece.start, state(kind, states)),
                    kind,
                    range: Range { parameter: ids[name.as_str()], elements: piece.start..piece.end },
                }));
            }
        }
        Self { file: shard_file(rank, ranks), tensors }
    }

    /// Returns the number of elements of all tensors.
    pub(crate) fn elements(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.range.elements.len()).sum()
    }
}

fn state(kind: Kind, states: &[&'static str]) -> Option<&'static str> {
    match kind {
        Kind::Parameter => None,
        Kind::State(index) => states.get(index).copied(),
    }
}

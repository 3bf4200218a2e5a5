//! A segment: a flat parameter and its shards.

use std::ops::Range;

use zero_model::ParameterId;
use zero_model::ops::Quantization;
use zero_optim::MatrixStates;
use zero_pipeline::{Placement, Placements, Tiers};

use crate::options::Widths;
use crate::states::{Column, Format};

/// One parameter inside a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The parameter.
    pub parameter: ParameterId,
    /// The parameter's element range within the segment.
    pub range: Range<usize>,
}

/// A flat parameter: parameters that are placed, gathered and reduced together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The layer's NAME for a segment of ordinary parameters, `NAME (persistent)` for persistent ones, `NAME (whole)`
    /// for parameters that the ranks of a tensor group do not cut. A segment of one tied or large parameter has the
    /// parameter's name.
    pub name: String,
    /// Index of the layer that owns the parameters.
    pub layer: usize,
    /// The parameters, in order and without gaps.
    pub pieces: Vec<Piece>,
    /// Shard boundaries: the shard of rank `r` is `bounds[r]..bounds[r + 1]`.
    pub bounds: Vec<usize>,
    /// Boundaries of the secondary shards of a near group, in the form of `bounds`; empty if there are none.
    pub secondary: Vec<usize>,
    /// Whether its parameters, gradients and optimizer state are replicated or sharded over the ranks.
    pub placements: Placements,
    /// Memory tiers of each rank's part.
    pub tiers: Tiers,
    /// Whether each rank of a tensor group has these parameters whole. Their gradients are summed over the group.
    pub is_shared: bool,
    /// Whether training changes the parameters. A frozen segment has no gradient, no master and no optimizer state.
    pub is_trainable: bool,
    /// How the values of its only parameter are quantized; `None` if they are not. In a quantized segment, all ranges
    /// are in bytes, and shards are cut between records.
    pub quantization: Option<Quantization>,
    /// Its only parameter, if the optimizer updates it as a whole matrix.
    pub matrix: Option<Matrix>,
    /// Whether the segment's only parameter has 8-bit optimizer states.
    pub is_eight_bit: bool,
    /// Whether its optimizer needs norms of whole parameters and therefore takes two passes over the segment.
    pub two_passes: bool,
    /// Which of the run's optimizers updates it: an index into [`ZeroOptions::optimizers`](crate::ZeroOptions).
    pub optimizer: usize,
}

/// A matrix that the optimizer updates as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix {
    /// Rows and columns.
    pub shape: [usize; 2],
    /// The states that the optimizer keeps of the matrix.
    pub states: MatrixStates,
}

/// Maps a range of a matrix's elements to a range of the `values` values of one of its states. Element i gets value i
/// if it exists, and the last element also gets all remaining values.
#[must_use]
pub fn part_of_state(range: Range<usize>, elements: usize, values: usize) -> Range<usize> {
    let at = |element: usize| if element >= elements { values } else { element.min(values) };
    at(range.start)..at(range.end)
}

impl Segment {
    /// Returns the number of the segment's optimizer states. `states` are the numbers of states of all optimizers.
    #[must_use]
    pub fn states(&self, states: &[usize]) -> usize {
        let of_optimizer = states.get(self.optimizer).copied().unwrap_or(0);
        self.matrix.as_ref().map_or(of_optimizer, |matrix| matrix.states.values.len())
    }

    /// Returns how the segment's values are stored: the average of the weights, if there is one, and then each
    /// optimizer state.
    pub(crate) fn columns(&self, widths: &Widths) -> Vec<Column> {
        let format = match (self.is_eight_bit, widths.state) {
            (true, _) => Format::EightBit,
            (false, 2) => Format::Bf16,
            (false, _) => Format::F32,
        };
        let values = |state| self.matrix.as_ref().map(|matrix| (self.elements(), matrix.states.values[state]));
        let states = (0..self.states(&widths.states)).map(|state| Column { format, of_matrix: values(state) });
        (widths.average > 0).then_some(Column::F32).into_iter().chain(states).collect()
    }

    /// Maps a range of the segment's elements to a range of the values of an optimizer state: see [`part_of_state`].
    #[must_use]
    pub fn in_state(&self, state: usize, range: Range<usize>) -> Range<usize> {
        match self.matrix.as_ref().and_then(|matrix| matrix.states.values.get(state)) {
            Some(&values) => part_of_state(range, self.elements(), values),
            None => range,
        }
    }

    /// Returns the bytes of the average and of the states of the first `own` elements.
    #[must_use]
    pub fn state_bytes(&self, own: usize, widths: &Widths) -> usize {
        self.columns(widths).iter().map(|column| column.bytes(own)).sum()
    }

    /// Returns the number of values that a checkpoint holds for a range of the segment's elements.
    #[must_use]
    pub fn saved(&self, range: Range<usize>, widths: &Widths) -> usize {
        if !self.is_trainable {
            return range.len();
        }
        let averages = usize::from(widths.average > 0);
        let in_state = |state| self.in_state(state, range.clone()).len();
        range.len() * (1 + averages) + (0..self.states(&widths.states)).map(in_state).sum::<usize>()
    }

    /// Returns the bytes of the buffers that the update of the matrix allocates; 0 if the segment is not a matrix.
    #[must_use]
    pub fn update_bytes(&self) -> usize {
        self.matrix.as_ref().map_or(0, |matrix| matrix.states.buffer_bytes)
    }

    /// Returns the segment's parameter if it has only one. In that case the segment shares the storage of the
    /// parameter's leaf.
    #[must_use]
    pub fn only_parameter(&self) -> Option<ParameterId> {
        match self.pieces[..] {
            [Piece { parameter, .. }] => Some(parameter),
            _ => None,
        }
    }

    /// Returns the number of elements of its parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.quantization.map_or(self.elements(), |quantization| quantization.elements())
    }

    /// Returns the bytes of each stored element. `working` is the width of the working dtype.
    #[must_use]
    pub fn width(&self, working: usize) -> usize {
        if self.quantization.is_some() { 1 } else { working }
    }

    /// Returns the number of stored elements: bytes, if the segment is quantized.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.range.end)
    }

    /// Returns the element range of a rank's shard.
    #[must_use]
    pub fn shard(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// Returns the element range that rank `rank` of the shard group holds, for values with this placement.
    #[must_use]
    pub fn held(&self, placement: Placement, rank: usize) -> Range<usize> {
        match placement {
            Placement::Replicated => 0..self.elements(),
            Placement::Sharded => self.shard(rank),
        }
    }

    /// Returns whether near groups hold secondary shards of its parameters.
    #[must_use]
    pub fn has_secondary(&self) -> bool {
        !self.secondary.is_empty()
    }

    /// Returns the element range of the secondary shard of rank `rank` of the shard group; empty if the segment has
    /// none.
    #[must_use]
    pub fn secondary_shard(&self, rank: usize) -> Range<usize> {
        match self.secondary.len().checked_sub(1) {
            Some(near) => self.secondary[rank % near]..self.secondary[rank % near + 1],
            None => 0..0,
        }
    }

    /// Returns the number of elements of each secondary shard of a near group, in the form that collectives take.
    #[must_use]
    pub fn secondary_counts(&self) -> Vec<usize> {
        self.secondary.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Returns the offset of `own`, a rank's shard, in the reduced gradients that the rank holds: the start of `own` if
    /// gradients are replicated, and 0 if the rank holds only the shard.
    #[must_use]
    pub fn begin_in_gradients(&self, own: &Range<usize>) -> usize {
        match self.placements.gradients {
            Placement::Replicated => own.start,
            Placement::Sharded => 0,
        }
    }

    /// Returns the bytes of the flat buffer through which NCCL gathers or reduces the segment; 0 if its shards have
    /// equal lengths. `width` is the number of bytes per element.
    #[must_use]
    pub fn flat_bytes(&self, width: usize) -> usize {
        flat_bytes(&self.counts(), width)
    }

    /// Returns the number of elements of each rank's shard, in the form that collectives take.
    #[must_use]
    pub fn counts(&self) -> Vec<usize> {
        self.bounds.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Returns the parts of parameters that lie within `range`: (parameter, range in the parameter, position in
    /// `range`).
    pub fn overlaps(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (ParameterId, Range<usize>, Range<usize>)> + '_ {
        self.pieces.iter().filter_map(move |piece| {
            let start = piece.range.start.max(range.start);
            let end = piece.range.end.min(range.end);
            (start < end).then(|| {
                let offset = piece.range.start;
                (piece.parameter, start - offset..end - offset, start - range.start..end - range.start)
            })
        })
    }
}

/// Returns the bytes of the flat buffer through which NCCL gathers or reduces ranges with these counts; 0 if they have
/// equal lengths.
pub(crate) fn flat_bytes(counts: &[usize], width: usize) -> usize {
    zero_comm::flat_block(counts, width).map_or(0, |block| block * counts.len())
}

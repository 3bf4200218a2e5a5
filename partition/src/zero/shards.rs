//! Reads and writes ranges of parameters and optimizer state, for checkpoints and the user.

use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{CpuStorage, Storage};
use zero_model::ParameterId;
use zero_model::sink::FlatBuffer;
use zero_pipeline::{Coordinates, SegmentId, Stages};

use super::ShardedState;
use crate::accounting::ledger::Category;
use crate::disk::Stored;
use crate::error::{ZeroError, missing};
use crate::gpu;
use crate::layout::Layout;
use crate::options::Widths;
use crate::rounding::working;
use crate::segment::Segment;
use crate::states::{StateBuffer, read_eight_bit};
use crate::storage::{self, overwrite};
use crate::threads::widen;

/// Kind of value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The parameter: its f32 master if the working dtype has 16 bits.
    Parameter,
    /// The state with this index, in the order of [`ZeroOptions::states`](crate::ZeroOptions::states).
    State(usize),
    /// The momentum of the outer optimizer; each replicate holds a share.
    OuterMomentum,
}

impl Kind {
    /// Returns the index of the state.
    #[must_use]
    pub fn state(self) -> Option<usize> {
        match self {
            Kind::Parameter | Kind::OuterMomentum => None,
            Kind::State(index) => Some(index),
        }
    }
}

/// A range of elements of one parameter, in row-major order; for a quantized parameter, a range of its stored bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Range {
    /// The parameter.
    pub parameter: ParameterId,
    /// Its element range.
    pub elements: std::ops::Range<usize>,
}

/// Elements copied at a time: 16 MiB in f32. This is small compared with a rank's memory, and large enough to amortize
/// the overhead per copy.
const PORTION: usize = 1 << 22;

impl Range {
    /// Splits the range into portions small enough for temporary buffers.
    pub fn portions(self) -> impl Iterator<Item = Range> {
        let Range { parameter, elements } = self;
        let end = elements.end;
        elements.step_by(PORTION).map(move |start| Range { parameter, elements: start..(start + PORTION).min(end) })
    }
}

/// Copies with streaming stores, which bypass the cache. A save copies all of a rank's state, which does not fit into
/// the cache.
fn copy(from: &[f32], to: &mut [f32]) {
    zero_comm::copy::copy(cast_slice(from), cast_slice_mut(to), size_of_val(from));
}

fn read_flat(from: &FlatBuffer, range: std::ops::Range<usize>, values: &mut [f32]) -> Result<(), ZeroError> {
    if range.start > range.end || range.end > from.len() {
        return Err(missing());
    }
    match from.host() {
        Some(from) => copy(&from[range], values),
        None => from.read(range, values)?,
    }
    Ok(())
}

/// Reads parameters in their working dtype: f32, or 16 bits if they are frozen and therefore have no master.
fn read_storage(from: &Storage, range: std::ops::Range<usize>, values: &mut [f32]) -> Result<(), ZeroError> {
    match from {
        Storage::Cpu(CpuStorage::F32(from)) => copy(from.get(range).ok_or_else(missing)?, values),
        Storage::Cpu(CpuStorage::BF16(from)) => widen(from.get(range).ok_or_else(missing)?, values)?,
        Storage::Cpu(CpuStorage::F16(from)) => widen(from.get(range).ok_or_else(missing)?, values)?,
        Storage::Cuda(from) => {
            let from = Storage::Cpu(gpu::download(from, range.clone())?);
            read_storage(&from, 0..range.len(), values)?;
        }
        _ => return Err(missing()),
    }
    Ok(())
}

impl Layout {
    /// Returns the size of a rank's part of a checkpoint, as a number of f32 values: the parameter, average and states
    /// of each trainable element, one value of each frozen element, and the bytes of quantized parameters. Only the
    /// first of the replicates saves their shard.
    #[must_use]
    pub fn saved_elements(&self, stages: &Stages, at: Coordinates, widths: &Widths) -> usize {
        let is_saved = |id| stages.owner(id) == at.stage && at.replicate == 0;
        let owned = self.segments().iter().enumerate().filter(|&(id, _)| is_saved(id));
        let saved =
            |segment: &Segment| segment.overlaps(segment.shard(at.shard)).map(|(_, e, _)| e.len()).sum::<usize>();
        owned
            .map(|(_, segment)| match segment.quantization {
                Some(_) => saved(segment).div_ceil(size_of::<f32>()),
                None => segment.saved(segment.shard(at.shard), widths),
            })
            .sum()
    }

    /// Returns the bytes of the values in a checkpoint.
    #[must_use]
    pub fn checkpoint_bytes(&self, widths: &Widths) -> u64 {
        let of_replicates = |segment: &Segment| match widths.outer.filter(|_| segment.is_trainable) {
            Some(share) => {
                let states = segment.saved(0..segment.elements(), widths) - segment.elements();
                let has_momentum = usize::from(share.width > size_of::<f32>());
                (share.replicates - 1) * states + has_momentum * segment.elements()
            }
            None => 0,
        };
        let saved = |segment: &Segment| segment.saved(0..segment.elements(), widths) + of_replicates(segment);
        let bytes = |segment: &Segment| segment.width(size_of::<f32>()) * saved(segment);
        self.segments().iter().map(|segment| bytes(segment) as u64).sum()
    }
}

impl ShardedState {
    /// Adds memory reserved for copies of the state to the ledger.
    pub fn count_copy(&mut self, bytes: usize) {
        self.memory.count(Category::Staging, bytes, 1);
    }

    /// Returns the kinds of values that parameters have, without the outer momentum.
    #[must_use]
    pub fn kinds(&self) -> Vec<Kind> {
        std::iter::once(Kind::Parameter).chain((0..self.state_names().len()).map(Kind::State)).collect()
    }

    /// Returns the ranges that this rank writes into a checkpoint, in portions. At every ZeRO stage, a rank of the
    /// first replicate writes its shards of the segments that its pipeline stage owns, and a rank of another replicate
    /// writes nothing. The ranges of all ranks together cover each element once. If replicates train independently, the
    /// ranges of each replicate cover each element once.
    #[must_use]
    pub fn saved_ranges(&self) -> Vec<Range> {
        let is_saved = |id| self.owns(id) && self.rank.speaks();
        let ranges = self.ranges(is_saved, |id, _| self.rank.shard(id));
        ranges.into_iter().flat_map(Range::portions).collect()
    }

    /// Returns the ranges that this rank holds and must read from a checkpoint.
    #[must_use]
    pub fn held_ranges(&self, kind: Kind) -> Vec<Range> {
        if kind == Kind::OuterMomentum {
            return self.momentum_ranges();
        }
        let is_held = |id| match kind {
            Kind::Parameter | Kind::OuterMomentum => self.holds(id),
            Kind::State(index) => self.rank.updates(id) && self.rank.own_state(id, index).is_some(),
        };
        self.ranges(is_held, |id, segment| {
            let placement = match kind {
                Kind::Parameter => segment.placements.parameters,
                Kind::State(_) | Kind::OuterMomentum => segment.placements.optimizer,
            };
            self.values_of(kind, id, segment.held(placement, self.rank.groups.at().shard))
        })
    }

    /// Returns the ranges of elements that this rank's optimizer updates.
    #[must_use]
    pub fn updated_ranges(&self) -> Vec<Range> {
        let segments = (0..self.rank.layout.segments().len()).filter(|&id| self.rank.updates(id));
        let ranges = segments.flat_map(|id| self.rank.segment(id).overlaps(self.rank.own_range(id)));
        ranges.map(|(parameter, elements, _)| Range { parameter, elements }).collect()
    }

    /// Maps a range of a segment's elements to a range of its values of this kind.
    fn values_of(&self, kind: Kind, id: SegmentId, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let own = kind.state().and_then(|index| self.rank.own_state(id, index));
        match own.and_then(|own| own.checked_sub(self.rank.options.averages())) {
            Some(state) => self.rank.segment(id).in_state(state, range),
            None => range,
        }
    }

    fn ranges(
        &self,
        is_wanted: impl Fn(SegmentId) -> bool,
        of: impl Fn(SegmentId, &Segment) -> std::ops::Range<usize>,
    ) -> Vec<Range> {
        let segments = self.rank.layout.segments().iter().enumerate().filter(|&(id, _)| is_wanted(id));
        let of_segment = |(id, segment): (SegmentId, &Segment)| -> Vec<Range> {
            let range = of(id, segment);
            match (&segment.matrix, segment.only_parameter()) {
                // A state of a matrix may have more values than the matrix.
                (Some(_), Some(_)) if range.is_empty() => vec![],
                (Some(_), Some(parameter)) => vec![Range { parameter, elements: range }],
                _ => segment.overlaps(range).map(|(parameter, elements, _)| Range { parameter, elements }).collect(),
            }
        };
        segments.flat_map(of_segment).collect()
    }

    /// Reads a range that this rank holds into `values`.
    ///
    /// # Errors
    /// Fails if the rank does not hold the range, or the lengths differ.
    pub fn read_into(&self, kind: Kind, range: &Range, values: &mut [f32]) -> Result<(), ZeroError> {
        let (id, at) = self.locate(range)?;
        let own = self.rank.own_range(id);
        let local = |base: usize| at.start.wrapping_sub(base)..at.end.wrapping_sub(base);
        if values.len() != range.elements.len() {
            return Err(ZeroError::internal("the number of values differs from the length of their range"));
        }
        if kind == Kind::OuterMomentum {
            values.copy_from_slice(self.outer.momentum(&self.rank, id, local(own.start))?);
            return Ok(());
        }
        if let Some(stored) = self.stored_as(kind, id)? {
            return self.disk.read(&self.rank, id, stored, local(own.start).start, values);
        }
        let state = self.optimizer.segment(id);
        match (kind, self.parameters.shard(id)) {
            (Kind::OuterMomentum, _) => Err(missing()),
            (Kind::State(index), _) => match state.states.get(self.own_state(id, index)?).ok_or_else(missing)? {
                StateBuffer::F32(state) => read_flat(state, local(own.start), values),
                StateBuffer::Bf16(state) => Ok(widen(state.get(local(own.start)).ok_or_else(missing)?, values)?),
                StateBuffer::EightBit(of, indices, largest) => {
                    read_eight_bit(*of, (indices, largest), local(own.start), values)
                }
            },
            (Kind::Parameter, _) if !state.master.is_empty() => read_flat(&state.master, local(own.start), values),
            (Kind::Parameter, Some(shard)) => read_storage(shard, local(own.start), values),
            (Kind::Parameter, None) => {
                let (full, _) = self.rank.model.parameters()[range.parameter].leaf().storage_and_layout();
                read_storage(&full, range.elements.clone(), values)
            }
        }
    }

    /// Reads a range that this rank holds.
    ///
    /// # Errors
    /// Fails if the rank does not hold the range.
    pub fn read(&self, kind: Kind, range: &Range) -> Result<Vec<f32>, ZeroError> {
        let mut values = vec![0.0; range.elements.len()];
        self.read_into(kind, range, &mut values)?;
        Ok(values)
    }

    /// Overwrites the part of a parameter that this rank holds, given the values of the whole parameter even if it is
    /// cut. Quantizes them if the parameter is quantized.
    ///
    /// # Errors
    /// Fails in the same cases as [`ShardedState::write`] and [`ShardedState::quantize`].
    ///
    /// # Panics
    /// Panics if `values` has fewer elements than the parameter.
    pub fn write_parameter(&mut self, parameter: ParameterId, values: &[f32]) -> Result<(), ZeroError> {
        let quantized = self.quantize(parameter, |start, out| {
            out.copy_from_slice(&values[start..start + out.len()]);
            Ok::<_, ZeroError>(())
        })?;
        if quantized {
            return Ok(());
        }
        for range in self.held_ranges(Kind::Parameter).into_iter().filter(|range| range.parameter == parameter) {
            let mut own = vec![0.0; range.elements.len()];
            self.rank.model.parameters()[parameter].fill_from_whole(range.elements.start, &mut own, |whole, out| {
                out.copy_from_slice(&values[whole..whole + out.len()]);
                Ok::<_, ZeroError>(())
            })?;
            self.write(Kind::Parameter, &range, &own)?;
        }
        Ok(())
    }

    /// Overwrites a range that this rank holds. A parameter's working copy is updated together with its master.
    ///
    /// # Errors
    /// Fails if the rank does not hold the range, or the lengths differ.
    pub fn write(&mut self, kind: Kind, range: &Range, values: &[f32]) -> Result<(), ZeroError> {
        let (id, at) = self.locate(range)?;
        if values.len() != range.elements.len() {
            return Err(ZeroError::internal("the number of values differs from the length of their range"));
        }
        let own = self.rank.own_range(id);
        // The range of a replicated parameter may extend beyond the part whose optimizer state this rank holds.
        let held = at.start.max(own.start)..at.end.min(own.end);
        let of_held = |values: &[f32]| values[held.start - at.start..held.end - at.start].to_vec();
        if kind == Kind::OuterMomentum {
            let start = at.start.checked_sub(own.start).ok_or_else(missing)?;
            return self.outer.set_momentum(&self.rank, id, start..start + values.len(), values);
        }
        let master = Stored::State(self.rank.states(id));
        if let Kind::State(index) = kind {
            let index = self.own_state(id, index)?;
            if self.disk.has(id, Stored::State(index)) {
                let start = at.start.checked_sub(own.start).ok_or_else(missing)?;
                return self.disk.write(&self.rank, id, Stored::State(index), start, values);
            }
            let state = self.optimizer.segment_mut(id).states.get_mut(index).ok_or_else(missing)?;
            let local = at.start.wrapping_sub(own.start)..at.end.wrapping_sub(own.start);
            if local.start > local.end || local.end > state.len() {
                return Err(missing());
            }
            return state.write(local.start, values);
        }
        if held.start < held.end {
            let values = &values[held.start - at.start..held.end - at.start];
            self.outer.follow(&self.rank, id, held.start - own.start, values);
        }
        if held.start < held.end && self.disk.has(id, master) {
            self.disk.write(&self.rank, id, master, held.start - own.start, &of_held(values))?;
        } else if held.start < held.end && !self.optimizer.master(id).is_empty() {
            self.optimizer.segment_mut(id).master.write(held.start - own.start, &of_held(values))?;
        }
        if self.disk.has(id, Stored::Parameters) {
            let start = at.start.checked_sub(own.start).ok_or_else(missing)?;
            return self.disk.write(&self.rank, id, Stored::Parameters, start, values);
        }
        let working = Storage::Cpu(working(values, self.rank.dtype));
        if let Some(shard) = self.parameters.shard_mut(id) {
            let start = at.start.checked_sub(own.start).ok_or_else(missing)?;
            return storage::copy(&working, 0..values.len(), shard, start..start + values.len());
        }
        let parameter = &self.rank.model.parameters()[range.parameter];
        overwrite(parameter, range.elements.clone(), &working, 0..values.len())
    }

    /// Returns the kind under which these values are stored on the disk; `None` if they are not on the disk. A
    /// parameter with a master is read from the master.
    fn stored_as(&self, kind: Kind, id: SegmentId) -> Result<Option<Stored>, ZeroError> {
        let states = self.rank.states(id);
        let stored = match kind {
            Kind::State(index) => Stored::State(self.own_state(id, index)?),
            Kind::Parameter if self.disk.has(id, Stored::State(states)) => Stored::State(states),
            // The master in memory is exact.
            Kind::Parameter if !self.optimizer.master(id).is_empty() => return Ok(None),
            Kind::Parameter => Stored::Parameters,
            Kind::OuterMomentum => return Ok(None),
        };
        Ok(self.disk.has(id, stored).then_some(stored))
    }

    fn own_state(&self, id: SegmentId, index: usize) -> Result<usize, ZeroError> {
        self.rank.own_state(id, index).ok_or_else(missing)
    }

    /// Returns the segment of a range, and the range within it.
    pub(super) fn locate(&self, range: &Range) -> Result<(usize, std::ops::Range<usize>), ZeroError> {
        let segments = self.rank.layout.segments().iter().enumerate();
        for (id, segment) in segments {
            if let Some(piece) = segment.pieces.iter().find(|piece| piece.parameter == range.parameter)
                && (range.elements.end <= piece.range.len() || segment.matrix.is_some())
            {
                let base = piece.range.start;
                return Ok((id, base + range.elements.start..base + range.elements.end));
            }
        }
        Err(ZeroError::internal("the requested range is outside every segment"))
    }
}

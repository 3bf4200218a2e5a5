//! The reduced gradients of segments. Updates read them here; afterwards they are freed or offloaded.

use std::ops::Range;

use zero_pipeline::{Placement, SegmentId};
use zero_tier::AlignedBuffer;

use super::Reductions;
use super::squares::{clipping, no_squares};
use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::error::ZeroError;
use crate::grad_buffer::{GradBuffer, Grads};
use crate::optimizer::on_host;
use crate::rank::Rank;
use crate::threads::add_parameter_range;

impl Reductions {
    /// Turns the accumulated sharded gradients into the reduced gradients, after the last micro-batch.
    pub(crate) fn settle(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId) -> Result<(), ZeroError> {
        self.catch_up(rank, memory)?;
        if let Some(at) = self.over_replicates.iter().position(|(ids, _)| ids.contains(&id)) {
            let (ids, pending) = self.over_replicates.remove(at);
            for (id, sum) in ids.into_iter().zip(pending.wait()?) {
                self.segments[id].reduced = Some(memory.received(rank, id, sum)?);
            }
        }
        if self.segments[id].reduced.is_none() {
            self.segments[id].reduced = Some(self.total(memory, id)?);
        }
        Ok(())
    }

    /// Returns the reduced gradients of a segment.
    pub(crate) fn reduced(&self, id: SegmentId) -> Result<&GradBuffer, ZeroError> {
        self.segments[id].reduced.as_ref().ok_or_else(not_reduced)
    }

    /// Returns the reduced gradients of `part`, a range of this rank's part of a segment. They are on the host: in a
    /// tile's buffer or in memory.
    pub(crate) fn part<'a>(
        &'a self,
        rank: &Rank,
        id: SegmentId,
        part: &Range<usize>,
        of_tile: Option<&'a AlignedBuffer>,
    ) -> Result<Grads<'a>, ZeroError> {
        if let Some(buffer) = of_tile {
            return Ok(Grads::F32(buffer.as_f32()));
        }
        let offset = rank.segment(id).begin_in_gradients(&rank.own_range(id));
        Ok(on_host(self.reduced(id)?.host())?.part(part.start + offset..part.end + offset))
    }

    /// Takes the reduced gradients out of a segment.
    fn take_reduced(&mut self, memory: &mut Memory, id: SegmentId) -> Result<GradBuffer, ZeroError> {
        let gradients = self.segments[id].reduced.take().ok_or_else(not_reduced)?;
        memory.uncount(Category::Gradients, gradients.len(), gradients.width());
        Ok(gradients)
    }

    /// Frees a segment's reduced gradients, after an update or in a skipped step. If parameters are sharded, saving
    /// memory matters more than the time to clear new pages. The gradients then return to the allocator, so the
    /// activations of the next forward can use their memory.
    pub(crate) fn discard(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId) -> Result<(), ZeroError> {
        let gradients = self.take_reduced(memory, id)?;
        match rank.placements(id).parameters {
            Placement::Replicated => memory.give_kept_back(gradients),
            Placement::Sharded => drop(gradients),
        }
        Ok(())
    }

    /// Takes the accumulated gradients of a segment, to be offloaded, and keeps their sum of squares for the norm.
    pub(crate) fn take_to_offload(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        id: SegmentId,
    ) -> Result<Vec<f32>, ZeroError> {
        self.settle(rank, memory, id)?;
        let gradients = self.take_reduced(memory, id)?.into_f32()?.into_host()?;
        let mut squares = no_squares(rank);
        let counted = if rank.speaks() { rank.shard(id) } else { 0..0 };
        for (parameter, _, at) in rank.segment(id).overlaps(counted) {
            add_parameter_range(&mut squares[clipping(rank, parameter)], Grads::F32(&gradients[at]));
        }
        self.segments[id].squares = Some(squares);
        Ok(gradients)
    }
}

pub(super) fn not_reduced() -> ZeroError {
    ZeroError::internal("the gradients of the update are not reduced yet")
}

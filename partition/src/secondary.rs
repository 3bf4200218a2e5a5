//! Secondary shards (hpZ of ZeRO++): a second copy of the sharded parameters in each near group, from which later gathers of a
//! step come.
//!
//! Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv 2306.10209, section 4.2.
//! The copy has the working dtype, so a gather from the copy and a gather from all shards return the same bits.

use candle_core::Storage;
use zero_comm::{Gathered, Pending, ToGather};
use zero_pipeline::SegmentId;

use crate::error::ZeroError;
use crate::leaves::fill_and_give;
use crate::ledger::Category;
use crate::memory::Memory;
use crate::parameters::InFlight;
use crate::rank::Rank;
use crate::storage::{copy, incoming, outgoing};

/// The secondary shards of one rank. Each is allocated once, and filled whenever the segment is gathered from all shards.
#[derive(Default)]
pub(crate) struct SecondaryShards {
    /// By segment; `None` if it has no secondary shards, and while a gather reads it.
    shards: Vec<Option<Storage>>,
    /// Gathers in flight.
    gathering: InFlight<Pending<Vec<Gathered>>>,
}

impl SecondaryShards {
    /// Adds the next segment, and allocates its shard if this rank's stage uses it and it has secondary shards.
    pub(crate) fn push(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId) -> Result<(), ZeroError> {
        let shard = match rank.holds(id) && rank.segment(id).has_secondary() {
            true => {
                let elements = rank.secondary_shard(id).len();
                memory.count(Category::Parameters, elements, rank.width(id));
                Some(memory.blank(rank.stored_as(id), elements, false)?)
            }
            false => None,
        };
        self.shards.push(shard);
        Ok(())
    }

    /// Copies this rank's part of the values of a whole segment, if it has secondary shards.
    pub(crate) fn fill(&mut self, rank: &Rank, id: SegmentId, full: &Storage) -> Result<(), ZeroError> {
        let Some(shard) = &mut self.shards[id] else { return Ok(()) };
        let own = rank.secondary_shard(id);
        copy(full, own.clone(), shard, 0..own.len())
    }

    /// Starts gathering segments over the near group.
    pub(crate) fn gather(&mut self, rank: &Rank, memory: &mut Memory, ids: &[SegmentId]) -> Result<(), ZeroError> {
        let missing = || ZeroError::internal("the segment has no secondary shard, or was gathered twice");
        let near = rank.groups.near().ok_or_else(missing)?;
        let mut vectors = Vec::with_capacity(ids.len());
        for &id in ids {
            let shard = self.shards[id].take().ok_or_else(missing)?;
            let (elements, counts) = (rank.segment(id).elements(), rank.segment(id).secondary_counts());
            memory.count(Category::Staging, elements, rank.width(id));
            let shard = outgoing(shard, counts[near.rank()], false)?;
            let output = outgoing(memory.blank(rank.stored_as(id), elements, false)?, elements, false)?;
            vectors.push(ToGather { shard, output, counts });
        }
        self.gathering.start(ids, near.all_gather_coalesced(vectors));
        Ok(())
    }

    /// Waits for the gather and fills the segments' leaves.
    pub(crate) fn await_gather(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        ids: &[SegmentId],
    ) -> Result<(), ZeroError> {
        for (&id, Gathered { shard, output }) in ids.iter().zip(self.gathering.take(ids)?.wait()?) {
            self.shards[id] = Some(incoming(shard)?);
            fill_and_give(rank, memory, id, incoming(output)?)?;
        }
        Ok(())
    }
}

//! Secondary shards (hpZ of ZeRO++): a second copy of the sharded parameters in each near group. Later gathers of a
//! step read this copy.
//!
//! Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv 2306.10209,
//! section 4.2. The copy has the working dtype, so a gather from the copy is bit-identical to a gather from all shards.

use candle_core::Storage;
use zero_comm::{Gathered, Pending};
use zero_pipeline::SegmentId;

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::error::ZeroError;
use crate::leaves::fill_and_give;
use crate::parameters::{InFlight, to_gather};
use crate::rank::Rank;
use crate::storage::{copy, incoming};

/// The secondary shards of one rank. Each secondary shard is allocated once and filled whenever its segment is gathered
/// from all shards.
#[derive(Default)]
pub(crate) struct SecondaryShards {
    /// By segment; `None` if the segment has no secondary shards, and while a gather reads the shard.
    shards: Vec<Option<Storage>>,
    /// Gathers in flight.
    gathering: InFlight<Gathering>,
}

/// A gather of several segments.
struct Gathering {
    pending: Pending<Vec<Gathered>>,
    /// For each segment, its shard if the gather sends a copy of the shard.
    kept: Vec<Option<Storage>>,
}

impl SecondaryShards {
    /// Adds the next segment. Allocates the segment's secondary shard if it has one and this rank's stage uses the
    /// segment.
    pub(crate) fn push(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId) -> Result<(), ZeroError> {
        let shard = match rank.holds(id) && rank.segment(id).has_secondary() {
            true => {
                let elements = rank.secondary_shard(id).len();
                memory.count(Category::Parameters, elements, rank.width(id));
                Some(memory.blank(rank.stored_as(id), elements, rank.options.on_gpu.parameters)?)
            }
            false => None,
        };
        self.shards.push(shard);
        Ok(())
    }

    /// Fills this rank's secondary shard from the values of the whole segment, if the segment has secondary shards.
    pub(crate) fn fill(&mut self, rank: &Rank, id: SegmentId, full: &Storage) -> Result<(), ZeroError> {
        let Some(shard) = &mut self.shards[id] else { return Ok(()) };
        let own = rank.secondary_shard(id);
        copy(full, own.clone(), shard, 0..own.len())
    }

    /// Starts gathering segments over the near group.
    pub(crate) fn gather(&mut self, rank: &Rank, memory: &mut Memory, ids: &[SegmentId]) -> Result<(), ZeroError> {
        let missing = || ZeroError::internal("the segment has no secondary shard, or was gathered twice");
        let near = rank.groups.near().ok_or_else(missing)?;
        let (mut vectors, mut kept) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len()));
        for &id in ids {
            let shard = self.shards[id].take().ok_or_else(missing)?;
            let (elements, counts) = (rank.segment(id).elements(), rank.segment(id).secondary_counts());
            memory.count(Category::Staging, elements, rank.width(id));
            let (vector, shard) = to_gather(rank, memory, id, shard, (counts[near.rank()], counts))?;
            vectors.push(vector);
            kept.push(shard);
        }
        self.gathering.start(ids, Gathering { pending: near.all_gather_coalesced(vectors), kept });
        Ok(())
    }

    /// Waits for the gather and fills the segments' leaves.
    pub(crate) fn await_gather(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        ids: &[SegmentId],
    ) -> Result<(), ZeroError> {
        let Gathering { pending, kept } = self.gathering.take(ids)?;
        for ((&id, kept), Gathered { shard, output }) in ids.iter().zip(kept).zip(pending.wait()?) {
            self.shards[id] = Some(kept.map_or_else(|| incoming(shard), Ok)?);
            fill_and_give(rank, memory, id, incoming(output)?)?;
        }
        Ok(())
    }
}

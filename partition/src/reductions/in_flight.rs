//! Reductions in flight. Some of them are several collectives, one after the other.

use zero_comm::{Buffer, Exchanged, Pending, ReduceOp, Scattered};
use zero_pipeline::SegmentId;

use super::{MicroBatch, Reductions, coded};
use crate::error::ZeroError;
use crate::kept::KeptGradient;
use crate::memory::Memory;
use crate::rank::Rank;

/// A bucket whose reduction is in flight.
pub(super) struct PendingReduce {
    pub(super) segments: Vec<SegmentId>,
    pub(super) micro_batch: MicroBatch,
    /// Whether micro-batches are summed before the replicates of a shard are.
    pub(super) sums_first: bool,
    pub(super) started: Vec<Reduction>,
}

pub(super) enum Reduction {
    /// With one rank, the local gradient is the sum.
    Alone(KeptGradient),
    /// An all-reduce over the data-parallel group.
    All(Pending<Buffer>),
    /// A reduce-scatter over the shard group.
    Scatter(Pending<Scattered>),
    /// The all-to-all of this level of codes.
    Coded(usize, Pending<Exchanged>),
    /// The all-reduce of the shard over its replicates that follows, and the input of the reduce-scatter.
    Replicates(Option<Buffer>, Pending<Buffer>),
}

impl Reductions {
    /// Starts the next collective of each reduction that has several and whose current one is complete. Waits for the current
    /// ones of the first `due` buckets. All ranks start the collectives of a communicator in the order of the reductions.
    pub(super) fn pass_on(&mut self, rank: &Rank, memory: &mut Memory, due: usize) -> Result<(), ZeroError> {
        if rank.groups.across().is_some() {
            let is_done = |_: bool, reduction: &Reduction| match reduction {
                Reduction::Coded(0, pending) => Some(pending.is_done()),
                _ => None,
            };
            self.advance(due, is_done, |id, reduction| match reduction {
                Reduction::Coded(level, pending) => {
                    let sum = KeptGradient::F32(coded::sum(rank, memory, id, level, pending.wait()?)?);
                    Ok(Reduction::Coded(level + 1, coded::exchange(rank, memory, id, level + 1, sum)?))
                }
                other => Ok(other),
            })?;
        }
        let Some(replicates) = rank.groups.replicate() else { return Ok(()) };
        let last = usize::from(rank.groups.across().is_some());
        let is_done = |sums_first: bool, reduction: &Reduction| match reduction {
            _ if sums_first => None,
            Reduction::Scatter(pending) => Some(pending.is_done()),
            Reduction::Coded(level, pending) => Some(*level == last && pending.is_done()),
            _ => None,
        };
        self.advance(due, is_done, |id, reduction| match reduction {
            Reduction::Scatter(pending) => {
                let Scattered { input, shard } = pending.wait()?;
                Ok(Reduction::Replicates(Some(input), replicates.all_reduce(shard, ReduceOp::Sum)))
            }
            Reduction::Coded(level, pending) => {
                let shard = coded::sum(rank, memory, id, level, pending.wait()?)?;
                let shard = memory.packed(rank, KeptGradient::F32(shard))?;
                Ok(Reduction::Replicates(None, replicates.all_reduce(shard, ReduceOp::Sum)))
            }
            other => Ok(other),
        })
    }

    /// Replaces reductions by what `next` starts, in their order: those that are due, and the others up to the first one that
    /// is not complete. `is_done` returns `None` for a reduction that is not to be replaced; it gets [`PendingReduce::sums_first`].
    fn advance(
        &mut self,
        due: usize,
        is_done: impl Fn(bool, &Reduction) -> Option<bool>,
        mut next: impl FnMut(SegmentId, Reduction) -> Result<Reduction, ZeroError>,
    ) -> Result<(), ZeroError> {
        for (index, bucket) in self.reducing.iter_mut().enumerate() {
            let mut is_late = false;
            let replace = |(&id, reduction): (&SegmentId, Reduction)| match is_done(bucket.sums_first, &reduction) {
                Some(is_done) if !is_late && (index < due || is_done) => next(id, reduction),
                waits => {
                    is_late |= waits.is_some();
                    Ok(reduction)
                }
            };
            let started = std::mem::take(&mut bucket.started);
            bucket.started = bucket.segments.iter().zip(started).map(replace).collect::<Result<_, _>>()?;
            if is_late {
                break;
            }
        }
        Ok(())
    }
}

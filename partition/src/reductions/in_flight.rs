//! Reductions in flight. Some reductions consist of several collectives, one after the other.

use zero_comm::{Buffer, Pending, ReduceOp, Scattered};
use zero_pipeline::SegmentId;

use super::coded::Exchange;
use super::{MicroBatch, Reductions, coded};
use crate::accounting::memory::Memory;
use crate::error::ZeroError;
use crate::grad_buffer::GradBuffer;
use crate::rank::Rank;

/// A bucket whose reduction is in flight.
pub(super) struct PendingReduce {
    pub(super) segments: Vec<SegmentId>,
    pub(super) micro_batch: MicroBatch,
    /// Whether gradients are summed over micro-batches before they are summed over the replicates of a shard.
    pub(super) sums_first: bool,
    pub(super) started: Vec<Started>,
}

/// The reduction of some or all segments of a bucket.
pub(super) struct Started {
    pub(super) segments: Vec<SegmentId>,
    pub(super) reduction: Reduction,
}

/// The current collective of a reduction. It covers all segments of the reduction.
pub(super) enum Reduction {
    /// No collective: with one rank, the local gradients are the sums.
    Alone(Vec<GradBuffer>),
    /// An all-reduce over the data-parallel group.
    All(Pending<Vec<Buffer>>),
    /// A reduce-scatter over the shard group.
    Scatter(Pending<Vec<Scattered>>),
    /// The all-to-all of a level of codes.
    Coded(Exchange),
    /// The all-reduce of the reduced shards over their replicates. Also holds the inputs of the preceding
    /// reduce-scatter; none if the gradients were sent as codes.
    Replicates(Vec<Buffer>, Pending<Vec<Buffer>>),
}

/// Buffers of one kind of collective. Buffers on the host and buffers on the GPU need separate collectives.
pub(super) struct ByPlace<T>([(Vec<SegmentId>, Vec<T>); 2]);

impl<T> Default for ByPlace<T> {
    fn default() -> Self {
        Self([(vec![], vec![]), (vec![], vec![])])
    }
}

impl<T> ByPlace<T> {
    pub(super) fn add(&mut self, is_on_device: bool, id: SegmentId, buffer: T) {
        let (ids, buffers) = &mut self.0[usize::from(is_on_device)];
        ids.push(id);
        buffers.push(buffer);
    }

    /// Starts one reduction for each place that has buffers.
    pub(super) fn start(
        self,
        mut start: impl FnMut(&[SegmentId], Vec<T>) -> Result<Reduction, ZeroError>,
    ) -> Result<Vec<Started>, ZeroError> {
        let places = self.0.into_iter().filter(|(ids, _)| !ids.is_empty());
        let started = places
            .map(|(segments, buffers)| start(&segments, buffers).map(|reduction| Started { segments, reduction }));
        started.collect()
    }
}

impl Reductions {
    /// Starts the next collective of each reduction whose current collective is complete and not the last. Waits for
    /// the current collectives of the first `due` buckets. All ranks start the collectives of a communicator in the
    /// order of the reductions.
    pub(super) fn pass_on(&mut self, rank: &Rank, memory: &mut Memory, due: usize) -> Result<(), ZeroError> {
        if rank.groups.across().is_some() {
            let is_done = |_: bool, reduction: &Reduction| match reduction {
                Reduction::Coded(exchange) if exchange.level() == 0 => Some(exchange.is_done()),
                _ => None,
            };
            self.advance(due, is_done, |ids, reduction| match reduction {
                Reduction::Coded(exchange) => {
                    let next = exchange.level() + 1;
                    let sums = coded::sum(rank, memory, ids, exchange)?.into_iter().map(GradBuffer::F32);
                    Ok(Reduction::Coded(coded::exchange(rank, memory, ids, next, sums.collect())?))
                }
                other => Ok(other),
            })?;
        }
        let Some(replicates) = rank.groups.replicate() else { return Ok(()) };
        let last = usize::from(rank.groups.across().is_some());
        let is_done = |sums_first: bool, reduction: &Reduction| match reduction {
            _ if sums_first => None,
            Reduction::Scatter(pending) => Some(pending.is_done()),
            Reduction::Coded(exchange) => Some(exchange.level() == last && exchange.is_done()),
            _ => None,
        };
        self.advance(due, is_done, |ids, reduction| match reduction {
            Reduction::Scatter(pending) => {
                let scattered = pending.wait()?.into_iter().map(|Scattered { input, shard }| (input, shard));
                let (inputs, shards) = scattered.unzip();
                Ok(Reduction::Replicates(inputs, replicates.all_reduce_coalesced(shards, ReduceOp::Sum)))
            }
            Reduction::Coded(exchange) => {
                let sums = coded::sum(rank, memory, ids, exchange)?.into_iter();
                let shards = sums.map(|sum| memory.packed(rank, GradBuffer::F32(sum)));
                let shards = shards.collect::<Result<Vec<_>, ZeroError>>()?;
                Ok(Reduction::Replicates(vec![], replicates.all_reduce_coalesced(shards, ReduceOp::Sum)))
            }
            other => Ok(other),
        })
    }

    /// Replaces reductions, in order, with the reductions that `next` returns: first those of the first `due` buckets,
    /// then the complete ones that follow. `is_done` receives [`PendingReduce::sums_first`] and returns `None` for a
    /// reduction that must not be replaced.
    fn advance(
        &mut self,
        due: usize,
        is_done: impl Fn(bool, &Reduction) -> Option<bool>,
        mut next: impl FnMut(&[SegmentId], Reduction) -> Result<Reduction, ZeroError>,
    ) -> Result<(), ZeroError> {
        for (index, bucket) in self.reducing.iter_mut().enumerate() {
            let mut is_late = false;
            let replace = |Started { segments, reduction }| match is_done(bucket.sums_first, &reduction) {
                Some(is_done) if !is_late && (index < due || is_done) => {
                    next(&segments, reduction).map(|reduction| Started { segments, reduction })
                }
                waits => {
                    is_late |= waits.is_some();
                    Ok(Started { segments, reduction })
                }
            };
            let started = std::mem::take(&mut bucket.started);
            bucket.started = started.into_iter().map(replace).collect::<Result<_, ZeroError>>()?;
            if is_late {
                break;
            }
        }
        Ok(())
    }

    /// Waits for a reduction and stores its results.
    pub(super) fn store(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        ids: &[SegmentId],
        reduction: Reduction,
    ) -> Result<(), ZeroError> {
        match reduction {
            Reduction::Alone(full) => {
                for (&id, full) in ids.iter().zip(full) {
                    self.file_all(rank, memory, id, full)?;
                }
            }
            Reduction::All(pending) => {
                for (&id, full) in ids.iter().zip(pending.wait()?) {
                    let full = memory.received(rank, id, full)?;
                    self.file_all(rank, memory, id, full)?;
                }
            }
            Reduction::Scatter(pending) => {
                for (&id, Scattered { input, shard }) in ids.iter().zip(pending.wait()?) {
                    self.file(rank, memory, id, input, shard)?;
                }
            }
            Reduction::Coded(exchange) => {
                for (&id, shard) in ids.iter().zip(coded::sum(rank, memory, ids, exchange)?) {
                    let shard = memory.kept(rank, shard)?;
                    self.add_up(memory, id, shard)?;
                }
            }
            Reduction::Replicates(inputs, pending) => {
                let mut inputs = inputs.into_iter();
                for (&id, shard) in ids.iter().zip(pending.wait()?) {
                    match inputs.next() {
                        Some(input) => self.file(rank, memory, id, input, shard)?,
                        None => {
                            let shard = memory.received(rank, id, shard)?;
                            self.add_up(memory, id, shard)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Starts an all-reduce over the replicates of each shard. It adds up their gradients, which are already summed
    /// over all micro-batches.
    pub(super) fn start_over_replicates(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        ids: Vec<SegmentId>,
    ) -> Result<(), ZeroError> {
        let Some(replicates) = rank.groups.replicate() else { return Ok(()) };
        let mut sums = Vec::with_capacity(ids.len());
        for &id in &ids {
            let total = self.total(memory, id)?;
            sums.push(memory.packed(rank, total)?);
        }
        self.over_replicates.push((ids, replicates.all_reduce_coalesced(sums, ReduceOp::Sum)));
        Ok(())
    }
}

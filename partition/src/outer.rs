//! Outer steps of replicates that train independently in between (DiLoCo). An outer step averages the parameters of all
//! replicates. The outer optimizer, SGD with Nesterov's momentum, then updates the parameters from which all replicates
//! started; its gradient is these parameters minus the average.
//!
//! Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1. The
//! replicates of a shard divide the state of the outer optimizer among themselves. The state is f32, in host memory.

use std::collections::VecDeque;
use std::ops::Range;

use candle_core::{CpuStorage, Storage};
use zero_comm::{Buffer, Communicator, Gathered, Pending, ReduceOp, Scattered};
use zero_optim::{Optimizer, Sgd, Step};
use zero_pipeline::SegmentId;

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::error::{ZeroError, missing};
use crate::grad_buffer::Grads;
use crate::narrow::{Values, update};
use crate::options::OuterOptions;
use crate::rank::Rank;
use crate::rounding::{round_to, working};
use crate::storage::copy;

/// The outer optimizer's state of this rank, by segment.
#[derive(Default)]
pub(crate) struct OuterState {
    segments: Vec<Share>,
    averaging: VecDeque<(SegmentId, Pending<Scattered>)>,
}

/// This rank's share of a segment.
#[derive(Default)]
struct Share {
    /// The parameters after the last outer step, from which all replicates continued.
    before: Vec<f32>,
    /// Empty without momentum.
    momentum: Vec<f32>,
}

impl OuterState {
    /// Adds the next segment, with its initial values.
    pub(crate) fn push(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId, seed: u64) {
        let (Some(outer), Some(share)) = (rank.options.outer, share(rank, id)) else {
            return self.segments.push(Share::default());
        };
        memory.count(Category::OptimizerState, share.len(), outer.share.width);
        let momentum = vec![0.0; if outer.momentum > 0.0 { share.len() } else { 0 }];
        let first = rank.own_range(id).start;
        let before = rank.initial_values(id, first + share.start..first + share.end, seed);
        self.segments.push(Share { before, momentum });
    }

    /// Takes over parameters that were written between outer steps. `at` is the index of the first value in this rank's
    /// range of the segment.
    pub(crate) fn follow(&mut self, rank: &Rank, id: SegmentId, at: usize, values: &[f32]) {
        let Some(share) = share(rank, id) else { return };
        let (start, end) = (share.start.max(at), share.end.min(at + values.len()));
        if start < end {
            let of_share = start - share.start..end - share.start;
            self.segments[id].before[of_share].copy_from_slice(&values[start - at..end - at]);
        }
    }

    /// Returns the momentum of `range`, which counts from the start of this rank's range of a segment. The range must
    /// lie in this rank's share.
    pub(crate) fn momentum(&self, rank: &Rank, id: SegmentId, range: Range<usize>) -> Result<&[f32], ZeroError> {
        self.segments[id].momentum.get(in_share(rank, id, range)?).ok_or_else(missing)
    }

    /// Overwrites the momentum of `range`, which counts from the start of this rank's range of a segment. The range
    /// must lie in this rank's share.
    pub(crate) fn set_momentum(
        &mut self,
        rank: &Rank,
        id: SegmentId,
        range: Range<usize>,
        values: &[f32],
    ) -> Result<(), ZeroError> {
        let momentum = self.segments[id].momentum.get_mut(in_share(rank, id, range)?).ok_or_else(missing)?;
        momentum.copy_from_slice(values);
        Ok(())
    }

    /// Starts summing `values`, this rank's range of a segment's parameters, over the replicates.
    pub(crate) fn start(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        id: SegmentId,
        values: Vec<f32>,
    ) -> Result<(), ZeroError> {
        let (replicates, outer) = replicates(rank)?;
        let counts = outer.share.counts(values.len());
        let share = memory.take(counts[outer.share.replicate]);
        memory.count(Category::Staging, values.len() + share.len(), 4);
        let (values, share) = (Buffer::F32(values), Buffer::F32(share));
        self.averaging.push_back((id, replicates.reduce_scatter(values, share, &counts, ReduceOp::Sum)));
        Ok(())
    }

    /// Waits for the sum, runs the outer optimizer on this rank's share, and returns the new parameters of this rank's
    /// range. Pass them to [`OuterState::give_back`] after use.
    pub(crate) fn finish(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId) -> Result<Vec<f32>, ZeroError> {
        let (replicates, outer) = replicates(rank)?;
        let (_, pending) = self
            .averaging
            .pop_front()
            .filter(|(started, _)| *started == id)
            .ok_or_else(|| ZeroError::internal("no such outer step was started"))?;
        let Scattered { input, shard } = pending.wait()?;
        let mut difference = shard.into_f32()?;
        let counts = outer.share.counts(input.len());
        let Share { before, momentum } = &mut self.segments[id];
        let count = outer.share.replicates as f32;
        difference.iter_mut().zip(&*before).for_each(|(sum, before)| *sum = before - *sum / count);
        let sgd = Sgd { momentum: outer.momentum, dampening: 0.0, nesterov: outer.momentum > 0.0, weight_decay: 0.0 };
        let step = Step { step: 1, lr: outer.lr, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: false };
        let states = (outer.momentum > 0.0).then_some(Values::F32(momentum)).into_iter().collect();
        update(&Optimizer::Sgd(sgd), &step, Values::F32(before), Grads::F32(&difference), states, None)?;
        difference.copy_from_slice(before);
        let Gathered { shard, output } = replicates.all_gather(Buffer::F32(difference), input, &counts).wait()?;
        memory.uncount(Category::Staging, shard.len(), 4);
        memory.give(shard.into_f32()?);
        Ok(output.into_f32()?)
    }

    /// Recycles the buffer that [`OuterState::finish`] has returned.
    pub(crate) fn give_back(memory: &mut Memory, values: Vec<f32>) {
        memory.uncount(Category::Staging, values.len(), 4);
        memory.give(values);
    }
}

/// Overwrites a range of working parameters, in host memory or on a GPU.
pub(crate) fn store(values: &[f32], parameters: &mut Storage, at: Range<usize>) -> Result<(), ZeroError> {
    match parameters {
        Storage::Cpu(CpuStorage::F32(parameters)) => {
            parameters[at].copy_from_slice(values);
            Ok(())
        }
        Storage::Cpu(narrow) => round_to(values, narrow, at),
        of_gpu => {
            let rounded = Storage::Cpu(working(values, of_gpu.dtype()));
            copy(&rounded, 0..values.len(), of_gpu, at)
        }
    }
}

/// Returns this rank's share of its range of a segment; `None` without outer steps, or if the rank does not update the
/// segment.
pub(crate) fn share(rank: &Rank, id: SegmentId) -> Option<Range<usize>> {
    let outer = rank.options.outer.filter(|_| rank.updates(id))?;
    Some(outer.share.of(rank.own_range(id).len()))
}

fn in_share(rank: &Rank, id: SegmentId, range: Range<usize>) -> Result<Range<usize>, ZeroError> {
    let share = share(rank, id).ok_or_else(missing)?;
    let start = range.start.checked_sub(share.start).ok_or_else(missing)?;
    Ok(start..start + range.len())
}

fn replicates(rank: &Rank) -> Result<(&dyn Communicator, OuterOptions), ZeroError> {
    let outer = || ZeroError::internal("there are no replicates that train independently");
    Ok((&**rank.groups.apart().ok_or_else(outer)?, rank.options.outer.ok_or_else(outer)?))
}

//! Sums of the squares of gradients, for norms.

use std::ops::Range;

use zero_model::ParameterId;
use zero_model::sink::FlatBuffer;
use zero_optim::ExactSum;
use zero_pipeline::SegmentId;

use super::Reductions;
use crate::accounting::memory::Memory;
use crate::error::ZeroError;
use crate::gpu::Gpu;
use crate::grad_buffer::Grads;
use crate::rank::Rank;
use crate::threads::add_parameter_range;

impl Reductions {
    /// Adds the squared norm of a micro-batch's gradient to the sum over micro-batches, if the options ask for it.
    pub(super) fn add_micro_batch(&mut self, rank: &Rank, id: SegmentId, local: &FlatBuffer) {
        let Some(local) = local.host().filter(|_| rank.options.sums_micro_batches) else { return };
        for piece in &rank.segment(id).pieces {
            add_parameter_range(&mut self.of_micro_batches, Grads::F32(&local[piece.range.clone()]));
        }
    }

    /// Takes the sum of the squared norms of this rank's gradients in each micro-batch since the last call.
    pub(crate) fn take_micro_batch_squares(&mut self) -> ExactSum {
        std::mem::replace(&mut self.of_micro_batches, ExactSum::new())
    }

    /// Adds the squares of the reduced gradients that are on the host and in this rank's share. Each parameter's
    /// squares go to the sum of its clipping.
    pub(crate) fn add_squares(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        sums: &mut [ExactSum],
    ) -> Result<(), ZeroError> {
        for id in rank.updated() {
            if let Some(squares) = self.segments[id].squares.take() {
                sums.iter_mut().zip(&squares).for_each(|(sum, squares)| sum.merge(squares));
                continue;
            }
            self.settle(rank, memory, id)?;
            let Some(gradients) = self.reduced(id)?.host() else { continue };
            for (parameter, range) in shares(rank, id) {
                add_parameter_range(&mut sums[clipping(rank, parameter)], gradients.part(range));
            }
        }
        Ok(())
    }

    /// Calls `then` with this rank's share of the reduced gradients on the GPU, as ranges of buffers.
    pub(crate) fn on_gpu<T>(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        then: impl FnOnce(&mut Gpu, &[(&FlatBuffer, Vec<Range<usize>>)]) -> Result<T, ZeroError>,
    ) -> Result<T, ZeroError> {
        let resident: Vec<SegmentId> = rank.updated().into_iter().filter(|&id| rank.is_resident(id)).collect();
        resident.iter().try_for_each(|&id| self.settle(rank, memory, id))?;
        let ranges = |id| shares(rank, id).into_iter().map(|(_, range)| range).collect();
        let gradients = resident.iter().map(|&id| Ok((self.reduced(id)?.f32()?, ranges(id))));
        let gradients = gradients.collect::<Result<Vec<_>, ZeroError>>()?;
        then(memory.gpu()?, &gradients)
    }
}

/// Returns an empty sum for each clipping.
pub(crate) fn no_squares(rank: &Rank) -> Vec<ExactSum> {
    vec![ExactSum::new(); 1 + rank.options.clippings.len()]
}

/// Returns the index of the clipping that applies to a parameter's gradient.
pub(super) fn clipping(rank: &Rank, parameter: ParameterId) -> usize {
    rank.model.parameters()[parameter].tuning().clipping
}

/// Returns this rank's share of a segment: pairs of a parameter and its range in the reduced gradients. No element must
/// be counted twice. A rank's share is therefore its shard, even if gradients are replicated. Only the first of the
/// replicates has a share, and only the first rank of a tensor group counts parameters that are not cut.
fn shares(rank: &Rank, id: SegmentId) -> Vec<(ParameterId, Range<usize>)> {
    if !rank.speaks() {
        return vec![];
    }
    let (segment, shard) = (rank.segment(id), rank.shard(id));
    let offset = segment.begin_in_gradients(&shard);
    if segment.is_shared && rank.groups.tensor_index() > 0 {
        return vec![];
    }
    let parts = segment.overlaps(shard);
    parts.map(|(parameter, _, at)| (parameter, at.start + offset..at.end + offset)).collect()
}

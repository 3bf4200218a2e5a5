//! Sums, over the ranks of a tensor group, the gradients of parameters that are not cut.
//!
//! Each rank of the group computes a part of such a gradient, from its slice of the positions or from its part of the
//! layers. Once the gradients of a step are reduced, all ranks of the group hold the same shards.

use std::ops::Range;

use zero_comm::{Buffer, ReduceOp};
use zero_pipeline::SegmentId;

use super::Reductions;
use super::reduced::not_reduced;
use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::error::ZeroError;
use crate::grad_buffer::GradBuffer;
use crate::rank::Rank;

impl Reductions {
    /// If there is a tensor group, sums over it the gradients of parameters that are not cut, in the ranges that this
    /// rank updates. Uses one collective for all of them, in f32, on the host.
    pub(crate) fn sum_over_tensor_group(&mut self, rank: &Rank, memory: &mut Memory) -> Result<(), ZeroError> {
        let Some(group) = rank.groups.tensor() else { return Ok(()) };
        let parts: Vec<(SegmentId, Range<usize>)> =
            rank.updated().into_iter().filter_map(|id| shared(rank, id)).collect();
        let elements = parts.iter().map(|(_, range)| range.len()).sum();
        memory.count(Category::Staging, elements, size_of::<f32>());
        let mut values = Vec::with_capacity(elements);
        for (id, range) in &parts {
            self.settle(rank, memory, *id)?;
            match self.segments[*id].reduced.as_mut() {
                Some(GradBuffer::F32(gradients)) => {
                    gradients.round_communicated()?;
                    let start = values.len();
                    values.resize(start + range.len(), 0.0);
                    gradients.read(range.clone(), &mut values[start..])?;
                }
                Some(GradBuffer::Bf16(gradients)) => {
                    values.extend(gradients[range.clone()].iter().map(|value| value.to_f32()));
                }
                None => return Err(not_reduced()),
            }
        }
        let summed = group.all_reduce(Buffer::F32(values), ReduceOp::Sum).wait()?.into_f32()?;
        let mut rest = summed.as_slice();
        for (id, range) in parts {
            let (part, later) = rest.split_at(range.len());
            rest = later;
            match self.segments[id].reduced.as_mut() {
                Some(GradBuffer::F32(gradients)) => gradients.write(range.start, part)?,
                Some(GradBuffer::Bf16(gradients)) => {
                    gradients[range].iter_mut().zip(part).for_each(|(to, &sum)| *to = half::bf16::from_f32(sum));
                }
                None => return Err(not_reduced()),
            }
        }
        memory.uncount(Category::Staging, elements, size_of::<f32>());
        Ok(())
    }
}

/// Returns the range of a segment's reduced gradients that this rank updates, if the tensor group sums them.
fn shared(rank: &Rank, id: SegmentId) -> Option<(SegmentId, Range<usize>)> {
    let (segment, own) = (rank.segment(id), rank.own_range(id));
    let start = segment.begin_in_gradients(&own);
    segment.is_shared.then(|| (id, start..start + own.len()))
}

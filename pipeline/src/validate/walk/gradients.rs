//! Checks that a segment's gradient is complete before it is summed, and that micro-batches are summed in order.

use super::{Fact, State};
use crate::ids::{LayerId, SegmentId};
use crate::shape::Placement;
use crate::validate::check::{Check, ensure};
use crate::world::World;

impl State<'_> {
    pub(super) fn contribute(&mut self, layer: LayerId, micro_batch: usize) -> Check {
        let World { shape, stages, .. } = *self.world;
        let is_trainable = |segment: &&SegmentId| shape.segments[**segment].is_trainable;
        for &segment in shape.layers[layer].segments.iter().filter(is_trainable) {
            self.hold(segment, micro_batch)?;
            if stages.completes(layer, segment) {
                self.facts.insert(Fact::Complete(segment, micro_batch));
            }
        }
        self.facts.extend(stages.tied_after(layer, micro_batch).into_iter().map(Fact::Leaving));
        Ok(())
    }

    pub(super) fn hold(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        let held = self.open[segment].replace(micro_batch);
        ensure(held.is_none_or(|other| other == micro_batch), || {
            format!("segment {segment} still holds the gradient of another micro-batch")
        })
    }

    pub(super) fn reduce(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        if self.placements(segment).gradients == Placement::Sharded {
            return self.take(segment, micro_batch);
        }
        let (has, all) = (self.added[segment], self.micro_batches.len());
        ensure(has == all, || {
            format!("segment {segment} cannot be reduced yet: {has} of {all} micro-batches are accumulated")
        })?;
        ensure(self.facts.insert(Fact::Reducing(segment)), || format!("segment {segment} is reduced already"))
    }

    pub(super) fn await_reduce(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        if self.placements(segment).gradients == Placement::Sharded {
            self.items.reduced(segment, self.added[segment] == 0)?;
            self.add_up(segment, micro_batch)?;
        }
        if self.added[segment] == self.micro_batches.len() {
            self.facts.insert(Fact::Reduced(segment));
        }
        Ok(())
    }

    /// Removes a complete local gradient from its segment, to accumulate or reduce it.
    pub(super) fn take(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        self.open[segment] = None;
        ensure(self.facts.remove(&Fact::Complete(segment, micro_batch)), || {
            format!("segment {segment}'s gradient of that micro-batch is not complete")
        })
    }

    /// Adds a micro-batch to the sum. Micro-batches must be added in order.
    pub(super) fn add_up(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        let next = self.added[segment];
        self.added[segment] += 1;
        ensure(micro_batch == next, || {
            format!("micro-batches must be added in order: segment {segment} needs micro-batch {next} next")
        })
    }
}

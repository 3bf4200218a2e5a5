//! The assignment of layers to pipeline stages, and of tied segments to their owners.
//!
//! The model is cut into *chunks* of consecutive layers. Chunk `c` is on stage `c % stages`: with one chunk per stage,
//! each stage runs one range of layers. With more (interleaved schedules), the chunks are assigned round-robin.
//!
//! A tied segment is used by layers of several stages. Its *owner* is the stage of its first user: the owner reduces
//! its gradient, updates it and writes it into checkpoints. The other stages keep a copy of the segment for their
//! forward and backward, send their contribution to the gradient, and receive the updated parameters. The copies are
//! bit-identical, so they cannot drift apart.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::ids::{LayerId, SegmentId};
use crate::message::{Content, Message, StageId};
use crate::shape::ModelShape;

/// A model that is cut into pipeline stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages {
    count: usize,
    chunks: Vec<Range<LayerId>>,
    stage_of: Vec<StageId>,
    /// Users of each segment, in the order of the forward pass.
    users: Vec<Vec<LayerId>>,
    /// Trainable segments with several users. Copies of a frozen segment never change, so they need no messages.
    ties: Vec<SegmentId>,
}

/// An invalid assignment of layers to stages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StagesError {
    /// The chunks leave out layers, overlap or are empty.
    #[error("the chunks {0:?} must cover the model's layers in order, without gaps or overlaps, and none may be empty")]
    NotConsecutive(Vec<Range<LayerId>>),
    /// The number of chunks is not a multiple of the number of stages.
    #[error("the number of chunks, {chunks}, must be a multiple of the number of stages, {stages}")]
    Uneven {
        /// Number of chunks.
        chunks: usize,
        /// Number of stages.
        stages: usize,
    },
}

impl Stages {
    /// Cuts a model into the given chunks.
    ///
    /// # Errors
    /// Fails if the chunks are not the model's layers in order, or cannot be divided evenly among the stages.
    pub fn new(shape: &ModelShape, count: usize, chunks: Vec<Range<LayerId>>) -> Result<Self, StagesError> {
        let layers = shape.layers.len();
        if count == 0 || chunks.is_empty() || !chunks.len().is_multiple_of(count) {
            return Err(StagesError::Uneven { chunks: chunks.len(), stages: count });
        }
        let mut next = 0;
        for chunk in &chunks {
            if chunk.start != next || chunk.is_empty() {
                return Err(StagesError::NotConsecutive(chunks));
            }
            next = chunk.end;
        }
        if next != layers {
            return Err(StagesError::NotConsecutive(chunks));
        }
        let stage_of =
            chunks.iter().enumerate().flat_map(|(index, chunk)| chunk.clone().map(move |_| index % count)).collect();
        let mut users: Vec<Vec<LayerId>> = vec![vec![]; shape.segments.len()];
        for (layer, of) in shape.layers.iter().enumerate() {
            for &segment in &of.segments {
                if users[segment].last() != Some(&layer) {
                    users[segment].push(layer);
                }
            }
        }
        let is_tied = |&segment: &usize| users[segment].len() > 1 && shape.segments[segment].is_trainable;
        let ties = (0..users.len()).filter(is_tied).collect();
        Ok(Self { count, chunks, stage_of, users, ties })
    }

    /// Puts the whole model on one stage.
    ///
    /// # Panics
    /// Panics if the model has no layers.
    #[must_use]
    pub fn single(shape: &ModelShape) -> Self {
        let all = 0..shape.layers.len();
        Self::new(shape, 1, vec![all]).expect("a model has layers")
    }

    /// Returns the number of stages.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns all chunks, in the order of the forward pass.
    #[must_use]
    pub fn chunks(&self) -> &[Range<LayerId>] {
        &self.chunks
    }

    /// Returns the number of chunks per stage, also called virtual stages.
    #[must_use]
    pub fn chunks_per_stage(&self) -> usize {
        self.chunks.len() / self.count
    }

    /// Returns the stage of a layer.
    #[must_use]
    pub fn stage_of(&self, layer: LayerId) -> StageId {
        self.stage_of[layer]
    }

    /// Returns the number of layers of the model.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.stage_of.len()
    }

    /// Returns the layers of a stage, in the order of the forward pass.
    pub fn layers_of(&self, stage: StageId) -> impl Iterator<Item = LayerId> + '_ {
        (0..self.stage_of.len()).filter(move |&layer| self.stage_of[layer] == stage)
    }

    /// Returns whether the backward of `layer` completes a segment's gradient: whether `layer` is the segment's first
    /// user in the forward pass.
    #[must_use]
    pub fn completes(&self, layer: LayerId, segment: SegmentId) -> bool {
        self.users[segment].first() == Some(&layer)
    }

    /// Returns the stages that exchange messages with `stage`: the stages that share a tied segment with `stage`, or
    /// that have a layer directly before or after one of its layers.
    #[must_use]
    pub fn peers(&self, stage: StageId) -> BTreeSet<StageId> {
        let next_to = self.stage_of.windows(2).filter(|pair| pair.contains(&stage)).flatten().copied();
        let tied = self.ties.iter().filter(|&&segment| self.holds(stage, segment));
        let sharing = tied.flat_map(|&segment| self.users[segment].iter().map(|&layer| self.stage_of[layer]));
        next_to.chain(sharing).filter(|&other| other != stage).collect()
    }

    /// Returns the stage that updates a segment: the stage of its first user.
    #[must_use]
    pub fn owner(&self, segment: SegmentId) -> StageId {
        self.users[segment].first().map_or(0, |&layer| self.stage_of[layer])
    }

    /// Returns whether a stage has a layer that uses the segment.
    #[must_use]
    pub fn holds(&self, stage: StageId, segment: SegmentId) -> bool {
        self.users[segment].iter().any(|&layer| self.stage_of[layer] == stage)
    }

    /// Returns whether the segment is trainable and several layers use it.
    #[must_use]
    pub fn is_tied(&self, segment: SegmentId) -> bool {
        self.ties.contains(&segment)
    }

    /// Returns a segment that two chunks of one stage use consecutively, if any. A schedule that alternates between
    /// chunks would mix gradients of several micro-batches in such a segment.
    #[must_use]
    pub fn tied_within_a_stage(&self) -> Option<SegmentId> {
        let chunk_of = |layer: LayerId| self.chunks.iter().position(|chunk| chunk.contains(&layer));
        let is_within = |pair: &[LayerId]| {
            self.stage_of[pair[0]] == self.stage_of[pair[1]] && chunk_of(pair[0]) != chunk_of(pair[1])
        };
        self.ties.iter().copied().find(|&segment| self.count > 1 && self.users[segment].windows(2).any(is_within))
    }

    /// Returns the stages that use a tied segment but do not own it, in ascending order. They receive its updates.
    #[must_use]
    pub fn borrowers(&self, segment: SegmentId) -> Vec<StageId> {
        let owner = self.owner(segment);
        let borrows = |&stage: &StageId| self.is_tied(segment) && stage != owner && self.holds(stage, segment);
        (0..self.count).filter(borrows).collect()
    }

    /// Returns the messages to receive before the backward of `layer` on a micro-batch. They contain the partial sums
    /// of tied gradients to which this backward adds.
    ///
    /// A tied gradient is summed in the order of the backward pass, from the last user to the first, as if all users
    /// were on one stage. If the next user in this order is on another stage, the partial sum is sent to that stage.
    #[must_use]
    pub fn tied_before(&self, layer: LayerId, micro_batch: usize) -> Vec<Message> {
        self.tied(layer, micro_batch, |users, at| Some((*users.get(at + 1)?, users[at])))
    }

    /// Returns the messages to send after the backward of `layer` on a micro-batch. They contain partial sums of tied
    /// gradients.
    #[must_use]
    pub fn tied_after(&self, layer: LayerId, micro_batch: usize) -> Vec<Message> {
        self.tied(layer, micro_batch, |users, at| Some((users[at], *users.get(at.checked_sub(1)?)?)))
    }

    /// Returns, for each tied segment, the message from the stage of one user to the stage of the next. `hop` returns
    /// these two users, given the position of `layer` among the users.
    fn tied(
        &self,
        layer: LayerId,
        micro_batch: usize,
        hop: impl Fn(&[LayerId], usize) -> Option<(LayerId, LayerId)>,
    ) -> Vec<Message> {
        let message = |&segment: &SegmentId| {
            let users = &self.users[segment];
            let (source, next) = hop(users, users.iter().position(|&user| user == layer)?)?;
            let (from, to) = (self.stage_of[source], self.stage_of[next]);
            let content = Content::TiedGradient { segment, layer: next, micro_batch };
            (from != to).then_some(Message { content, from, to })
        };
        self.ties.iter().filter_map(message).collect()
    }
}

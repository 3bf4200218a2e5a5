//! Which pipeline stage has which layers, and what follows for segments.
//!
//! The model is cut into *chunks* of consecutive layers. Chunk `c` is on stage `c % stages`, so with as many chunks as stages
//! each stage has one, and with more of them they are dealt out in turn (interleaved schedules).
//!
//! A tied segment is used by layers of several stages. Its *owner* is the stage of its first user: that one reduces its
//! gradient, updates it and writes it into checkpoints. The others keep a copy for computing, send on what they contribute to
//! the gradient, and are sent the updated values: copies of the same bits, so they cannot drift apart.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::instruction::{LayerId, SegmentId};
use crate::message::{Content, Message, StageId};
use crate::shape::ModelShape;

/// A model cut into pipeline stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages {
    count: usize,
    chunks: Vec<Range<LayerId>>,
    stage_of: Vec<StageId>,
    /// By segment, its users in the order of the forward pass.
    users: Vec<Vec<LayerId>>,
    /// Segments with several users.
    ties: Vec<SegmentId>,
}

/// A model that cannot be cut like that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StagesError {
    /// The parts leave layers out, overlap or are empty.
    #[error("the parts {0:?} are not the model's layers one after another, with at least one in each")]
    NotConsecutive(Vec<Range<LayerId>>),
    /// Not the same number of chunks for every stage.
    #[error("{chunks} parts cannot be dealt out evenly to {stages} stages")]
    Uneven {
        /// Number of parts.
        chunks: usize,
        /// Number of stages.
        stages: usize,
    },
}

impl Stages {
    /// Cuts a model where `chunks` says.
    ///
    /// # Errors
    /// If the chunks are not the layers in order, or cannot be dealt out evenly.
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
        let ties = (0..users.len()).filter(|&segment| users[segment].len() > 1).collect();
        Ok(Self { count, chunks, stage_of, users, ties })
    }

    /// The whole model on one stage.
    ///
    /// # Panics
    /// If the model has no layers.
    #[must_use]
    pub fn single(shape: &ModelShape) -> Self {
        let all = 0..shape.layers.len();
        Self::new(shape, 1, vec![all]).expect("a model has layers")
    }

    /// Number of stages.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// All chunks, in the order of the forward pass.
    #[must_use]
    pub fn chunks(&self) -> &[Range<LayerId>] {
        &self.chunks
    }

    /// Chunks of each stage: virtual stages.
    #[must_use]
    pub fn chunks_per_stage(&self) -> usize {
        self.chunks.len() / self.count
    }

    /// The stage of a layer.
    #[must_use]
    pub fn stage_of(&self, layer: LayerId) -> StageId {
        self.stage_of[layer]
    }

    /// Number of layers of the model.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.stage_of.len()
    }

    /// Layers of a stage, in the order of the forward pass.
    pub fn layers_of(&self, stage: StageId) -> impl Iterator<Item = LayerId> + '_ {
        (0..self.stage_of.len()).filter(move |&layer| self.stage_of[layer] == stage)
    }

    /// Whether a segment's gradient is complete after the backward of `layer`: it is the first one that uses it in the forward pass.
    #[must_use]
    pub fn completes(&self, layer: LayerId, segment: SegmentId) -> bool {
        self.users[segment].first() == Some(&layer)
    }

    /// Stages that exchange messages with `stage`: those with a layer next to one of its own, or that share a tied segment with it.
    #[must_use]
    pub fn peers(&self, stage: StageId) -> BTreeSet<StageId> {
        let next_to = self.stage_of.windows(2).filter(|pair| pair.contains(&stage)).flatten().copied();
        let tied = self.ties.iter().filter(|&&segment| self.holds(stage, segment));
        let sharing = tied.flat_map(|&segment| self.users[segment].iter().map(|&layer| self.stage_of[layer]));
        next_to.chain(sharing).filter(|&other| other != stage).collect()
    }

    /// The stage that updates a segment: that of its first user.
    #[must_use]
    pub fn owner(&self, segment: SegmentId) -> StageId {
        self.users[segment].first().map_or(0, |&layer| self.stage_of[layer])
    }

    /// Whether a stage has a layer that uses the segment.
    #[must_use]
    pub fn holds(&self, stage: StageId, segment: SegmentId) -> bool {
        self.users[segment].iter().any(|&layer| self.stage_of[layer] == stage)
    }

    /// Whether several layers use the segment.
    #[must_use]
    pub fn is_tied(&self, segment: SegmentId) -> bool {
        self.users[segment].len() > 1
    }

    /// A segment that two chunks of one stage use one after the other, if there is one: while a schedule goes from chunk to chunk,
    /// its gradient would belong to several micro-batches at a time.
    #[must_use]
    pub fn tied_within_a_stage(&self) -> Option<SegmentId> {
        let chunk_of = |layer: LayerId| self.chunks.iter().position(|chunk| chunk.contains(&layer));
        let is_within = |pair: &[LayerId]| {
            self.stage_of[pair[0]] == self.stage_of[pair[1]] && chunk_of(pair[0]) != chunk_of(pair[1])
        };
        (0..self.users.len()).find(|&segment| self.count > 1 && self.users[segment].windows(2).any(is_within))
    }

    /// Stages that use a segment without owning it, in order.
    #[must_use]
    pub fn borrowers(&self, segment: SegmentId) -> Vec<StageId> {
        let owner = self.owner(segment);
        (0..self.count).filter(|&stage| stage != owner && self.holds(stage, segment)).collect()
    }

    /// Sums of tied gradients that must be here before the backward of `layer` of a micro-batch, each to be added to.
    ///
    /// A tied gradient is added up in the order of the backward pass, as on one stage: last user first. Where the next user is
    /// on another stage, the sum so far goes there.
    #[must_use]
    pub fn tied_before(&self, layer: LayerId, micro_batch: usize) -> Vec<Message> {
        self.tied(layer, micro_batch, |users, at| Some((*users.get(at + 1)?, users[at])))
    }

    /// Sums of tied gradients that leave after the backward of `layer` of a micro-batch.
    #[must_use]
    pub fn tied_after(&self, layer: LayerId, micro_batch: usize) -> Vec<Message> {
        self.tied(layer, micro_batch, |users, at| Some((users[at], *users.get(at.checked_sub(1)?)?)))
    }

    /// Messages from the stage of one user to that of the next, both found by `hop` from where `layer` is among the users.
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

//! What pipeline stages send each other.
//!
//! Between two stages there is one channel for each kind of content and direction. Messages of a channel arrive in the
//! order in which they were sent, and are received in that order.

use std::fmt;

use crate::instruction::{LayerId, SegmentId};

/// Index of a pipeline stage.
pub type StageId = usize;

/// Something that one stage sends to another; both are ranks with the same place on the data axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// What it carries.
    pub content: Content,
    /// The stage that sends it.
    pub from: StageId,
    /// The stage that receives it.
    pub to: StageId,
}

/// What a message carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// The inputs of a layer, which are the outputs of the layer before.
    Activations {
        /// The layer that takes them.
        layer: LayerId,
        /// Of which micro-batch.
        micro_batch: usize,
    },
    /// The gradients of a layer's inputs.
    Gradients {
        /// The layer whose backward made them.
        layer: LayerId,
        /// Of which micro-batch.
        micro_batch: usize,
    },
    /// The gradient of a tied segment, as far as the layers behind have added it up.
    TiedGradient {
        /// The segment.
        segment: SegmentId,
        /// The layer whose backward adds to it next.
        layer: LayerId,
        /// Of which micro-batch.
        micro_batch: usize,
    },
    /// The updated parameters of a tied segment, from the stage that owns it.
    TiedParameters {
        /// The segment.
        segment: SegmentId,
    },
}

/// The kinds of content: a channel each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Forwards through the model.
    Activations,
    /// Backwards through it.
    Gradients,
    /// Of tied parameters, either way.
    Tied,
}

impl Content {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Activations { .. } => Kind::Activations,
            Self::Gradients { .. } => Kind::Gradients,
            Self::TiedGradient { .. } | Self::TiedParameters { .. } => Kind::Tied,
        }
    }
}

/// One way for messages: (kind, from, to).
pub type Channel = (Kind, StageId, StageId);

impl Message {
    /// The channel that it goes through.
    #[must_use]
    pub fn channel(&self) -> Channel {
        (self.content.kind(), self.from, self.to)
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Activations { layer, micro_batch } => {
                write!(f, "activations for layer {layer} of micro-batch {micro_batch}")
            }
            Self::Gradients { layer, micro_batch } => {
                write!(f, "gradients of layer {layer}'s input of micro-batch {micro_batch}")
            }
            Self::TiedGradient { segment, layer, micro_batch } => {
                write!(f, "tied gradient of segment {segment} for layer {layer} of micro-batch {micro_batch}")
            }
            Self::TiedParameters { segment } => write!(f, "tied parameters of segment {segment}"),
        }
    }
}

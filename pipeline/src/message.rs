//! Messages between pipeline stages.
//!
//! Between two stages, there is one channel per kind of content and direction. A channel delivers messages in the order
//! in which they were sent.

use std::fmt;

use crate::ids::{LayerId, SegmentId};

/// Index of a pipeline stage.
pub type StageId = usize;

/// A message from one stage to another. It goes from a rank to the rank with the same position in the other stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// Contents of the message.
    pub content: Content,
    /// Stage that sends it.
    pub from: StageId,
    /// Stage that receives it.
    pub to: StageId,
}

/// The contents of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// The inputs of a layer: the outputs of the layer before it.
    Activations {
        /// Layer that consumes them.
        layer: LayerId,
        /// Their micro-batch.
        micro_batch: usize,
    },
    /// The gradients of a layer's inputs.
    Gradients {
        /// Layer whose backward produced them.
        layer: LayerId,
        /// Their micro-batch.
        micro_batch: usize,
    },
    /// The gradient of a tied segment, summed over the layers whose backward has run.
    TiedGradient {
        /// The segment.
        segment: SegmentId,
        /// The next layer whose backward adds to the sum.
        layer: LayerId,
        /// Its micro-batch.
        micro_batch: usize,
    },
    /// The updated parameters of a tied segment, from the stage that owns it.
    TiedParameters {
        /// The segment.
        segment: SegmentId,
    },
}

/// Kind of content. Each kind has its own channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Activations, sent forward through the model.
    Activations,
    /// Gradients of activations, sent backward through the model.
    Gradients,
    /// Gradients and values of tied parameters, in either direction.
    Tied,
}

impl Content {
    /// Returns the kind of the content.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Activations { .. } => Kind::Activations,
            Self::Gradients { .. } => Kind::Gradients,
            Self::TiedGradient { .. } | Self::TiedParameters { .. } => Kind::Tied,
        }
    }
}

/// A channel: (kind, sending stage, receiving stage).
pub type Channel = (Kind, StageId, StageId);

impl Message {
    /// Returns the channel of the message.
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

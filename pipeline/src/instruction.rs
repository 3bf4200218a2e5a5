//! The instructions of a step.
//!
//! Communication comes in two halves: one instruction starts it, and a later one awaits it. Instructions in between
//! overlap with it, so a pass controls prefetching by where it puts the first half.

use std::fmt;

use crate::message::Message;
use crate::tier::Item;

/// Index of a layer in the model.
pub type LayerId = usize;
/// Index of a segment: a flat parameter, made of parameters of one layer that are placed, gathered and reduced
/// together.
pub type SegmentId = usize;

/// One instruction of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    /// Loads the inputs and targets of a micro-batch of this rank.
    Load {
        /// Index of the micro-batch on this rank, from 0.
        micro_batch: usize,
    },
    /// Starts gathering the segment's parameters from all shards.
    Gather {
        /// Segment with sharded, released parameters.
        segment: SegmentId,
    },
    /// Waits until the segment's parameters are gathered.
    AwaitGather {
        /// Segment whose gather was started.
        segment: SegmentId,
    },
    /// Frees the gathered parameters; the shard stays.
    Release {
        /// Segment with gathered parameters.
        segment: SegmentId,
    },
    /// Runs a layer's forward. The last layer also computes the loss.
    Forward {
        /// The layer.
        layer: LayerId,
        /// Micro-batch to run on.
        micro_batch: usize,
    },
    /// Keeps the inputs of a layer, whose forward comes next, for recomputation.
    Keep {
        /// The layer.
        layer: LayerId,
        /// Micro-batch of the inputs.
        micro_batch: usize,
    },
    /// Frees the activations that a layer's forward saved for its backward. The outputs still go to the next layer.
    Discard {
        /// The layer.
        layer: LayerId,
        /// Micro-batch of the activations.
        micro_batch: usize,
    },
    /// Runs a layer's forward again, on inputs that were kept or that the recomputation of the layer before produced.
    Recompute {
        /// The layer.
        layer: LayerId,
        /// Micro-batch to run on.
        micro_batch: usize,
    },
    /// Runs a layer's backward, adds to the local gradients of its parameters and frees its activations.
    Backward {
        /// The layer.
        layer: LayerId,
        /// Micro-batch to run on.
        micro_batch: usize,
    },
    /// Runs the first half of a backward: the gradients of the layer's inputs. Defers the gradients of its parameters.
    BackwardInput {
        /// The layer.
        layer: LayerId,
        /// Micro-batch to run on.
        micro_batch: usize,
    },
    /// Runs the second half of a backward: the deferred gradients. Reads no parameters.
    BackwardWeight {
        /// The layer.
        layer: LayerId,
        /// Micro-batch to run on.
        micro_batch: usize,
    },
    /// Starts sending to another pipeline stage.
    Send {
        /// Contents and receiver.
        message: Message,
    },
    /// Waits until the buffer of a message that was sent may be freed.
    AwaitSend {
        /// Message that was sent.
        message: Message,
    },
    /// Posts a receive: allocates a buffer, so that the message arrives while this stage computes.
    Receive {
        /// Contents and sender.
        message: Message,
    },
    /// Waits until a message has arrived, and takes it.
    AwaitReceive {
        /// Message whose receive was posted.
        message: Message,
    },
    /// Adds a segment's complete local gradient of one micro-batch to this rank's accumulator.
    Accumulate {
        /// Segment with replicated gradients.
        segment: SegmentId,
        /// Micro-batch of the gradient.
        micro_batch: usize,
    },
    /// Starts reducing the gradients of segments over the ranks.
    Reduce {
        /// The bucket: segments with complete gradients, in the order of their backward.
        segments: Vec<SegmentId>,
        /// Micro-batch of the gradients, or the last micro-batch if they were accumulated before.
        micro_batch: usize,
    },
    /// Waits for a reduction. Adds the result to the shard where gradients are sharded.
    AwaitReduce {
        /// The same bucket as in the `Reduce`.
        segments: Vec<SegmentId>,
        /// The same micro-batch as in the `Reduce`.
        micro_batch: usize,
    },
    /// Computes the global norm of all gradients, and the clip coefficient from it.
    GradientNorm,
    /// Runs the optimizer step on this rank's part of a segment.
    Update {
        /// Segment with reduced gradients.
        segment: SegmentId,
    },
    /// Runs the optimizer step on one tile of this rank's part, for a segment with state on a disk.
    UpdateTile {
        /// Segment with reduced gradients.
        segment: SegmentId,
        /// Index of the tile. Tiles are updated in order.
        tile: usize,
    },
    /// Starts reading from the disk.
    Fetch {
        /// Item on the disk.
        item: Item,
    },
    /// Waits until an item is in memory.
    AwaitFetch {
        /// Item whose fetch was started.
        item: Item,
    },
    /// Starts writing to the disk.
    Offload {
        /// Item in memory.
        item: Item,
    },
    /// Waits until an item is on the disk, and frees its memory.
    AwaitOffload {
        /// Item whose offload was started.
        item: Item,
    },
    /// Starts gathering updated parameters that are replicated but were updated in parts by different ranks.
    Refresh {
        /// The bucket.
        segments: Vec<SegmentId>,
    },
    /// Waits until the updated parameters have arrived.
    AwaitRefresh {
        /// The same bucket as in the `Refresh`.
        segments: Vec<SegmentId>,
    },
}

impl Instruction {
    /// Returns whether the instruction only waits for work done elsewhere. Such time counts as idle in the bubble.
    #[must_use]
    pub fn is_wait(&self) -> bool {
        matches!(
            self,
            Self::AwaitGather { .. }
                | Self::AwaitSend { .. }
                | Self::AwaitReceive { .. }
                | Self::AwaitReduce { .. }
                | Self::AwaitRefresh { .. }
                | Self::AwaitFetch { .. }
                | Self::AwaitOffload { .. }
                | Self::GradientNorm
        )
    }

    /// Returns the instruction's name as used in reports.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Load { .. } => "load",
            Self::Gather { .. } => "gather",
            Self::AwaitGather { .. } => "await_gather",
            Self::Release { .. } => "release",
            Self::Forward { .. } => "forward",
            Self::Keep { .. } => "keep",
            Self::Discard { .. } => "discard",
            Self::Recompute { .. } => "recompute",
            Self::Backward { .. } => "backward",
            Self::BackwardInput { .. } => "backward_input",
            Self::BackwardWeight { .. } => "backward_weight",
            Self::Send { .. } => "send",
            Self::AwaitSend { .. } => "await_send",
            Self::Receive { .. } => "receive",
            Self::AwaitReceive { .. } => "await_receive",
            Self::Accumulate { .. } => "accumulate",
            Self::Reduce { .. } => "reduce",
            Self::AwaitReduce { .. } => "await_reduce",
            Self::GradientNorm => "gradient_norm",
            Self::Update { .. } => "update",
            Self::UpdateTile { .. } => "update_tile",
            Self::Fetch { .. } => "fetch",
            Self::AwaitFetch { .. } => "await_fetch",
            Self::Offload { .. } => "offload",
            Self::AwaitOffload { .. } => "await_offload",
            Self::Refresh { .. } => "refresh",
            Self::AwaitRefresh { .. } => "await_refresh",
        }
    }

    /// Returns whether the instruction starts a collective of the data-parallel group or of all ranks. All members must
    /// start these in the same order.
    #[must_use]
    pub fn is_collective(&self) -> bool {
        matches!(self, Self::Gather { .. } | Self::Reduce { .. } | Self::GradientNorm | Self::Refresh { .. })
    }
}

impl Instruction {
    /// Returns the instruction that awaits the data-parallel collective started by this one, if any.
    #[must_use]
    pub fn awaited_with(&self) -> Option<Self> {
        match self {
            Self::Gather { segment } => Some(Self::AwaitGather { segment: *segment }),
            Self::Reduce { segments, micro_batch } => {
                Some(Self::AwaitReduce { segments: segments.clone(), micro_batch: *micro_batch })
            }
            Self::Refresh { segments } => Some(Self::AwaitRefresh { segments: segments.clone() }),
            _ => None,
        }
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind();
        match self {
            Self::Load { micro_batch } => write!(f, "{kind} micro-batch {micro_batch}"),
            Self::Gather { segment }
            | Self::AwaitGather { segment }
            | Self::Release { segment }
            | Self::Update { segment } => write!(f, "{kind} segment {segment}"),
            Self::Accumulate { segment, micro_batch } => {
                write!(f, "{kind} segment {segment} of micro-batch {micro_batch}")
            }
            Self::Forward { layer, micro_batch }
            | Self::Keep { layer, micro_batch }
            | Self::Discard { layer, micro_batch }
            | Self::Recompute { layer, micro_batch }
            | Self::Backward { layer, micro_batch }
            | Self::BackwardInput { layer, micro_batch }
            | Self::BackwardWeight { layer, micro_batch } => {
                write!(f, "{kind} layer {layer} of micro-batch {micro_batch}")
            }
            Self::Send { message } | Self::AwaitSend { message } => {
                write!(f, "{kind} {} to stage {}", message.content, message.to)
            }
            Self::Receive { message } | Self::AwaitReceive { message } => {
                write!(f, "{kind} {} from stage {}", message.content, message.from)
            }
            Self::Reduce { segments, micro_batch } | Self::AwaitReduce { segments, micro_batch } => {
                write!(f, "{kind} segments {segments:?} of micro-batch {micro_batch}")
            }
            Self::Refresh { segments } | Self::AwaitRefresh { segments } => write!(f, "{kind} segments {segments:?}"),
            Self::UpdateTile { segment, tile } => write!(f, "{kind} {tile} of segment {segment}"),
            Self::Fetch { item } | Self::AwaitFetch { item } | Self::Offload { item } | Self::AwaitOffload { item } => {
                write!(f, "{kind} {item}")
            }
            Self::GradientNorm => f.write_str(kind),
        }
    }
}

/// The instructions of one rank for one global batch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Program {
    /// Instructions in execution order.
    pub instructions: Vec<Instruction>,
    /// Number of micro-batches of this rank.
    pub micro_batches: usize,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, instruction) in self.instructions.iter().enumerate() {
            writeln!(f, "{index:4}  {instruction}")?;
        }
        Ok(())
    }
}

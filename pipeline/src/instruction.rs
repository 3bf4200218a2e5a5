//! The instructions of a step.
//!
//! Communication comes in two halves: one instruction starts it, a later one awaits it. What lies between
//! overlaps with it, so prefetching is a matter of where a pass puts the first half.

use std::fmt;

use crate::message::Message;
use crate::tier::Item;

/// Index of a layer in the model.
pub type LayerId = usize;
/// Index of a segment: parameters of one layer that are placed, gathered and reduced together.
pub type SegmentId = usize;

/// One step of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    /// Makes the inputs and targets of this rank's micro-batch ready.
    Load {
        /// Counted per rank, from 0.
        micro_batch: usize,
    },
    /// Starts gathering the segment's parameters from all shards.
    Gather {
        /// Its parameters must be sharded and released.
        segment: SegmentId,
    },
    /// Waits until the segment's parameters are there.
    AwaitGather {
        /// A gather of it was started.
        segment: SegmentId,
    },
    /// Gives up the full parameters; the shard stays.
    Release {
        /// It must be gathered.
        segment: SegmentId,
    },
    /// Runs a layer; the last layer computes the loss too.
    Forward {
        /// Which layer.
        layer: LayerId,
        /// On which micro-batch.
        micro_batch: usize,
    },
    /// Keeps the inputs of a layer whose forward is next, for it to be run again.
    Keep {
        /// Which layer.
        layer: LayerId,
        /// Of which micro-batch.
        micro_batch: usize,
    },
    /// Gives up what a layer's forward kept for its backward. The outputs go on to the next layer.
    Discard {
        /// Which layer.
        layer: LayerId,
        /// Of which micro-batch.
        micro_batch: usize,
    },
    /// Runs the forward of a layer once more, on the inputs that were kept or that the layer before gave when it was run again.
    Recompute {
        /// Which layer.
        layer: LayerId,
        /// On which micro-batch.
        micro_batch: usize,
    },
    /// Runs a layer's backward and frees its activations. Its parameters' gradients are contributed to.
    Backward {
        /// Which layer.
        layer: LayerId,
        /// On which micro-batch.
        micro_batch: usize,
    },
    /// The first half of a backward: the gradient of the layer's input. That of its parameters is put off.
    BackwardInput {
        /// Which layer.
        layer: LayerId,
        /// On which micro-batch.
        micro_batch: usize,
    },
    /// The second half: what was put off. It reads no parameters.
    BackwardWeight {
        /// Which layer.
        layer: LayerId,
        /// On which micro-batch.
        micro_batch: usize,
    },
    /// Starts sending to another pipeline stage.
    Send {
        /// What, and where to.
        message: Message,
    },
    /// Waits until what was sent need not be kept any longer.
    AwaitSend {
        /// It was sent.
        message: Message,
    },
    /// Makes room for what another pipeline stage sends, so that it arrives while this one computes.
    Receive {
        /// What, and where from.
        message: Message,
    },
    /// Waits until it is there, and takes it.
    AwaitReceive {
        /// A receive of it was started.
        message: Message,
    },
    /// Adds a segment's complete local gradient of one micro-batch to this rank's accumulator.
    Accumulate {
        /// Its gradients are replicated.
        segment: SegmentId,
        /// Whose gradient.
        micro_batch: usize,
    },
    /// Starts reducing the gradients of segments over the ranks.
    Reduce {
        /// The bucket: complete gradients, in the order of their backward.
        segments: Vec<SegmentId>,
        /// Whose gradients, or the last one where micro-batches were added up before.
        micro_batch: usize,
    },
    /// Waits for that reduction, and adds what it brings to the shard where gradients are sharded.
    AwaitReduce {
        /// The bucket as it was started.
        segments: Vec<SegmentId>,
        /// As it was started.
        micro_batch: usize,
    },
    /// Computes the global norm of all gradients, and from it the clip coefficient.
    GradientNorm,
    /// The optimizer step on this rank's part of a segment.
    Update {
        /// Its gradients are reduced.
        segment: SegmentId,
    },
    /// The optimizer step on a part of that part: of a segment whose optimizer state is not in memory.
    UpdateTile {
        /// Its gradients are reduced.
        segment: SegmentId,
        /// They are updated in order.
        tile: usize,
    },
    /// Starts reading from the disk.
    Fetch {
        /// It is there.
        item: Item,
    },
    /// Waits until it is in memory.
    AwaitFetch {
        /// A fetch of it was started.
        item: Item,
    },
    /// Starts writing to the disk.
    Offload {
        /// It is in memory.
        item: Item,
    },
    /// Waits until it is on the disk, and gives its memory up.
    AwaitOffload {
        /// An offload of it was started.
        item: Item,
    },
    /// Starts gathering updated parameters that every rank keeps but each updated a part of.
    Refresh {
        /// The bucket.
        segments: Vec<SegmentId>,
    },
    /// Waits until the updated parameters are there.
    AwaitRefresh {
        /// The bucket as it was started.
        segments: Vec<SegmentId>,
    },
}

impl Instruction {
    /// Whether it waits for something that goes on elsewhere, and does no work of its own: not computing, as far as the bubble goes.
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

    /// The instruction's name, as reports count it.
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

    /// Whether it starts a collective of the data-parallel group, or of all ranks: these must come in the same order on
    /// all of them.
    #[must_use]
    pub fn is_collective(&self) -> bool {
        matches!(self, Self::Gather { .. } | Self::Reduce { .. } | Self::GradientNorm | Self::Refresh { .. })
    }
}

impl Instruction {
    /// The instruction that waits for the collective of a data-parallel group which this one starts.
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

/// What one rank does for one global batch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Program {
    /// In order.
    pub instructions: Vec<Instruction>,
    /// Micro-batches of this rank.
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

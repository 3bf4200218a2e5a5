//! The instructions of a step.
//!
//! Communication consists of two instructions: the first starts it, and a later one awaits it. The instructions between
//! the two overlap with the communication, so a pass controls prefetching by the place of the first instruction.
//!
//! [`Instruction::effects`] is a table of what each instruction does. All code that walks a program reads that table.

use std::fmt;

use crate::effects::{Action, Computation, Effects, Operand, Transfer};
use crate::ids::{LayerId, SegmentId};
use crate::message::Message;
use crate::tier::Item;

/// One instruction of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    /// Loads the inputs and targets of a micro-batch of this rank.
    Load {
        /// Index of the micro-batch on this rank, from 0.
        micro_batch: usize,
    },
    /// Starts gathering the parameters of segments from all shards, in one collective.
    Gather {
        /// Segments with sharded, released parameters.
        segments: Vec<SegmentId>,
    },
    /// Waits until the parameters are gathered. Fills this rank's secondary shards of the segments that have them.
    AwaitGather {
        /// The same segments as in the `Gather`.
        segments: Vec<SegmentId>,
    },
    /// Starts gathering the parameters of segments from the secondary shards of the near group, in one collective.
    GatherSecondary {
        /// Segments with released parameters, whose secondary shards were filled after the last update of the
        /// parameters.
        segments: Vec<SegmentId>,
    },
    /// Waits until the parameters are gathered from secondary shards.
    AwaitGatherSecondary {
        /// The same segments as in the `GatherSecondary`.
        segments: Vec<SegmentId>,
    },
    /// Frees the gathered parameters; this rank's shard stays in memory.
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
    /// Keeps the inputs of a layer for recomputation. The layer's forward comes next.
    Keep {
        /// The layer.
        layer: LayerId,
        /// Micro-batch of the inputs.
        micro_batch: usize,
    },
    /// Frees the activations that a layer's forward saved for its backward. The outputs are still passed to the next
    /// layer.
    Discard {
        /// The layer.
        layer: LayerId,
        /// Micro-batch of the activations.
        micro_batch: usize,
    },
    /// Runs a layer's forward again, on inputs that were kept or on the outputs of the previous layer's recomputation.
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
    /// Runs the second half of a backward: the deferred gradients of the layer's parameters. Reads no parameters.
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
    /// Waits until the buffer of a sent message may be freed.
    AwaitSend {
        /// Message that was sent.
        message: Message,
    },
    /// Posts a receive: allocates a buffer, so that the message can arrive while this stage computes.
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
    /// Starts reducing the gradients of segments over the ranks, in one collective, or in up to two all-to-alls if it
    /// sends codes.
    Reduce {
        /// The bucket: segments with complete gradients, in the order of their backward.
        segments: Vec<SegmentId>,
        /// Micro-batch of the gradients, or the last micro-batch if the gradients were accumulated over all
        /// micro-batches.
        micro_batch: usize,
    },
    /// Waits for a reduction. If gradients are sharded, adds the result to this rank's shard. The sum over the
    /// replicates of a shard either is part of each micro-batch's reduction, or runs once after the reduction of the
    /// last micro-batch, while the program continues to the norm.
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
    /// Runs the first pass of an optimizer that needs norms of whole parameters, on one tile of this rank's part. Adds
    /// the gradients to the moments, and the tile's squares to the sums of squares of its parameters.
    MeasureTile {
        /// Segment with reduced gradients.
        segment: SegmentId,
        /// Index of the tile.
        tile: usize,
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
    /// Starts averaging this rank's part of a segment's parameters over the replicates, which have trained separately.
    OuterStep {
        /// Trainable segment of this stage.
        segment: SegmentId,
    },
    /// Waits for the average, runs the outer optimizer on this rank's share, and gathers the new parameters from the
    /// replicates.
    AwaitOuterStep {
        /// Segment whose outer step was started.
        segment: SegmentId,
    },
    /// Starts gathering replicated parameters in one collective, after each rank has updated its part of them.
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

/// Builds a row of the table of effects.
fn row<'a, const N: usize>(kind: &'static str, operands: [Operand<'a>; N], action: Action<'a>) -> Effects<'a> {
    let mut operands = operands.into_iter();
    Effects { kind, operands: [operands.next(), operands.next()], action }
}

impl Instruction {
    /// Returns the instruction's row in the table of effects.
    #[must_use]
    pub fn effects(&self) -> Effects<'_> {
        use Action::{Awaits, Computes, Meets, Releases, Saves, Starts};
        use Operand::{From, Item, Layer, MicroBatch, Segment, Segments, Tile, To};
        match self {
            Self::Load { micro_batch } => row("load", [MicroBatch(*micro_batch)], Computes(Computation::Load)),
            Self::Gather { segments } => row("gather", [Segments(segments)], Starts(Transfer::Gather(segments))),
            Self::AwaitGather { segments } => {
                row("await_gather", [Segments(segments)], Awaits(Transfer::Gather(segments)))
            }
            Self::GatherSecondary { segments } => {
                row("gather_secondary", [Segments(segments)], Starts(Transfer::GatherSecondary(segments)))
            }
            Self::AwaitGatherSecondary { segments } => {
                row("await_gather_secondary", [Segments(segments)], Awaits(Transfer::GatherSecondary(segments)))
            }
            Self::Release { segment } => row("release", [Segment(segment)], Releases),
            Self::Forward { layer: l, micro_batch: m } => {
                row("forward", [Layer(*l), MicroBatch(*m)], Computes(Computation::Forward(*l)))
            }
            Self::Keep { layer: l, micro_batch: m } => row("keep", [Layer(*l), MicroBatch(*m)], Saves),
            Self::Discard { layer: l, micro_batch: m } => row("discard", [Layer(*l), MicroBatch(*m)], Saves),
            Self::Recompute { layer: l, micro_batch: m } => {
                row("recompute", [Layer(*l), MicroBatch(*m)], Computes(Computation::Recompute(*l)))
            }
            Self::Backward { layer: l, micro_batch: m } => {
                row("backward", [Layer(*l), MicroBatch(*m)], Computes(Computation::Backward(*l)))
            }
            Self::BackwardInput { layer: l, micro_batch: m } => {
                row("backward_input", [Layer(*l), MicroBatch(*m)], Computes(Computation::BackwardInput(*l)))
            }
            Self::BackwardWeight { layer: l, micro_batch: m } => {
                row("backward_weight", [Layer(*l), MicroBatch(*m)], Computes(Computation::BackwardWeight(*l)))
            }
            Self::Send { message } => row("send", [To(message)], Starts(Transfer::Send(message))),
            Self::AwaitSend { message } => row("await_send", [To(message)], Awaits(Transfer::Send(message))),
            Self::Receive { message } => row("receive", [From(message)], Starts(Transfer::Receive(message))),
            Self::AwaitReceive { message } => row("await_receive", [From(message)], Awaits(Transfer::Receive(message))),
            Self::Accumulate { segment, micro_batch } => {
                let operands = [Segment(segment), MicroBatch(*micro_batch)];
                row("accumulate", operands, Computes(Computation::Accumulate(*segment)))
            }
            Self::Reduce { segments, micro_batch: m } => {
                row("reduce", [Segments(segments), MicroBatch(*m)], Starts(Transfer::Reduce(segments, *m)))
            }
            Self::AwaitReduce { segments, micro_batch: m } => {
                row("await_reduce", [Segments(segments), MicroBatch(*m)], Awaits(Transfer::Reduce(segments, *m)))
            }
            Self::GradientNorm => row("gradient_norm", [], Meets),
            Self::Update { segment } => row("update", [Segment(segment)], Computes(Computation::Update(*segment))),
            Self::MeasureTile { segment, tile } => {
                row("measure_tile", [Tile(*tile), Segment(segment)], Computes(Computation::MeasureTile(*segment)))
            }
            Self::UpdateTile { segment, tile } => {
                row("update_tile", [Tile(*tile), Segment(segment)], Computes(Computation::UpdateTile(*segment)))
            }
            Self::Fetch { item } => row("fetch", [Item(item)], Starts(Transfer::Fetch(item))),
            Self::AwaitFetch { item } => row("await_fetch", [Item(item)], Awaits(Transfer::Fetch(item))),
            Self::Offload { item } => row("offload", [Item(item)], Starts(Transfer::Offload(item))),
            Self::AwaitOffload { item } => row("await_offload", [Item(item)], Awaits(Transfer::Offload(item))),
            Self::OuterStep { segment } => row("outer_step", [Segment(segment)], Starts(Transfer::OuterStep(segment))),
            Self::AwaitOuterStep { segment } => {
                row("await_outer_step", [Segment(segment)], Awaits(Transfer::OuterStep(segment)))
            }
            Self::Refresh { segments } => row("refresh", [Segments(segments)], Starts(Transfer::Refresh(segments))),
            Self::AwaitRefresh { segments } => {
                row("await_refresh", [Segments(segments)], Awaits(Transfer::Refresh(segments)))
            }
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

impl Program {
    /// Returns whether the program trains, that is, contains a gradient norm. Other programs only run forwards, or only
    /// average replicates.
    #[must_use]
    pub fn trains(&self) -> bool {
        self.instructions.contains(&Instruction::GradientNorm)
    }

    /// Returns whether the program changes parameters: it trains, or it averages replicates.
    #[must_use]
    pub fn updates(&self) -> bool {
        self.trains() || self.instructions.iter().any(|of| matches!(of, Instruction::OuterStep { .. }))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, instruction) in self.instructions.iter().enumerate() {
            writeln!(f, "{index:4}  {instruction}")?;
        }
        Ok(())
    }
}

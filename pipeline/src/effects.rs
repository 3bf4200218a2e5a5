//! Describes the effects of instructions. All code that walks a program uses the same description.
//!
//! [`Instruction::effects`] is the table: one row for each instruction. The deadlock check, the simulator, timelines
//! and traces read this table. They depend on the kinds of actions, transfers and computations, not on single
//! instructions. The check of one rank's program also reads the table, and adds the preconditions of each instruction.

use std::fmt;

use crate::ids::{LayerId, SegmentId};
use crate::instruction::Instruction;
use crate::message::{Content, Message};
use crate::shape::{Exchanges, ModelShape};
use crate::tier::Item;
use crate::timeline::Lane;
use crate::world::World;

/// One row of the table of effects: the effects of one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effects<'a> {
    /// The instruction's name as used in reports.
    pub kind: &'static str,
    /// The operands, in the order in which the instruction prints them.
    pub operands: [Option<Operand<'a>>; 2],
    /// What the instruction does.
    pub action: Action<'a>,
}

/// An object that an instruction names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand<'a> {
    /// A micro-batch of this rank.
    MicroBatch(usize),
    /// A layer.
    Layer(LayerId),
    /// A segment.
    Segment(&'a SegmentId),
    /// A bucket of segments.
    Segments(&'a [SegmentId]),
    /// A tile of the segment that is the next operand.
    Tile(usize),
    /// An item that moves between memory and a disk.
    Item(&'a Item),
    /// A message to another stage.
    To(&'a Message),
    /// A message from another stage.
    From(&'a Message),
}

/// What an instruction does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'a> {
    /// Computes, which occupies the rank.
    Computes(Computation),
    /// Starts a transfer, which then proceeds in its lane. Starting it takes no time.
    Starts(Transfer<'a>),
    /// Waits until a transfer is complete.
    Awaits(Transfer<'a>),
    /// Waits for all ranks of the world: no rank continues before all ranks have arrived.
    Meets,
    /// Frees the gathered parameters of a segment.
    Releases,
    /// Keeps or frees the inputs or activations of a layer.
    Saves,
}

/// A computation, which takes time on the processor or the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Computation {
    /// Loading a micro-batch.
    Load,
    /// A layer's forward.
    Forward(LayerId),
    /// A layer's forward, run again.
    Recompute(LayerId),
    /// A layer's whole backward.
    Backward(LayerId),
    /// The gradients of a layer's inputs.
    BackwardInput(LayerId),
    /// The deferred gradients of a layer's parameters.
    BackwardWeight(LayerId),
    /// Adding a segment's gradient to the accumulator.
    Accumulate(SegmentId),
    /// The optimizer step on this rank's part of a segment.
    Update(SegmentId),
    /// The first pass of the optimizer step on one tile of this rank's part of a segment.
    MeasureTile(SegmentId),
    /// The optimizer step on one tile of this rank's part of a segment.
    UpdateTile(SegmentId),
}

/// A transfer. One instruction starts it and a later instruction awaits it. Their `Transfer` values are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transfer<'a> {
    /// All-gather of parameters, by the shard group.
    Gather(&'a [SegmentId]),
    /// All-gather of parameters from secondary shards, by the near group.
    GatherSecondary(&'a [SegmentId]),
    /// Reduction of the gradients of a micro-batch, by the data-parallel group.
    Reduce(&'a [SegmentId], usize),
    /// All-gather of updated parameters, by the shard group.
    Refresh(&'a [SegmentId]),
    /// Average of a segment's parameters over the replicates, and all-gather of the outer optimizer's result among
    /// them.
    OuterStep(&'a SegmentId),
    /// A message, from the point of view of its sender.
    Send(&'a Message),
    /// A message, from the point of view of its receiver.
    Receive(&'a Message),
    /// A read from the disk.
    Fetch(&'a Item),
    /// A write to the disk.
    Offload(&'a Item),
}

impl Computation {
    /// Returns the segments whose parameters the computation reads. These parameters must be gathered. Returns `None`
    /// for a computation that reads no gathered parameters.
    #[must_use]
    pub fn reads(self, shape: &ModelShape) -> Option<&[SegmentId]> {
        match self {
            Self::Forward(layer) | Self::Recompute(layer) => Some(&shape.layers[layer].segments),
            Self::Backward(layer) | Self::BackwardInput(layer) => Some(&shape.layers[layer].read_backward),
            Self::Load
            | Self::BackwardWeight(_)
            | Self::Accumulate(_)
            | Self::Update(_)
            | Self::MeasureTile(_)
            | Self::UpdateTile(_) => None,
        }
    }

    /// Returns the groups of ranks with which the computation exchanges values.
    #[must_use]
    pub fn exchanges(self, shape: &ModelShape) -> Exchanges {
        match self {
            Self::Forward(layer) | Self::Recompute(layer) | Self::Backward(layer) | Self::BackwardInput(layer) => {
                shape.layers[layer].exchanges
            }
            _ => Exchanges::default(),
        }
    }

    /// Returns the other ranks that must run this computation at the same time as `rank`, because they exchange values.
    #[must_use]
    pub fn meets(self, rank: usize, world: &World) -> Vec<usize> {
        let Exchanges { context, tensor } = self.exchanges(world.shape);
        // Most meshes have groups of one rank, and this is called for every computation.
        let context = if context && world.mesh.context() > 1 { world.mesh.context_ranks(rank) } else { vec![] };
        let tensor = if tensor && world.mesh.tensor() > 1 { world.mesh.tensor_ranks(rank) } else { vec![] };
        context.into_iter().chain(tensor).filter(|&other| other != rank).collect()
    }
}

impl Transfer<'_> {
    /// Returns the lane that the transfer occupies. Transfers of one lane proceed one after another.
    #[must_use]
    pub fn lane(self) -> Lane {
        match self {
            Self::Gather(_) | Self::GatherSecondary(_) | Self::Reduce(..) | Self::Refresh(_) | Self::OuterStep(_) => {
                Lane::Collectives
            }
            Self::Send(message) | Self::Receive(message) => Lane::Channel(message.channel()),
            Self::Fetch(_) | Self::Offload(_) => Lane::Disk,
        }
    }
}

impl fmt::Display for Transfer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gather(_) => "gather",
            Self::GatherSecondary(_) => "gather from secondary shards",
            Self::Reduce(..) => "reduction",
            Self::Refresh(_) => "refresh",
            Self::OuterStep(_) => "outer step",
            Self::Send(_) => "send",
            Self::Receive(_) => "receive",
            Self::Fetch(_) => "fetch",
            Self::Offload(_) => "offload",
        })
    }
}

impl Operand<'_> {
    /// Checks that the layer, segments and stages that the operand names exist.
    ///
    /// # Errors
    /// Names the first of them that does not exist.
    pub(crate) fn exists(self, world: &World) -> Result<(), String> {
        let layer = |layer: LayerId| match layer < world.shape.layers.len().min(world.stages.layers()) {
            true => Ok(()),
            false => Err(format!("there is no layer {layer}")),
        };
        let segment = |&segment: &SegmentId| match segment < world.shape.segments.len() {
            true => Ok(()),
            false => Err(format!("there is no segment {segment}")),
        };
        match self {
            Self::Layer(l) | Self::Item(&Item::Activations { layer: l, .. }) => layer(l),
            Self::Segment(s)
            | Self::Item(Item::Parameters { segment: s } | Item::Gradients { segment: s })
            | Self::Item(Item::Tile { segment: s, .. }) => segment(s),
            Self::Segments(segments) => segments.iter().try_for_each(segment),
            Self::To(message) | Self::From(message) => {
                if message.from.max(message.to) >= world.mesh.pipe() {
                    return Err("no such stage".to_string());
                }
                match &message.content {
                    Content::Activations { layer: l, .. } | Content::Gradients { layer: l, .. } => layer(*l),
                    Content::TiedGradient { segment: s, .. } | Content::TiedParameters { segment: s } => segment(s),
                }
            }
            Self::MicroBatch(_) | Self::Tile(_) => Ok(()),
        }
    }
}

impl fmt::Display for Operand<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MicroBatch(micro_batch) => write!(f, "micro-batch {micro_batch}"),
            Self::Layer(layer) => write!(f, "layer {layer}"),
            Self::Segment(segment) => write!(f, "segment {segment}"),
            Self::Segments(segments) => write!(f, "segments {segments:?}"),
            Self::Tile(tile) => write!(f, "{tile}"),
            Self::Item(item) => write!(f, "{item}"),
            Self::To(message) => write!(f, "{} to stage {}", message.content, message.to),
            Self::From(message) => write!(f, "{} from stage {}", message.content, message.from),
        }
    }
}

impl Instruction {
    /// Returns the instruction's name as used in reports.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.effects().kind
    }

    /// Returns whether the instruction only waits for other work. The bubble counts its time as idle.
    #[must_use]
    pub fn is_wait(&self) -> bool {
        matches!(self.effects().action, Action::Awaits(_) | Action::Meets)
    }

    /// Returns whether the instruction starts a collective of the data-parallel group or of all ranks. All members must
    /// start these in the same order.
    #[must_use]
    pub fn is_collective(&self) -> bool {
        match self.effects().action {
            Action::Starts(transfer) => transfer.lane() == Lane::Collectives,
            action => action == Action::Meets,
        }
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Effects { kind, operands, .. } = self.effects();
        f.write_str(kind)?;
        for (operand, link) in operands.into_iter().flatten().zip([" ", " of "]) {
            write!(f, "{link}{operand}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Content;

    #[test]
    fn instruction_texts_name_the_operands_in_order() {
        let message = Message { content: Content::TiedParameters { segment: 3 }, from: 0, to: 1 };
        let texts = [
            (Instruction::GradientNorm, "gradient_norm"),
            (Instruction::GatherSecondary { segments: vec![1, 2] }, "gather_secondary segments [1, 2]"),
            (Instruction::Load { micro_batch: 2 }, "load micro-batch 2"),
            (Instruction::Backward { layer: 1, micro_batch: 2 }, "backward layer 1 of micro-batch 2"),
            (Instruction::Accumulate { segment: 1, micro_batch: 2 }, "accumulate segment 1 of micro-batch 2"),
            (Instruction::Reduce { segments: vec![1, 2], micro_batch: 0 }, "reduce segments [1, 2] of micro-batch 0"),
            (Instruction::AwaitOuterStep { segment: 4 }, "await_outer_step segment 4"),
            (Instruction::MeasureTile { segment: 1, tile: 2 }, "measure_tile 2 of segment 1"),
            (Instruction::UpdateTile { segment: 1, tile: 2 }, "update_tile 2 of segment 1"),
            (Instruction::Fetch { item: Item::Gradients { segment: 1 } }, "fetch gradients of segment 1"),
            (Instruction::AwaitSend { message }, "await_send tied parameters of segment 3 to stage 1"),
            (Instruction::Receive { message }, "receive tied parameters of segment 3 from stage 0"),
        ];
        for (instruction, text) in texts {
            assert_eq!(instruction.to_string(), text);
        }
    }
}

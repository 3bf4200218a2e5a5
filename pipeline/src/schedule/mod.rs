//! Pipeline schedules: the order of compute on each stage, and the messages between stages. Pure functions, independent
//! of ZeRO.
//!
//! A [`Schedule`] orders whole chunks of layers ([`Slot`]); [`training`] and [`forward_only`] expand them into layers
//! and messages. A single stage is a pipeline without messages, for which every schedule is plain gradient
//! accumulation.

mod messages;
mod slot;

use std::collections::BTreeMap;

use crate::ids::LayerId;
use crate::instruction::{Instruction, Program};
use crate::message::{Channel, Content, Message, StageId};
use crate::shape::ModelShape;
use crate::stages::Stages;

pub use slot::{SCHEDULES, Schedule, Size, Slot, Work};

/// Returns the training step of one stage: its micro-batches in schedule order, then the optimizer step on the segments
/// that it owns.
#[must_use]
pub fn training(
    schedule: Schedule,
    shape: &ModelShape,
    stages: &Stages,
    stage: StageId,
    micro_batches: usize,
) -> Program {
    let size = Size { stages: stages.count(), chunks: stages.chunks_per_stage(), micro_batches };
    let mut instructions = connected(shape, stages, stage, |stage| schedule.slots(size, stage));
    instructions.push(Instruction::GradientNorm);
    let is_updated = |&segment: &usize| stages.owner(segment) == stage && shape.segments[segment].is_trainable;
    let updated = (0..shape.segments.len()).filter(is_updated);
    instructions.extend(updated.map(|segment| Instruction::Update { segment }));
    Program { instructions, micro_batches }
}

/// Returns an evaluation program, which runs each micro-batch forward through all chunks of the stage.
#[must_use]
pub fn forward_only(shape: &ModelShape, stages: &Stages, stage: StageId, micro_batches: usize) -> Program {
    let size = Size { stages: stages.count(), chunks: stages.chunks_per_stage(), micro_batches };
    let forwards = |stage| -> Vec<Slot> {
        Schedule::Interleaved.slots(size, stage).into_iter().filter(|slot| slot.work == Work::Forward).collect()
    };
    Program { instructions: connected(shape, stages, stage, forwards), micro_batches }
}

/// Expands the slots of a stage into instructions, including both instructions of each send and each receive. Messages
/// arrive in the order in which the peers' programs send them.
fn connected(
    shape: &ModelShape,
    stages: &Stages,
    stage: StageId,
    slots: impl Fn(StageId) -> Vec<Slot>,
) -> Vec<Instruction> {
    let written = |stage| {
        let first_trained = shape.first_trained();
        let mut writer = Writer { shape, stages, stage, first_trained, instructions: vec![] };
        slots(stage).into_iter().for_each(|slot| writer.slot(slot));
        writer.instructions
    };
    let mut arriving: BTreeMap<Channel, Vec<Message>> = BTreeMap::new();
    for other in stages.peers(stage) {
        for instruction in written(other) {
            if let Instruction::Send { message } = instruction
                && message.to == stage
            {
                arriving.entry(message.channel()).or_default().push(message);
            }
        }
    }
    messages::asynchronous(written(stage), &arriving)
}

/// Returns the program for plain gradient accumulation on one stage: forward and backward of each micro-batch, then one
/// optimizer step.
#[must_use]
pub fn accumulation(shape: &ModelShape, micro_batches: usize) -> Program {
    training(Schedule::OneFOneB, shape, &Stages::single(shape), 0, micro_batches)
}

/// Expands slots into instructions. A message is awaited where it is needed, and sent as soon as its data exists.
/// `messages::asynchronous` then adds the instructions that post receives and await sends.
struct Writer<'a> {
    shape: &'a ModelShape,
    stages: &'a Stages,
    stage: StageId,
    /// Layers before the first trained layer have no backward.
    first_trained: LayerId,
    instructions: Vec<Instruction>,
}

impl Writer<'_> {
    fn slot(&mut self, slot: Slot) {
        let Slot { work, chunk, micro_batch } = slot;
        let index = chunk * self.stages.count() + self.stage;
        let layers = self.stages.chunks()[index].clone();
        match work {
            Work::Forward => {
                // A micro-batch is loaded once, by the first chunk of the stage that needs it.
                let loads = |chunk: usize| {
                    let index = chunk * self.stages.count() + self.stage;
                    self.stages.chunks()[index].clone().any(|layer| self.shape.loads(layer))
                };
                if loads(chunk) && !(0..chunk).any(loads) {
                    self.instructions.push(Instruction::Load { micro_batch });
                }
                self.forward(layers, micro_batch);
            }
            Work::Backward => self.backward(layers, micro_batch, |_| false),
            Work::BackwardInput => {
                let (shape, stages) = (self.shape, self.stages);
                self.backward(layers, micro_batch, |layer| splits(shape, stages, layer));
            }
            Work::BackwardWeight => {
                let splits = |&layer: &LayerId| layer >= self.first_trained && splits(self.shape, self.stages, layer);
                let layers = layers.rev().filter(splits);
                self.instructions.extend(layers.map(|layer| Instruction::BackwardWeight { layer, micro_batch }));
            }
        }
    }

    fn forward(&mut self, layers: std::ops::Range<LayerId>, micro_batch: usize) {
        let (first, behind, all) = (layers.start, layers.end, self.stages.layers());
        let content = |layer| Content::Activations { layer, micro_batch };
        if first > 0 {
            self.await_receive(content(first), first - 1);
        }
        self.instructions.extend(layers.map(|layer| Instruction::Forward { layer, micro_batch }));
        if behind < all {
            self.send(content(behind), behind);
        }
    }

    fn backward(&mut self, layers: std::ops::Range<LayerId>, micro_batch: usize, splits: impl Fn(LayerId) -> bool) {
        let (first, behind) = (layers.start.max(self.first_trained), layers.end);
        if first >= behind {
            return;
        }
        let content = |layer| Content::Gradients { layer, micro_batch };
        if behind < self.stages.layers() {
            self.await_receive(content(behind), behind);
        }
        for layer in (first..behind).rev() {
            let before = self.stages.tied_before(layer, micro_batch);
            self.instructions.extend(before.into_iter().map(|message| Instruction::AwaitReceive { message }));
            self.instructions.push(match splits(layer) {
                true => Instruction::BackwardInput { layer, micro_batch },
                false => Instruction::Backward { layer, micro_batch },
            });
            let after = self.stages.tied_after(layer, micro_batch);
            self.instructions.extend(after.into_iter().map(|message| Instruction::Send { message }));
        }
        if first > self.first_trained {
            self.send(content(first), first - 1);
        }
    }

    /// Awaits content from the stage of layer `source`, unless that layer is on this stage.
    fn await_receive(&mut self, content: Content, source: LayerId) {
        let (from, to) = (self.stages.stage_of(source), self.stage);
        if from != to {
            self.instructions.push(Instruction::AwaitReceive { message: Message { content, from, to } });
        }
    }

    /// Sends content to the stage of layer `target`, unless that layer is on this stage.
    fn send(&mut self, content: Content, target: LayerId) {
        let (from, to) = (self.stage, self.stages.stage_of(target));
        if from != to {
            self.instructions.push(Instruction::Send { message: Message { content, from, to } });
        }
    }
}

/// Returns whether a layer's weight gradients are deferred. A frozen layer has no weight gradients. Layers with tied
/// segments never defer theirs, because a tied gradient is summed across stages in the order of the backward pass.
fn splits(shape: &ModelShape, stages: &Stages, layer: LayerId) -> bool {
    let is_tied = |&segment: &usize| stages.is_tied(segment);
    shape.layers[layer].splits && shape.trains(layer) && !shape.layers[layer].segments.iter().any(is_tied)
}

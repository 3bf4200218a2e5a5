//! Checks one rank's program against the preconditions of its instructions.
//!
//! The table of effects lists the operands, reads and transfers of each instruction. This module adds the values that
//! must be available before each instruction, and those that are available after it.

mod gradients;
mod parameters;

use std::collections::BTreeSet;

use super::check::{Check, ensure};
use super::micro_batch::MicroBatch;
use super::tiers::Items;
use super::{Violation, violation};
use crate::effects::{Action, Effects, Operand, Transfer};
use crate::ids::{LayerId, SegmentId};
use crate::instruction::{Instruction, Program};
use crate::message::{Content, Message, StageId};
use crate::shape::{Placement, Placements};
use crate::tier::Item;
use crate::world::World;

/// A value that the rank holds, or an event on which later instructions depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fact<'a> {
    /// All parameters of a sharded segment are in flight or complete.
    Gathering(SegmentId),
    /// All parameters of a sharded segment are complete.
    Gathered(SegmentId),
    /// The secondary shards of a segment hold the current values of its parameters.
    Secondary(SegmentId),
    /// A segment's local gradient of a micro-batch, to which all layers have contributed.
    Complete(SegmentId, usize),
    /// A partial sum of a tied gradient that must be sent.
    Leaving(Message),
    /// The reduction of a replicated gradient, in flight or complete.
    Reducing(SegmentId),
    Reduced(SegmentId),
    Norm,
    Updated(SegmentId),
    Refreshed(SegmentId),
    /// A transfer that was started and not yet awaited.
    InFlight(Transfer<'a>),
    /// A transfer of a message that has been awaited.
    Moved(Transfer<'a>),
}

/// Checks one rank's program by itself.
pub(super) fn walk<'a>(rank: usize, program: &'a Program, world: &'a World<'a>) -> Result<(), Violation> {
    let stage = world.mesh.coordinates(rank).stage;
    let held = |segment| (world.stages.holds(stage, segment), world.stages.owner(segment) == stage);
    let trains = program.trains();
    let mut state = State {
        world,
        stage,
        updates: program.updates(),
        facts: BTreeSet::new(),
        items: Items::new(world.shape, held),
        micro_batches: vec![MicroBatch::new(world.shape, trains); program.micro_batches],
        open: vec![None; world.shape.segments.len()],
        added: vec![0; world.shape.segments.len()],
    };
    for (index, instruction) in program.instructions.iter().enumerate() {
        state.apply(instruction).map_err(|reason| violation(rank, program, index, reason))?;
    }
    state.finish().map_err(|reason| violation(rank, program, program.instructions.len(), reason))
}

struct State<'a> {
    world: &'a World<'a>,
    stage: StageId,
    /// Whether the program must update the segments that it holds.
    updates: bool,
    facts: BTreeSet<Fact<'a>>,
    items: Items<'a>,
    micro_batches: Vec<MicroBatch>,
    /// Micro-batch of the local gradient that each segment holds, from its first backward until it is accumulated or
    /// reduced.
    open: Vec<Option<usize>>,
    /// Number of micro-batches in each replicated accumulator or reduced shard. Micro-batches are added in order.
    added: Vec<usize>,
}

impl<'a> State<'a> {
    fn apply(&mut self, instruction: &'a Instruction) -> Check {
        let Effects { operands, action, .. } = instruction.effects();
        operands.into_iter().flatten().try_for_each(|operand| self.exists(operand))?;
        match action {
            Action::Awaits(transfer) => self.end(transfer)?,
            Action::Computes(computation) => self.readable(computation)?,
            _ => {}
        }
        self.rule(instruction)?;
        let Action::Starts(transfer) = action else { return Ok(()) };
        let is_new = !self.has(Fact::Moved(transfer)) && self.facts.insert(Fact::InFlight(transfer));
        ensure(is_new, || format!("this {transfer} was started already"))
    }

    fn end(&mut self, transfer: Transfer<'a>) -> Check {
        let was_started = self.facts.remove(&Fact::InFlight(transfer));
        match transfer {
            Transfer::Fetch(item) => return self.items.await_fetch(*item),
            Transfer::Offload(item) => return self.items.await_offload(*item),
            Transfer::Gather(segments) | Transfer::GatherSecondary(segments) if !was_started => {
                segments.iter().try_for_each(|&segment| self.parameters_are(segment, "being gathered"))?;
            }
            Transfer::Send(_) | Transfer::Receive(_) => drop(self.facts.insert(Fact::Moved(transfer))),
            Transfer::Gather(_)
            | Transfer::GatherSecondary(_)
            | Transfer::Reduce(..)
            | Transfer::Refresh(_)
            | Transfer::OuterStep(_) => {}
        }
        ensure(was_started, || match transfer {
            Transfer::Send(_) => "the message was not sent".into(),
            Transfer::Receive(_) => "no receive of the message was started".into(),
            _ => format!("no such {transfer} was started"),
        })
    }

    fn rule(&mut self, instruction: &'a Instruction) -> Check {
        match *instruction {
            Instruction::Load { micro_batch } => {
                self.micro_batches[micro_batch].load(self.world.stages.stage_of(0) == self.stage)
            }
            Instruction::Gather { ref segments } => segments.iter().try_for_each(|&segment| {
                self.parameters_are(segment, "released")?;
                self.items.gather(segment)?;
                self.makes(Fact::Gathering(segment), "gathered twice")
            }),
            Instruction::AwaitGather { ref segments } => segments.iter().try_for_each(|&segment| {
                if self.world.shape.segments[segment].has_secondary {
                    self.facts.insert(Fact::Secondary(segment));
                }
                self.is_gathered(segment)
            }),
            Instruction::GatherSecondary { ref segments } => segments.iter().try_for_each(|&segment| {
                self.parameters_are(segment, "released")?;
                let has_secondary = self.world.shape.segments[segment].has_secondary;
                ensure(has_secondary, || "it has no secondary shards".into())?;
                ensure(self.has(Fact::Secondary(segment)), || {
                    "its secondary shards were not filled since its last update".into()
                })?;
                self.makes(Fact::Gathering(segment), "gathered twice")
            }),
            Instruction::AwaitGatherSecondary { ref segments } => {
                segments.iter().try_for_each(|&segment| self.is_gathered(segment))
            }
            Instruction::Release { segment } => {
                self.parameters_are(segment, "gathered")?;
                self.removes(Fact::Gathered(segment), "released twice")
            }
            Instruction::Forward { layer, micro_batch } => {
                let needs_data = self.world.shape.loads(layer);
                self.micro_batches[micro_batch].forward(layer, needs_data)
            }
            Instruction::Keep { layer, micro_batch } => self.micro_batches[micro_batch].keep(layer),
            Instruction::Discard { layer, micro_batch } => self.micro_batches[micro_batch].discard(layer),
            Instruction::Recompute { layer, micro_batch } => {
                self.micro_batches[micro_batch].recompute(layer)?;
                self.items.use_up(Item::Activations { layer, micro_batch })
            }
            Instruction::Backward { layer, micro_batch } => {
                self.backward(layer, micro_batch)?;
                self.contribute(layer, micro_batch)
            }
            Instruction::BackwardInput { layer, micro_batch } => {
                self.backward(layer, micro_batch)?;
                self.micro_batches[micro_batch].put_off(layer);
                Ok(())
            }
            Instruction::BackwardWeight { layer, micro_batch } => {
                self.micro_batches[micro_batch].take_deferred(layer)?;
                self.contribute(layer, micro_batch)
            }
            Instruction::Send { message } => self.send(message),
            Instruction::Receive { message } => ensure(message.to == self.stage && message.from != self.stage, || {
                "the message must go from another stage to this one".into()
            }),
            Instruction::AwaitReceive { message } => self.receive(message.content),
            Instruction::Accumulate { segment, micro_batch } => {
                let is_replicated = self.placements(segment).gradients == Placement::Replicated;
                ensure(is_replicated, || "sharded gradients must be reduced, not accumulated".into())?;
                self.take(segment, micro_batch)?;
                self.add_up(segment, micro_batch)
            }
            Instruction::Reduce { ref segments, micro_batch } => {
                segments.iter().try_for_each(|&segment| self.reduce(segment, micro_batch))
            }
            Instruction::AwaitReduce { ref segments, micro_batch } => {
                segments.iter().try_for_each(|&segment| self.await_reduce(segment, micro_batch))
            }
            Instruction::GradientNorm => {
                let World { shape, stages, .. } = *self.world;
                let is_owned = |&segment: &usize| stages.owner(segment) == self.stage && self.is_trainable(segment);
                for segment in (0..shape.segments.len()).filter(is_owned) {
                    let is_reduced = self.has(Fact::Reduced(segment));
                    ensure(is_reduced, || format!("the gradients of segment {segment} are not reduced"))?;
                    self.items.norm(segment)?;
                }
                self.makes(Fact::Norm, "computed twice")
            }
            Instruction::Update { segment } => {
                self.can_be_updated(segment)?;
                self.items.are_measured()?;
                ensure(self.world.shape.segments[segment].tiers.tiles == 0, || {
                    "this segment must be updated tile by tile".into()
                })?;
                self.facts.remove(&Fact::Secondary(segment));
                self.makes(Fact::Updated(segment), "updated twice")
            }
            Instruction::MeasureTile { segment, tile } => {
                self.can_be_updated(segment)?;
                self.items.measure(segment, tile)
            }
            Instruction::UpdateTile { segment, tile } => {
                self.can_be_updated(segment)?;
                self.items.are_measured()?;
                self.facts.remove(&Fact::Secondary(segment));
                if self.items.update(segment, tile)? {
                    self.facts.insert(Fact::Updated(segment));
                }
                Ok(())
            }
            Instruction::Fetch { item } => {
                let facts = &self.facts;
                self.items.fetch(item, |segment| facts.contains(&Fact::Reduced(segment)))
            }
            Instruction::Offload { item } => {
                if let Item::Activations { layer, micro_batch } = item {
                    self.micro_batch(micro_batch)?.is_kept(layer)?;
                    self.items.keep(item)?;
                }
                self.items.offload(item)
            }
            Instruction::OuterStep { segment } => {
                let is_between = !self.has(Fact::Norm) && self.micro_batches.is_empty();
                ensure(is_between, || "replicates must be averaged between training steps".into())?;
                self.is_own(segment)?;
                ensure(!self.has(Fact::Updated(segment)), || "updated twice".into())?;
                self.cannot_be_stale(segment)
            }
            Instruction::AwaitOuterStep { segment } => self.makes(Fact::Updated(segment), "updated twice"),
            Instruction::Refresh { ref segments } => segments.iter().try_for_each(|&segment| {
                ensure(self.placements(segment).need_refresh(), || format!("segment {segment} needs no refresh"))?;
                ensure(self.has(Fact::Updated(segment)), || format!("segment {segment} is not updated"))
            }),
            Instruction::AwaitRefresh { ref segments } => {
                self.facts.extend(segments.iter().map(|&segment| Fact::Refreshed(segment)));
                Ok(())
            }
            Instruction::AwaitSend { .. } | Instruction::AwaitFetch { .. } | Instruction::AwaitOffload { .. } => Ok(()),
        }
    }

    fn backward(&mut self, layer: LayerId, micro_batch: usize) -> Check {
        self.micro_batches[micro_batch].backward(layer)?;
        self.world.stages.tied_before(layer, micro_batch).iter().try_for_each(|message| {
            ensure(self.has(Fact::Moved(Transfer::Receive(message))), || {
                format!("the {} was not received", message.content)
            })
        })
    }

    fn send(&mut self, message: Message) -> Check {
        ensure(message.from == self.stage && message.to != self.stage, || {
            "the message must go from this stage to another one".into()
        })?;
        match message.content {
            Content::Activations { layer, micro_batch } => self.micro_batch(micro_batch)?.send_inputs(layer),
            Content::Gradients { layer, micro_batch } => self.micro_batch(micro_batch)?.send_gradients(layer),
            Content::TiedGradient { segment, .. } => {
                self.open[segment] = None;
                self.removes(
                    Fact::Leaving(message),
                    "this stage has not added its own gradient, or has already sent the sum",
                )
            }
            Content::TiedParameters { segment } => {
                ensure(self.has(Fact::Updated(segment)), || "the parameters are not updated yet".into())?;
                ensure(self.is_refreshed(segment), || "the parameters are not refreshed yet".into())
            }
        }
    }

    fn receive(&mut self, content: Content) -> Check {
        match content {
            Content::TiedGradient { segment, micro_batch, .. } => {
                ensure(self.open[segment].is_none(), || {
                    format!("the tied gradient must be received before this stage adds its own to segment {segment}")
                })?;
                self.hold(segment, micro_batch)
            }
            Content::TiedParameters { segment } => {
                let is_after = self.has(Fact::Norm) || self.micro_batches.is_empty();
                ensure(is_after, || "tied parameters must be received after the gradient norm".into())?;
                self.facts.remove(&Fact::Secondary(segment));
                self.cannot_be_stale(segment)
            }
            Content::Activations { layer, micro_batch } => self.micro_batch(micro_batch)?.receive_inputs(layer),
            Content::Gradients { layer, micro_batch } => self.micro_batch(micro_batch)?.receive_gradients(layer),
        }
    }

    fn finish(&self) -> Check {
        self.facts.iter().try_for_each(|fact| match fact {
            Fact::InFlight(transfer) => Err(format!("a {transfer} was not awaited")),
            Fact::Leaving(message) => Err(format!("the {} was not sent to stage {}", message.content, message.to)),
            Fact::Gathered(segment) => Err(format!("segment {segment} is still gathered")),
            _ => Ok(()),
        })?;
        self.items.finish()?;
        let World { shape, stages, .. } = self.world;
        let is_held =
            |&segment: &usize| self.updates && self.is_trainable(segment) && stages.holds(self.stage, segment);
        for segment in (0..shape.segments.len()).filter(is_held) {
            let (content, from, to) = (Content::TiedParameters { segment }, stages.owner(segment), self.stage);
            if from != to {
                let received = Fact::Moved(Transfer::Receive(&Message { content, from, to }));
                ensure(self.has(received), || format!("the {content} were never received"))?;
                continue;
            }
            ensure(self.has(Fact::Updated(segment)), || format!("segment {segment} was never updated"))?;
            ensure(self.is_refreshed(segment), || {
                format!("segment {segment} differs between ranks: it was updated but not refreshed")
            })?;
        }
        let layers = stages.layers_of(self.stage).count();
        let first_trained = shape.first_trained();
        let trained = stages.layers_of(self.stage).filter(|&layer| layer >= first_trained).count();
        self.micro_batches.iter().try_for_each(|micro_batch| micro_batch.finish(layers, trained))
    }

    fn has(&self, fact: Fact<'_>) -> bool {
        // Shorten the lifetime of the facts in the set, so that the set can be searched for `fact`.
        let facts: &BTreeSet<Fact<'_>> = &self.facts;
        facts.contains(&fact)
    }

    fn makes(&mut self, fact: Fact<'a>, reason: &str) -> Check {
        ensure(self.facts.insert(fact), || reason.into())
    }

    fn removes(&mut self, fact: Fact<'a>, reason: &str) -> Check {
        ensure(self.facts.remove(&fact), || reason.into())
    }

    fn micro_batch(&mut self, micro_batch: usize) -> Result<&mut MicroBatch, String> {
        self.micro_batches.get_mut(micro_batch).ok_or_else(|| "no such micro-batch".into())
    }

    fn placements(&self, segment: SegmentId) -> Placements {
        self.world.shape.segments[segment].placements
    }

    fn is_trainable(&self, segment: SegmentId) -> bool {
        self.world.shape.segments[segment].is_trainable
    }

    /// Checks that an operand exists and that a layer is on this stage. Only the layer of a message may be on another
    /// stage.
    fn exists(&self, operand: Operand<'_>) -> Check {
        operand.exists(self.world)?;
        match operand {
            Operand::MicroBatch(m) => ensure(m < self.micro_batches.len(), || "no such micro-batch".into()),
            Operand::Layer(layer) | Operand::Item(&Item::Activations { layer, .. }) => {
                let stage = self.world.stages.stage_of(layer);
                ensure(stage == self.stage, || format!("the layer is on stage {stage}, not on this rank's stage"))
            }
            _ => Ok(()),
        }
    }
}

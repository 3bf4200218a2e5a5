//! Checks one rank's program against the preconditions and effects of its instructions.

use std::collections::BTreeSet;

use super::tiers::Items;
use super::{Violation, World, violation};
use crate::instruction::{Instruction, LayerId, Program, SegmentId};
use crate::message::{Content, Message, StageId};
use crate::shape::{ModelShape, Placement, SegmentShape};
use crate::stages::Stages;
use crate::tier::Item;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parameters {
    Released,
    Gathering,
    Gathered,
}

/// Checks one rank's program by itself.
pub(super) fn walk(rank: usize, program: &Program, world: &World) -> Result<(), Violation> {
    let mut state = State::new(world, world.mesh.coordinates(rank).stage, program);
    for (index, instruction) in program.instructions.iter().enumerate() {
        state.apply(instruction).map_err(|reason| violation(rank, program, index, reason))?;
    }
    state.finish().map_err(|reason| violation(rank, program, program.instructions.len(), reason))
}

struct State<'a> {
    shape: &'a ModelShape,
    stages: &'a Stages,
    stage: StageId,
    micro_batches: usize,
    /// Whether the program trains, that is, has a gradient norm.
    trains: bool,
    parameters: Vec<Parameters>,
    items: Items<'a>,
    loaded: BTreeSet<usize>,
    forwarded: BTreeSet<(usize, LayerId)>,
    backwarded: BTreeSet<(usize, LayerId)>,
    /// Forwards with saved activations.
    saved: BTreeSet<(usize, LayerId)>,
    /// Inputs kept for recomputation.
    kept: BTreeSet<(usize, LayerId)>,
    /// Micro-batches whose latest output no layer has consumed yet.
    waiting: BTreeSet<usize>,
    /// The layer recomputed last.
    recomputed: Option<(usize, LayerId)>,
    /// Backwards whose second half is pending.
    put_off: BTreeSet<(usize, LayerId)>,
    /// Posted receives. The next fields hold the messages received, the sends not yet awaited, and all messages sent.
    receiving: BTreeSet<Message>,
    received: BTreeSet<Message>,
    sending: BTreeSet<Message>,
    sent: BTreeSet<Message>,
    /// Partial sums of tied gradients that must be sent.
    leaving: BTreeSet<Message>,
    /// Micro-batch of the local gradient that each segment holds, from its first backward until it is accumulated or
    /// reduced.
    open: Vec<Option<usize>>,
    /// Local gradients to which all layers have contributed: (micro-batch, segment).
    complete: BTreeSet<(usize, SegmentId)>,
    /// Number of micro-batches in each replicated accumulator or reduced shard, which are added in order.
    gathered_up: Vec<usize>,
    reducing: Vec<(Vec<SegmentId>, usize)>,
    reduced: Vec<bool>,
    norm: bool,
    updated: Vec<bool>,
    refreshing: Vec<Vec<SegmentId>>,
    refreshed: Vec<bool>,
}

pub(super) type Check = Result<(), String>;

pub(super) fn ensure(condition: bool, reason: impl FnOnce() -> String) -> Check {
    if condition { Ok(()) } else { Err(reason()) }
}

impl<'a> State<'a> {
    fn new(world: &World<'a>, stage: StageId, program: &Program) -> Self {
        let World { shape, stages, .. } = *world;
        let count = shape.segments.len();
        let initial = |s: &SegmentShape| match s.placements.parameters {
            Placement::Replicated => Parameters::Gathered,
            Placement::Sharded => Parameters::Released,
        };
        let held = |segment| (stages.holds(stage, segment), stages.owner(segment) == stage);
        Self {
            shape,
            stages,
            stage,
            items: Items::new(shape, held),
            micro_batches: program.micro_batches,
            trains: program.instructions.iter().any(|i| matches!(i, Instruction::GradientNorm)),
            parameters: shape.segments.iter().map(initial).collect(),
            loaded: BTreeSet::new(),
            forwarded: BTreeSet::new(),
            backwarded: BTreeSet::new(),
            saved: BTreeSet::new(),
            kept: BTreeSet::new(),
            waiting: BTreeSet::new(),
            recomputed: None,
            put_off: BTreeSet::new(),
            receiving: BTreeSet::new(),
            received: BTreeSet::new(),
            sending: BTreeSet::new(),
            sent: BTreeSet::new(),
            leaving: BTreeSet::new(),
            open: vec![None; count],
            complete: BTreeSet::new(),
            gathered_up: vec![0; count],
            reducing: vec![],
            reduced: vec![false; count],
            norm: false,
            updated: vec![false; count],
            refreshing: vec![],
            refreshed: vec![false; count],
        }
    }

    fn apply(&mut self, instruction: &Instruction) -> Check {
        match instruction {
            Instruction::Load { micro_batch } => {
                ensure(*micro_batch < self.micro_batches, || "no such micro-batch".into())?;
                ensure(self.loaded.insert(*micro_batch), || "loaded twice".into())
            }
            Instruction::Gather { segment } => {
                self.sharded(*segment)?;
                self.expect(*segment, Parameters::Released)?;
                self.items.gather(*segment)?;
                self.parameters[*segment] = Parameters::Gathering;
                Ok(())
            }
            Instruction::AwaitGather { segment } => {
                self.expect(*segment, Parameters::Gathering)?;
                self.parameters[*segment] = Parameters::Gathered;
                Ok(())
            }
            Instruction::Release { segment } => {
                self.sharded(*segment)?;
                self.expect(*segment, Parameters::Gathered)?;
                self.parameters[*segment] = Parameters::Released;
                Ok(())
            }
            Instruction::Forward { layer, micro_batch } => self.forward(*layer, *micro_batch),
            Instruction::Keep { layer, micro_batch } => {
                self.can_be_recomputed(*layer)?;
                ensure(self.is_fed(*layer, *micro_batch), || "the layer before has not run".into())?;
                ensure(!self.forwarded.contains(&(*micro_batch, *layer)), || "its inputs have been used up".into())?;
                ensure(self.kept.insert((*micro_batch, *layer)), || "kept twice".into())
            }
            Instruction::Discard { layer, micro_batch } => {
                self.can_be_recomputed(*layer)?;
                ensure(self.saved.remove(&(*micro_batch, *layer)), || "its forward has kept nothing".into())
            }
            Instruction::Recompute { layer, micro_batch } => self.recompute(*layer, *micro_batch),
            Instruction::Backward { layer, micro_batch } => {
                self.backward(*layer, *micro_batch)?;
                self.contribute(*layer, *micro_batch)
            }
            Instruction::BackwardInput { layer, micro_batch } => {
                self.backward(*layer, *micro_batch)?;
                self.put_off.insert((*micro_batch, *layer));
                Ok(())
            }
            Instruction::BackwardWeight { layer, micro_batch } => {
                self.layer(*layer)?;
                ensure(self.put_off.remove(&(*micro_batch, *layer)), || "nothing was put off".into())?;
                self.contribute(*layer, *micro_batch)
            }
            Instruction::Send { message } => self.send(*message),
            Instruction::AwaitSend { message } => ensure(self.sending.remove(message), || "it was not sent".into()),
            Instruction::Receive { message } => {
                ensure(message.to == self.stage && message.from != self.stage, || "it is not for this stage".into())?;
                ensure(!self.received.contains(message), || "received twice".into())?;
                ensure(self.receiving.insert(*message), || "received twice".into())
            }
            Instruction::AwaitReceive { message } => self.arrive(*message),
            Instruction::Accumulate { segment, micro_batch } => {
                self.segment(*segment)?;
                let placement = self.shape.segments[*segment].placements.gradients;
                ensure(placement == Placement::Replicated, || {
                    "its gradients are sharded: they are reduced, not accumulated".into()
                })?;
                self.take(*segment, *micro_batch)?;
                self.add_up(*segment, *micro_batch)
            }
            Instruction::Reduce { segments, micro_batch } => self.reduce(segments, *micro_batch),
            Instruction::AwaitReduce { segments, micro_batch } => {
                let position = self.reducing.iter().position(|(s, m)| s == segments && m == micro_batch);
                let position = position.ok_or("no such reduction was started")?;
                self.reducing.remove(position);
                for &segment in segments {
                    if self.shape.segments[segment].placements.gradients == Placement::Sharded {
                        self.items.reduced(segment, self.gathered_up[segment] == 0)?;
                        self.add_up(segment, *micro_batch)?;
                    }
                    self.reduced[segment] = self.gathered_up[segment] == self.micro_batches;
                }
                Ok(())
            }
            Instruction::GradientNorm => {
                self.all_reduced()?;
                let owned = |&segment: &usize| self.stages.owner(segment) == self.stage;
                (0..self.reduced.len()).filter(owned).try_for_each(|segment| self.items.norm(segment))?;
                ensure(!std::mem::replace(&mut self.norm, true), || "computed twice".into())
            }
            Instruction::UpdateTile { segment, tile } => {
                self.can_be_updated(*segment)?;
                self.updated[*segment] |= self.items.update(*segment, *tile)?;
                Ok(())
            }
            Instruction::Fetch { item } => {
                self.item(*item)?;
                self.items.fetch(*item, |segment| self.reduced[segment])
            }
            Instruction::AwaitFetch { item } => self.items.await_fetch(*item),
            Instruction::Offload { item } => {
                self.item(*item)?;
                if let Item::Activations { layer, micro_batch } = *item {
                    ensure(self.kept.contains(&(micro_batch, layer)), || "they are not kept".into())?;
                    ensure(!self.items.knows(*item), || "they were written already".into())?;
                    self.items.keep(*item);
                }
                self.items.offload(*item)
            }
            Instruction::AwaitOffload { item } => self.items.await_offload(*item),
            Instruction::Update { segment } => {
                self.can_be_updated(*segment)?;
                let tiles = self.shape.segments[*segment].tiers.tiles;
                ensure(tiles == 0, || "it is updated in tiles".into())?;
                ensure(!std::mem::replace(&mut self.updated[*segment], true), || "updated twice".into())
            }
            Instruction::Refresh { segments } => {
                for &segment in segments {
                    self.segment(segment)?;
                    ensure(self.needs_refresh(segment), || format!("segment {segment} needs no refresh"))?;
                    ensure(self.updated[segment], || format!("segment {segment} is not updated"))?;
                }
                self.refreshing.push(segments.clone());
                Ok(())
            }
            Instruction::AwaitRefresh { segments } => {
                let position = self.refreshing.iter().position(|s| s == segments);
                self.refreshing.remove(position.ok_or("no such refresh was started")?);
                segments.iter().for_each(|&s| self.refreshed[s] = true);
                Ok(())
            }
        }
    }

    fn forward(&mut self, layer: LayerId, micro_batch: usize) -> Check {
        self.layer(layer)?;
        ensure(!self.shape.loads(layer) || self.loaded.contains(&micro_batch), || {
            "its micro-batch is not loaded".into()
        })?;
        ensure(self.is_fed(layer, micro_batch), || "the layer before has not run".into())?;
        self.readable(&self.shape.layers[layer].segments)?;
        self.saved.insert((micro_batch, layer));
        self.waiting.insert(micro_batch);
        ensure(self.forwarded.insert((micro_batch, layer)), || "run twice".into())
    }

    /// Returns whether the inputs of a layer's forward are available.
    fn is_fed(&self, layer: LayerId, micro_batch: usize) -> bool {
        match layer.checked_sub(1) {
            None => self.loaded.contains(&micro_batch),
            Some(before) if self.is_here(before) => self.forwarded.contains(&(micro_batch, before)),
            Some(before) => self.has_received(Content::Activations { layer, micro_batch }, before),
        }
    }

    fn can_be_recomputed(&self, layer: LayerId) -> Check {
        self.layer(layer)?;
        ensure(layer + 1 < self.shape.layers.len(), || "the last layer's forward is part of its backward".into())
    }

    fn recompute(&mut self, layer: LayerId, micro_batch: usize) -> Check {
        self.can_be_recomputed(layer)?;
        ensure(self.forwarded.contains(&(micro_batch, layer)), || "its forward has not run".into())?;
        ensure(!self.backwarded.contains(&(micro_batch, layer)), || "its backward has run".into())?;
        let from_before = layer.checked_sub(1).is_some_and(|before| self.recomputed == Some((micro_batch, before)));
        let item = Item::Activations { layer, micro_batch };
        if self.items.knows(item) {
            self.items.use_up(item)?;
        }
        ensure(self.kept.remove(&(micro_batch, layer)) || from_before, || "its inputs are not there".into())?;
        ensure(!self.waiting.contains(&micro_batch), || "another layer has not taken its inputs yet".into())?;
        self.readable(&self.shape.layers[layer].segments)?;
        self.recomputed = Some((micro_batch, layer));
        ensure(self.saved.insert((micro_batch, layer)), || "what its forward kept is still there".into())
    }

    fn backward(&mut self, layer: LayerId, micro_batch: usize) -> Check {
        self.layer(layer)?;
        ensure(self.forwarded.contains(&(micro_batch, layer)), || "its forward has not run".into())?;
        let behind = layer + 1;
        let is_fed = match behind {
            _ if behind == self.shape.layers.len() => true,
            _ if self.is_here(behind) => self.backwarded.contains(&(micro_batch, behind)),
            _ => self.has_received(Content::Gradients { layer: behind, micro_batch }, behind),
        };
        ensure(is_fed, || "the backward of the layer behind has not run".into())?;
        self.readable(&self.shape.layers[layer].read_backward)?;
        for message in self.stages.tied_before(layer, micro_batch) {
            ensure(self.received.contains(&message), || format!("the {} is not here", message.content))?;
        }
        ensure(self.backwarded.insert((micro_batch, layer)), || "run twice".into())?;
        // A backward consumes the output that was waiting for the next layer.
        self.recomputed = None;
        if layer + 1 == self.shape.layers.len() {
            self.waiting.remove(&micro_batch);
        }
        ensure(self.saved.remove(&(micro_batch, layer)), || "what its forward kept was given up".into())
    }

    fn can_be_updated(&self, segment: SegmentId) -> Check {
        self.segment(segment)?;
        ensure(self.stages.owner(segment) == self.stage, || "another stage owns it".into())?;
        ensure(self.norm, || "before the gradient norm".into())?;
        ensure(self.reduced[segment], || "its gradients are not reduced".into())?;
        let sharded = self.shape.segments[segment].placements.parameters == Placement::Sharded;
        ensure(!sharded || self.parameters[segment] == Parameters::Released, || {
            "its gathered parameters would be stale".into()
        })
    }

    fn item(&self, item: Item) -> Check {
        match item {
            Item::Parameters { segment } | Item::Gradients { segment } | Item::Tile { segment, .. } => {
                self.segment(segment)
            }
            Item::Activations { layer, .. } => self.layer(layer),
        }
    }

    /// Records the gradients of a layer's parameters.
    fn contribute(&mut self, layer: LayerId, micro_batch: usize) -> Check {
        for &segment in &self.shape.layers[layer].segments {
            self.hold(segment, micro_batch)?;
        }
        let completed =
            self.shape.layers[layer].segments.iter().filter(|&&segment| self.stages.completes(layer, segment));
        self.complete.extend(completed.map(|&segment| (micro_batch, segment)));
        self.leaving.extend(self.stages.tied_after(layer, micro_batch));
        Ok(())
    }

    fn hold(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        let holds = self.open[segment].replace(micro_batch);
        ensure(holds.is_none_or(|other| other == micro_batch), || {
            format!("segment {segment} still holds the gradient of another micro-batch")
        })
    }

    fn send(&mut self, message: Message) -> Check {
        ensure(message.from == self.stage && message.to != self.stage, || "it is not this stage's to send".into())?;
        match message.content {
            Content::Activations { layer, micro_batch } => {
                let made = layer.checked_sub(1).is_some_and(|before| self.forwarded.contains(&(micro_batch, before)));
                ensure(made, || "the layer before has not run".into())?;
                self.waiting.remove(&micro_batch);
            }
            Content::Gradients { layer, micro_batch } => {
                ensure(self.backwarded.contains(&(micro_batch, layer)), || "the layer's backward has not run".into())?;
            }
            Content::TiedGradient { segment, .. } => {
                ensure(self.leaving.remove(&message), || "this stage has not added its part".into())?;
                self.open[segment] = None;
            }
            Content::TiedParameters { segment } => {
                self.segment(segment)?;
                ensure(self.updated[segment], || "it is not updated".into())?;
                ensure(self.refreshed[segment] || !self.needs_refresh(segment), || "it is not refreshed".into())?;
            }
        }
        ensure(self.sent.insert(message), || "sent twice".into())?;
        self.sending.insert(message);
        Ok(())
    }

    fn arrive(&mut self, message: Message) -> Check {
        ensure(self.receiving.remove(&message), || "no receive was started".into())?;
        match message.content {
            Content::TiedGradient { segment, micro_batch, .. } => {
                self.segment(segment)?;
                ensure(self.open[segment].is_none(), || {
                    format!("segment {segment} has a gradient already: what is received comes before what is added")
                })?;
                self.hold(segment, micro_batch)?;
            }
            Content::TiedParameters { segment } => {
                self.segment(segment)?;
                ensure(self.norm, || "before all gradients are made".into())?;
                let sharded = self.shape.segments[segment].placements.parameters == Placement::Sharded;
                ensure(!sharded || self.parameters[segment] == Parameters::Released, || {
                    "its gathered parameters would be stale".into()
                })?;
            }
            Content::Activations { micro_batch, .. } => drop(self.waiting.insert(micro_batch)),
            Content::Gradients { .. } => {}
        }
        self.received.insert(message);
        Ok(())
    }

    /// Returns whether a message from the stage of layer `source` has been received.
    fn has_received(&self, content: Content, source: LayerId) -> bool {
        let from = self.stages.stage_of(source);
        self.received.contains(&Message { content, from, to: self.stage })
    }

    fn is_here(&self, layer: LayerId) -> bool {
        self.stages.stage_of(layer) == self.stage
    }

    fn reduce(&mut self, segments: &[SegmentId], micro_batch: usize) -> Check {
        for &segment in segments {
            self.segment(segment)?;
            match self.shape.segments[segment].placements.gradients {
                Placement::Sharded => self.take(segment, micro_batch)?,
                Placement::Replicated => {
                    ensure(self.gathered_up[segment] == self.micro_batches, || {
                        let (has, all) = (self.gathered_up[segment], self.micro_batches);
                        format!("segment {segment} has {has} of {all} micro-batches")
                    })?;
                    let pending = self.reducing.iter().any(|(segments, _)| segments.contains(&segment));
                    ensure(!pending && !self.reduced[segment], || format!("segment {segment} is reduced already"))?;
                }
            }
        }
        self.reducing.push((segments.to_vec(), micro_batch));
        Ok(())
    }

    /// Takes a complete local gradient out of its segment.
    fn take(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        ensure(self.complete.remove(&(micro_batch, segment)), || {
            format!("segment {segment}'s gradient of that micro-batch is not complete")
        })?;
        self.open[segment] = None;
        Ok(())
    }

    /// Adds a micro-batch to the sum. Micro-batches must be added in order.
    fn add_up(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        let next = self.gathered_up[segment];
        self.gathered_up[segment] += 1;
        ensure(micro_batch == next, || format!("segment {segment} adds up micro-batch {next} next"))
    }

    fn finish(&self) -> Check {
        ensure(self.reducing.is_empty(), || "a reduction was not awaited".into())?;
        ensure(self.refreshing.is_empty(), || "a refresh was not awaited".into())?;
        ensure(self.sending.is_empty(), || "a send was not awaited".into())?;
        ensure(self.receiving.is_empty(), || "a receive was not awaited".into())?;
        ensure(self.leaving.is_empty(), || "the sum of a tied gradient was not sent on".into())?;
        self.items.finish()?;
        ensure(self.kept.is_empty(), || "inputs were kept for a layer that was not run again".into())?;
        ensure(self.put_off.is_empty(), || "weight gradients were put off for good".into())?;
        let is_held = |&(segment, _): &(usize, &SegmentShape)| self.stages.holds(self.stage, segment);
        for (segment, shape) in self.shape.segments.iter().enumerate().filter(is_held) {
            if shape.placements.parameters == Placement::Sharded {
                ensure(self.parameters[segment] == Parameters::Released, || {
                    format!("segment {segment} is still gathered")
                })?;
            }
            if self.trains && self.stages.owner(segment) != self.stage {
                let content = Content::TiedParameters { segment };
                let message = Message { content, from: self.stages.owner(segment), to: self.stage };
                ensure(self.received.contains(&message), || format!("the {content} were never received"))?;
            } else if self.trains {
                ensure(self.updated[segment], || format!("segment {segment} was never updated"))?;
                ensure(self.refreshed[segment] || !self.needs_refresh(segment), || {
                    format!("segment {segment} differs between ranks: it was updated but not refreshed")
                })?;
            }
        }
        let all = self.micro_batches * self.stages.layers_of(self.stage).count();
        ensure(self.forwarded.len() == all, || "not every layer ran on every micro-batch".into())?;
        ensure(!self.trains || self.backwarded.len() == all, || "not every backward ran".into())
    }

    fn needs_refresh(&self, segment: SegmentId) -> bool {
        let placements = self.shape.segments[segment].placements;
        placements.parameters == Placement::Replicated && placements.optimizer == Placement::Sharded
    }

    fn all_reduced(&self) -> Check {
        let owned = |&segment: &usize| self.stages.owner(segment) == self.stage;
        match (0..self.reduced.len()).filter(owned).find(|&segment| !self.reduced[segment]) {
            None => Ok(()),
            Some(segment) => Err(format!("the gradients of segment {segment} are not reduced")),
        }
    }

    fn readable(&self, segments: &[SegmentId]) -> Check {
        for &segment in segments {
            ensure(self.parameters[segment] == Parameters::Gathered, || {
                format!("reads segment {segment}, which is {:?}", self.parameters[segment]).to_lowercase()
            })?;
        }
        Ok(())
    }

    fn layer(&self, layer: LayerId) -> Check {
        ensure(layer < self.shape.layers.len(), || "no such layer".into())?;
        ensure(self.is_here(layer), || format!("the layer is on stage {}", self.stages.stage_of(layer)))
    }

    fn segment(&self, segment: SegmentId) -> Check {
        ensure(segment < self.shape.segments.len(), || format!("there is no segment {segment}"))
    }

    fn sharded(&self, segment: SegmentId) -> Check {
        self.segment(segment)?;
        let placement = self.shape.segments[segment].placements.parameters;
        ensure(placement == Placement::Sharded, || "its parameters are replicated".into())
    }

    fn expect(&self, segment: SegmentId, state: Parameters) -> Check {
        self.segment(segment)?;
        ensure(self.parameters[segment] == state, || {
            format!("its parameters are {:?}, not {state:?}", self.parameters[segment]).to_lowercase()
        })
    }
}

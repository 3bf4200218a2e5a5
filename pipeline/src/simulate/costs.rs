//! The cost table: how long things take and how large they are.

use crate::instruction::{Instruction, SegmentId};
use crate::message::{Content, Message};
use crate::shape::{ModelShape, Placement};
use crate::simulate::SimulationError;
use crate::tier::Item;
use crate::validate::World;

/// A way between ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Seconds until the first byte is there.
    pub latency: f64,
    /// Bytes per second.
    pub bandwidth: f64,
}

impl Link {
    /// One that takes no time.
    pub const FREE: Self = Self { latency: 0.0, bandwidth: f64::INFINITY };

    /// How long so many bytes take.
    #[must_use]
    pub fn seconds(self, bytes: f64) -> f64 {
        self.latency + bytes / self.bandwidth
    }
}

/// The ways of the collectives. Bytes are those that each rank must send at least.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Collectives {
    /// Gathers and refreshes of parameters.
    pub all_gather: Link,
    /// Reductions of gradients whose optimizer state is sharded.
    pub reduce_scatter: Link,
    /// Reductions of other gradients.
    pub all_reduce: Link,
}

impl Collectives {
    /// The same for all.
    #[must_use]
    pub fn all(link: Link) -> Self {
        Self { all_gather: link, reduce_scatter: link, all_reduce: link }
    }
}

/// How fast things go on beside each other, as a share of what they do alone: above 0, at most 1. A worker that carries out a collective
/// takes time from a core that computes, and is given less of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sharing {
    /// Computing, while something is on its way to or from the rank.
    pub computing: f64,
    /// What is on its way, while one of its ranks computes.
    pub transferring: f64,
}

impl Sharing {
    /// Nothing slows anything.
    pub const NONE: Self = Self { computing: 1.0, transferring: 1.0 };
}

/// What a layer costs, for a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerCosts {
    /// Seconds of its forward.
    pub forward: f64,
    /// Seconds of its whole backward.
    pub backward: f64,
    /// Seconds of its backward without what is put off.
    pub backward_input: f64,
    /// Seconds of what is put off.
    pub backward_weight: f64,
    /// Bytes that its forward keeps for its backward.
    pub activations: u64,
    /// Bytes that are kept for what is put off, once the rest of the backward is done.
    pub put_off: u64,
    /// Bytes of its inputs: what is sent to its stage.
    pub inputs: u64,
    /// Bytes of the gradients of its inputs: what its stage sends back.
    pub input_gradients: u64,
}

/// What a segment costs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SegmentCosts {
    /// Bytes of all its parameters, gathered.
    pub parameters: u64,
    /// Bytes of the gradients of all its parameters.
    pub gradients: u64,
    /// Seconds to add a micro-batch's gradient to the accumulator.
    pub accumulate: f64,
    /// Seconds of the optimizer step on a rank's part.
    pub update: f64,
    /// Bytes of a rank's shard of the parameters, where it is read from the disk.
    pub stored_parameters: u64,
    /// Bytes of a rank's accumulated gradients, where they are on the disk.
    pub stored_gradients: u64,
    /// Bytes that are read for one of its tiles.
    pub tile_read: u64,
    /// Bytes of a tile that are written.
    pub tile_written: u64,
}

/// The table.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// By layer of the model.
    pub layers: Vec<LayerCosts>,
    /// By segment of the model.
    pub segments: Vec<SegmentCosts>,
    /// Seconds to make a micro-batch ready.
    pub load: f64,
    /// Seconds of the gradient norm, from when all ranks are there.
    pub gradient_norm: f64,
    /// Between the stages of a pipeline.
    pub pipe: Link,
    /// Between the ranks of a data-parallel group.
    pub data: Collectives,
    /// How computing and communicating slow each other.
    pub sharing: Sharing,
    /// From the disk.
    pub read: Link,
    /// To the disk.
    pub write: Link,
}

impl Costs {
    /// A table in which layers and segments take time, and nothing else does.
    #[must_use]
    pub fn of_compute(layers: Vec<LayerCosts>, segments: Vec<SegmentCosts>) -> Self {
        let (pipe, read, write) = (Link::FREE, Link::FREE, Link::FREE);
        let (data, sharing) = (Collectives::all(Link::FREE), Sharing::NONE);
        Self { layers, segments, load: 0.0, gradient_norm: 0.0, pipe, data, sharing, read, write }
    }

    /// Whether the table is for the world's model, and holds times.
    pub(super) fn check(&self, world: &World) -> Result<(), SimulationError> {
        let fits = |what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(SimulationError::Table { what, found, expected }),
        };
        fits("layers", self.layers.len(), world.shape.layers.len())?;
        fits("segments", self.segments.len(), world.shape.segments.len())?;
        let layers = self.layers.iter().flat_map(|l| [l.forward, l.backward, l.backward_input, l.backward_weight]);
        let segments = self.segments.iter().flat_map(|s| [s.accumulate, s.update]);
        let Collectives { all_gather, reduce_scatter, all_reduce } = self.data;
        let links = [self.pipe, all_gather, reduce_scatter, all_reduce, self.read, self.write];
        let others = [self.load, self.gradient_norm].into_iter().chain(links.map(|link| link.latency));
        let is_none = |seconds: &f64| !seconds.is_finite() || *seconds < 0.0;
        if let Some(seconds) = layers.chain(segments).chain(others).find(is_none) {
            return Err(SimulationError::NotATime(seconds));
        }
        let bandwidths = links.map(|link| link.bandwidth).into_iter();
        if let Some(bandwidth) = bandwidths.clone().find(|bandwidth| bandwidth.is_nan() || *bandwidth <= 0.0) {
            return Err(SimulationError::NotABandwidth(bandwidth));
        }
        let rates = [self.sharing.computing, self.sharing.transferring];
        match rates.into_iter().find(|rate| !(*rate > 0.0 && *rate <= 1.0)) {
            Some(rate) => Err(SimulationError::NotARate(rate)),
            None => Ok(()),
        }
    }

    /// Seconds that an instruction computes: nothing, where it only starts something or waits.
    pub(super) fn compute(&self, instruction: &Instruction, shape: &ModelShape) -> f64 {
        match instruction {
            Instruction::Load { .. } => self.load,
            Instruction::Forward { layer, .. } | Instruction::Recompute { layer, .. } => self.layers[*layer].forward,
            Instruction::Backward { layer, .. } => self.layers[*layer].backward,
            Instruction::BackwardInput { layer, .. } => self.layers[*layer].backward_input,
            Instruction::BackwardWeight { layer, .. } => self.layers[*layer].backward_weight,
            Instruction::Accumulate { segment, .. } => self.segments[*segment].accumulate,
            Instruction::Update { segment } => self.segments[*segment].update,
            Instruction::UpdateTile { segment, .. } => {
                self.segments[*segment].update / shape.segments[*segment].tiers.tiles.max(1) as f64
            }
            Instruction::Fetch { .. }
            | Instruction::AwaitFetch { .. }
            | Instruction::Offload { .. }
            | Instruction::AwaitOffload { .. }
            | Instruction::Keep { .. }
            | Instruction::Discard { .. }
            | Instruction::Gather { .. }
            | Instruction::AwaitGather { .. }
            | Instruction::Release { .. }
            | Instruction::Send { .. }
            | Instruction::AwaitSend { .. }
            | Instruction::Receive { .. }
            | Instruction::AwaitReceive { .. }
            | Instruction::Reduce { .. }
            | Instruction::AwaitReduce { .. }
            | Instruction::GradientNorm
            | Instruction::Refresh { .. }
            | Instruction::AwaitRefresh { .. } => 0.0,
        }
    }

    /// Bytes that an item has in memory, and those of them that an offload writes.
    pub(super) fn item(&self, item: &Item) -> (u64, u64) {
        match item {
            Item::Parameters { segment } => (self.segments[*segment].stored_parameters, 0),
            Item::Gradients { segment } => {
                let bytes = self.segments[*segment].stored_gradients;
                (bytes, bytes)
            }
            Item::Tile { segment, .. } => (self.segments[*segment].tile_read, self.segments[*segment].tile_written),
            Item::Activations { layer, .. } => (self.layers[*layer].inputs, self.layers[*layer].inputs),
        }
    }

    /// Bytes of a message.
    pub(super) fn message(&self, message: &Message) -> u64 {
        match message.content {
            Content::Activations { layer, .. } => self.layers[layer].inputs,
            Content::Gradients { layer, .. } => self.layers[layer].input_gradients,
            Content::TiedGradient { segment, .. } => self.segments[segment].gradients,
            Content::TiedParameters { segment } => self.segments[segment].parameters,
        }
    }

    /// Seconds that a collective of a data-parallel group takes once all members are there, one segment after the other: the bytes that
    /// each of them must send at least, (n−1)/n of a buffer to gather or to reduce it into shards, twice as much to reduce it everywhere.
    pub(super) fn collective(&self, instruction: &Instruction, world: &World) -> f64 {
        let members = world.mesh.data() as f64;
        if world.mesh.data() == 1 {
            return 0.0;
        }
        let share = (members - 1.0) / members;
        let gathered =
            |&segment: &SegmentId| self.data.all_gather.seconds(self.segments[segment].parameters as f64 * share);
        let reduced = |&segment: &SegmentId| {
            let bytes = self.segments[segment].gradients as f64 * share;
            match world.shape.segments[segment].placements.optimizer {
                Placement::Sharded => self.data.reduce_scatter.seconds(bytes),
                Placement::Replicated => self.data.all_reduce.seconds(2.0 * bytes),
            }
        };
        match instruction {
            Instruction::Gather { segment } => gathered(segment),
            Instruction::Refresh { segments } => segments.iter().map(gathered).sum(),
            Instruction::Reduce { segments, .. } => segments.iter().map(reduced).sum(),
            _ => 0.0,
        }
    }
}

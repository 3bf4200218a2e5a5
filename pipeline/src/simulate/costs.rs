//! The cost table: durations and sizes.

use crate::effects::{Computation, Transfer};
use crate::ids::SegmentId;
use crate::message::{Content, Message};
use crate::shape::{ModelShape, Placement};
use crate::simulate::SimulationError;
use crate::tier::Item;
use crate::world::World;

/// A link between ranks, or to a disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Seconds until the first byte arrives.
    pub latency: f64,
    /// Bytes per second.
    pub bandwidth: f64,
}

impl Link {
    /// A link that takes no time.
    pub const FREE: Self = Self { latency: 0.0, bandwidth: f64::INFINITY };

    /// Returns the seconds that a transfer of `bytes` takes.
    #[must_use]
    pub fn seconds(self, bytes: f64) -> f64 {
        self.latency + bytes / self.bandwidth
    }
}

/// One link for each kind of collective. The bytes of a transfer are the minimum that each rank must send.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Collectives {
    /// Gathers and refreshes of parameters, by a shard group.
    pub all_gather: Link,
    /// Gathers of parameters from secondary shards, by a near group.
    pub near: Link,
    /// Reductions of gradients with sharded optimizer state, by a shard group.
    pub reduce_scatter: Link,
    /// All-reduces of reduced shards over their replicates.
    pub replicates: Link,
    /// Reductions of all other gradients, by a data-parallel group.
    pub all_reduce: Link,
    /// Outer steps, by the replicates of a shard.
    pub outer: Link,
    /// All-to-alls of codes: first between the ranks of a near group, then between the ranks with the same position in
    /// their near groups.
    pub codes: [Link; 2],
}

impl Collectives {
    /// Uses the same link for all collectives.
    #[must_use]
    pub fn all(link: Link) -> Self {
        Self {
            all_gather: link,
            near: link,
            reduce_scatter: link,
            replicates: link,
            all_reduce: link,
            outer: link,
            codes: [link; 2],
        }
    }
}

/// Speed of compute and of communication while both run, each relative to its speed when it runs alone: above 0, at
/// most 1. Collectives run on worker threads that share cores with compute, so compute and collectives slow each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sharing {
    /// Rate of compute while the rank has a transfer in flight.
    pub computing: f64,
    /// Rate of a collective while one of its ranks computes.
    pub transferring: f64,
    /// Rate of a message while its sender or its receiver computes.
    pub sending: f64,
}

impl Sharing {
    /// No slowdown.
    pub const NONE: Self = Self { computing: 1.0, transferring: 1.0, sending: 1.0 };
}

/// Costs of a layer per micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerCosts {
    /// Seconds of its forward.
    pub forward: f64,
    /// Seconds of its whole backward.
    pub backward: f64,
    /// Seconds of the first half of its backward, without the deferred gradients.
    pub backward_input: f64,
    /// Seconds to compute the deferred gradients.
    pub backward_weight: f64,
    /// Number of bytes of the layer's inputs, if they are sent to its stage.
    pub inputs: u64,
    /// Number of bytes of the gradients of the layer's inputs, if its stage sends them back.
    pub input_gradients: u64,
}

/// Costs of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SegmentCosts {
    /// Number of bytes of all parameters of the segment when gathered.
    pub parameters: u64,
    /// Number of bytes of the gradients of all parameters of the segment.
    pub gradients: u64,
    /// Number of bytes of the codes of all parameters of the segment, if gathers send codes.
    pub gathered_codes: Option<u64>,
    /// Seconds to quantize and dequantize values in a gather; 0 if gathers send values.
    pub gather_coding: f64,
    /// Seconds to quantize and dequantize gradients in a reduction; 0 if reductions send values.
    pub reduce_coding: f64,
    /// Bytes that a rank sends in a reduction, if reductions send codes: (within its near group, between near groups).
    pub reduced_codes: Option<[u64; 2]>,
    /// Seconds to add one micro-batch's gradient to the accumulator.
    pub accumulate: f64,
    /// Seconds of the optimizer step on one rank's part.
    pub update: f64,
    /// Number of bytes that a rank sends to its replicates in an outer step.
    pub outer: u64,
    /// Number of bytes of one rank's parameter shard, if it is read from a disk.
    pub stored_parameters: u64,
    /// Number of bytes of one rank's accumulated gradients, if they are on a disk.
    pub stored_gradients: u64,
    /// Number of bytes read per tile.
    pub tile_read: u64,
    /// Number of bytes written per tile.
    pub tile_written: u64,
}

/// The cost table of a model and a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// Costs by layer.
    pub layers: Vec<LayerCosts>,
    /// Costs by segment.
    pub segments: Vec<SegmentCosts>,
    /// Seconds to load a micro-batch.
    pub load: f64,
    /// Seconds that the gradient norm takes after the last rank has arrived.
    pub gradient_norm: f64,
    /// Link between pipeline stages.
    pub pipe: Link,
    /// The last micro-batch, if only its reductions include the sum over replicates. `None` if the reductions of every
    /// micro-batch include it.
    pub replicates_after: Option<usize>,
    /// Links between the ranks of a data-parallel group.
    pub data: Collectives,
    /// Mutual slowdown of compute and communication.
    pub sharing: Sharing,
    /// Reads from the disk.
    pub read: Link,
    /// Writes to the disk.
    pub write: Link,
}

impl Costs {
    /// Creates a table in which only layers and segments take time.
    #[must_use]
    pub fn of_compute(layers: Vec<LayerCosts>, segments: Vec<SegmentCosts>) -> Self {
        let (pipe, read, write) = (Link::FREE, Link::FREE, Link::FREE);
        let (data, replicates_after, sharing) = (Collectives::all(Link::FREE), None, Sharing::NONE);
        Self { layers, segments, load: 0.0, gradient_norm: 0.0, replicates_after, pipe, data, sharing, read, write }
    }

    /// Checks that the table matches the world's model and has valid values.
    pub(super) fn check(&self, world: &World) -> Result<(), SimulationError> {
        let fits = |what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(SimulationError::Table { what, found, expected }),
        };
        fits("layers", self.layers.len(), world.shape.layers.len())?;
        fits("segments", self.segments.len(), world.shape.segments.len())?;
        let layers = self.layers.iter().flat_map(|l| [l.forward, l.backward, l.backward_input, l.backward_weight]);
        let segments = self.segments.iter().flat_map(|s| [s.accumulate, s.update, s.gather_coding, s.reduce_coding]);
        let Collectives { all_gather, near, reduce_scatter, replicates, all_reduce, outer, codes } = self.data;
        let links = [all_gather, near, reduce_scatter, replicates, all_reduce, outer, self.pipe, self.read, self.write];
        let links = || links.into_iter().chain(codes);
        let others = [self.load, self.gradient_norm].into_iter().chain(links().map(|link| link.latency));
        let is_none = |seconds: &f64| !seconds.is_finite() || *seconds < 0.0;
        if let Some(seconds) = layers.chain(segments).chain(others).find(is_none) {
            return Err(SimulationError::NotATime(seconds));
        }
        let mut bandwidths = links().map(|link| link.bandwidth);
        if let Some(bandwidth) = bandwidths.find(|bandwidth| bandwidth.is_nan() || *bandwidth <= 0.0) {
            return Err(SimulationError::NotABandwidth(bandwidth));
        }
        let Sharing { computing, transferring, sending } = self.sharing;
        let rates = [computing, transferring, sending];
        match rates.into_iter().find(|rate| !(*rate > 0.0 && *rate <= 1.0)) {
            Some(rate) => Err(SimulationError::NotARate(rate)),
            None => Ok(()),
        }
    }

    /// Returns the seconds of a computation.
    pub(super) fn compute(&self, computation: Computation, shape: &ModelShape) -> f64 {
        match computation {
            Computation::Load => self.load,
            Computation::Forward(layer) | Computation::Recompute(layer) => self.layers[layer].forward,
            Computation::Backward(layer) => self.layers[layer].backward,
            Computation::BackwardInput(layer) => self.layers[layer].backward_input,
            Computation::BackwardWeight(layer) => self.layers[layer].backward_weight,
            Computation::Accumulate(segment) => self.segments[segment].accumulate,
            Computation::Update(segment) => self.segments[segment].update,
            // If there are two passes, each takes half of the time.
            Computation::MeasureTile(segment) | Computation::UpdateTile(segment) => {
                let tiers = shape.segments[segment].tiers;
                self.segments[segment].update / (tiers.tiles.max(1) * (1 + usize::from(tiers.two_passes))) as f64
            }
        }
    }

    /// Returns the seconds that a transfer takes, from the moment when its lane is free and all its ranks have started
    /// it. A bucket is one collective. Each member of a group sends at least (n−1)/n of the buffer in an all-gather or
    /// reduce-scatter, and twice as much in an all-reduce.
    pub(super) fn transfer(&self, transfer: Transfer<'_>, world: &World) -> f64 {
        let mesh = world.mesh;
        let sum = |segments: &[SegmentId], bytes: fn(&SegmentCosts) -> u64| {
            segments.iter().map(|&segment| bytes(&self.segments[segment])).sum::<u64>() as f64
        };
        // Codes are written before a transfer and read after it; both count as a part of it.
        let coding = |segments: &[SegmentId], seconds: fn(&SegmentCosts) -> f64| {
            segments.iter().map(|&segment| seconds(&self.segments[segment])).sum::<f64>()
        };
        match transfer {
            Transfer::Gather(segments) if mesh.shards() == 1 => coding(segments, |of| of.gather_coding),
            Transfer::Refresh(_) if mesh.shards() == 1 => 0.0,
            Transfer::Reduce(..) if mesh.data() == 1 => 0.0,
            Transfer::Gather(segments) | Transfer::Refresh(segments) => {
                let bytes = sum(segments, |of| of.gathered_codes.unwrap_or(of.parameters));
                let seconds = self.data.all_gather.seconds(bytes * others(mesh.shards()));
                seconds + coding(segments, |of| of.gather_coding)
            }
            Transfer::GatherSecondary(segments) => {
                self.data.near.seconds(sum(segments, |of| of.parameters) * others(mesh.near()))
            }
            Transfer::Reduce(segments, micro_batch) => {
                self.reduction(segments, micro_batch, world) + coding(segments, |of| of.reduce_coding)
            }
            // An outer step is a reduce-scatter and an all-gather of equal size.
            Transfer::OuterStep(&segment) => {
                let bytes = self.segments[segment].outer as f64;
                2.0 * self.data.outer.seconds(bytes / 2.0)
            }
            Transfer::Send(message) => self.pipe.seconds(self.message(message) as f64),
            Transfer::Receive(_) => 0.0,
            Transfer::Fetch(item) => self.read.seconds(self.item(item).0 as f64),
            Transfer::Offload(item) => self.write.seconds(self.item(item).1 as f64),
        }
    }

    /// Returns the seconds of the reduction of a bucket. It takes one reduce-scatter for the segments with sharded
    /// optimizer state, one all-reduce for the others, and one or two all-to-alls for those that send codes. Replicates
    /// all-reduce their shards afterwards.
    fn reduction(&self, segments: &[SegmentId], micro_batch: usize, world: &World) -> f64 {
        let mesh = world.mesh;
        let replicates_sum = mesh.replicates() > 1 && self.replicates_after.is_none_or(|last| micro_batch == last);
        let all_reduced = |link: Link, bytes: f64, members| link.seconds(2.0 * bytes * others(members));
        let replicated = |bytes: f64| match replicates_sum {
            true => all_reduced(self.data.replicates, bytes / mesh.shards() as f64, mesh.replicates()),
            false => 0.0,
        };
        let (mut cut, mut whole, mut coded, mut levels) = (None, None, None, [0; 2]);
        for &id in segments {
            let SegmentCosts { gradients, reduced_codes, .. } = self.segments[id];
            let sum = match (world.shape.segments[id].placements.optimizer, reduced_codes) {
                (Placement::Sharded, Some(codes)) if mesh.shards() > 1 => {
                    levels.iter_mut().zip(codes).for_each(|(level, codes)| *level += codes);
                    &mut coded
                }
                (Placement::Sharded, None) if mesh.shards() > 1 => &mut cut,
                _ => &mut whole,
            };
            *sum.get_or_insert(0.0) += gradients as f64;
        }
        let scattered =
            |bytes: f64| self.data.reduce_scatter.seconds(bytes * others(mesh.shards())) + replicated(bytes);
        let levels = levels.into_iter().zip(self.data.codes).filter(|(bytes, _)| *bytes > 0);
        let coded: f64 =
            levels.map(|(bytes, link)| link.seconds(bytes as f64)).sum::<f64>() + coded.map_or(0.0, replicated);
        let cut = cut.map_or(0.0, scattered);
        coded + cut + whole.map_or(0.0, |bytes| all_reduced(self.data.all_reduce, bytes, mesh.data()))
    }

    /// Returns the bytes of an item that a fetch reads, and the bytes that an offload writes.
    fn item(&self, item: &Item) -> (u64, u64) {
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

    /// Returns the bytes of a message.
    fn message(&self, message: &Message) -> u64 {
        match message.content {
            Content::Activations { layer, .. } => self.layers[layer].inputs,
            Content::Gradients { layer, .. } => self.layers[layer].input_gradients,
            Content::TiedGradient { segment, .. } => self.segments[segment].gradients,
            Content::TiedParameters { segment } => self.segments[segment].parameters,
        }
    }
}

/// Returns the minimum fraction of a buffer that each of `members` ranks sends in an all-gather or reduce-scatter.
fn others(members: usize) -> f64 {
    (members as f64 - 1.0) / members as f64
}

//! Memory of a rank over a step, in addition to its persistent parameters, accumulated gradients and optimizer state.

use std::collections::{BTreeMap, BTreeSet};

use super::Costs;
use crate::instruction::{Instruction, LayerId, Program, SegmentId};
use crate::message::{Content, Message};
use crate::shape::{ModelShape, Placement};
use crate::tier::{Item, Tier};
use crate::validate::World;

/// Category of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Parameters of sharded segments, from the start of their gather to their release.
    Gathered,
    /// Activations that forwards have saved for unfinished backwards.
    Activations,
    /// Local gradients of segments, from the first layer that contributes until they are accumulated, reduced or sent.
    Gradients,
    /// Buffers of disk transfers.
    Moving,
    /// Buffers of messages: posted receives until they are awaited, and sends until they are complete.
    Messages,
}

/// All categories, in the order used by samples.
pub const CATEGORIES: [Category; 5] =
    [Category::Gathered, Category::Activations, Category::Gradients, Category::Moving, Category::Messages];

/// Memory from a point in time on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Seconds since the beginning of the step.
    pub time: f64,
    /// Bytes by category, in the order of [`CATEGORIES`].
    pub bytes: [u64; CATEGORIES.len()],
}

/// Memory of a rank over a step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Memory {
    /// Samples in order of time, one per change.
    pub samples: Vec<Sample>,
    /// Peak number of micro-batches alive: those whose forward has run through a chunk on this rank and whose backward
    /// has not finished. A micro-batch that is alive in two chunks counts twice.
    pub alive: usize,
}

impl Memory {
    /// Returns the peak bytes over all categories.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.samples.iter().map(|sample| sample.bytes.iter().sum()).max().unwrap_or(0)
    }

    /// Returns the peak bytes of one category.
    #[must_use]
    pub fn peak_of(&self, category: Category) -> u64 {
        self.samples.iter().map(|sample| sample.bytes[category as usize]).max().unwrap_or(0)
    }
}

/// Records the memory changes of a rank. Completed sends are recorded out of order.
pub(super) struct Ledger<'a> {
    shape: &'a ModelShape,
    costs: &'a Costs,
    /// Chunk of each layer.
    chunks: Vec<usize>,
    /// Whether the program trains, so that forwards save activations.
    trains: bool,
    changes: Vec<(f64, Category, i128)>,
    /// Segments that hold a local gradient.
    open: Vec<bool>,
    /// Layers and micro-batches whose inputs are kept for recomputation.
    kept: BTreeSet<(LayerId, usize)>,
    /// Number of live layers by chunk and micro-batch.
    alive: BTreeMap<(usize, usize), usize>,
    most_alive: usize,
}

impl<'a> Ledger<'a> {
    pub(super) fn new(world: &World<'a>, costs: &'a Costs, program: &Program) -> Self {
        let chunks = world.stages.chunks().iter().enumerate();
        Self {
            shape: world.shape,
            costs,
            chunks: chunks.flat_map(|(index, chunk)| chunk.clone().map(move |_| index)).collect(),
            trains: program.instructions.iter().any(|i| matches!(i, Instruction::GradientNorm)),
            changes: vec![],
            open: vec![false; world.shape.segments.len()],
            kept: BTreeSet::new(),
            alive: BTreeMap::new(),
            most_alive: 0,
        }
    }

    /// Records an instruction that ran from `start` to `end`. Memory is allocated at the start and freed at the end.
    pub(super) fn pass(&mut self, instruction: &Instruction, start: f64, end: f64) {
        match instruction {
            Instruction::AwaitGather { segment } => {
                if self.shape.segments[*segment].tiers.parameters == Tier::Nvme {
                    self.free(end, Category::Moving, self.costs.segments[*segment].stored_parameters);
                }
            }
            Instruction::Gather { segment } => {
                self.add(start, Category::Gathered, self.costs.segments[*segment].parameters)
            }
            Instruction::Release { segment } => {
                self.free(end, Category::Gathered, self.costs.segments[*segment].parameters)
            }
            Instruction::Forward { layer, micro_batch } => {
                let bytes = self.costs.layers[*layer].activations;
                self.add(start, Category::Activations, bytes);
                if self.trains {
                    *self.alive.entry((self.chunks[*layer], *micro_batch)).or_default() += 1;
                    self.most_alive = self.alive.len().max(self.most_alive);
                } else {
                    self.free(end, Category::Activations, bytes);
                }
            }
            Instruction::Keep { layer, micro_batch } => {
                self.kept.insert((*layer, *micro_batch));
                self.add(start, Category::Activations, self.costs.layers[*layer].inputs);
            }
            Instruction::Discard { layer, .. } => {
                self.free(end, Category::Activations, self.costs.layers[*layer].activations);
            }
            Instruction::Recompute { layer, micro_batch } => {
                self.add(start, Category::Activations, self.costs.layers[*layer].activations);
                if self.kept.remove(&(*layer, *micro_batch)) {
                    self.free(end, Category::Activations, self.costs.layers[*layer].inputs);
                }
            }
            Instruction::Backward { layer, micro_batch } => {
                self.contribute(*layer, start);
                self.free(end, Category::Activations, self.costs.layers[*layer].activations);
                self.finish_layer(*layer, *micro_batch);
            }
            Instruction::BackwardInput { layer, .. } => {
                let layer = &self.costs.layers[*layer];
                self.free(end, Category::Activations, layer.activations);
                self.add(end, Category::Activations, layer.put_off);
            }
            Instruction::BackwardWeight { layer, micro_batch } => {
                self.contribute(*layer, start);
                self.free(end, Category::Activations, self.costs.layers[*layer].put_off);
                self.finish_layer(*layer, *micro_batch);
            }
            Instruction::Receive { message } => self.add(start, Category::Messages, self.costs.message(message)),
            Instruction::AwaitReceive { message } => {
                if let Content::TiedGradient { segment, .. } = message.content {
                    self.open(segment, end);
                }
                self.free(end, Category::Messages, self.costs.message(message));
            }
            Instruction::Send { message } => {
                self.add(start, Category::Messages, self.costs.message(message));
                if let Content::TiedGradient { segment, .. } = message.content {
                    self.open[segment] = false;
                    self.free(start, Category::Gradients, self.costs.segments[segment].gradients);
                }
            }
            Instruction::Accumulate { segment, .. } => {
                self.open[*segment] = false;
                self.free(end, Category::Gradients, self.costs.segments[*segment].gradients);
            }
            Instruction::Reduce { segments, .. } => {
                // The reduction keeps its buffer; the next micro-batch allocates another.
                self.sharded(segments).into_iter().for_each(|segment| self.open[segment] = false);
            }
            Instruction::AwaitReduce { segments, .. } => {
                for segment in self.sharded(segments) {
                    self.free(end, Category::Gradients, self.costs.segments[segment].gradients);
                }
            }
            Instruction::Fetch { item } => self.add(start, Category::Moving, self.costs.item(item).0),
            Instruction::Offload { item: item @ Item::Gradients { .. } } => {
                self.add(start, Category::Moving, self.costs.item(item).0);
            }
            Instruction::AwaitOffload { item } => self.offloaded(item, end),
            Instruction::Load { .. }
            | Instruction::AwaitFetch { .. }
            | Instruction::Offload { .. }
            | Instruction::UpdateTile { .. }
            | Instruction::AwaitSend { .. }
            | Instruction::GradientNorm
            | Instruction::Update { .. }
            | Instruction::Refresh { .. }
            | Instruction::AwaitRefresh { .. } => {}
        }
    }

    fn offloaded(&mut self, item: &Item, end: f64) {
        let bytes = self.costs.item(item).0;
        match item {
            // `Keep` has already counted the inputs.
            Item::Activations { .. } => self.free(end, Category::Activations, bytes),
            _ => self.free(end, Category::Moving, bytes),
        }
    }

    /// Records that a message sent by this rank is complete.
    pub(super) fn gone(&mut self, message: &Message, end: f64) {
        self.free(end, Category::Messages, self.costs.message(message));
    }

    fn contribute(&mut self, layer: LayerId, at: f64) {
        let shape = self.shape;
        shape.layers[layer].segments.iter().for_each(|&segment| self.open(segment, at));
    }

    fn open(&mut self, segment: SegmentId, at: f64) {
        if !std::mem::replace(&mut self.open[segment], true) {
            self.add(at, Category::Gradients, self.costs.segments[segment].gradients);
        }
    }

    fn finish_layer(&mut self, layer: LayerId, micro_batch: usize) {
        let key = (self.chunks[layer], micro_batch);
        let left = self.alive.get(&key).map_or(0, |layers| layers.saturating_sub(1));
        match left {
            0 => drop(self.alive.remove(&key)),
            _ => drop(self.alive.insert(key, left)),
        }
    }

    fn sharded(&self, segments: &[SegmentId]) -> Vec<SegmentId> {
        let is_sharded = |&segment: &SegmentId| self.shape.segments[segment].placements.gradients == Placement::Sharded;
        segments.iter().copied().filter(is_sharded).collect()
    }

    fn add(&mut self, at: f64, category: Category, bytes: u64) {
        self.changes.push((at, category, i128::from(bytes)));
    }

    fn free(&mut self, at: f64, category: Category, bytes: u64) {
        self.changes.push((at, category, -i128::from(bytes)));
    }

    /// Accumulates the changes in order of time; simultaneous changes stay in program order.
    pub(super) fn finish(mut self) -> Memory {
        self.changes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut bytes = [0i128; CATEGORIES.len()];
        let sample = |(time, category, change): (f64, Category, i128)| {
            bytes[category as usize] += change;
            Sample { time, bytes: bytes.map(|bytes| u64::try_from(bytes).unwrap_or(0)) }
        };
        Memory {
            samples: self.changes.into_iter().filter(|change| change.2 != 0).map(sample).collect(),
            alive: self.most_alive,
        }
    }
}

//! Walks through a rank's program with sizes only, without data: counts the memory that the executor and `ShardedState`
//! allocate, free and keep, in the same order.

use std::collections::{BTreeMap, BTreeSet};

use zero_model::memory::room_of_a_thread;
use zero_partition::{Category, Layout, OnGpu, Segment, Widths, ZeroOptions};
use zero_pipeline::{
    Content, Coordinates, Instruction, Item, LayerId, Mesh, Message, Placement, SegmentId, Stages, Tier,
};

mod buffers;
mod disk;
mod layers;
mod messages;
mod parameters;

use super::meter::{Idle, Meter, Peaks};
use super::{Arrivals, Script};
use zero_engine::costs::forms::Table;

/// The inputs that determine a rank's memory.
#[derive(Clone, Copy)]
pub(crate) struct WalkInputs<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) stages: &'a Stages,
    pub(crate) mesh: Mesh,
    pub(crate) at: Coordinates,
    pub(crate) options: &'a ZeroOptions,
    /// Number of bytes per element of the working dtype.
    pub(crate) width: u64,
    /// `None` if the memory of layers is unknown; the plan then excludes it.
    pub(crate) table: Option<&'a Table>,
    /// Number of gradient elements that are summed over the tensor group.
    pub(crate) tensor_sum: u64,
}

/// The outputs of a layer for a micro-batch, and the uses that keep them alive.
#[derive(Debug, Clone, Copy, Default)]
struct Values {
    bytes: u64,
    /// Saved for the backward of the next layer, as its leaves.
    saved: bool,
    /// Will be the input of the next layer, or be sent in a message.
    flows: bool,
    /// Kept for the recomputation of the next layer.
    kept: bool,
}

/// The state of a rank during the walk.
pub(crate) struct Walk<'a> {
    work: WalkInputs<'a>,
    meter: Meter,
    pool: Idle,
    /// Maximum elements of a buffer in the pool.
    longest: u64,
    /// Idle aligned buffers for the disk, by size class.
    buffers: Idle,
    /// Idle aligned buffers for inputs that are kept on the disk.
    kept_buffers: Idle,
    /// By segment: whether its gradient buffer is open, the tree heights of its partial sums, and whether its reduced
    /// gradient is in memory.
    open: Vec<bool>,
    sums: Vec<Vec<u32>>,
    reduced: Vec<bool>,
    /// By segment, whether the all-reduce of its gradient sum over replicates is in flight.
    over_replicates: Vec<bool>,
    /// Layer outputs, by producing layer and micro-batch.
    values: BTreeMap<(LayerId, usize), Values>,
    /// Bytes that forwards have saved for backwards, by layer and micro-batch.
    saved: BTreeMap<(LayerId, usize), u64>,
    /// Gradients of the outputs of the layer whose backward is next, by micro-batch.
    upstream: BTreeMap<usize, u64>,
    put_off: BTreeMap<(LayerId, usize), u64>,
    sending: BTreeMap<Message, u64>,
    /// Messages in flight whose arrival becomes certain before the program awaits them, each with the position in the
    /// program at which its arrival becomes certain.
    leaving: BTreeSet<(usize, Message)>,
    /// For each message, the position in the program at which its arrival becomes certain.
    arrivals: Arrivals,
    place: usize,
    /// Number of micro-batches of the program.
    micro_batches: usize,
    loaded: u64,
    trains: bool,
    /// First layer with a trainable parameter; the layers before it have no backward.
    first_trained: LayerId,
    /// For each tile in memory, the size classes of its buffers.
    tiles: BTreeMap<Item, Vec<u64>>,
    moving: BTreeMap<Item, Vec<u64>>,
    /// Number of bytes of a layer's gradients in transit from the GPU to the host.
    brought: u64,
    /// By segment, whether its state is on the GPU.
    residents: Vec<bool>,
    /// Whether the state of the current segment is on the GPU.
    is_resident: bool,
}

impl<'a> Walk<'a> {
    /// Creates the state of a rank before its first step.
    pub(crate) fn new(work: WalkInputs<'a>) -> Self {
        let segments = work.layout.segments().len();
        let mut walk = Self {
            work,
            meter: Meter::default(),
            pool: Idle::default(),
            longest: zero_partition::longest_kept(work.layout, work.options) as u64,
            buffers: Idle::default(),
            kept_buffers: Idle::default(),
            open: vec![false; segments],
            sums: vec![vec![]; segments],
            reduced: vec![false; segments],
            over_replicates: vec![false; segments],
            values: BTreeMap::new(),
            saved: BTreeMap::new(),
            upstream: BTreeMap::new(),
            put_off: BTreeMap::new(),
            sending: BTreeMap::new(),
            leaving: BTreeSet::new(),
            arrivals: Arrivals::new(),
            place: 0,
            micro_batches: 0,
            loaded: 0,
            trains: false,
            first_trained: work.layout.shape().first_trained(),
            tiles: BTreeMap::new(),
            moving: BTreeMap::new(),
            brought: 0,
            residents: work.options.on_gpu.residents(work.layout),
            is_resident: false,
        };
        walk.state();
        walk
    }

    /// Returns the peaks so far.
    pub(crate) fn peaks(&self) -> Peaks {
        self.meter.peaks
    }

    fn segment(&self, id: SegmentId) -> &'a Segment {
        &self.work.layout.segments()[id]
    }

    fn elements(&self, id: SegmentId) -> u64 {
        self.segment(id).elements() as u64
    }

    fn shard(&self, id: SegmentId) -> u64 {
        self.segment(id).shard(self.work.at.shard).len() as u64
    }

    /// Returns the number of elements of this rank's part of a segment under a placement.
    fn part(&self, id: SegmentId, placement: Placement) -> u64 {
        match placement {
            Placement::Replicated => self.elements(id),
            Placement::Sharded => self.shard(id),
        }
    }

    /// Returns the bytes of each stored element of a segment's working parameters.
    fn width_of(&self, id: SegmentId) -> u64 {
        self.segment(id).width(self.work.width as usize) as u64
    }

    fn widths(&self) -> Widths {
        self.work.options.widths(self.work.width as usize)
    }

    fn is_half(&self) -> bool {
        self.work.width < 4
    }

    fn on_gpu(&self) -> OnGpu {
        self.work.options.on_gpu
    }

    /// Adds the parameters, master copies and optimizer state of all segments.
    fn state(&mut self) {
        let (widths, on_gpu) = (self.widths(), self.on_gpu());
        for id in 0..self.work.layout.segments().len() {
            if !self.work.stages.holds(self.work.at.stage, id) {
                continue;
            }
            let (placements, tiers) = (self.segment(id).placements, self.segment(id).tiers);
            let is_on_gpu = match placements.parameters {
                Placement::Replicated => on_gpu.layers,
                Placement::Sharded => on_gpu.parameters,
            };
            if tiers.parameters == Tier::Memory {
                let bytes = self.part(id, placements.parameters) * self.width_of(id);
                self.meter.add_at(Category::Parameters, bytes, is_on_gpu);
            }
            let secondary = self.segment(id).secondary_shard(self.work.at.shard).len() as u64;
            self.meter.add(Category::Parameters, secondary * self.width_of(id));
            let is_updated = self.work.stages.owner(id) == self.work.at.stage && self.segment(id).is_trainable;
            if is_updated && tiers.optimizer == Tier::Memory {
                let own = self.part(id, placements.optimizer);
                // If the parameters are on the GPU but their state is not, the host also holds a master copy.
                let has_master = widths.master > 0 || (is_on_gpu && !self.residents[id]);
                self.meter.add_at(Category::Parameters, if has_master { own * 4 } else { 0 }, self.residents[id]);
                self.meter.add_at(
                    Category::OptimizerState,
                    self.segment(id).state_bytes(own as usize, &widths) as u64,
                    self.residents[id],
                );
                let outer = self.outer_share(id).map_or(0, |(share, width)| share * width);
                self.meter.add(Category::OptimizerState, outer);
            }
        }
        let bounce = self.work.options.disk.bounce_bytes(self.work.layout, self.work.stages, self.work.at, &widths);
        self.meter.add(Category::Staging, bounce);
        let threads = zero_model::ops::threads() as u64;
        self.meter.add(Category::Activations, threads * room_of_a_thread());
        self.meter.usually_on_gpu[Category::Activations as usize] = on_gpu.layers;
    }

    /// Returns how many elements of a segment have their outer optimizer state on this rank, and the bytes of this
    /// state per element.
    fn outer_share(&self, id: SegmentId) -> Option<(u64, u64)> {
        let share = self.work.options.outer?.share;
        let own = self.part(id, self.segment(id).placements.optimizer) as usize;
        Some((share.of(own).len() as u64, share.width as u64))
    }

    /// With a schedule-free optimizer, an evaluation uses averages of the weights. Meanwhile, the rank keeps a copy of
    /// the weights that it updates. Adds this copy and returns its bytes. Excludes segments whose optimizer states are
    /// not in memory.
    pub(crate) fn keep_weights(&mut self) -> u64 {
        if !self.work.options.is_schedule_free() {
            return 0;
        }
        let is_kept = |&id: &SegmentId| {
            let (of, owner) = (self.segment(id), self.work.stages.owner(id));
            owner == self.work.at.stage && of.is_trainable && of.tiers.optimizer == Tier::Memory
        };
        let updated = (0..self.work.layout.segments().len()).filter(is_kept);
        let bytes = updated.map(|id| 4 * self.part(id, self.segment(id).placements.optimizer)).sum();
        self.meter.add(Category::Staging, bytes);
        bytes
    }

    /// Frees the copy that [`Walk::keep_weights`] counted.
    pub(crate) fn drop_weights(&mut self, bytes: u64) {
        self.meter.free(Category::Staging, bytes);
    }

    /// Walks a program once.
    pub(crate) fn run(&mut self, script: Script<'_>) {
        let program = script.program;
        self.arrivals.clone_from(script.arrivals);
        self.trains = program.trains();
        self.micro_batches = program.micro_batches;
        for (place, instruction) in program.instructions.iter().enumerate() {
            self.place = place;
            self.step(instruction);
        }
        if self.trains {
            self.drop_buffers();
            let idle = self.kept_buffers.clear();
            self.meter.free(Category::Staging, idle);
        }
        // At the end of the program, the executor drops all values of its micro-batches.
        self.meter.free(Category::Activations, std::mem::take(&mut self.loaded));
        for (_, values) in std::mem::take(&mut self.values) {
            if values.saved || values.flows || values.kept {
                self.meter.free(Category::Activations, values.bytes);
            }
        }
        for (_, bytes) in std::mem::take(&mut self.upstream) {
            self.meter.free(Category::Activations, bytes);
        }
    }

    /// If the segment is a matrix that this rank owns, adds the buffers of its update and frees them.
    fn update_whole(&mut self, id: SegmentId) {
        if self.part(id, self.segment(id).placements.optimizer) > 0 {
            self.meter.flash(Category::Staging, self.segment(id).update_bytes() as u64);
        }
    }

    fn step(&mut self, instruction: &Instruction) {
        match instruction {
            Instruction::Load { .. } => {
                let bytes = self.work.table.map_or(0, |table| table.batch);
                // Tokens are read into one buffer and copied out of it.
                self.meter.add(Category::Activations, bytes);
                self.loaded += bytes;
            }
            Instruction::Gather { segments } => segments.iter().for_each(|&id| self.gather(id)),
            Instruction::AwaitGather { segments } => segments.iter().for_each(|&id| self.await_gather(id)),
            Instruction::GatherSecondary { segments } => segments.iter().for_each(|&id| self.gather_values(id)),
            Instruction::AwaitGatherSecondary { segments } => segments.iter().for_each(|&id| self.await_values(id)),
            Instruction::Release { segment } => self.release(*segment),
            Instruction::Forward { layer, micro_batch } => self.forward(*layer, *micro_batch, false),
            Instruction::Keep { layer, micro_batch } => {
                if let Some(values) = self.incoming(*layer, *micro_batch) {
                    values.kept = true;
                }
            }
            Instruction::Discard { layer, micro_batch } => {
                let bytes = self.saved.remove(&(*layer, *micro_batch)).unwrap_or(0);
                self.meter.free(Category::Activations, bytes);
                if let Some(before) = layer.checked_sub(1) {
                    self.let_go(before, *micro_batch, |values| values.saved = false);
                }
            }
            Instruction::Recompute { layer, micro_batch } => self.forward(*layer, *micro_batch, true),
            Instruction::Backward { layer, micro_batch } => {
                self.open_all(*layer);
                self.backward(*layer, *micro_batch, false);
            }
            Instruction::BackwardInput { layer, micro_batch } => self.backward(*layer, *micro_batch, true),
            Instruction::BackwardWeight { layer, micro_batch } => {
                self.open_all(*layer);
                let bytes = self.put_off.remove(&(*layer, *micro_batch)).unwrap_or(0);
                self.meter.free(Category::Activations, bytes);
            }
            Instruction::Accumulate { segment, .. } => {
                self.open[*segment] = false;
                self.add_up(*segment, self.elements(*segment));
            }
            Instruction::Reduce { segments, .. } => self.reduce(segments),
            Instruction::AwaitReduce { segments, micro_batch } => self.await_reduce(segments, *micro_batch),
            Instruction::GradientNorm => {
                for id in 0..self.sums.len() {
                    if !self.sums[id].is_empty() || self.over_replicates[id] {
                        self.settle(id);
                    }
                }
                self.meter.add(Category::Staging, self.work.tensor_sum * 4);
                self.meter.free(Category::Staging, self.work.tensor_sum * 4);
                self.drop_buffers();
            }
            Instruction::Update { segment } => {
                self.update_whole(*segment);
                self.done_with(*segment);
            }
            Instruction::MeasureTile { segment, .. } => self.update_whole(*segment),
            Instruction::UpdateTile { segment, tile } => {
                let tiers = self.segment(*segment).tiers;
                if !tiers.two_passes {
                    self.update_whole(*segment);
                }
                if *tile + 1 == tiers.tiles && tiers.gradients == Tier::Memory {
                    self.done_with(*segment);
                }
            }
            Instruction::OuterStep { segment } => self.outer_step(*segment),
            Instruction::AwaitOuterStep { segment } => self.await_outer_step(*segment),
            Instruction::Refresh { segments } => segments.iter().for_each(|&id| self.refresh(id)),
            Instruction::AwaitRefresh { segments } => segments.iter().for_each(|&id| self.await_refresh(id)),
            Instruction::Fetch { item } => self.fetch(*item),
            Instruction::AwaitFetch { item } => self.await_fetch(*item),
            Instruction::Offload { item } => self.offload(*item),
            Instruction::AwaitOffload { item } => self.await_offload(*item),
            Instruction::Send { message } => self.send(*message),
            Instruction::AwaitSend { message } => self.sent(*message),
            Instruction::Receive { message } => {
                let bytes = self.message(message);
                match message.content {
                    Content::TiedGradient { segment, .. } => self.take(Category::Staging, self.elements(segment)),
                    Content::TiedParameters { .. } => self.blank(bytes / self.work.width),
                    // The size of the first message is only known on arrival, when its memory is allocated.
                    Content::Activations { micro_batch: 0, .. } | Content::Gradients { micro_batch: 0, .. } => {}
                    _ => self.meter.add(Category::Communication, bytes),
                }
            }
            Instruction::AwaitReceive { message } => self.received(*message),
        }
    }
}

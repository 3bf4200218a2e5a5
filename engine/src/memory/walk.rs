//! Carries out a rank's program on sizes alone: what the executor and `Zero` take, give up and keep, in their order.

use std::collections::BTreeMap;

use zero_model::memory::room_of_a_thread;
use zero_partition::{Category, Layout, Order, Segment, ZeroOptions, disk_buffers};
use zero_pipeline::{
    Content, Coordinates, Instruction, Item, LayerId, Message, Placement, Program, SegmentId, Stages, Tier,
};
use zero_tier::BufferPool;

use super::meter::{Idle, Meter, Peaks};
use super::table::Table;

/// What a rank's memory depends on.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) stages: &'a Stages,
    pub(crate) at: Coordinates,
    pub(crate) options: &'a ZeroOptions,
    /// Bytes of an element of the working dtype.
    pub(crate) width: u64,
    /// `None`: what layers take is not known, and left out.
    pub(crate) table: Option<&'a Table>,
}

/// The outputs of a layer of a micro-batch: who holds their values.
#[derive(Debug, Clone, Copy, Default)]
struct Values {
    bytes: u64,
    /// For the layer's backward.
    saved: bool,
    /// For the next layer, or for a message.
    flows: bool,
    /// For the next layer to be run again.
    kept: bool,
}

/// A rank while it is walked.
pub(crate) struct Walk<'a> {
    work: Work<'a>,
    meter: Meter,
    pool: Idle,
    /// Aligned buffers of the disk, by size class.
    buffers: Idle,
    /// By segment: an open gradient, the heights of its partial sums, reduced gradients in memory.
    open: Vec<bool>,
    sums: Vec<Vec<u32>>,
    reduced: Vec<bool>,
    /// By layer whose outputs they are, and micro-batch.
    values: BTreeMap<(LayerId, usize), Values>,
    /// What forwards have left for backwards.
    saved: BTreeMap<(LayerId, usize), u64>,
    /// Gradients of the outputs of the layer whose backward is next, by micro-batch.
    upstream: BTreeMap<usize, u64>,
    put_off: BTreeMap<(LayerId, usize), u64>,
    sending: BTreeMap<Message, u64>,
    loaded: u64,
    trains: bool,
    /// Tiles that are in memory: the size classes of their buffers.
    tiles: BTreeMap<Item, Vec<u64>>,
    moving: BTreeMap<Item, Vec<u64>>,
}

impl<'a> Walk<'a> {
    /// A rank as it is before its first step.
    pub(crate) fn new(work: Work<'a>) -> Self {
        let segments = work.layout.segments().len();
        let mut walk = Self {
            work,
            meter: Meter::default(),
            pool: Idle::default(),
            buffers: Idle::default(),
            open: vec![false; segments],
            sums: vec![vec![]; segments],
            reduced: vec![false; segments],
            values: BTreeMap::new(),
            saved: BTreeMap::new(),
            upstream: BTreeMap::new(),
            put_off: BTreeMap::new(),
            sending: BTreeMap::new(),
            loaded: 0,
            trains: false,
            tiles: BTreeMap::new(),
            moving: BTreeMap::new(),
        };
        walk.state();
        walk
    }

    /// The most bytes so far.
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
        self.segment(id).shard(self.work.at.replica).len() as u64
    }

    /// Elements of this rank's part by a placement.
    fn part(&self, id: SegmentId, placement: Placement) -> u64 {
        match placement {
            Placement::Replicated => self.elements(id),
            Placement::Sharded => self.shard(id),
        }
    }

    fn is_bf16(&self) -> bool {
        self.work.width < 4
    }

    /// Parameters, masters and optimizer state.
    fn state(&mut self) {
        let states = self.work.options.optimizer.states().len() as u64;
        for id in 0..self.work.layout.segments().len() {
            if !self.work.stages.holds(self.work.at.stage, id) {
                continue;
            }
            let (placements, tiers) = (self.segment(id).placements, self.segment(id).tiers);
            if tiers.parameters == Tier::Memory {
                self.meter.add(Category::Parameters, self.part(id, placements.parameters) * self.work.width);
            }
            if self.work.stages.owner(id) == self.work.at.stage && tiers.optimizer == Tier::Memory {
                let own = self.part(id, placements.optimizer);
                self.meter.add(Category::Parameters, if self.is_bf16() { own * 4 } else { 0 });
                self.meter.add(Category::OptimizerState, own * 4 * states);
            }
        }
        let threads = zero_model::ops::threads() as u64;
        self.meter.add(Category::Activations, threads * room_of_a_thread());
    }

    /// Carries out a program once.
    pub(crate) fn run(&mut self, program: &Program) {
        self.trains = program.instructions.iter().any(|i| matches!(i, Instruction::GradientNorm));
        for instruction in &program.instructions {
            self.step(instruction);
        }
        if self.trains {
            self.drop_buffers();
        }
        // What the executor's micro-batches hold goes with them.
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

    fn step(&mut self, instruction: &Instruction) {
        match instruction {
            Instruction::Load { .. } => {
                let bytes = self.work.table.map_or(0, |table| table.batch);
                // Tokens are read into one buffer and taken out of it.
                self.meter.add(Category::Activations, bytes);
                self.loaded += bytes;
            }
            Instruction::Gather { segment } => self.gather(*segment),
            Instruction::AwaitGather { segment } => self.await_gather(*segment),
            Instruction::Release { segment } => self.release(*segment),
            Instruction::Forward { layer, micro_batch } => self.forward(*layer, *micro_batch),
            Instruction::Keep { layer, micro_batch } => {
                if let Some(values) = self.incoming(*layer, *micro_batch) {
                    values.kept = true;
                }
            }
            Instruction::Discard { layer, micro_batch } => {
                let bytes = self.saved.remove(&(*layer, *micro_batch)).unwrap_or(0);
                self.meter.free(Category::Activations, bytes);
                self.let_go(*layer, *micro_batch, |values| values.saved = false);
            }
            Instruction::Recompute { layer, micro_batch } => self.forward(*layer, *micro_batch),
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
            Instruction::Reduce { segments, .. } => segments.iter().for_each(|&id| self.reduce(id)),
            Instruction::AwaitReduce { segments, .. } => segments.iter().for_each(|&id| self.await_reduce(id)),
            Instruction::GradientNorm => {
                for id in 0..self.sums.len() {
                    if !self.sums[id].is_empty() {
                        self.settle(id);
                    }
                }
                self.drop_buffers();
            }
            Instruction::Update { segment } => self.done_with(*segment),
            Instruction::UpdateTile { segment, tile } => {
                let tiers = self.segment(*segment).tiers;
                if *tile + 1 == tiers.tiles && tiers.gradients == Tier::Memory {
                    self.done_with(*segment);
                }
            }
            Instruction::Refresh { segments } => segments.iter().for_each(|&id| self.refresh(id)),
            Instruction::AwaitRefresh { segments } => segments.iter().for_each(|&id| self.await_refresh(id)),
            Instruction::Fetch { item } => self.fetch(*item),
            Instruction::AwaitFetch { item } => self.await_fetch(*item),
            Instruction::Offload { item } => self.offload(*item),
            Instruction::AwaitOffload { item } => {
                for class in self.moving.remove(item).unwrap_or_default() {
                    self.buffers.give(class);
                }
            }
            Instruction::Send { message } => self.send(*message),
            Instruction::AwaitSend { message } => self.sent(*message),
            Instruction::Receive { message } => {
                let bytes = self.message(message);
                match message.content {
                    Content::TiedGradient { segment, .. } => self.take(Category::Staging, self.elements(segment)),
                    _ => self.meter.add(Category::Communication, bytes),
                }
            }
            Instruction::AwaitReceive { message } => self.received(*message),
        }
    }

    // What layers take.

    /// The outputs of the layer before, or what was received of them.
    fn incoming(&mut self, layer: LayerId, micro_batch: usize) -> Option<&mut Values> {
        self.values.get_mut(&(layer.checked_sub(1)?, micro_batch))
    }

    fn let_go(&mut self, layer: LayerId, micro_batch: usize, change: impl FnOnce(&mut Values)) {
        let Some(values) = self.values.get_mut(&(layer, micro_batch)) else { return };
        let was = values.saved || values.flows || values.kept;
        change(values);
        if was && !(values.saved || values.flows || values.kept) {
            let bytes = values.bytes;
            self.values.remove(&(layer, micro_batch));
            self.meter.free(Category::Activations, bytes);
        }
    }

    /// Whether a layer's inputs came from another stage: then they are leaves as they are.
    fn is_received(&self, layer: LayerId) -> bool {
        layer > 0 && self.work.stages.stage_of(layer - 1) != self.work.stages.stage_of(layer)
    }

    fn forward(&mut self, layer: LayerId, micro_batch: usize) {
        let Some(table) = self.work.table else { return };
        let is_last = layer == table.layers.len();
        if !self.trains {
            let (peak, outputs) = match is_last {
                true => (table.evaluation_loss, 0),
                false => {
                    let memory = &table.evaluation[layer];
                    (memory.peak, memory.outputs.iter().map(|form| form.bytes()).sum())
                }
            };
            self.meter.flash(Category::Activations, peak);
            self.meter.add(Category::Activations, outputs);
            if layer > 0 {
                self.let_go(layer - 1, micro_batch, |values| values.flows = false);
            }
            self.values.insert((layer, micro_batch), Values { bytes: outputs, flows: true, ..Values::default() });
            return;
        }
        if is_last {
            return;
        }
        let memory = &table.layers[layer];
        let outputs = memory.outputs.iter().map(|form| form.bytes()).sum();
        let leaves = if self.is_received(layer) { 0 } else { memory.leaves };
        self.meter.add(Category::Activations, leaves);
        if layer > 0 {
            let received = self.is_received(layer);
            // What was received is the leaf, and stays.
            self.let_go(layer - 1, micro_batch, |values| {
                (values.flows, values.kept) = (false, false);
                values.saved |= received;
            });
        }
        self.meter.flash(Category::Activations, memory.forward_peak);
        self.meter.add(Category::Activations, memory.kept + outputs);
        self.saved.insert((layer, micro_batch), leaves + memory.kept);
        let values = Values { bytes: outputs, saved: true, flows: true, kept: false };
        self.values.insert((layer, micro_batch), values);
    }

    fn backward(&mut self, layer: LayerId, micro_batch: usize, puts_off: bool) {
        let Some(table) = self.work.table else { return };
        let upstream = self.upstream.remove(&micro_batch).unwrap_or(0);
        let received = self.is_received(layer);
        if layer == table.layers.len() {
            let leaves = if received { 0 } else { table.loss.leaves };
            self.meter.flash(Category::Activations, leaves + table.loss.peak);
            if layer > 0 {
                self.let_go(layer - 1, micro_batch, |values| values.flows = false);
            }
            self.flow_back(micro_batch, upstream, table.loss.input_gradients);
            return;
        }
        let memory = &table.layers[layer];
        self.let_go(layer, micro_batch, |values| values.flows = false);
        self.meter.flash(Category::Activations, if puts_off { memory.put_off_peak } else { memory.backward_peak });
        let saved = self.saved.remove(&(layer, micro_batch)).unwrap_or(0);
        self.meter.free(Category::Activations, saved);
        self.let_go(layer, micro_batch, |values| values.saved = false);
        if received {
            self.let_go(layer - 1, micro_batch, |values| values.saved = false);
        }
        if puts_off {
            self.meter.add(Category::Activations, memory.put_off);
            self.put_off.insert((layer, micro_batch), memory.put_off);
        }
        self.flow_back(micro_batch, upstream, memory.input_gradients);
    }

    fn flow_back(&mut self, micro_batch: usize, before: u64, after: u64) {
        self.meter.free(Category::Activations, before);
        self.meter.add(Category::Activations, after);
        self.upstream.insert(micro_batch, after);
    }

    // Buffers of `Zero`.

    /// A buffer of floats from the pool; where none waits there, new memory of the category.
    fn take(&mut self, category: Category, elements: u64) {
        if self.pool.take(elements) {
            self.meter.free(Category::Staging, elements * 4);
        }
        self.meter.add(category, elements * 4);
    }

    /// Gives a buffer of floats up to the pool, if that keeps buffers so long.
    fn give(&mut self, category: Category, elements: u64) {
        self.meter.free(category, elements * 4);
        if elements > 0 && elements <= self.longest() {
            self.pool.give(elements);
            self.meter.add(Category::Staging, elements * 4);
        }
    }

    fn longest(&self) -> u64 {
        zero_partition::longest_kept(self.work.layout) as u64
    }

    fn open_all(&mut self, layer: LayerId) {
        for &id in &self.work.layout.shape().layers[layer].segments {
            if !std::mem::replace(&mut self.open[id], true) {
                self.take(Category::Staging, self.elements(id));
            }
        }
    }

    /// A summand of staging becomes a part of the sum.
    fn add_up(&mut self, id: SegmentId, elements: u64) {
        self.meter.free(Category::Staging, elements * 4);
        self.meter.add(Category::Gradients, elements * 4);
        self.sums[id].push(0);
        while let [.., below, top] = self.sums[id][..]
            && (self.work.options.order == Order::Arrival || below == top)
        {
            self.merge(id, elements);
        }
    }

    fn merge(&mut self, id: SegmentId, elements: u64) {
        let sums = &mut self.sums[id];
        if let (Some(top), Some(below)) = (sums.pop(), sums.last_mut()) {
            *below = top.max(*below) + 1;
            self.give(Category::Gradients, elements);
        }
    }

    fn total(&mut self, id: SegmentId, elements: u64) {
        while self.sums[id].len() > 1 {
            self.merge(id, elements);
        }
        self.sums[id].clear();
    }

    fn reduce(&mut self, id: SegmentId) {
        let (segment, elements) = (self.segment(id), self.elements(id));
        let category = match segment.placements.gradients {
            Placement::Sharded => {
                self.open[id] = false;
                Category::Staging
            }
            Placement::Replicated => {
                self.total(id, elements);
                Category::Gradients
            }
        };
        let is_narrow = self.work.options.communication.size_in_bytes() < 4;
        if self.scatters(id) {
            match is_narrow {
                true => self.meter.add(Category::Staging, self.shard(id) * 2),
                false => self.take(Category::Staging, self.shard(id)),
            }
        }
        if is_narrow {
            self.meter.add(category, elements * 2);
            self.give(category, elements);
        }
    }

    fn scatters(&self, id: SegmentId) -> bool {
        self.segment(id).placements.optimizer == Placement::Sharded && self.work.options.reduce_scatter
    }

    fn await_reduce(&mut self, id: SegmentId) {
        let (placements, elements, shard) = (self.segment(id).placements, self.elements(id), self.shard(id));
        let is_sharded = placements.gradients == Placement::Sharded;
        let category = if is_sharded { Category::Staging } else { Category::Gradients };
        let is_narrow = self.work.options.communication.size_in_bytes() < 4;
        if is_narrow {
            self.take(category, elements);
            self.meter.free(category, elements * 2);
        }
        match (self.scatters(id), is_sharded) {
            (true, _) => {
                if is_narrow {
                    self.take(Category::Staging, shard);
                    self.meter.free(Category::Staging, shard * 2);
                }
                match is_sharded {
                    true => {
                        self.give(Category::Staging, elements);
                        self.add_up(id, shard);
                    }
                    false => self.give(Category::Staging, shard),
                }
            }
            (false, true) => {
                self.take(Category::Staging, shard);
                self.give(Category::Staging, elements);
                self.add_up(id, shard);
            }
            (false, false) => {}
        }
        self.reduced[id] = !is_sharded;
    }

    /// Sharded gradients become the reduced ones.
    fn settle(&mut self, id: SegmentId) {
        let elements = self.part(id, self.segment(id).placements.gradients);
        self.total(id, elements);
        self.reduced[id] = true;
    }

    fn done_with(&mut self, id: SegmentId) {
        self.reduced[id] = false;
        let placements = self.segment(id).placements;
        let elements = self.part(id, placements.gradients);
        match placements.parameters {
            Placement::Replicated => self.give(Category::Gradients, elements),
            Placement::Sharded => self.meter.free(Category::Gradients, elements * 4),
        }
    }

    fn gather(&mut self, id: SegmentId) {
        match self.is_bf16() {
            true => self.meter.add(Category::Staging, self.elements(id) * 2),
            false => self.take(Category::Staging, self.elements(id)),
        }
    }

    fn await_gather(&mut self, id: SegmentId) {
        let segment = self.segment(id);
        if segment.tiers.parameters == Tier::Nvme {
            self.meter.free(Category::Staging, self.shard(id) * self.work.width);
        }
        if segment.only_parameter().is_some() {
            return;
        }
        let pieces: Vec<u64> = segment.pieces.iter().map(|piece| piece.range.len() as u64).collect();
        match self.is_bf16() {
            true => {
                self.meter.add(Category::Staging, self.elements(id) * 2);
                self.meter.free(Category::Staging, self.elements(id) * 2);
            }
            false => {
                pieces.into_iter().for_each(|elements| self.take(Category::Staging, elements));
                self.give(Category::Staging, self.elements(id));
            }
        }
    }

    fn release(&mut self, id: SegmentId) {
        let pieces: Vec<u64> = self.segment(id).pieces.iter().map(|piece| piece.range.len() as u64).collect();
        for elements in pieces {
            match self.is_bf16() {
                true => self.meter.free(Category::Staging, elements * 2),
                false => self.give(Category::Staging, elements),
            }
        }
    }

    /// A buffer of the working dtype.
    fn blank(&mut self, elements: u64) {
        match self.is_bf16() {
            true => self.meter.add(Category::Staging, elements * 2),
            false => self.take(Category::Staging, elements),
        }
    }

    fn reuse(&mut self, elements: u64) {
        match self.is_bf16() {
            true => self.meter.free(Category::Staging, elements * 2),
            false => self.give(Category::Staging, elements),
        }
    }

    fn refresh(&mut self, id: SegmentId) {
        self.blank(self.shard(id));
        if self.segment(id).only_parameter().is_none() {
            self.blank(self.elements(id));
        }
    }

    fn await_refresh(&mut self, id: SegmentId) {
        self.reuse(self.shard(id));
        if self.segment(id).only_parameter().is_none() {
            self.reuse(self.elements(id));
        }
    }

    // The disk.

    /// An aligned buffer.
    fn buffer(&mut self, bytes: u64) -> u64 {
        let class = BufferPool::size_class(bytes as usize) as u64;
        if !self.buffers.take(class) {
            self.meter.add(Category::Staging, class);
        }
        class
    }

    fn drop_buffers(&mut self) {
        let idle = self.buffers.clear();
        self.meter.free(Category::Staging, idle);
    }

    fn fetch(&mut self, item: Item) {
        let sizes = disk_buffers(self.work.layout, self.work.stages, self.work.at, self.states(), self.width(), item);
        let classes = match item {
            Item::Parameters { .. } => {
                // Buffers of their own, which are not kept.
                sizes.iter().for_each(|&bytes| self.meter.add(Category::Staging, bytes));
                sizes
            }
            _ => sizes.into_iter().map(|bytes| self.buffer(bytes)).collect(),
        };
        self.moving.insert(item, classes);
    }

    fn await_fetch(&mut self, item: Item) {
        let moved = self.moving.remove(&item).unwrap_or_default();
        match item {
            Item::Parameters { segment } => {
                self.meter.add(Category::Staging, self.shard(segment) * self.work.width);
                moved.into_iter().for_each(|bytes| self.meter.free(Category::Staging, bytes));
            }
            Item::Gradients { segment } => {
                self.take(Category::Gradients, self.shard(segment));
                self.sums[segment].push(0);
                moved.into_iter().for_each(|class| self.buffers.give(class));
            }
            Item::Tile { .. } => drop(self.tiles.insert(item, moved)),
            Item::Activations { .. } => {}
        }
    }

    fn offload(&mut self, item: Item) {
        match item {
            Item::Gradients { segment } => {
                self.settle(segment);
                self.reduced[segment] = false;
                let sizes =
                    disk_buffers(self.work.layout, self.work.stages, self.work.at, self.states(), self.width(), item);
                let classes = sizes.into_iter().map(|bytes| self.buffer(bytes)).collect();
                self.give(Category::Gradients, self.shard(segment));
                self.moving.insert(item, classes);
            }
            Item::Tile { segment, .. } => {
                let mut classes = self.tiles.remove(&item).unwrap_or_default();
                // Gradients are not written back: their buffer is free at once. It comes behind the state's.
                let tiers = self.segment(segment).tiers;
                if tiers.gradients == Tier::Nvme && !classes.is_empty() {
                    let class = classes.remove(usize::from(tiers.optimizer == Tier::Nvme));
                    self.buffers.give(class);
                }
                self.moving.insert(item, classes);
            }
            Item::Parameters { .. } | Item::Activations { .. } => {}
        }
    }

    fn states(&self) -> usize {
        self.work.options.optimizer.states().len()
    }

    fn width(&self) -> usize {
        self.work.width as usize
    }

    // Messages between stages.

    fn message(&self, message: &Message) -> u64 {
        match message.content {
            Content::Activations { layer, .. } => self.work.table.map_or(0, |table| table.inputs[layer]),
            Content::Gradients { layer, .. } => self.work.table.map_or(0, |table| match table.layers.get(layer) {
                Some(memory) => memory.input_gradients,
                None => table.loss.input_gradients,
            }),
            Content::TiedGradient { segment, .. } => self.elements(segment) * 4,
            Content::TiedParameters { segment } => {
                self.part(segment, self.segment(segment).placements.parameters) * self.work.width
            }
        }
    }

    fn send(&mut self, message: Message) {
        let bytes = self.message(&message);
        match message.content {
            Content::Activations { layer, micro_batch } => {
                self.meter.add(Category::Communication, bytes);
                if let Some(before) = layer.checked_sub(1) {
                    self.let_go(before, micro_batch, |values| values.flows = false);
                }
            }
            Content::Gradients { micro_batch, .. } => {
                self.meter.add(Category::Communication, bytes);
                let upstream = self.upstream.remove(&micro_batch).unwrap_or(0);
                self.meter.free(Category::Activations, upstream);
            }
            // Staging, as it was.
            Content::TiedGradient { segment, .. } => self.open[segment] = false,
            Content::TiedParameters { .. } => self.meter.add(Category::Staging, bytes),
        }
        self.sending.insert(message, bytes);
    }

    fn sent(&mut self, message: Message) {
        let bytes = self.sending.remove(&message).unwrap_or(0);
        match message.content {
            Content::Activations { .. } | Content::Gradients { .. } => self.meter.free(Category::Communication, bytes),
            Content::TiedGradient { segment, .. } => self.give(Category::Staging, self.elements(segment)),
            Content::TiedParameters { .. } => self.reuse(bytes / self.work.width),
        }
    }

    fn received(&mut self, message: Message) {
        let bytes = self.message(&message);
        match message.content {
            Content::Activations { layer, micro_batch } => {
                self.meter.free(Category::Communication, bytes);
                self.meter.add(Category::Activations, bytes);
                if let Some(before) = layer.checked_sub(1) {
                    let values = Values { bytes, flows: true, ..Values::default() };
                    self.values.insert((before, micro_batch), values);
                }
            }
            Content::Gradients { micro_batch, .. } => {
                self.meter.free(Category::Communication, bytes);
                self.meter.add(Category::Activations, bytes);
                self.upstream.insert(micro_batch, bytes);
            }
            Content::TiedGradient { segment, .. } => self.open[segment] = true,
            Content::TiedParameters { .. } => {
                self.meter.free(Category::Communication, bytes);
                self.meter.add(Category::Staging, bytes);
                self.reuse(bytes / self.work.width);
            }
        }
    }
}

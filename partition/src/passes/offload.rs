//! Reads offloaded state before it is needed, and writes it back afterwards.
//!
//! Follows Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC 2021:
//! while one tile is updated, the next is read and the previous one is written.

use std::collections::{BTreeMap, VecDeque};

use zero_pipeline::{Instruction, Item, ModelShape, Program, SegmentId, Tier};

/// Options of offloading, named by DeepSpeed's keys of `offload_optimizer` and `offload_param`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OffloadOptions {
    /// `offload_param.buffer_count`: maximum number of parameter shards in memory or being read. The shards of one
    /// layer may exceed it.
    pub shards: usize,
    /// `offload_optimizer.buffer_count`: maximum tiles of optimizer state in memory; at least 1.
    pub tiles: usize,
    /// `pipeline_read`: reads the next tiles while one is updated.
    pub reads_ahead: bool,
    /// `pipeline_write`: writes the previous tile while one is updated.
    pub writes_behind: bool,
}

impl OffloadOptions {
    /// Transfers one shard and one tile at a time, without overlap.
    pub const PLAIN: Self = Self { shards: 1, tiles: 1, reads_ahead: false, writes_behind: false };

    /// Returns how many tiles are read ahead of the tile that is being updated.
    fn ahead(&self) -> usize {
        let written = usize::from(self.writes_behind && self.tiles > 2);
        if self.reads_ahead { self.tiles.saturating_sub(1 + written) } else { 0 }
    }
}

/// Inserts [`Instruction::Fetch`], [`Instruction::Offload`] and their awaits into a program, and splits updates into
/// tiles.
#[must_use]
pub fn offload(program: Program, shape: &ModelShape, options: &OffloadOptions) -> Program {
    let Program { instructions, micro_batches } = program;
    let instructions = parameters(instructions, shape, options.shards);
    let instructions = gradients(instructions, shape);
    Program { instructions: tiles(instructions, shape, options), micro_batches }
}

/// Reads shards before they are gathered. At most `buffers` shards are in memory or being read, but all shards of one
/// gather are always in memory together.
fn parameters(instructions: Vec<Instruction>, shape: &ModelShape, buffers: usize) -> Vec<Instruction> {
    let is_stored = |segment: &SegmentId| shape.segments[*segment].tiers.parameters == Tier::Nvme;
    let gathered = |instruction: &Instruction| match instruction {
        Instruction::Gather { segments } => segments.iter().copied().filter(is_stored).collect(),
        _ => vec![],
    };
    let of_instruction = |(at, instruction)| gathered(instruction).into_iter().map(move |segment| (at, segment));
    let gathers: Vec<(usize, SegmentId)> = instructions.iter().enumerate().flat_map(of_instruction).collect();
    // Segments whose fetch starts before each instruction.
    let mut starts: BTreeMap<usize, Vec<SegmentId>> = BTreeMap::new();
    let mut latest = 0;
    for (index, &(at, segment)) in gathers.iter().enumerate() {
        // The buffers of a gather are free once the gather has been awaited.
        let freed = |&(at, segment): &(usize, SegmentId)| {
            let awaits =
                |i: &Instruction| matches!(i, Instruction::AwaitGather { segments } if segments.contains(&segment));
            instructions[at..].iter().position(awaits).map_or(at, |after| at + after + 1)
        };
        let room = index.checked_sub(buffers).map_or(0, |before| freed(&gathers[before]));
        let same = gathers[..index].iter().rfind(|(_, s)| *s == segment).map_or(0, freed);
        // Shards are read in the order of their use.
        latest = room.max(same).max(latest).min(at);
        starts.entry(latest).or_default().push(segment);
    }
    let mut out = Vec::with_capacity(instructions.len() + 2 * gathers.len());
    for (at, instruction) in instructions.into_iter().enumerate() {
        for &segment in starts.get(&at).into_iter().flatten() {
            out.push(Instruction::Fetch { item: Item::Parameters { segment } });
        }
        for segment in gathered(&instruction) {
            out.push(Instruction::AwaitFetch { item: Item::Parameters { segment } });
        }
        out.push(instruction);
    }
    out
}

/// Writes accumulated gradients after each reduction, and reads them back before the next reduction adds to them.
fn gradients(instructions: Vec<Instruction>, shape: &ModelShape) -> Vec<Instruction> {
    let moved = |segments: &[SegmentId]| -> Vec<Item> {
        let lives_there = |&segment: &SegmentId| shape.segments[segment].tiers.gradients == Tier::Nvme;
        segments.iter().copied().filter(lives_there).map(|segment| Item::Gradients { segment }).collect()
    };
    let mut out = Vec::with_capacity(instructions.len());
    let mut written: Vec<Item> = vec![];
    let mut on_disk: Vec<Item> = vec![];
    for instruction in instructions {
        match &instruction {
            Instruction::Reduce { segments, .. } => {
                let items = moved(segments);
                // Await the write before reading the same gradients again.
                if items.iter().any(|item| written.contains(item)) {
                    settle(&mut written, &mut on_disk, &mut out);
                }
                out.push(instruction.clone());
                for item in items.into_iter().filter(|item| on_disk.contains(item)) {
                    out.push(Instruction::Fetch { item });
                }
            }
            Instruction::AwaitReduce { segments, .. } => {
                let items = moved(segments);
                for &item in items.iter().filter(|item| on_disk.contains(item)) {
                    out.push(Instruction::AwaitFetch { item });
                }
                out.push(instruction.clone());
                // The previous write overlapped with a whole backward.
                settle(&mut written, &mut on_disk, &mut out);
                for item in items {
                    on_disk.retain(|other| *other != item);
                    out.push(Instruction::Offload { item });
                    written.push(item);
                }
            }
            Instruction::GradientNorm => {
                settle(&mut written, &mut on_disk, &mut out);
                out.push(instruction);
            }
            _ => out.push(instruction),
        }
    }
    out
}

fn settle(written: &mut Vec<Item>, on_disk: &mut Vec<Item>, out: &mut Vec<Instruction>) {
    for item in written.drain(..) {
        out.push(Instruction::AwaitOffload { item });
        on_disk.push(item);
    }
}

/// Splits the updates of offloaded segments into tiles. If an optimizer has two passes, its tiles are measured before
/// the first update.
fn tiles(instructions: Vec<Instruction>, shape: &ModelShape, options: &OffloadOptions) -> Vec<Instruction> {
    let tiers = |segment: SegmentId| shape.segments[segment].tiers;
    let updated = instructions.iter().filter_map(|instruction| match *instruction {
        Instruction::Update { segment } => Some(segment),
        _ => None,
    });
    let tiles_of = |segment: SegmentId| (0..tiers(segment).tiles).map(move |index| Item::Tile { segment, index });
    let updated: Vec<SegmentId> = updated.collect();
    let measured: Vec<Item> =
        updated.iter().filter(|&&segment| tiers(segment).two_passes).flat_map(|&segment| tiles_of(segment)).collect();
    let mut first = Tiles::new(measured.clone(), options);
    for item in measured {
        first.process(item, |segment, tile| Instruction::MeasureTile { segment, tile });
    }
    // All measured tiles are back on the disk before the first tile is read for its update.
    let mut first = first.finish();
    let mut work = Tiles::new(updated.into_iter().flat_map(tiles_of).collect(), options);
    for instruction in instructions {
        let Instruction::Update { segment } = instruction else {
            work.out.push(instruction);
            continue;
        };
        work.out.append(&mut first);
        if tiers(segment).tiles == 0 {
            work.out.push(instruction);
        }
        for item in tiles_of(segment) {
            work.process(item, |segment, tile| Instruction::UpdateTile { segment, tile });
        }
    }
    work.finish()
}

/// Reads, processes and writes tiles in their order.
struct Tiles<'a> {
    all: Vec<Item>,
    fetched: usize,
    processed: usize,
    writing: VecDeque<Item>,
    out: Vec<Instruction>,
    options: &'a OffloadOptions,
}

impl<'a> Tiles<'a> {
    fn new(all: Vec<Item>, options: &'a OffloadOptions) -> Self {
        Self { all, fetched: 0, processed: 0, writing: VecDeque::new(), out: vec![], options }
    }

    /// Processes the next tile with an instruction.
    fn process(&mut self, item: Item, instruction: impl Fn(SegmentId, usize) -> Instruction) {
        let Item::Tile { segment, index } = item else { return };
        let wanted = (self.processed + 1 + self.options.ahead()).min(self.all.len());
        while self.fetched < wanted {
            // Tiles in memory: those fetched but not processed, and those being written.
            while self.fetched - self.processed + self.writing.len() >= self.options.tiles
                && (self.writing.len() > 1 || self.fetched == self.processed)
            {
                self.wait();
            }
            if self.fetched - self.processed + self.writing.len() >= self.options.tiles {
                break;
            }
            self.out.push(Instruction::Fetch { item: self.all[self.fetched] });
            self.fetched += 1;
        }
        self.out.push(Instruction::AwaitFetch { item });
        self.out.push(instruction(segment, index));
        self.out.push(Instruction::Offload { item });
        self.processed += 1;
        self.writing.push_back(item);
        if !self.options.writes_behind {
            self.wait();
        }
    }

    /// Waits for the oldest write.
    fn wait(&mut self) {
        if let Some(item) = self.writing.pop_front() {
            self.out.push(Instruction::AwaitOffload { item });
        }
    }

    fn finish(mut self) -> Vec<Instruction> {
        while !self.writing.is_empty() {
            self.wait();
        }
        self.out
    }
}

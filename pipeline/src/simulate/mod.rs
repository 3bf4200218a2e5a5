//! Runs the programs of all ranks on a cost table, before anything runs: what happens when, and what it needs.
//!
//! Semantics are those of the executor and of the validator. A rank does its instructions one after another; what it starts goes
//! on in lanes of its own, and an await takes until that has come. A channel moves one message at a time, in order, each
//! once its receiver has made room for it. The collectives of a data-parallel group come one after another, each once all members have
//! started it. All ranks meet for the gradient norm.
//!
//! Lanes are first in, first out, so nothing here depends on who comes first: times follow from each other, and a walk over
//! the programs, each as far as it goes, finds them all.

mod costs;
mod lanes;
mod memory;

pub use costs::{Costs, LayerCosts, Link, SegmentCosts};
pub use memory::{CATEGORIES, Category, Memory, Sample};

use crate::instruction::{Instruction, Program};
use crate::mesh::Coordinates;
use crate::message::{Content, Message};
use crate::tier::Item;
use crate::timeline::{Event, Lane, Timeline};
use crate::validate::{Violation, World};
use lanes::{Channels, Disk, Groups, Norms};
use memory::Ledger;

/// What a simulation finds.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// What happens when.
    pub timeline: Timeline,
    /// What each rank needs, besides its state.
    pub memory: Vec<Memory>,
}

/// Why there is nothing to simulate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimulationError {
    /// The table is for another model.
    #[error("costs of {found} {what} for a model of {expected}")]
    Table {
        /// Layers or segments.
        what: &'static str,
        /// How many are in the table.
        found: usize,
        /// How many the model has.
        expected: usize,
    },
    /// The table has a time that is none.
    #[error("a cost of {0} seconds: not a time")]
    NotATime(f64),
    /// The table has a bandwidth with which nothing arrives.
    #[error("a bandwidth of {0} bytes per second")]
    NotABandwidth(f64),
    /// There is not one program for each rank.
    #[error("{programs} programs for {ranks} ranks")]
    Programs {
        /// Number of programs.
        programs: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A program cannot be run to its end.
    #[error(transparent)]
    Program(#[from] Violation),
}

/// Runs the programs of all ranks, one for each, as `costs` say.
///
/// They need not be complete: a schedule's programs can be simulated without the passes that add ZeRO's communication.
///
/// # Errors
/// If the table or the programs are for another model or mesh, or somebody waits for something that never comes.
pub fn simulate(programs: &[Program], world: &World, costs: &Costs) -> Result<Simulation, SimulationError> {
    let ranks = world.mesh.world_size();
    if programs.len() != ranks || world.stages.count() != world.mesh.pipe() {
        return Err(SimulationError::Programs { programs: programs.len(), ranks });
    }
    costs.check(world)?;
    for (rank, program) in programs.iter().enumerate() {
        let foreign = program.instructions.iter().position(|instruction| !is_of(instruction, world));
        if let Some(index) = foreign {
            return Err(violation(rank, program, index, "it is for another model or mesh").into());
        }
    }
    let mut run = Run::new(world, costs, programs);
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, program) in programs.iter().enumerate() {
            moved |= run.advance(rank, program);
        }
    }
    for (rank, program) in programs.iter().enumerate() {
        let next = run.ranks[rank].next;
        if next < program.instructions.len() {
            return Err(violation(rank, program, next, "it waits for something that never comes").into());
        }
    }
    Ok(run.finish())
}

fn violation(rank: usize, program: &Program, index: usize, reason: &str) -> Violation {
    Violation { rank, index, instruction: program.instructions[index].to_string(), reason: reason.into() }
}

/// Whether all that an instruction names is there.
fn is_of(instruction: &Instruction, world: &World) -> bool {
    let layer = |layer: &usize| *layer < world.shape.layers.len().min(world.stages.layers());
    let segment = |segment: &usize| *segment < world.shape.segments.len();
    let message = |message: &Message| {
        let is_known = match &message.content {
            Content::Activations { layer: l, .. } | Content::Gradients { layer: l, .. } => layer(l),
            Content::TiedGradient { segment: s, .. } | Content::TiedParameters { segment: s } => segment(s),
        };
        is_known && message.from.max(message.to) < world.mesh.pipe()
    };
    match instruction {
        Instruction::Forward { layer: l, .. }
        | Instruction::Keep { layer: l, .. }
        | Instruction::Discard { layer: l, .. }
        | Instruction::Recompute { layer: l, .. }
        | Instruction::Backward { layer: l, .. }
        | Instruction::BackwardInput { layer: l, .. }
        | Instruction::BackwardWeight { layer: l, .. } => layer(l),
        Instruction::Gather { segment: s }
        | Instruction::AwaitGather { segment: s }
        | Instruction::Release { segment: s }
        | Instruction::Accumulate { segment: s, .. }
        | Instruction::Update { segment: s }
        | Instruction::UpdateTile { segment: s, .. } => segment(s),
        Instruction::Fetch { item: i }
        | Instruction::AwaitFetch { item: i }
        | Instruction::Offload { item: i }
        | Instruction::AwaitOffload { item: i } => match i {
            Item::Parameters { segment: s } | Item::Gradients { segment: s } | Item::Tile { segment: s, .. } => {
                segment(s)
            }
            Item::Activations { layer: l, .. } => layer(l),
        },
        Instruction::Reduce { segments, .. }
        | Instruction::AwaitReduce { segments, .. }
        | Instruction::Refresh { segments }
        | Instruction::AwaitRefresh { segments } => segments.iter().all(segment),
        Instruction::Send { message: m }
        | Instruction::AwaitSend { message: m }
        | Instruction::Receive { message: m }
        | Instruction::AwaitReceive { message: m } => message(m),
        Instruction::Load { .. } | Instruction::GradientNorm => true,
    }
}

/// How far a rank has come.
#[derive(Default)]
struct Progress {
    next: usize,
    /// Seconds, when it has finished the instruction before that.
    clock: f64,
    /// Collectives of its group that it has started, and those that it awaits, by what they are awaited with.
    started: usize,
    awaited: Vec<(Instruction, usize)>,
    norms: usize,
}

struct Run<'a> {
    world: &'a World<'a>,
    costs: &'a Costs,
    ranks: Vec<Progress>,
    channels: Channels,
    groups: Groups,
    norms: Norms,
    /// By rank.
    disks: Vec<Disk>,
    events: Vec<Event>,
    ledgers: Vec<Ledger<'a>>,
}

impl<'a> Run<'a> {
    fn new(world: &'a World<'a>, costs: &'a Costs, programs: &[Program]) -> Self {
        Self {
            world,
            costs,
            ranks: programs.iter().map(|_| Progress::default()).collect(),
            channels: Channels::new(world.capacity, costs.pipe),
            groups: Groups::new(world.mesh.pipe(), world.mesh.data()),
            norms: Norms::default(),
            disks: programs.iter().map(|_| Disk::default()).collect(),
            events: vec![],
            ledgers: programs.iter().map(|program| Ledger::new(world, costs, program)).collect(),
        }
    }

    /// Lets a rank go on until it waits for something whose time is not known yet. Whether it has done anything.
    fn advance(&mut self, rank: usize, program: &Program) -> bool {
        let mut moved = false;
        while let Some(instruction) = program.instructions.get(self.ranks[rank].next) {
            let start = self.ranks[rank].clock;
            if matches!(instruction, Instruction::GradientNorm) {
                moved |= self.norms.arrive(self.ranks[rank].norms, rank, start, self.ranks.len());
            }
            let Some(end) = self.end(rank, instruction) else { break };
            self.ranks[rank].clock = end;
            self.ranks[rank].next += 1;
            self.record(rank, Lane::Compute, instruction.clone(), (start, end));
            self.ledgers[rank].pass(instruction, start, end);
            self.pass(rank, instruction, start);
            moved = true;
        }
        moved
    }

    /// When a rank will have done its next instruction, if that is known yet.
    fn end(&self, rank: usize, instruction: &Instruction) -> Option<f64> {
        let Progress { clock, awaited, norms, .. } = &self.ranks[rank];
        let Coordinates { stage, replica } = self.world.mesh.coordinates(rank);
        let come = match instruction {
            Instruction::AwaitGather { .. } | Instruction::AwaitReduce { .. } | Instruction::AwaitRefresh { .. } => {
                let &(_, index) = awaited.iter().find(|(awaits, _)| awaits == instruction)?;
                self.groups.end(stage, index)?
            }
            Instruction::AwaitSend { message } | Instruction::AwaitReceive { message } => {
                self.channels.arrival(replica, message)?
            }
            Instruction::GradientNorm => self.norms.begin(*norms)? + self.costs.gradient_norm,
            Instruction::AwaitFetch { item } | Instruction::AwaitOffload { item } => self.disks[rank].end(item)?,
            other => clock + self.costs.compute(other, self.world.shape),
        };
        Some(come.max(*clock))
    }

    /// What an instruction starts, or leaves behind.
    fn pass(&mut self, rank: usize, instruction: &Instruction, start: f64) {
        let replica = self.world.mesh.coordinates(rank).replica;
        if let Some(awaited) = instruction.awaited_with() {
            self.collective(rank, instruction, awaited);
            return;
        }
        match instruction {
            Instruction::AwaitGather { .. } | Instruction::AwaitReduce { .. } | Instruction::AwaitRefresh { .. } => {
                let awaited = &mut self.ranks[rank].awaited;
                if let Some(position) = awaited.iter().position(|(awaits, _)| awaits == instruction) {
                    awaited.remove(position);
                }
            }
            Instruction::GradientNorm => {
                let begin = self.norms.begin(self.ranks[rank].norms).unwrap_or(start);
                let end = self.ranks[rank].clock;
                self.ranks[rank].norms += 1;
                self.record(rank, Lane::Collectives, instruction.clone(), (begin, end));
            }
            Instruction::Send { message } => {
                self.channels.send(replica, message, start, self.costs.message(message));
                self.settle(replica, message);
            }
            Instruction::Receive { message } => {
                self.channels.post(replica, message, start);
                self.settle(replica, message);
            }
            Instruction::Fetch { item } => {
                let seconds = self.costs.read.seconds(self.costs.item(item).0 as f64);
                let times = self.disks[rank].request(*item, start, seconds);
                self.record(rank, Lane::Disk, instruction.clone(), times);
            }
            Instruction::Offload { item } => {
                let seconds = self.costs.write.seconds(self.costs.item(item).1 as f64);
                let times = self.disks[rank].request(*item, start, seconds);
                self.record(rank, Lane::Disk, instruction.clone(), times);
            }
            _ => {}
        }
    }

    fn collective(&mut self, rank: usize, instruction: &Instruction, awaited: Instruction) {
        let stage = self.world.mesh.coordinates(rank).stage;
        let Progress { started, clock, .. } = self.ranks[rank];
        self.ranks[rank].awaited.push((awaited, started));
        self.ranks[rank].started += 1;
        let seconds = self.costs.collective(instruction, self.world);
        if let Some(times) = self.groups.start(stage, started, clock, seconds) {
            for replica in 0..self.world.mesh.data() {
                let member = self.world.mesh.rank(Coordinates { stage, replica });
                self.record(member, Lane::Collectives, instruction.clone(), times);
            }
        }
    }

    /// Messages of a channel that can go now, do.
    fn settle(&mut self, replica: usize, through: &Message) {
        let sender = self.world.mesh.rank(Coordinates { stage: through.from, replica });
        for (message, times) in self.channels.settle(replica, through.channel()) {
            self.ledgers[sender].gone(&message, times.1);
            self.record(sender, Lane::Channel(message.channel()), Instruction::Send { message }, times);
        }
    }

    fn record(&mut self, rank: usize, lane: Lane, instruction: Instruction, (start, end): (f64, f64)) {
        if end > start {
            self.events.push(Event { rank, lane, instruction, start, end });
        }
    }

    fn finish(mut self) -> Simulation {
        self.events.sort_by(|a, b| (a.rank, a.lane).cmp(&(b.rank, b.lane)).then(a.start.total_cmp(&b.start)));
        let timeline = Timeline { ranks: self.ranks.len(), events: self.events };
        Simulation { timeline, memory: self.ledgers.into_iter().map(Ledger::finish).collect() }
    }
}

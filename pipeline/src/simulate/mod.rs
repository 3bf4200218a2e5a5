//! Simulates the programs of all ranks with a cost table, to predict timing and memory before a run.
//!
//! The semantics match the executor and the validator. A rank executes its instructions in order. Operations that it
//! starts proceed in separate lanes, and an await lasts until the operation is complete. A channel moves one message at
//! a time, in order, each once its receive has been posted. The collectives of a data-parallel group run one after
//! another, each once all members have started it. All ranks synchronize at the gradient norm.
//!
//! Concurrent compute and communication may slow each other, as set by [`Sharing`]. Simulated time therefore advances
//! from one completion to the next, and work in progress continues at the rate that holds until then. Lanes are first
//! in, first out, so the result does not depend on the order in which ranks are processed at equal times.

mod agenda;
mod costs;
mod lanes;
mod memory;

pub use costs::{Collectives, Costs, LayerCosts, Link, SegmentCosts, Sharing};
pub use memory::{CATEGORIES, Category, Memory, Sample};

use std::collections::VecDeque;

use crate::instruction::{Instruction, Program};
use crate::mesh::Coordinates;
use crate::message::{Content, Message};
use crate::tier::Item;
use crate::timeline::{Event, Lane, Timeline};
use crate::validate::{Violation, World};
use agenda::Agenda;
use lanes::{Disk, Group, Norms, Way, Ways};
use memory::Ledger;

/// Result of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// Timeline of all ranks.
    pub timeline: Timeline,
    /// Memory of each rank in addition to its persistent state.
    pub memory: Vec<Memory>,
}

/// Why a simulation failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimulationError {
    /// The cost table is for another model.
    #[error("costs of {found} {what} for a model of {expected}")]
    Table {
        /// Kind of entry: layers or segments.
        what: &'static str,
        /// Number in the table.
        found: usize,
        /// Number in the model.
        expected: usize,
    },
    /// A time in the table is negative, infinite or NaN.
    #[error("a cost of {0} seconds: not a time")]
    NotATime(f64),
    /// A bandwidth in the table is not positive.
    #[error("a bandwidth of {0} bytes per second")]
    NotABandwidth(f64),
    /// A rate in the table is not positive or exceeds 1.
    #[error("a rate of {0}: it is above 0 and at most 1")]
    NotARate(f64),
    /// The number of programs differs from the number of ranks.
    #[error("{programs} programs for {ranks} ranks")]
    Programs {
        /// Number of programs.
        programs: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A program cannot run to its end.
    #[error(transparent)]
    Program(#[from] Violation),
}

/// Simulates the programs of all ranks, one each, with the given costs.
///
/// The programs need not be complete: a schedule's programs can be simulated without the passes that add ZeRO's
/// communication.
///
/// # Errors
/// Fails if the table or the programs are for another model or mesh, or if a rank waits for something that never
/// happens.
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
    run.until_nothing_moves();
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

/// Returns whether the world contains every layer, segment and stage that an instruction names.
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

/// Progress of a rank.
#[derive(Default)]
struct Progress {
    next: usize,
    /// Time in seconds at which it reached the next instruction.
    begun: f64,
    doing: Doing,
    /// Number of collectives started in its group, and the awaited ones: the instruction that awaits each, and its
    /// index.
    started: usize,
    awaited: Vec<(Instruction, usize)>,
    norms: usize,
    /// Whether it has arrived at the next gradient norm.
    at_norm: bool,
    /// Numbers of the active transfers of this rank.
    transfers: Vec<usize>,
}

/// State of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Doing {
    /// Executes instructions.
    #[default]
    Moving,
    /// Computes until an end time in the agenda.
    Computing,
    /// Waits until an end time in the agenda.
    Resting,
    /// Waits for another rank.
    Waiting,
}

/// What keeps a rank from completing an instruction immediately.
enum Hold {
    Nothing,
    /// Compute of this many seconds.
    Work(f64),
    /// A wait until this time.
    Until(f64),
    /// A wait for another rank.
    Others,
}

/// A numbered lane between ranks. The first lanes are the data-parallel groups of the stages, in order.
struct Transfer {
    slot: usize,
    /// Ranks that take part.
    members: Vec<usize>,
    active: bool,
    began: f64,
    of: Of,
}

enum Of {
    Group(Group),
    /// A channel, with the rank that sends.
    Way(usize, Way),
}

struct Run<'a> {
    world: &'a World<'a>,
    costs: &'a Costs,
    programs: &'a [Program],
    agenda: Agenda,
    /// Progress by rank. Ranks have the first slots of the agenda.
    ranks: Vec<Progress>,
    transfers: Vec<Transfer>,
    ways: Ways,
    norms: Norms,
    /// Disks by rank.
    disks: Vec<Disk>,
    events: Vec<Event>,
    ledgers: Vec<Ledger<'a>>,
    /// Ranks that can proceed, and `changed`, the ranks whose work or transfers changed since the rates were last set.
    ready: VecDeque<usize>,
    changed: Vec<usize>,
}

impl<'a> Run<'a> {
    fn new(world: &'a World<'a>, costs: &'a Costs, programs: &'a [Program]) -> Self {
        let mut agenda = Agenda::default();
        for _ in programs {
            agenda.slot();
        }
        let group = |stage| {
            let members = (0..world.mesh.data()).map(|replica| world.mesh.rank(Coordinates { stage, replica }));
            let (slot, of) = (agenda.slot(), Of::Group(Group::default()));
            Transfer { slot, members: members.collect(), active: false, began: 0.0, of }
        };
        let transfers = (0..world.mesh.pipe()).map(group).collect();
        Self {
            world,
            costs,
            programs,
            agenda,
            ranks: programs.iter().map(|_| Progress::default()).collect(),
            transfers,
            ways: Ways::new(),
            norms: Norms::default(),
            disks: programs.iter().map(|_| Disk::default()).collect(),
            events: vec![],
            ledgers: programs.iter().map(|program| Ledger::new(world, costs, program)).collect(),
            ready: (0..programs.len()).collect(),
            changed: vec![],
        }
    }

    fn until_nothing_moves(&mut self) {
        loop {
            while let Some(rank) = self.ready.pop_front() {
                self.advance(rank);
            }
            self.share();
            match self.agenda.next() {
                None => return,
                Some(rank) if rank < self.ranks.len() => {
                    self.changed.push(rank);
                    self.finish_instruction(rank);
                    self.advance(rank);
                }
                Some(slot) => self.arrive(slot - self.ranks.len()),
            }
        }
    }

    /// Advances a rank until it computes or waits.
    fn advance(&mut self, rank: usize) {
        let programs = self.programs;
        self.ranks[rank].doing = Doing::Moving;
        while let Some(instruction) = programs[rank].instructions.get(self.ranks[rank].next) {
            if matches!(instruction, Instruction::GradientNorm) && !self.ranks[rank].at_norm {
                self.ranks[rank].at_norm = true;
                if self.norms.arrive(self.ranks[rank].norms, self.agenda.now, self.ranks.len()) {
                    (0..self.ranks.len()).for_each(|other| self.wake(other));
                }
            }
            match self.hold(rank, instruction) {
                Hold::Nothing => self.finish_instruction(rank),
                Hold::Work(seconds) => {
                    self.agenda.start(rank, seconds);
                    self.ranks[rank].doing = Doing::Computing;
                    self.changed.push(rank);
                    return;
                }
                Hold::Until(time) => {
                    self.agenda.wait(rank, time);
                    self.ranks[rank].doing = Doing::Resting;
                    return;
                }
                Hold::Others => {
                    self.ranks[rank].doing = Doing::Waiting;
                    return;
                }
            }
        }
    }

    fn wake(&mut self, rank: usize) {
        if self.ranks[rank].doing == Doing::Waiting {
            self.ranks[rank].doing = Doing::Moving;
            self.ready.push_back(rank);
        }
    }

    fn hold(&self, rank: usize, instruction: &Instruction) -> Hold {
        let Coordinates { stage, replica } = self.world.mesh.coordinates(rank);
        let others = |has_come: bool| if has_come { Hold::Nothing } else { Hold::Others };
        let until = |time: Option<f64>| match time {
            Some(time) if time <= self.agenda.now => Hold::Nothing,
            Some(time) => Hold::Until(time),
            None => Hold::Others,
        };
        match instruction {
            Instruction::AwaitGather { .. } | Instruction::AwaitReduce { .. } | Instruction::AwaitRefresh { .. } => {
                let awaited = self.ranks[rank].awaited.iter().find(|(awaits, _)| awaits == instruction);
                let Of::Group(group) = &self.transfers[stage].of else { return Hold::Others };
                others(awaited.is_some_and(|&(_, index)| index < group.ended))
            }
            Instruction::AwaitSend { message } | Instruction::AwaitReceive { message } => {
                let way = self.ways.get(&(replica, message.channel())).map(|&way| &self.transfers[way].of);
                others(matches!(way, Some(Of::Way(_, way)) if way.has(message)))
            }
            Instruction::GradientNorm => {
                let begin = self.norms.begin(self.ranks[rank].norms);
                until(begin.map(|begin| begin + self.costs.gradient_norm))
            }
            Instruction::AwaitFetch { item } | Instruction::AwaitOffload { item } => until(self.disks[rank].end(item)),
            other => match self.costs.compute(other, self.world.shape) {
                seconds if seconds > 0.0 => Hold::Work(seconds),
                _ => Hold::Nothing,
            },
        }
    }

    /// Completes a rank's current instruction: records it and starts its operations.
    fn finish_instruction(&mut self, rank: usize) {
        let (programs, now) = (self.programs, self.agenda.now);
        let start = std::mem::replace(&mut self.ranks[rank].begun, now);
        let Some(instruction) = programs[rank].instructions.get(self.ranks[rank].next) else { return };
        self.ranks[rank].next += 1;
        self.record(rank, Lane::Compute, instruction, (start, now));
        self.ledgers[rank].pass(instruction, start, now);
        if let Some(awaited) = instruction.awaited_with() {
            let stage = self.world.mesh.coordinates(rank).stage;
            let Progress { started, .. } = self.ranks[rank];
            self.ranks[rank].awaited.push((awaited, started));
            self.ranks[rank].started += 1;
            let seconds = self.costs.collective(instruction, self.world);
            if let Of::Group(group) = &mut self.transfers[stage].of {
                group.start(started, instruction, seconds);
            }
            self.settle(stage);
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
                self.ranks[rank].norms += 1;
                self.ranks[rank].at_norm = false;
                self.record(rank, Lane::Collectives, instruction, (begin, now));
            }
            Instruction::Send { message } => {
                let seconds = self.costs.pipe.seconds(self.costs.message(message) as f64);
                let way = self.way(rank, message, |way| way.send(*message, seconds));
                self.settle(way);
            }
            Instruction::Receive { message } => {
                let way = self.way(rank, message, Way::post);
                self.settle(way);
            }
            Instruction::Fetch { item } => {
                let seconds = self.costs.read.seconds(self.costs.item(item).0 as f64);
                let times = self.disks[rank].request(*item, now, seconds);
                self.record(rank, Lane::Disk, instruction, times);
            }
            Instruction::Offload { item } => {
                let seconds = self.costs.write.seconds(self.costs.item(item).1 as f64);
                let times = self.disks[rank].request(*item, now, seconds);
                self.record(rank, Lane::Disk, instruction, times);
            }
            _ => {}
        }
    }

    /// Applies `with` to the channel of a message on this rank's replica. Returns the number of the transfer.
    fn way(&mut self, rank: usize, message: &Message, with: impl FnOnce(&mut Way)) -> usize {
        let replica = self.world.mesh.coordinates(rank).replica;
        let (agenda, transfers, mesh) = (&mut self.agenda, &mut self.transfers, self.world.mesh);
        let number = *self.ways.entry((replica, message.channel())).or_insert_with(|| {
            let members = [message.from, message.to].map(|stage| mesh.rank(Coordinates { stage, replica }));
            let of = Of::Way(members[0], Way::default());
            transfers.push(Transfer { slot: agenda.slot(), members: members.into(), active: false, began: 0.0, of });
            transfers.len() - 1
        });
        if let Of::Way(_, way) = &mut self.transfers[number].of {
            with(way);
        }
        number
    }

    /// Starts the next transfer of an idle lane if it is ready.
    fn settle(&mut self, number: usize) {
        while !self.transfers[number].active {
            let transfer = &self.transfers[number];
            let next = match &transfer.of {
                Of::Group(group) => group.first(transfer.members.len()).map(|(_, seconds)| *seconds),
                Of::Way(_, way) => way.first(self.world.capacity).map(|(_, seconds)| seconds),
            };
            let Some(seconds) = next else { return };
            let transfer = &mut self.transfers[number];
            transfer.began = self.agenda.now;
            if seconds > 0.0 {
                transfer.active = true;
                self.agenda.start(transfer.slot, seconds);
                for &member in &transfer.members {
                    self.ranks[member].transfers.push(number);
                    self.changed.push(member);
                }
            } else {
                self.pass_through(number);
            }
        }
    }

    /// Completes a transfer that took time.
    fn arrive(&mut self, number: usize) {
        let transfer = &mut self.transfers[number];
        transfer.active = false;
        for &member in &transfer.members {
            self.ranks[member].transfers.retain(|&other| other != number);
            self.changed.push(member);
        }
        self.pass_through(number);
        self.settle(number);
    }

    fn pass_through(&mut self, number: usize) {
        let (now, began) = (self.agenda.now, self.transfers[number].began);
        let members = self.transfers[number].members.clone();
        match &mut self.transfers[number].of {
            Of::Group(group) => {
                let collective = group.collectives[group.ended].0.clone();
                group.ended += 1;
                members.iter().for_each(|&member| self.record(member, Lane::Collectives, &collective, (began, now)));
            }
            Of::Way(sender, way) => {
                let (sender, first) = (*sender, way.first(self.world.capacity));
                way.arrive();
                if let Some((message, _)) = first {
                    self.ledgers[sender].gone(&message, now);
                    let lane = Lane::Channel(message.channel());
                    self.record(sender, lane, &Instruction::Send { message }, (began, now));
                }
            }
        }
        members.into_iter().for_each(|member| self.wake(member));
    }

    /// Updates the rates of work that has gained or lost concurrent work.
    fn share(&mut self) {
        let sharing = self.costs.sharing;
        let changed = std::mem::take(&mut self.changed);
        if sharing == Sharing::NONE {
            return;
        }
        for rank in changed {
            let Progress { doing, transfers, .. } = &self.ranks[rank];
            if *doing == Doing::Computing {
                self.agenda.set_rate(rank, if transfers.is_empty() { 1.0 } else { sharing.computing });
            }
            for &number in transfers {
                let Transfer { slot, members, .. } = &self.transfers[number];
                let computes = members.iter().any(|&member| self.ranks[member].doing == Doing::Computing);
                self.agenda.set_rate(*slot, if computes { sharing.transferring } else { 1.0 });
            }
        }
    }

    fn record(&mut self, rank: usize, lane: Lane, instruction: &Instruction, (start, end): (f64, f64)) {
        if end > start {
            self.events.push(Event { rank, lane, instruction: instruction.clone(), start, end });
        }
    }

    fn finish(mut self) -> Simulation {
        self.events.sort_by(|a, b| (a.rank, a.lane).cmp(&(b.rank, b.lane)).then(a.start.total_cmp(&b.start)));
        let timeline = Timeline { ranks: self.ranks.len(), events: self.events };
        Simulation { timeline, memory: self.ledgers.into_iter().map(Ledger::finish).collect() }
    }
}

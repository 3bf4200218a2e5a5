//! Simulates the programs of all ranks with a cost table, to predict timing before a run.
//!
//! Follows the rules of the executor and the validator. A rank executes its instructions in order. Operations that it
//! starts proceed in separate lanes, and an await lasts until the operation is complete. A channel moves one message at
//! a time, in order, once its receive has been posted. The collectives of a data-parallel group run one after another;
//! a collective starts once all members have started it. A layer that exchanges values with other ranks starts once
//! they have reached it; its time includes the exchanges. All ranks synchronize at the gradient norm.
//!
//! Concurrent compute and communication may slow each other, as set by [`Sharing`]. Simulated time therefore advances
//! from one completion to the next, and all rates are constant in between. Lanes are first in, first out. The result
//! therefore does not depend on the order in which the simulator processes ranks at equal times.

mod agenda;
mod costs;
mod lanes;
mod progress;

pub use costs::{Collectives, Costs, LayerCosts, Link, SegmentCosts, Sharing};

use std::collections::{BTreeMap, VecDeque};

use crate::effects::{Action, Transfer};
use crate::instruction::{Instruction, Program};
use crate::message::{Channel, Message};
use crate::timeline::{Event, Lane, Timeline};
use crate::validate::{Violation, violation};
use crate::world::World;
use agenda::Agenda;
use lanes::{Norms, Queue};
use progress::{Doing, End, Hold, Progress};

/// Why a simulation failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimulationError {
    /// The cost table is for another model.
    #[error("the cost table has {found} {what}, but the model has {expected}")]
    Table {
        /// Kind of entry: layers or segments.
        what: &'static str,
        /// Number of entries in the table.
        found: usize,
        /// Number of layers or segments in the model.
        expected: usize,
    },
    /// A time in the table is negative, infinite or NaN.
    #[error("the cost table has a time of {0} seconds; times must be finite and not negative")]
    NotATime(f64),
    /// A bandwidth in the table is not positive.
    #[error("the cost table has a bandwidth of {0} bytes per second; bandwidths must be positive")]
    NotABandwidth(f64),
    /// A rate in the table is not positive or exceeds 1.
    #[error("the cost table has a rate of {0}; rates must be above 0 and at most 1")]
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

/// Simulates the programs of all ranks, one program per rank, with the given costs.
///
/// The programs need not be complete: a schedule's programs can be simulated without the passes that add ZeRO's
/// communication.
///
/// # Errors
/// Fails if the table or the programs are for another model or mesh, or if a rank waits for something that never
/// happens.
pub fn simulate(programs: &[Program], world: &World, costs: &Costs) -> Result<Timeline, SimulationError> {
    let ranks = world.mesh.world_size();
    if programs.len() != ranks || world.stages.count() != world.mesh.pipe() {
        return Err(SimulationError::Programs { programs: programs.len(), ranks });
    }
    costs.check(world)?;
    for (rank, program) in programs.iter().enumerate() {
        let is_foreign = |instruction: &Instruction| {
            instruction.effects().operands.into_iter().flatten().any(|operand| operand.exists(world).is_err())
        };
        let foreign = program.instructions.iter().position(is_foreign);
        if let Some(index) = foreign {
            let reason = "it names a layer, segment or stage that does not exist";
            return Err(violation(rank, program, index, reason.into()).into());
        }
    }
    let mut run = Run::new(world, costs, programs);
    run.until_nothing_moves();
    for (rank, program) in programs.iter().enumerate() {
        let next = run.ranks[rank].next;
        if next < program.instructions.len() {
            return Err(violation(rank, program, next, "it waits for an operation that never completes".into()).into());
        }
    }
    run.events.sort_by(|a, b| (a.rank, a.lane).cmp(&(b.rank, b.lane)).then(a.start.total_cmp(&b.start)));
    Ok(Timeline { ranks, events: run.events })
}

struct Run<'a> {
    world: &'a World<'a>,
    costs: &'a Costs,
    programs: &'a [Program],
    agenda: Agenda,
    /// Progress by rank. The first slots of the agenda belong to ranks, the next ones to lanes.
    ranks: Vec<Progress<'a>>,
    /// The lanes of the data-parallel groups, one per stage and plane, followed by the lanes of channels.
    lanes: Vec<Queue<'a>>,
    /// Index of each channel's lane, by channel and position of its ranks within their stages.
    channels: BTreeMap<(usize, Channel), usize>,
    norms: Norms,
    events: Vec<Event>,
    /// Ranks that can proceed. `changed` lists the ranks whose work or transfers changed after rates were last set.
    ready: VecDeque<usize>,
    changed: Vec<usize>,
}

impl<'a> Run<'a> {
    fn new(world: &'a World<'a>, costs: &'a Costs, programs: &'a [Program]) -> Self {
        let mut agenda = Agenda::new(programs.len());
        let first = |stage| world.mesh.ranks(stage).take(world.mesh.tensor());
        let group = |rank| Queue::collectives(agenda.slot(), world.mesh.group(rank).collect());
        let lanes = (0..world.mesh.pipe()).flat_map(first).map(group).collect();
        Self {
            world,
            costs,
            programs,
            agenda,
            ranks: programs.iter().map(|_| Progress::default()).collect(),
            lanes,
            channels: BTreeMap::new(),
            norms: Norms::default(),
            events: vec![],
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
            let action = instruction.effects().action;
            if action == Action::Meets && !self.ranks[rank].at_norm {
                self.ranks[rank].at_norm = true;
                if self.norms.arrive(self.ranks[rank].norms, self.agenda.now, self.ranks.len()) {
                    (0..self.ranks.len()).for_each(|other| self.wake(other));
                }
            }
            let meets = match action {
                Action::Computes(computation) => computation.meets(rank, self.world),
                _ => vec![],
            };
            if !meets.is_empty() && !std::mem::replace(&mut self.ranks[rank].at_exchange, true) {
                meets.iter().for_each(|&other| self.wake(other));
            }
            if !meets.iter().all(|&other| self.ranks[other].is_at_exchange_of(&self.ranks[rank])) {
                self.ranks[rank].doing = Doing::Waiting;
                return;
            }
            if !meets.is_empty() {
                self.ranks[rank].exchanged += 1;
                self.ranks[rank].at_exchange = false;
            }
            match self.hold(rank, action) {
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

    fn hold(&self, rank: usize, action: Action<'_>) -> Hold {
        let until = |time: f64| if time <= self.agenda.now { Hold::Nothing } else { Hold::Until(time) };
        match action {
            Action::Awaits(transfer) => match self.ranks[rank].in_flight.get(&transfer) {
                Some(&End::At(time)) => until(time),
                Some(&End::Of { lane, index }) if index < self.lanes[lane].ended => Hold::Nothing,
                _ => Hold::Others,
            },
            Action::Meets => match self.norms.begin(self.ranks[rank].norms) {
                Some(begin) => until(begin + self.costs.gradient_norm),
                None => Hold::Others,
            },
            Action::Computes(computation) => match self.costs.compute(computation, self.world.shape) {
                seconds if seconds > 0.0 => Hold::Work(seconds),
                _ => Hold::Nothing,
            },
            Action::Starts(_) | Action::Releases | Action::Saves => Hold::Nothing,
        }
    }

    /// Completes a rank's current instruction: records it and starts its transfer.
    fn finish_instruction(&mut self, rank: usize) {
        let (programs, now) = (self.programs, self.agenda.now);
        let start = std::mem::replace(&mut self.ranks[rank].begun, now);
        let Some(instruction) = programs[rank].instructions.get(self.ranks[rank].next) else { return };
        self.ranks[rank].next += 1;
        self.record(rank, Lane::Compute, instruction, (start, now));
        match instruction.effects().action {
            Action::Starts(transfer) => self.start(rank, instruction, transfer),
            Action::Awaits(transfer) => drop(self.ranks[rank].in_flight.remove(&transfer)),
            Action::Meets => {
                let begin = self.norms.begin(self.ranks[rank].norms).unwrap_or(start);
                self.ranks[rank].norms += 1;
                self.ranks[rank].at_norm = false;
                self.record(rank, Lane::Collectives, instruction, (begin, now));
            }
            Action::Computes(_) | Action::Releases | Action::Saves => {}
        }
    }

    fn start(&mut self, rank: usize, instruction: &'a Instruction, transfer: Transfer<'a>) {
        let seconds = self.costs.transfer(transfer, self.world);
        let (lane, index) = match transfer {
            Transfer::Fetch(_) | Transfer::Offload(_) => {
                let start = self.agenda.now.max(self.ranks[rank].disk);
                self.ranks[rank].disk = start + seconds;
                self.ranks[rank].in_flight.insert(transfer, End::At(start + seconds));
                return self.record(rank, Lane::Disk, instruction, (start, start + seconds));
            }
            Transfer::Send(message) => {
                let lane = self.channel(rank, message);
                (lane, self.lanes[lane].send(instruction, seconds))
            }
            Transfer::Receive(message) => {
                let lane = self.channel(rank, message);
                (lane, self.lanes[lane].post())
            }
            Transfer::Gather(_)
            | Transfer::GatherSecondary(_)
            | Transfer::Reduce(..)
            | Transfer::Refresh(_)
            | Transfer::OuterStep(_) => {
                let (mesh, index) = (self.world.mesh, self.ranks[rank].started);
                let lane = mesh.coordinates(rank).stage * mesh.tensor() + mesh.tensor_index(rank);
                self.ranks[rank].started += 1;
                self.lanes[lane].start(index, instruction, seconds);
                (lane, index)
            }
        };
        self.ranks[rank].in_flight.insert(transfer, End::Of { lane, index });
        self.settle(lane);
    }

    /// Returns the lane of a message between ranks at this rank's position.
    fn channel(&mut self, rank: usize, message: &Message) -> usize {
        let mesh = self.world.mesh;
        let place = rank - mesh.ranks(mesh.coordinates(rank).stage).start;
        let (agenda, lanes, capacity) = (&mut self.agenda, &mut self.lanes, self.world.capacity);
        *self.channels.entry((place, message.channel())).or_insert_with(|| {
            let members = [message.from, message.to].map(|stage| mesh.peer(rank, stage));
            lanes.push(Queue::channel(Lane::Channel(message.channel()), agenda.slot(), members.into(), capacity));
            lanes.len() - 1
        })
    }

    /// Starts the next transfer of an idle lane if it is ready.
    fn settle(&mut self, number: usize) {
        while !self.lanes[number].is_active {
            let Some((_, seconds)) = self.lanes[number].first() else { return };
            let lane = &mut self.lanes[number];
            lane.began = self.agenda.now;
            if seconds > 0.0 {
                lane.is_active = true;
                self.agenda.start(lane.slot, seconds);
                for &member in &lane.members {
                    self.ranks[member].moving.push(number);
                    self.changed.push(member);
                }
            } else {
                self.complete(number);
            }
        }
    }

    /// Completes the active transfer of a lane, and starts the next.
    fn arrive(&mut self, number: usize) {
        let lane = &mut self.lanes[number];
        lane.is_active = false;
        for &member in &lane.members {
            self.ranks[member].moving.retain(|&other| other != number);
            self.changed.push(member);
        }
        self.complete(number);
        self.settle(number);
    }

    fn complete(&mut self, number: usize) {
        let lane = &mut self.lanes[number];
        let (first, times) = (lane.first(), (lane.began, self.agenda.now));
        lane.ended += 1;
        let (kind, shown_on, members) = (lane.lane, lane.shown_on().to_vec(), lane.members.clone());
        if let Some((instruction, _)) = first {
            shown_on.into_iter().for_each(|rank| self.record(rank, kind, instruction, times));
        }
        members.into_iter().for_each(|member| self.wake(member));
    }

    /// Updates the rates of computations and transfers that have started or stopped overlapping with others.
    fn share(&mut self) {
        let sharing = self.costs.sharing;
        let changed = std::mem::take(&mut self.changed);
        if sharing == Sharing::NONE {
            return;
        }
        for rank in changed {
            let Progress { doing, moving, .. } = &self.ranks[rank];
            if *doing == Doing::Computing {
                self.agenda.set_rate(rank, if moving.is_empty() { 1.0 } else { sharing.computing });
            }
            for &number in moving {
                let Queue { slot, members, lane, .. } = &self.lanes[number];
                let beside = if *lane == Lane::Collectives { sharing.transferring } else { sharing.sending };
                let computes = members.iter().any(|&member| self.ranks[member].doing == Doing::Computing);
                self.agenda.set_rate(*slot, if computes { beside } else { 1.0 });
            }
        }
    }

    fn record(&mut self, rank: usize, lane: Lane, instruction: &Instruction, (start, end): (f64, f64)) {
        if end > start {
            self.events.push(Event { rank, lane, instruction: instruction.clone(), start, end });
        }
    }
}

//! Checks that involve several ranks: collectives, messages and deadlocks.

use std::collections::{BTreeMap, HashMap};

use super::{Violation, violation};
use crate::effects::{Action, Transfer};
use crate::instruction::{Instruction, Program};
use crate::message::{Channel, Message};
use crate::timeline::Lane;
use crate::world::World;

/// Checks that all ranks of a stage start the same collectives in the same order. A computation that exchanges values
/// with other ranks counts as a collective.
pub(super) fn same_collectives(programs: &[Program], world: &World) -> Result<(), Violation> {
    for stage in 0..world.mesh.pipe() {
        let mut ranks = world.mesh.ranks(stage);
        let Some(first) = ranks.next() else { continue };
        let expected = collectives(first, &programs[first], world);
        for rank in ranks {
            let found = collectives(rank, &programs[rank], world);
            for k in 0..expected.len().max(found.len()) {
                let (theirs, ours) = (expected.get(k), found.get(k));
                if theirs.map(|(_, i)| i) != ours.map(|(_, i)| i) {
                    let text = |entry: Option<&(usize, &Instruction)>| {
                        entry.map_or("nothing".to_string(), |(_, instruction)| format!("`{instruction}`"))
                    };
                    let index = ours.map_or(programs[rank].instructions.len(), |(index, _)| *index);
                    let reason = format!(
                        "all ranks of a stage must start the same collectives: collective {k} is {} here, but {} on rank {first}",
                        text(ours),
                        text(theirs)
                    );
                    return Err(violation(rank, &programs[rank], index, reason));
                }
            }
        }
    }
    Ok(())
}

fn collectives<'a>(rank: usize, program: &'a Program, world: &World) -> Vec<(usize, &'a Instruction)> {
    let is_collective = |instruction: &Instruction| {
        instruction.is_collective() || !meets(rank, instruction.effects().action, world).is_empty()
    };
    program.instructions.iter().enumerate().filter(|(_, instruction)| is_collective(instruction)).collect()
}

/// Returns the other ranks with which an action exchanges values.
fn meets(rank: usize, action: Action<'_>, world: &World) -> Vec<usize> {
    match action {
        Action::Computes(of) => of.meets(rank, world),
        _ => vec![],
    }
}

/// Checks that the messages sent and received on each channel match, in order.
pub(super) fn paired(programs: &[Program], world: &World) -> Result<(), Violation> {
    for replica in 0..world.mesh.data() * world.mesh.tensor() {
        let mut sent: BTreeMap<Channel, Vec<(usize, Message)>> = BTreeMap::new();
        let mut received: BTreeMap<Channel, Vec<(usize, Message)>> = BTreeMap::new();
        for stage in 0..world.mesh.pipe() {
            let program = &programs[world.mesh.ranks(stage).start + replica];
            for (index, instruction) in program.instructions.iter().enumerate() {
                let (ways, message) = match instruction.effects().action {
                    Action::Starts(Transfer::Send(message)) => (&mut sent, message),
                    Action::Starts(Transfer::Receive(message)) => (&mut received, message),
                    _ => continue,
                };
                ways.entry(message.channel()).or_default().push((index, *message));
            }
        }
        let channels: std::collections::BTreeSet<Channel> = sent.keys().chain(received.keys()).copied().collect();
        for channel in channels {
            let none = vec![];
            let (sent, received) = (sent.get(&channel).unwrap_or(&none), received.get(&channel).unwrap_or(&none));
            for k in 0..sent.len().max(received.len()) {
                let (gone, come) = (sent.get(k), received.get(k));
                if gone.map(|(_, m)| m) == come.map(|(_, m)| m) {
                    continue;
                }
                let (_, from, to) = channel;
                let at = |stage| world.mesh.ranks(stage).start + replica;
                return Err(match (gone, come) {
                    (Some(&(index, _)), None) => {
                        let reason = format!("rank {} never receives it", at(to));
                        violation(at(from), &programs[at(from)], index, reason)
                    }
                    (gone, come) => {
                        let (rank, index) = (at(to), come.map_or(0, |(index, _)| *index));
                        let theirs = gone.map_or("nothing".into(), |(_, message)| message.content.to_string());
                        let reason = format!("rank {} sends {theirs} as message {k} instead", at(from));
                        violation(rank, &programs[rank], index, reason)
                    }
                });
            }
        }
    }
    Ok(())
}

/// Detects deadlocks by simulating all programs without times. Only the operation that each rank waits for matters. A
/// waiting rank proceeds once the awaited operation is complete.
pub(super) fn flows(programs: &[Program], world: &World) -> Result<(), Violation> {
    let mut ranks: Vec<Progress> = programs.iter().map(|_| Progress::default()).collect();
    loop {
        let mut moved = false;
        for rank in 0..programs.len() {
            while let Some(instruction) = programs[rank].instructions.get(ranks[rank].next) {
                let action = instruction.effects().action;
                let (meets, shares) = (action == Action::Meets, !meets(rank, action, world).is_empty());
                moved |= meets && !std::mem::replace(&mut ranks[rank].meets, meets);
                moved |= shares && !std::mem::replace(&mut ranks[rank].exchanges, shares);
                if !arrived(rank, action, &ranks, world) {
                    break;
                }
                ranks[rank].exchanged += usize::from(shares);
                ranks[rank].pass(action);
                moved = true;
            }
        }
        let is_stuck = |&rank: &usize| ranks[rank].next < programs[rank].instructions.len();
        let stuck: Vec<usize> = (0..programs.len()).filter(is_stuck).collect();
        match stuck.first() {
            None => return Ok(()),
            Some(_) if moved => {}
            Some(&rank) => {
                let others = stuck.iter().skip(1).map(|&other| {
                    let index = ranks[other].next;
                    format!("rank {other} waits at instruction {index} ({})", programs[other].instructions[index])
                });
                let others: Vec<String> = others.collect();
                let reason = match others.is_empty() {
                    true => "it waits for an operation that never completes".into(),
                    false => format!("deadlock: this rank waits here, {}", others.join(", ")),
                };
                return Err(violation(rank, &programs[rank], ranks[rank].next, reason));
            }
        }
    }
}

/// Progress of a rank.
#[derive(Default)]
struct Progress<'a> {
    next: usize,
    /// Number of collectives that the rank has started. The next field, `in_flight`, lists the collectives in flight
    /// with their indices.
    started: usize,
    in_flight: Vec<(Transfer<'a>, usize)>,
    /// Whether the rank has arrived at an instruction that waits for all ranks. The next field, `met`, counts such
    /// instructions that it has completed.
    meets: bool,
    met: usize,
    /// Whether the rank has arrived at an instruction that exchanges values with other ranks. The next field,
    /// `exchanged`, counts such instructions that it has completed.
    exchanges: bool,
    exchanged: usize,
    /// By channel: the messages that the rank has sent. The next field, `posted`, has the receives that it has posted.
    sent: BTreeMap<Channel, Passed>,
    posted: BTreeMap<Channel, Passed>,
}

/// Messages in one direction of a channel.
#[derive(Default)]
struct Passed {
    count: usize,
    /// Index of each message.
    places: HashMap<Message, usize>,
}

impl Passed {
    fn push(&mut self, message: Message) {
        self.places.entry(message).or_insert(self.count);
        self.count += 1;
    }
}

impl<'a> Progress<'a> {
    fn pass(&mut self, action: Action<'a>) {
        self.next += 1;
        (self.meets, self.exchanges) = (false, false);
        match action {
            Action::Starts(Transfer::Send(message)) => self.sent.entry(message.channel()).or_default().push(*message),
            Action::Starts(Transfer::Receive(message)) => {
                self.posted.entry(message.channel()).or_default().push(*message);
            }
            Action::Starts(transfer) if transfer.lane() == Lane::Collectives => {
                self.in_flight.push((transfer, self.started));
                self.started += 1;
            }
            Action::Awaits(transfer) => {
                if let Some(position) = self.in_flight.iter().position(|(started, _)| *started == transfer) {
                    self.in_flight.remove(position);
                }
            }
            Action::Meets => self.met += 1,
            Action::Starts(_) | Action::Computes(_) | Action::Releases | Action::Saves => {}
        }
    }
}

/// Returns whether the operation that an instruction awaits is complete.
fn arrived(rank: usize, action: Action<'_>, ranks: &[Progress<'_>], world: &World) -> bool {
    let peer = |stage| &ranks[world.mesh.peer(rank, stage)];
    let position = |passed: Option<&Passed>, message: &Message| passed?.places.get(message).copied();
    let count = |passed: Option<&Passed>| passed.map_or(0, |passed| passed.count);
    match action {
        Action::Awaits(Transfer::Send(message)) => {
            let sent = position(ranks[rank].sent.get(&message.channel()), message);
            let posted = count(peer(message.to).posted.get(&message.channel()));
            sent.is_none_or(|index| posted + world.capacity > index)
        }
        Action::Awaits(Transfer::Receive(message)) => {
            let posted = position(ranks[rank].posted.get(&message.channel()), message);
            let sent = count(peer(message.from).sent.get(&message.channel()));
            posted.is_none_or(|index| sent > index)
        }
        Action::Awaits(transfer) => {
            // Disk transfers are not in this list, so a rank never waits for them here. They do not depend on other
            // ranks.
            let started = ranks[rank].in_flight.iter().find(|(started, _)| *started == transfer);
            let mut group = world.mesh.group(rank);
            started.is_none_or(|&(_, index)| group.all(|member| ranks[member].started > index))
        }
        Action::Meets => {
            // A rank waits until every other rank has arrived or has already passed.
            let is_there = |(other, progress): (usize, &Progress)| {
                other == rank || progress.met > ranks[rank].met || progress.meets
            };
            ranks.iter().enumerate().all(is_there)
        }
        Action::Computes(of) => {
            let own = ranks[rank].exchanged;
            let is_there = |other: &Progress| other.exchanged > own || other.exchanges;
            of.meets(rank, world).into_iter().all(|other| is_there(&ranks[other]))
        }
        Action::Starts(_) | Action::Releases | Action::Saves => true,
    }
}

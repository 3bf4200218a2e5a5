//! Checks that involve several ranks: collectives, messages and deadlocks.

use std::collections::{BTreeMap, HashMap};

use super::{Violation, World, violation};
use crate::instruction::{Instruction, Program};
use crate::mesh::Coordinates;
use crate::message::{Channel, Message};

/// Checks that every data-parallel group starts the same collectives in the same order.
pub(super) fn same_collectives(programs: &[Program], world: &World) -> Result<(), Violation> {
    for stage in 0..world.mesh.pipe() {
        let first = world.mesh.rank(Coordinates { stage, replica: 0 });
        let expected = collectives(&programs[first]);
        for replica in 1..world.mesh.data() {
            let rank = world.mesh.rank(Coordinates { stage, replica });
            let found = collectives(&programs[rank]);
            for k in 0..expected.len().max(found.len()) {
                let (theirs, ours) = (expected.get(k), found.get(k));
                if theirs.map(|(_, i)| i) != ours.map(|(_, i)| i) {
                    let text = |entry: Option<&(usize, &Instruction)>| {
                        entry.map_or("nothing".to_string(), |(_, instruction)| format!("`{instruction}`"))
                    };
                    let index = ours.map_or(programs[rank].instructions.len(), |(index, _)| *index);
                    let reason = format!("collective {k} is {} here but {} on rank {first}", text(ours), text(theirs));
                    return Err(violation(rank, &programs[rank], index, reason));
                }
            }
        }
    }
    Ok(())
}

fn collectives(program: &Program) -> Vec<(usize, &Instruction)> {
    program.instructions.iter().enumerate().filter(|(_, i)| i.is_collective()).collect()
}

/// Checks that the messages sent and received on each channel match, in order.
pub(super) fn paired(programs: &[Program], world: &World) -> Result<(), Violation> {
    for replica in 0..world.mesh.data() {
        let mut sent: BTreeMap<Channel, Vec<(usize, Message)>> = BTreeMap::new();
        let mut received: BTreeMap<Channel, Vec<(usize, Message)>> = BTreeMap::new();
        for stage in 0..world.mesh.pipe() {
            let program = &programs[world.mesh.rank(Coordinates { stage, replica })];
            for (index, instruction) in program.instructions.iter().enumerate() {
                match instruction {
                    Instruction::Send { message } => {
                        sent.entry(message.channel()).or_default().push((index, *message));
                    }
                    Instruction::Receive { message } => {
                        received.entry(message.channel()).or_default().push((index, *message));
                    }
                    _ => {}
                }
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
                let at = |stage| world.mesh.rank(Coordinates { stage, replica });
                return Err(match (gone, come) {
                    (Some(&(index, _)), None) => {
                        let reason = format!("rank {} never receives it", at(to));
                        violation(at(from), &programs[at(from)], index, reason)
                    }
                    (gone, come) => {
                        let (rank, index) = (at(to), come.map_or(0, |(index, _)| *index));
                        let theirs = gone.map_or("nothing".into(), |(_, message)| message.content.to_string());
                        let reason = format!("message {k} from rank {} is {theirs}", at(from));
                        violation(rank, &programs[rank], index, reason)
                    }
                });
            }
        }
    }
    Ok(())
}

/// Detects deadlocks by executing all programs against each other, considering only waits. A waiting rank proceeds once
/// the awaited operation is complete.
pub(super) fn flows(programs: &[Program], world: &World) -> Result<(), Violation> {
    let mut ranks: Vec<Progress> = programs.iter().map(|_| Progress::default()).collect();
    loop {
        let mut moved = false;
        for rank in 0..programs.len() {
            while let Some(instruction) = programs[rank].instructions.get(ranks[rank].next) {
                let at_norm = matches!(instruction, Instruction::GradientNorm);
                moved |= at_norm && !std::mem::replace(&mut ranks[rank].at_norm, at_norm);
                if !arrived(rank, instruction, &ranks, world) {
                    break;
                }
                ranks[rank].pass(instruction);
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
                    format!("rank {other} at instruction {index} ({})", programs[other].instructions[index])
                });
                let others: Vec<String> = others.collect();
                let reason = match others.is_empty() {
                    true => "it waits for something that never comes".into(),
                    false => format!("deadlock: it waits here, {}", others.join(", ")),
                };
                return Err(violation(rank, &programs[rank], ranks[rank].next, reason));
            }
        }
    }
}

/// Progress of a rank.
#[derive(Default)]
struct Progress {
    next: usize,
    /// Number of collectives started in its group, and the awaited ones: the instruction that awaits each, and its
    /// index.
    started: usize,
    awaited: Vec<(Instruction, usize)>,
    /// Whether its next instruction is the gradient norm, at which all ranks synchronize.
    at_norm: bool,
    norms: usize,
    /// Messages sent and receives posted, by channel.
    sent: BTreeMap<Channel, Passed>,
    posted: BTreeMap<Channel, Passed>,
}

/// Messages that went one way through a channel.
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

impl Progress {
    fn pass(&mut self, instruction: &Instruction) {
        self.next += 1;
        self.at_norm = false;
        match instruction {
            Instruction::Send { message } => self.sent.entry(message.channel()).or_default().push(*message),
            Instruction::Receive { message } => self.posted.entry(message.channel()).or_default().push(*message),
            other => {
                if let Some(position) = self.awaited.iter().position(|(awaits, _)| awaits == other) {
                    self.awaited.remove(position);
                }
            }
        }
        if let Some(awaited) = instruction.awaited_with() {
            self.awaited.push((awaited, self.started));
            self.started += 1;
        }
        if matches!(instruction, Instruction::GradientNorm) {
            self.norms += 1;
        }
    }
}

/// Returns whether the operation that an instruction awaits is complete.
fn arrived(rank: usize, instruction: &Instruction, ranks: &[Progress], world: &World) -> bool {
    let at = world.mesh.coordinates(rank);
    let peer = |stage| &ranks[world.mesh.rank(Coordinates { stage, ..at })];
    let position = |passed: Option<&Passed>, message: &Message| passed?.places.get(message).copied();
    let count = |passed: Option<&Passed>| passed.map_or(0, |passed| passed.count);
    match instruction {
        Instruction::AwaitGather { .. } | Instruction::AwaitReduce { .. } | Instruction::AwaitRefresh { .. } => {
            let started = ranks[rank].awaited.iter().find(|(awaits, _)| awaits == instruction);
            let mut group = (0..world.mesh.data()).map(|replica| world.mesh.rank(Coordinates { replica, ..at }));
            started.is_none_or(|&(_, index)| group.all(|member| ranks[member].started > index))
        }
        Instruction::GradientNorm => {
            // All ranks pass the norm together: a rank waits until every other rank has arrived or has already passed.
            let is_there = |(other, progress): (usize, &Progress)| {
                other == rank || progress.norms > ranks[rank].norms || progress.at_norm
            };
            ranks.iter().enumerate().all(is_there)
        }
        Instruction::AwaitSend { message } => {
            let sent = position(ranks[rank].sent.get(&message.channel()), message);
            let posted = count(peer(message.to).posted.get(&message.channel()));
            sent.is_none_or(|index| posted + world.capacity > index)
        }
        Instruction::AwaitReceive { message } => {
            let posted = position(ranks[rank].posted.get(&message.channel()), message);
            let sent = count(peer(message.from).sent.get(&message.channel()));
            posted.is_none_or(|index| sent > index)
        }
        _ => true,
    }
}

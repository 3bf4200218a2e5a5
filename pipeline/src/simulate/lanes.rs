//! The lanes of a simulation, each processed in order: collectives, channels and gradient norms.

use crate::instruction::Instruction;
use crate::timeline::Lane;

/// A lane between ranks, which moves one transfer at a time. The k-th message that the sender sends is the k-th message
/// that the receiver receives. The k-th collective that one member starts is the k-th collective of all other members.
pub(super) struct Queue<'a> {
    pub(super) lane: Lane,
    /// Slot in the agenda.
    pub(super) slot: usize,
    /// Ranks that take part. The sender of a channel comes first.
    pub(super) members: Vec<usize>,
    entries: Vec<Entry<'a>>,
    /// For a channel, how many messages may start, counted from the start of the simulation: its capacity plus the
    /// receives posted so far. `None` for collectives, which start when all members have started them.
    admitted: Option<usize>,
    posted: usize,
    /// Number of transfers that are complete.
    pub(super) ended: usize,
    pub(super) is_active: bool,
    /// Start of the active transfer in seconds.
    pub(super) began: f64,
}

struct Entry<'a> {
    instruction: &'a Instruction,
    seconds: f64,
    /// Number of members that have started the transfer.
    started: usize,
}

impl<'a> Queue<'a> {
    /// Creates the lane of a data-parallel group.
    pub(super) fn collectives(slot: usize, members: Vec<usize>) -> Self {
        Self {
            lane: Lane::Collectives,
            slot,
            members,
            entries: vec![],
            admitted: None,
            posted: 0,
            ended: 0,
            is_active: false,
            began: 0.0,
        }
    }

    /// Creates a channel, which buffers up to `capacity` messages without a posted receive.
    pub(super) fn channel(lane: Lane, slot: usize, members: Vec<usize>, capacity: usize) -> Self {
        Self { lane, admitted: Some(capacity), ..Self::collectives(slot, members) }
    }

    /// Records that a member starts transfer number `index`, which takes `seconds`.
    pub(super) fn start(&mut self, index: usize, instruction: &'a Instruction, seconds: f64) {
        if self.entries.len() == index {
            self.entries.push(Entry { instruction, seconds, started: 0 });
        }
        self.entries[index].started += 1;
    }

    /// Adds a message and returns its index.
    pub(super) fn send(&mut self, instruction: &'a Instruction, seconds: f64) -> usize {
        let index = self.entries.len();
        self.start(index, instruction, seconds);
        index
    }

    /// Posts a receive and returns the index of its message.
    pub(super) fn post(&mut self) -> usize {
        self.admitted = self.admitted.map(|admitted| admitted + 1);
        self.posted += 1;
        self.posted - 1
    }

    /// Returns the active or next transfer and its seconds; `None` if the next transfer may not start yet.
    pub(super) fn first(&self) -> Option<(&'a Instruction, f64)> {
        let first = self.entries.get(self.ended)?;
        let is_ready = match self.admitted {
            Some(admitted) => self.ended < admitted,
            None => first.started == self.members.len(),
        };
        is_ready.then_some((first.instruction, first.seconds))
    }

    /// Returns the ranks whose timeline shows the transfers: all members of a group, or the sender.
    pub(super) fn shown_on(&self) -> &[usize] {
        if self.admitted.is_some() { &self.members[..1] } else { &self.members }
    }
}

/// Gradient norms, at which all ranks synchronize.
#[derive(Default)]
pub(super) struct Norms {
    /// For each norm, the number of ranks that have arrived and the time at which the last rank arrived.
    met: Vec<(usize, Option<f64>)>,
}

impl Norms {
    /// Records that a rank arrives at norm number `index`. Returns whether it is the last rank to arrive.
    pub(super) fn arrive(&mut self, index: usize, at: f64, ranks: usize) -> bool {
        if self.met.len() == index {
            self.met.push((0, None));
        }
        let (come, begin) = &mut self.met[index];
        *come += 1;
        if *come == ranks {
            *begin = Some(at);
        }
        *come == ranks
    }

    /// Returns the time at which the last rank arrived; `None` if some have not.
    pub(super) fn begin(&self, index: usize) -> Option<f64> {
        self.met.get(index)?.1
    }
}

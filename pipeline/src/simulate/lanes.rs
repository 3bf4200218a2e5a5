//! The lanes of a simulation, each processed in order: channels, collectives, disks and gradient norms.

use std::collections::{BTreeMap, HashMap};

use crate::instruction::Instruction;
use crate::message::{Channel, Message};
use crate::tier::Item;

/// One channel between two ranks: the k-th message sent is the k-th received.
#[derive(Default)]
pub(super) struct Way {
    sent: Vec<(Message, f64)>,
    posted: usize,
    arrived: usize,
    /// Position of each message in the channel. In valid programs it is the same for sender and receiver.
    places: HashMap<Message, usize>,
}

impl Way {
    /// Adds a message that takes `seconds` to transfer.
    pub(super) fn send(&mut self, message: Message, seconds: f64) {
        self.places.insert(message, self.sent.len());
        self.sent.push((message, seconds));
    }

    pub(super) fn post(&mut self) {
        self.posted += 1;
    }

    /// Returns the message that is in flight or may start. The channel buffers up to `capacity` messages without a
    /// posted receive.
    pub(super) fn first(&self, capacity: usize) -> Option<(Message, f64)> {
        let first = self.sent.get(self.arrived)?;
        (self.arrived < self.posted + capacity).then_some(*first)
    }

    /// Completes the first message.
    pub(super) fn arrive(&mut self) {
        self.arrived += 1;
    }

    pub(super) fn has(&self, message: &Message) -> bool {
        self.places.get(message).is_some_and(|&place| place < self.arrived)
    }
}

/// Transfer numbers by replica and channel.
pub(super) type Ways = BTreeMap<(usize, Channel), usize>;

/// The collectives of one stage's data-parallel group.
#[derive(Default)]
pub(super) struct Group {
    /// Number of members that have started each collective.
    started: Vec<usize>,
    /// Instruction and duration in seconds of each collective.
    pub(super) collectives: Vec<(Instruction, f64)>,
    pub(super) ended: usize,
}

impl Group {
    /// Records that a member starts its collective number `index`.
    pub(super) fn start(&mut self, index: usize, instruction: &Instruction, seconds: f64) {
        if self.started.len() == index {
            self.started.push(0);
            self.collectives.push((instruction.clone(), seconds));
        }
        self.started[index] += 1;
    }

    /// Returns the collective that is running or may start: all members have started it, and all earlier ones are done.
    pub(super) fn first(&self, members: usize) -> Option<&(Instruction, f64)> {
        let first = self.collectives.get(self.ended)?;
        (self.started[self.ended] == members).then_some(first)
    }
}

/// One rank's disk, which serves requests one at a time.
#[derive(Default)]
pub(super) struct Disk {
    free: f64,
    /// Completion time of the last request for each item.
    done: BTreeMap<Item, f64>,
}

impl Disk {
    /// Schedules a request. Returns its start and end.
    pub(super) fn request(&mut self, item: Item, at: f64, seconds: f64) -> (f64, f64) {
        let start = at.max(self.free);
        self.free = start + seconds;
        self.done.insert(item, self.free);
        (start, self.free)
    }

    pub(super) fn end(&self, item: &Item) -> Option<f64> {
        self.done.get(item).copied()
    }
}

/// Gradient norms, at which all ranks synchronize.
#[derive(Default)]
pub(super) struct Norms {
    /// Number of ranks that have arrived at each norm, and the time at which the last one did.
    met: Vec<(usize, Option<f64>)>,
}

impl Norms {
    /// Records that a rank arrives at norm number `index`. Returns whether it is the last.
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

    /// Returns the time at which all ranks had arrived, if they have.
    pub(super) fn begin(&self, index: usize) -> Option<f64> {
        self.met.get(index)?.1
    }
}

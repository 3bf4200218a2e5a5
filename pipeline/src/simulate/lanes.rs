//! What is on its way between ranks, each lane in order.

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
    /// Which in the channel a message is, to its sender and to its receiver: the same, if the programs are valid.
    places: HashMap<Message, usize>,
}

impl Way {
    /// A message that takes so many seconds.
    pub(super) fn send(&mut self, message: Message, seconds: f64) {
        self.places.insert(message, self.sent.len());
        self.sent.push((message, seconds));
    }

    pub(super) fn post(&mut self) {
        self.posted += 1;
    }

    /// The message that is on its way, or can go now where the channel holds `capacity` messages that nobody has made room for.
    pub(super) fn first(&self, capacity: usize) -> Option<(Message, f64)> {
        let first = self.sent.get(self.arrived)?;
        (self.arrived < self.posted + capacity).then_some(*first)
    }

    /// The first one has arrived.
    pub(super) fn arrive(&mut self) {
        self.arrived += 1;
    }

    pub(super) fn has(&self, message: &Message) -> bool {
        self.places.get(message).is_some_and(|&place| place < self.arrived)
    }
}

/// All channels, by the place of their ranks on the data axis, and each with its number.
pub(super) type Ways = BTreeMap<(usize, Channel), usize>;

/// Collectives of the data-parallel group of a stage.
#[derive(Default)]
pub(super) struct Group {
    /// For each, how many have started it.
    started: Vec<usize>,
    /// What each is, and how many seconds it takes.
    pub(super) collectives: Vec<(Instruction, f64)>,
    pub(super) ended: usize,
}

impl Group {
    /// A member starts its collective number `index`.
    pub(super) fn start(&mut self, index: usize, instruction: &Instruction, seconds: f64) {
        if self.started.len() == index {
            self.started.push(0);
            self.collectives.push((instruction.clone(), seconds));
        }
        self.started[index] += 1;
    }

    /// The collective that is on its way, or can be: all members have started it, and those before are done.
    pub(super) fn first(&self, members: usize) -> Option<&(Instruction, f64)> {
        let first = self.collectives.get(self.ended)?;
        (self.started[self.ended] == members).then_some(first)
    }
}

/// One rank's disk: requests are served one after the other.
#[derive(Default)]
pub(super) struct Disk {
    free: f64,
    /// When the last request of each item is done.
    done: BTreeMap<Item, f64>,
}

impl Disk {
    /// From when to when a request goes.
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

/// Gradient norms, for which all ranks meet.
#[derive(Default)]
pub(super) struct Norms {
    /// For each, how many ranks have come, and since when all are there.
    met: Vec<(usize, Option<f64>)>,
}

impl Norms {
    /// A rank comes to norm number `index`, once. Whether it is the last one.
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

    /// When all are there, if they are.
    pub(super) fn begin(&self, index: usize) -> Option<f64> {
        self.met.get(index)?.1
    }
}

//! What is under way, and what ends next. A piece of work goes on at a rate, which may change before it is done.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Pieces of work, each in a slot of its own, which holds one at a time.
#[derive(Default)]
pub(super) struct Agenda {
    pub(super) now: f64,
    slots: Vec<Slot>,
    ends: BinaryHeap<End>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Seconds of work at rate 1 that were left at `since`.
    left: f64,
    rate: f64,
    since: f64,
    /// Counts the ends that were foretold: of those in the heap the last one holds.
    turn: u64,
}

/// When the work of a slot is done, if nothing changes.
struct End {
    time: f64,
    slot: usize,
    turn: u64,
}

impl Agenda {
    /// A new slot.
    pub(super) fn slot(&mut self) -> usize {
        self.slots.push(Slot::default());
        self.slots.len() - 1
    }

    /// Starts work of so many seconds at rate 1.
    pub(super) fn start(&mut self, slot: usize, seconds: f64) {
        let of = &mut self.slots[slot];
        (of.left, of.rate, of.since) = (seconds, 1.0, self.now);
        self.foretell(slot, self.now + seconds);
    }

    /// Starts a wait until a time, whatever its rate.
    pub(super) fn wait(&mut self, slot: usize, until: f64) {
        self.slots[slot].rate = 1.0;
        self.foretell(slot, until);
    }

    /// From now on the work of a slot goes on at another rate.
    pub(super) fn set_rate(&mut self, slot: usize, rate: f64) {
        let of = &mut self.slots[slot];
        if of.rate.total_cmp(&rate) != Ordering::Equal {
            of.left = (of.left - (self.now - of.since) * of.rate).max(0.0);
            (of.rate, of.since) = (rate, self.now);
            let end = self.now + of.left / rate;
            self.foretell(slot, end);
        }
    }

    /// Goes on to the next end, and says whose it is; `None` where nothing is under way.
    pub(super) fn next(&mut self) -> Option<usize> {
        loop {
            let End { time, slot, turn } = self.ends.pop()?;
            if self.slots[slot].turn == turn {
                self.now = time;
                return Some(slot);
            }
        }
    }

    fn foretell(&mut self, slot: usize, time: f64) {
        let of = &mut self.slots[slot];
        of.turn += 1;
        self.ends.push(End { time, slot, turn: of.turn });
    }
}

impl Ord for End {
    /// The heap gives the greatest: that is the earliest, and of several at a time the one of the first slot.
    fn cmp(&self, other: &Self) -> Ordering {
        other.time.total_cmp(&self.time).then(other.slot.cmp(&self.slot)).then(other.turn.cmp(&self.turn))
    }
}

impl PartialOrd for End {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for End {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for End {}

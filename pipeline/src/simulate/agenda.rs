//! The event queue of a simulation. Each piece of work proceeds at a rate, which may change before the work is done.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Slots that each hold one piece of work, and their end times.
#[derive(Default)]
pub(super) struct Agenda {
    pub(super) now: f64,
    slots: Vec<Slot>,
    ends: BinaryHeap<End>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Seconds of work at rate 1 left at time `since`.
    left: f64,
    rate: f64,
    since: f64,
    /// Number of end times of this slot that were pushed to the heap. Only the latest of them is valid.
    turn: u64,
}

/// Predicted end of the work of a slot.
struct End {
    time: f64,
    slot: usize,
    turn: u64,
}

impl Agenda {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: vec![Slot::default(); slots], ..Self::default() }
    }

    /// Adds a slot.
    pub(super) fn slot(&mut self) -> usize {
        self.slots.push(Slot::default());
        self.slots.len() - 1
    }

    /// Starts work that takes `seconds` at rate 1.
    pub(super) fn start(&mut self, slot: usize, seconds: f64) {
        let of = &mut self.slots[slot];
        (of.left, of.rate, of.since) = (seconds, 1.0, self.now);
        self.foretell(slot, self.now + seconds);
    }

    /// Starts a wait until a fixed time, independent of the rate.
    pub(super) fn wait(&mut self, slot: usize, until: f64) {
        self.slots[slot].rate = 1.0;
        self.foretell(slot, until);
    }

    /// Changes the rate of a slot's work from now on.
    pub(super) fn set_rate(&mut self, slot: usize, rate: f64) {
        let of = &mut self.slots[slot];
        if of.rate.total_cmp(&rate) != Ordering::Equal {
            of.left = (of.left - (self.now - of.since) * of.rate).max(0.0);
            (of.rate, of.since) = (rate, self.now);
            let end = self.now + of.left / rate;
            self.foretell(slot, end);
        }
    }

    /// Advances to the next end time and returns its slot, or `None` if nothing is in progress.
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
    /// Reverses the order, because the heap pops the greatest element. The earliest end comes first. At equal times,
    /// the lowest slot comes first.
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

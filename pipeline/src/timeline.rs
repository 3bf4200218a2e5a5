//! Timelines of a step. Simulated and measured timelines have the same form, so that they can be compared side by side.

use std::fmt;

use crate::instruction::Instruction;
use crate::message::{Channel, Kind};

/// A track of a rank. Events of one lane never overlap; events of different lanes may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Instructions of the program that compute or wait.
    Compute,
    /// Collectives in flight, of the data-parallel group or of all ranks.
    Collectives,
    /// Disk transfers in flight.
    Disk,
    /// Messages in flight to another stage, shown on the sender.
    Channel(Channel),
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compute => f.write_str("compute"),
            Self::Collectives => f.write_str("collectives"),
            Self::Disk => f.write_str("disk"),
            Self::Channel((kind, _, to)) => {
                let kind = match kind {
                    Kind::Activations => "activations",
                    Kind::Gradients => "gradients",
                    Kind::Tied => "tied parameters",
                };
                write!(f, "{kind} to stage {to}")
            }
        }
    }
}

/// One event with its duration.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Rank of the event.
    pub rank: usize,
    /// Lane within the rank.
    pub lane: Lane,
    /// The instruction. In communication lanes, the instruction that started the transfer.
    pub instruction: Instruction,
    /// Start in seconds since the beginning of the step.
    pub start: f64,
    /// End in seconds since the beginning of the step.
    pub end: f64,
}

impl Event {
    /// Returns the duration in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.end - self.start
    }

    /// Returns whether the event is compute rather than a wait. Only compute counts as busy in the bubble.
    #[must_use]
    pub fn is_compute(&self) -> bool {
        self.lane == Lane::Compute && !self.instruction.is_wait()
    }
}

/// The events of one step on all ranks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Timeline {
    /// Number of ranks.
    pub ranks: usize,
    /// Events in order of time within each lane of each rank. Events of zero duration may be omitted.
    pub events: Vec<Event>,
}

impl Timeline {
    /// Returns the seconds from the start of the first event to the end of the last.
    #[must_use]
    pub fn makespan(&self) -> f64 {
        let start = self.events.iter().map(|event| event.start).fold(f64::INFINITY, f64::min);
        let end = self.events.iter().map(|event| event.end).fold(f64::NEG_INFINITY, f64::max);
        (end - start).max(0.0)
    }

    /// Returns the seconds that each rank computes.
    #[must_use]
    pub fn busy(&self) -> Vec<f64> {
        self.seconds(Event::is_compute)
    }

    /// Returns the seconds that each rank does not compute.
    #[must_use]
    pub fn idle(&self) -> Vec<f64> {
        let makespan = self.makespan();
        self.busy().into_iter().map(|busy| makespan - busy).collect()
    }

    /// Returns the seconds that each rank's disk is busy.
    #[must_use]
    pub fn disk(&self) -> Vec<f64> {
        self.seconds(|event| event.lane == Lane::Disk)
    }

    /// Returns the seconds of communication of each rank, summed over its lanes. Time that overlaps with compute counts
    /// as well.
    #[must_use]
    pub fn communication(&self) -> Vec<f64> {
        self.seconds(|event| matches!(event.lane, Lane::Collectives | Lane::Channel(_)))
    }

    /// Sums the seconds of the selected events by rank.
    fn seconds(&self, is_selected: impl Fn(&Event) -> bool) -> Vec<f64> {
        let mut ranks = vec![0.0; self.ranks];
        for event in self.events.iter().filter(|event| event.rank < self.ranks && is_selected(event)) {
            ranks[event.rank] += event.seconds();
        }
        ranks
    }

    /// Returns the fraction of the step in which the busiest rank does not compute.
    ///
    /// For stages of equal duration, this is the bubble of the schedule. If stages are unequal, the additional time
    /// that ranks wait for the slowest stage depends on the split and is not included.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let (busiest, makespan) = (self.busy().into_iter().fold(0.0, f64::max), self.makespan());
        if makespan > 0.0 { (makespan - busiest) / makespan } else { 0.0 }
    }
}

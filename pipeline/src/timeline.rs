//! What ran when: of a simulation, or measured. One form for both, so that the two can be laid side by side.

use std::fmt;

use crate::instruction::Instruction;
use crate::message::{Channel, Kind};

/// What a rank does at a time: things of one lane come one after another, those of different lanes may overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// The instructions themselves, and the waits between them.
    Compute,
    /// What is on its way with the data-parallel group, or with all ranks.
    Collectives,
    /// What is on its way from or to the disk.
    Disk,
    /// What is on its way to another stage, in the lane of the rank that sends.
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

/// Something that took time.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Whose.
    pub rank: usize,
    /// In which of its lanes.
    pub lane: Lane,
    /// What it was. In lanes of communication it is the instruction that started it.
    pub instruction: Instruction,
    /// Seconds from the beginning of the step.
    pub start: f64,
    /// Likewise.
    pub end: f64,
}

impl Event {
    /// How long it took, in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.end - self.start
    }

    /// Whether it is work, not a wait: computing, as far as the bubble goes.
    #[must_use]
    pub fn is_compute(&self) -> bool {
        self.lane == Lane::Compute && !self.instruction.is_wait()
    }
}

/// A step of all ranks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Timeline {
    /// Number of ranks.
    pub ranks: usize,
    /// Of each lane of each rank in order of time. What took no time need not be here.
    pub events: Vec<Event>,
}

impl Timeline {
    /// Seconds from the first event to the end of the last one.
    #[must_use]
    pub fn makespan(&self) -> f64 {
        let start = self.events.iter().map(|event| event.start).fold(f64::INFINITY, f64::min);
        let end = self.events.iter().map(|event| event.end).fold(f64::NEG_INFINITY, f64::max);
        (end - start).max(0.0)
    }

    /// Seconds that each rank computes.
    #[must_use]
    pub fn busy(&self) -> Vec<f64> {
        self.seconds(Event::is_compute)
    }

    /// Seconds that each rank does not compute.
    #[must_use]
    pub fn idle(&self) -> Vec<f64> {
        let makespan = self.makespan();
        self.busy().into_iter().map(|busy| makespan - busy).collect()
    }

    /// Seconds that each rank's disk is busy.
    #[must_use]
    pub fn disk(&self) -> Vec<f64> {
        self.seconds(|event| event.lane == Lane::Disk)
    }

    /// Seconds that each rank communicates: all its lanes of communication together, overlapped or not.
    #[must_use]
    pub fn communication(&self) -> Vec<f64> {
        self.seconds(|event| matches!(event.lane, Lane::Collectives | Lane::Channel(_)))
    }

    /// Seconds of some events, by rank.
    fn seconds(&self, is_one: impl Fn(&Event) -> bool) -> Vec<f64> {
        let mut ranks = vec![0.0; self.ranks];
        for event in self.events.iter().filter(|event| event.rank < self.ranks && is_one(event)) {
            ranks[event.rank] += event.seconds();
        }
        ranks
    }

    /// The share of the step in which even the busiest rank does not compute.
    ///
    /// With stages that take equally long this is what is called a schedule's bubble. Where they do not, the others wait for the
    /// slowest one besides: that is for the split to answer for, and not counted here.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let (busiest, makespan) = (self.busy().into_iter().fold(0.0, f64::max), self.makespan());
        if makespan > 0.0 { (makespan - busiest) / makespan } else { 0.0 }
    }
}

//! The progress of a rank in a simulation.

use std::collections::HashMap;

use crate::effects::Transfer;

/// Progress of a rank.
#[derive(Default)]
pub(super) struct Progress<'a> {
    pub(super) next: usize,
    /// Time in seconds at which the rank reached the next instruction.
    pub(super) begun: f64,
    pub(super) doing: Doing,
    /// Transfers that were started and not awaited.
    pub(super) in_flight: HashMap<Transfer<'a>, End>,
    /// Number of collectives that the rank has started in its group.
    pub(super) started: usize,
    pub(super) norms: usize,
    /// Whether the rank has arrived at the next gradient norm.
    pub(super) at_norm: bool,
    /// Number of computations that the rank has started and in which it exchanges values with other ranks.
    pub(super) exchanged: usize,
    /// Whether the rank has arrived at the next such computation.
    pub(super) at_exchange: bool,
    /// Indices of the lanes that are moving a transfer of this rank.
    pub(super) moving: Vec<usize>,
    /// Time at which the rank's disk is free. The disk serves one request at a time.
    pub(super) disk: f64,
}

impl Progress<'_> {
    /// Returns whether this rank has reached the exchange that `other` has reached.
    pub(super) fn is_at_exchange_of(&self, other: &Self) -> bool {
        self.exchanged > other.exchanged || self.exchanged == other.exchanged && self.at_exchange
    }
}

/// When a transfer is complete.
#[derive(Clone, Copy)]
pub(super) enum End {
    /// At a known time.
    At(f64),
    /// When lane `lane` has completed its transfer number `index`.
    Of { lane: usize, index: usize },
}

/// State of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Doing {
    /// Executes instructions.
    #[default]
    Moving,
    /// Computes until an end time in the agenda.
    Computing,
    /// Waits until an end time in the agenda.
    Resting,
    /// Waits for another rank.
    Waiting,
}

/// The reason why a rank cannot complete an instruction immediately.
pub(super) enum Hold {
    Nothing,
    /// Compute of this many seconds.
    Work(f64),
    /// A wait until this time.
    Until(f64),
    /// A wait for another rank.
    Others,
}

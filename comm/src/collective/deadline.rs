//! The time limit of an operation.

use std::time::{Duration, Instant};

/// When an operation times out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    pub(crate) started: Instant,
    /// How long a thread may wait for the operation while no data moves.
    pub(crate) timeout: Duration,
}

impl Deadline {
    pub(crate) fn after(timeout: Duration) -> Deadline {
        Deadline { started: Instant::now(), timeout }
    }

    /// Returns the deadline of the next part of the operation, after a part is complete.
    pub(crate) fn renewed(self) -> Deadline {
        Deadline::after(self.timeout)
    }
}

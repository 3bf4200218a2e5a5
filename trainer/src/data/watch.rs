//! Lets a program show the progress of data preparation, and stop it.

use zero_engine::DataError;

/// A phase of data preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Objects are downloaded from a store.
    Downloading,
    /// This thread waits for another process or thread that tokenizes.
    Waiting,
    /// Files are hashed to find their entries in the cache.
    Hashing,
    /// Files are tokenized.
    Tokenizing,
}

/// Observes the preparation of data. Its methods are called often.
pub(crate) trait Watch {
    /// Shows that `done` of `total` bytes of a phase are complete.
    fn progress(&self, phase: Phase, done: u64, total: u64);

    /// Returns whether to stop the preparation with [`DataError::Stopped`](super::DataError::Stopped).
    fn is_stopped(&self) -> bool;

    /// Fails if the preparation should stop.
    fn goes_on(&self) -> Result<(), DataError> {
        if self.is_stopped() { Err(DataError::Stopped) } else { Ok(()) }
    }
}

/// Shows nothing and never stops.
pub(crate) struct Unwatched;

impl Watch for Unwatched {
    fn progress(&self, _: Phase, _: u64, _: u64) {}

    fn is_stopped(&self) -> bool {
        false
    }
}

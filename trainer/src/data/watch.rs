//! What a program shows while data are prepared, and how it ends the preparation.

use zero_engine::DataError;

/// The part of a preparation that takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Objects of a store are downloaded.
    Downloading,
    /// Another process or thread tokenizes.
    Waiting,
    /// Files are read to find out whether their content is in the cache.
    Hashing,
    /// Files are tokenized.
    Tokenizing,
}

/// A program that opens data. It is called often.
pub(crate) trait Watch {
    /// Shows that `done` of `total` bytes of a phase are done.
    fn progress(&self, phase: Phase, done: u64, total: u64);

    /// Returns whether to end the preparation with [`DataError::Stopped`](super::DataError::Stopped).
    fn is_stopped(&self) -> bool;

    /// Fails if the preparation is to end.
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

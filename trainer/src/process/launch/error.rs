//! Errors of a launcher.

use std::fmt::Display;

use zero_engine::Error;

/// Returns a function that adds a description of the failed operation to an error.
pub(super) fn failed<E: Display>(what: impl Display) -> impl FnOnce(E) -> Error {
    move |error| Error::Launch(format!("{what}: {error}"))
}

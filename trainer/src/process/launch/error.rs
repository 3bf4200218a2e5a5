//! Errors of a launcher.

use std::fmt::Display;

use zero_engine::Error;

/// Returns an error that names what has failed.
pub(super) fn failed<E: Display>(what: impl Display) -> impl FnOnce(E) -> Error {
    move |error| Error::Launch(format!("{what}: {error}"))
}

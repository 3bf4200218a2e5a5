//! Converts panics of crates that read files to errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code of a crate that may panic on a malformed file.
///
/// # Errors
/// Returns the message of the panic.
pub(super) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
            (Some(message), _) => message.clone(),
            (_, Some(message)) => message.to_string(),
            _ => "unknown".into(),
        }
    })
}

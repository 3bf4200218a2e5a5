//! Failpoints: named points of a save at which tests kill a process or make an operation fail.
//!
//! They exist only with the feature `failpoints`, which only the test build enables. The environment variable
//! `FAILPOINTS` selects the actions: `save::renamed=return(kill 0)` kills rank 0 at the failpoint `save::renamed`, and
//! `save::shard-begun=return(full 1)` simulates a full disk on rank 1.

use std::path::Path;

use crate::error::CheckpointError;

/// All failpoints, in the order in which a save passes them.
pub const FAILPOINTS: [&str; 11] = [
    "save::begun",
    "save::shard-begun",
    "save::shard-written",
    "save::shard-synced",
    "save::manifest-written",
    "save::moved-aside",
    "save::renamed",
    "save::synced",
    "save::pointer-written",
    "save::pointed",
    "save::retained",
];

/// Passes a failpoint; `path` is the file or folder being written.
#[cfg(feature = "failpoints")]
pub(crate) fn at(name: &'static str, path: &Path) -> Result<(), CheckpointError> {
    fail::fail_point!(name, |action| act(action.as_deref().unwrap_or_default(), path));
    Ok(())
}

/// Does nothing without the feature `failpoints`.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn at(_name: &'static str, _path: &Path) -> Result<(), CheckpointError> {
    Ok(())
}

/// Activates the failpoints in `FAILPOINTS` until the returned value is dropped.
#[cfg(feature = "failpoints")]
#[must_use]
pub fn failpoints() -> impl Drop {
    fail::FailScenario::setup()
}

/// Does nothing without the feature `failpoints`.
#[cfg(not(feature = "failpoints"))]
pub fn failpoints() {}

/// Carries out an action if this process has the action's rank. An action is `kill` or `full`, followed by a rank.
#[cfg(feature = "failpoints")]
fn act(action: &str, path: &Path) -> Result<(), CheckpointError> {
    let own = std::env::var("RANK").unwrap_or_else(|_| "0".into());
    match action.split_once(' ') {
        Some((_, rank)) if rank != own => Ok(()),
        Some(("kill", _)) => {
            // SIGKILL rather than a panic or an exit, so that no cleanup runs.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            Ok(())
        }
        Some(("full", _)) => Err(CheckpointError::io(path)(rustix::io::Errno::NOSPC.into())),
        _ => Err(CheckpointError::io(path)(std::io::Error::other(format!("no such action: {action}")))),
    }
}

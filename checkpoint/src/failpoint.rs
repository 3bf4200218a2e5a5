//! Named points of a save at which tests make a process die or an operation fail.
//!
//! They are there with the feature `failpoints`, which no build but that of the tests asks for. `FAILPOINTS` in the environment says
//! what happens: `save::renamed=return(kill 0)` kills rank 0 there, `save::shard-begun=return(full 1)` fills rank 1's disk.

use std::path::Path;

use crate::error::CheckpointError;

/// All of them, in the order in which a save passes them.
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

/// Passes a point on the way of a file or folder.
#[cfg(feature = "failpoints")]
pub(crate) fn at(name: &'static str, path: &Path) -> Result<(), CheckpointError> {
    fail::fail_point!(name, |action| act(action.as_deref().unwrap_or_default(), path));
    Ok(())
}

/// Passes a point.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn at(_name: &'static str, _path: &Path) -> Result<(), CheckpointError> {
    Ok(())
}

/// Reads `FAILPOINTS`, for as long as the value lives.
#[cfg(feature = "failpoints")]
#[must_use]
pub fn failpoints() -> impl Drop {
    fail::FailScenario::setup()
}

/// There are none.
#[cfg(not(feature = "failpoints"))]
pub fn failpoints() {}

/// Does what a test asks of one rank: `kill` or `full`, and the rank's number.
#[cfg(feature = "failpoints")]
fn act(action: &str, path: &Path) -> Result<(), CheckpointError> {
    let own = std::env::var("RANK").unwrap_or_else(|_| "0".into());
    match action.split_once(' ') {
        Some((_, rank)) if rank != own => Ok(()),
        Some(("kill", _)) => {
            // Not a panic and not an exit: nothing is cleaned up.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            Ok(())
        }
        Some(("full", _)) => Err(CheckpointError::io(path)(rustix::io::Errno::NOSPC.into())),
        _ => Err(CheckpointError::io(path)(std::io::Error::other(format!("no such action: {action}")))),
    }
}

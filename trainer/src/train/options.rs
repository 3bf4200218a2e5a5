//! Options of a run that the configuration does not have, and the ways in which a run ends without an error.

use std::path::PathBuf;

use super::progress::Output;
use super::restart::Restarts;

/// The checkpoint to resume from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest checkpoint in the run's own folder or, if there is none, in its `training.checkpoint_store`. Starts a new
    /// run if that has none either.
    Auto,
    /// The checkpoint in this folder or at this address of a store, or the newest one if it is a run's folder.
    From(PathBuf),
}

/// Options that the command line adds to the configuration.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// Resume instead of starting a new run.
    pub resume: Option<Resume>,
    /// Restarts of the run so far, and the checkpoints of earlier attempts to resume from. Empty unless a launcher has restarted the
    /// run.
    pub restarts: Restarts,
    /// The launcher's name for its job. All attempts of a job have the same name, and no other job has it.
    pub job: Option<String>,
    /// Train for this many steps, and compare the losses with one process at ZeRO stage 0.
    pub verify: Option<u64>,
    /// Ignore `training.memory_limit`.
    pub force: bool,
    /// How much the run prints.
    pub output: Output,
}

/// How a run ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// The run completed, or stopped early.
    Done,
    /// This signal stopped the run after a checkpoint was saved.
    Stopped(i32),
}

//! Options of a run that are not in the configuration, and the ways in which a run ends without an error.

use std::path::PathBuf;

use super::output::progress::Output;
use super::restart::Restarts;

/// The checkpoint to resume from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest checkpoint in the run's own folder or, without one, in its `training.checkpoint_store`. If neither
    /// has a checkpoint, a new run starts.
    Auto,
    /// The checkpoint in this folder or at this store URL. For a run folder, the run's newest checkpoint.
    From(PathBuf),
}

/// Options on the command line, in addition to the configuration.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// The checkpoint to resume from. `None` starts a new run.
    pub resume: Option<Resume>,
    /// Restarts of the run so far, and the checkpoints of earlier attempts to resume from. Empty unless a launcher has
    /// restarted the run.
    pub restarts: Restarts,
    /// The launcher's name for its job, which all attempts of the job share. No other job has the same name.
    pub job: Option<String>,
    /// Trains for this number of steps, and compares the losses with the losses of one process at ZeRO stage 0.
    pub verify: Option<u64>,
    /// Evaluates the model on the evaluation data instead of training it, and writes no files.
    pub evaluate: bool,
    /// Whether to ignore `training.memory_limit`.
    pub force: bool,
    /// What the run prints.
    pub output: Output,
}

/// How a run ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// The run completed, or stopped early.
    Done,
    /// This signal stopped the run, after the run had saved a checkpoint.
    Stopped(i32),
}

impl Finished {
    /// Returns the exit status of a program whose run ended in this way: 0, or 128 plus the signal number.
    #[must_use]
    pub fn exit_status(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Stopped(signal) => 128 + u8::try_from(signal).unwrap_or(0),
        }
    }
}

//! What the caller of a run adds to the configuration, and how a run ends well.

use std::path::PathBuf;

use super::progress::{DrawBar, Output};
use super::restart::Restarts;

/// Where a run goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// From the newest checkpoint of its own folder; anew if there is none.
    Auto,
    /// From a checkpoint's folder, or the newest of a run's.
    From(PathBuf),
}

/// What the command line adds to the configuration.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// Go on instead of starting anew.
    pub resume: Option<Resume>,
    /// What earlier attempts have left, where a launcher has started the run again.
    pub restarts: Restarts,
    /// The launcher's name for its job, which its attempts have in common and no other job has.
    pub job: Option<String>,
    /// Train so many steps, and compare them with one process at ZeRO stage 0.
    pub verify: Option<u64>,
    /// Go on beyond `training.memory_limit`.
    pub force: bool,
    /// How much is printed.
    pub output: Output,
    /// Draws the bar on a terminal.
    pub bar: Option<DrawBar>,
}

/// How a run ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// It is done.
    Done,
    /// This signal asked for it; a checkpoint is written.
    Stopped(i32),
}

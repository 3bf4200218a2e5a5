//! Starts the ranks of this host as processes, ends them together, and starts them again when one has died.
//!
//! The parent hosts the store where the ranks meet, and gives each its place in the variables that torchrun uses. It
//! trains nothing itself. Each attempt has a number and processes of its own; the next one begins when all
//! processes of the last have ended. Of several hosts each has a launcher, and that of host 0 says what comes next.

mod attempt;
mod attempts;
pub(crate) mod hosts;
mod job;
mod outcome;
pub(crate) mod output;
mod recovery;
mod signals;
mod training;

pub(crate) use attempts::launch;
pub(crate) use job::{Job, Team};
pub(crate) use training::{launch_program, launch_training, train};

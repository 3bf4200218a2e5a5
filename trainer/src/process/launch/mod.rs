//! Starts the ranks of this host as processes, ends them together, and restarts them when one has died.
//!
//! The launcher serves the store through which the ranks connect. It tells each rank its rank number and the number of
//! ranks in the same environment variables as torchrun. It does not train itself. Each attempt has a number and its own
//! processes. The next attempt begins when all processes of the previous attempt have ended. On several hosts, each
//! host has a launcher, and the launcher of host 0 makes the decisions.

mod attempt;
mod attempts;
mod error;
mod hosts;
mod job;
mod outcome;
mod output;
mod recovery;
mod signals;

pub use attempts::launch;
pub use hosts::{Hosts, Reach};
pub use job::{GRACE, Job, Team, What, one_a_gpu};
pub use output::{Output, Tee};
pub use recovery::{Before, Recovery, same_batch, unchanged};

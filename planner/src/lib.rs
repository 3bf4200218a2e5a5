//! Plans configurations before they run: memory, traffic and time of each rank. Also finds changes that make a
//! configuration fit into memory, and the fastest configuration that fits.
//!
//! [`Plan`] walks the same programs that an engine executes. [`advice()`] changes a configuration until it fits;
//! [`autotune`] searches for the fastest configuration, or for the best hyperparameters.

#![forbid(unsafe_code)]

mod advice;
pub mod autotune;
mod disk;
mod hosts;
pub mod memory;
pub mod page;
mod plan;
pub mod processor;

pub use advice::{Advice, Ranks, advice, other_ranks};
pub use hosts::{OnHosts, layouts_on_hosts};
pub use memory::{Limit, MemoryKind};
pub use plan::{MemoryPlan, Plan, Planner};

//! What a configuration comes to before it runs: memory, traffic and time of each rank, what would make it fit, and the fastest that does.
//!
//! [`Plan`] walks the very programs that an engine carries out. [`advice()`] changes a configuration until it fits; [`autotune`] searches for
//! the fastest one, or for the best hyperparameters. Most programs use `zero_train`, which exports what is here.

#![forbid(unsafe_code)]

mod advice;
pub mod autotune;
mod disk;
pub mod memory;
mod plan;
pub mod processor;

pub use advice::{Advice, Ranks, advice, other_ranks};
pub use memory::Limit;
pub use plan::{MemoryPlan, Plan, Planner};

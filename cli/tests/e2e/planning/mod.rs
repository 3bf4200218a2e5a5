//! Plans, cost tables and searches, held against runs.

mod autotune;
mod costs;
mod memory;
mod plan;
mod resident;
mod sweep;

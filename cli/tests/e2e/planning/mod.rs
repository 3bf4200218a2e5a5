//! Plans, cost tables and searches, compared with runs.

mod autotune;
mod costs;
mod hosts;
mod memory;
mod plan;
mod resident;
mod sweep;

//! Passes: `Program -> Program`. They put ZeRO's communication into a step that a schedule wrote.

mod gather;
mod reduce;
mod refresh;

pub use gather::{GatherOptions, gather};
pub use reduce::{ReduceOptions, reduce};
pub use refresh::{RefreshOptions, refresh};

use zero_pipeline::{ModelShape, Program, schedule};

/// Everything that the passes are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassOptions {
    /// For sharded parameters.
    pub gather: GatherOptions,
    /// For gradients.
    pub reduce: ReduceOptions,
    /// For parameters that every rank keeps but each updates a part of.
    pub refresh: RefreshOptions,
}

/// The program of one global batch: plain accumulation, then all passes.
#[must_use]
pub fn training_step(shape: &ModelShape, micro_batches: usize, options: &PassOptions) -> Program {
    let program = schedule::accumulation(shape, micro_batches);
    let program = reduce(program, shape, &options.reduce);
    let program = gather(program, shape, &options.gather);
    refresh(program, shape, &options.refresh)
}

/// The program of an evaluation of that many micro-batches.
#[must_use]
pub fn evaluation(shape: &ModelShape, micro_batches: usize, options: &PassOptions) -> Program {
    gather(schedule::forward_only(shape, micro_batches), shape, &options.gather)
}

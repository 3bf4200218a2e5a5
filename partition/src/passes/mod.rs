//! Passes: functions `Program -> Program` that add ZeRO's communication to the program of a schedule.

mod gather;
mod keep_on_disk;
mod offload;
mod outer;
mod recompute;
mod reduce;
mod refresh;
mod tie;

pub use gather::{GatherOptions, gather};
pub use keep_on_disk::keep_on_disk;
pub use offload::{OffloadOptions, offload};
pub use outer::outer_step;
pub use recompute::{RecomputeOptions, recompute};
pub use reduce::{ReduceOptions, reduce};
pub use refresh::{RefreshOptions, refresh};
pub use tie::tie;

use zero_pipeline::{ModelShape, Program, Schedule, StageId, Stages, schedule};

/// Options of all passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassOptions {
    /// Activation checkpointing.
    pub recompute: RecomputeOptions,
    /// Gathers of sharded parameters.
    pub gather: GatherOptions,
    /// Reductions of gradients.
    pub reduce: ReduceOptions,
    /// Options of refreshes, which gather replicated parameters that ranks update in parts.
    pub refresh: RefreshOptions,
    /// Offloading to a disk.
    pub offload: OffloadOptions,
}

/// The pipeline stage for which a program is written.
#[derive(Debug, Clone, Copy)]
pub struct Share<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// Assignment of layers to stages.
    pub stages: &'a Stages,
    /// The stage.
    pub stage: StageId,
}

/// Returns the program of one global batch: the schedule, followed by all passes.
#[must_use]
pub fn training_step(share: &Share, schedule: Schedule, micro_batches: usize, options: &PassOptions) -> Program {
    let Share { shape, stages, stage } = *share;
    let program = schedule::training(schedule, shape, stages, stage, micro_batches);
    let program = recompute(program, stages, stage, &options.recompute);
    let program = if options.recompute.on_disk { keep_on_disk(program) } else { program };
    let program = reduce(program, shape, &options.reduce);
    let program = gather(program, shape, &options.gather);
    let program = refresh(program, shape, &options.refresh);
    let program = tie(program, shape, stages, stage);
    offload(program, shape, &options.offload)
}

/// Returns the program of an outer step, which averages replicates that train independently.
#[must_use]
pub fn averaging(share: &Share, options: &PassOptions) -> Program {
    let Share { shape, stages, stage } = *share;
    let program = refresh(outer_step(shape, stages, stage), shape, &options.refresh);
    tie(program, shape, stages, stage)
}

/// Returns the program of an evaluation of `micro_batches` micro-batches.
#[must_use]
pub fn evaluation(share: &Share, micro_batches: usize, options: &PassOptions) -> Program {
    let Share { shape, stages, stage } = *share;
    let program = gather(schedule::forward_only(shape, stages, stage, micro_batches), shape, &options.gather);
    offload(program, shape, &options.offload)
}

//! Passes: `Program -> Program`. They put ZeRO's communication into a step that a schedule wrote.

mod gather;
mod keep_on_disk;
mod offload;
mod recompute;
mod reduce;
mod refresh;
mod tie;

pub use gather::{GatherOptions, gather};
pub use keep_on_disk::keep_on_disk;
pub use offload::{OffloadOptions, offload};
pub use recompute::{RecomputeOptions, recompute};
pub use reduce::{ReduceOptions, reduce};
pub use refresh::{RefreshOptions, refresh};
pub use tie::tie;

use zero_pipeline::{ModelShape, Program, Schedule, StageId, Stages, schedule};

/// Everything that the passes are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassOptions {
    /// For activations.
    pub recompute: RecomputeOptions,
    /// For sharded parameters.
    pub gather: GatherOptions,
    /// For gradients.
    pub reduce: ReduceOptions,
    /// For parameters that every rank keeps but each updates a part of.
    pub refresh: RefreshOptions,
    /// For what lives on a disk.
    pub offload: OffloadOptions,
}

/// A stage of a pipeline, for which a program is written.
#[derive(Debug, Clone, Copy)]
pub struct Share<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// How it is cut.
    pub stages: &'a Stages,
    /// Which of the stages.
    pub stage: StageId,
}

/// The program of one global batch: the schedule, then all passes.
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

/// The program of an evaluation of that many micro-batches.
#[must_use]
pub fn evaluation(share: &Share, micro_batches: usize, options: &PassOptions) -> Program {
    let Share { shape, stages, stage } = *share;
    let program = gather(schedule::forward_only(shape, stages, stage, micro_batches), shape, &options.gather);
    offload(program, shape, &options.offload)
}

//! Averages the parameters of replicates that train independently.

use zero_pipeline::{Instruction, ModelShape, Program, SegmentId, StageId, Stages};

/// Writes [`Instruction::OuterStep`] and [`Instruction::AwaitOuterStep`] for each segment that a stage updates. Each
/// outer step is awaited after the next one has started.
#[must_use]
pub fn outer_step(shape: &ModelShape, stages: &Stages, stage: StageId) -> Program {
    let is_updated = |&id: &SegmentId| stages.owner(id) == stage && shape.segments[id].is_trainable;
    let (mut instructions, mut last) = (vec![], None);
    for segment in (0..shape.segments.len()).filter(is_updated) {
        instructions.push(Instruction::OuterStep { segment });
        instructions.extend(last.replace(segment).map(|segment| Instruction::AwaitOuterStep { segment }));
    }
    instructions.extend(last.map(|segment| Instruction::AwaitOuterStep { segment }));
    Program { instructions, micro_batches: 0 }
}

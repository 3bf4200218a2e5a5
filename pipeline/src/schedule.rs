//! Schedules: who computes what when. A schedule is a pure function; it knows nothing of ZeRO.

use crate::instruction::{Instruction, Program};
use crate::shape::ModelShape;

/// Plain gradient accumulation: each micro-batch forward and backward, then one optimizer step.
#[must_use]
pub fn accumulation(shape: &ModelShape, micro_batches: usize) -> Program {
    let mut instructions = vec![];
    for micro_batch in 0..micro_batches {
        instructions.push(Instruction::Load { micro_batch });
        instructions.extend((0..shape.layers.len()).map(|layer| Instruction::Forward { layer, micro_batch }));
        instructions.extend((0..shape.layers.len()).rev().map(|layer| Instruction::Backward { layer, micro_batch }));
    }
    instructions.push(Instruction::GradientNorm);
    instructions.extend((0..shape.segments.len()).map(|segment| Instruction::Update { segment }));
    Program { instructions, micro_batches }
}

/// Evaluation: each micro-batch forward.
#[must_use]
pub fn forward_only(shape: &ModelShape, micro_batches: usize) -> Program {
    let mut instructions = vec![];
    for micro_batch in 0..micro_batches {
        instructions.push(Instruction::Load { micro_batch });
        instructions.extend((0..shape.layers.len()).map(|layer| Instruction::Forward { layer, micro_batch }));
    }
    Program { instructions, micro_batches }
}

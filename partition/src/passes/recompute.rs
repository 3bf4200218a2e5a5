//! Activation checkpointing: what forwards keep is given up, and made once more for the backward.
//!
//! Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016: layers are taken in groups, the inputs of a
//! group's first layer are kept, and the whole group is run again before its backward.

use std::ops::Range;

use zero_pipeline::{Instruction, LayerId, Program, StageId, Stages};

/// What is run again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecomputeOptions {
    /// By layer of the model, whether it is; those that are not on the list are not. The last layer never is: its forward is part of its backward.
    pub layers: Vec<bool>,
    /// The most layers of a group, at least 1: more keep fewer inputs, and need more memory while one group is run again.
    pub interval: usize,
    /// Whether the inputs that are kept wait on a disk.
    pub on_disk: bool,
}

impl RecomputeOptions {
    /// Nothing is run again.
    #[must_use]
    pub fn none() -> Self {
        Self { layers: vec![], interval: 1, on_disk: false }
    }

    /// The groups of a stage: neighbours in one chunk.
    #[must_use]
    pub fn groups(&self, stages: &Stages, stage: StageId) -> Vec<Range<LayerId>> {
        let last = stages.layers() - 1;
        let is_chosen = |layer: LayerId| layer < last && self.layers.get(layer).copied().unwrap_or(false);
        let mut groups: Vec<Range<LayerId>> = vec![];
        for chunk in stages.chunks().iter().skip(stage).step_by(stages.count()) {
            // A group never reaches over the end of a chunk.
            let mut fresh = true;
            for layer in chunk.clone() {
                match groups.last_mut() {
                    _ if !is_chosen(layer) => fresh = true,
                    Some(group) if !fresh && group.len() < self.interval => group.end = layer + 1,
                    _ => {
                        groups.push(layer..layer + 1);
                        fresh = false;
                    }
                }
            }
        }
        groups
    }
}

/// Puts [`Instruction::Keep`], [`Instruction::Discard`] and [`Instruction::Recompute`] into a training step.
#[must_use]
pub fn recompute(program: Program, stages: &Stages, stage: StageId, options: &RecomputeOptions) -> Program {
    let groups = options.groups(stages, stage);
    let group_of = |layer: LayerId| groups.iter().find(|group| group.contains(&layer));
    let mut out = Vec::with_capacity(program.instructions.len());
    for instruction in program.instructions {
        match instruction {
            Instruction::Forward { layer, micro_batch } => {
                let group = group_of(layer);
                if group.is_some_and(|group| group.start == layer) {
                    out.push(Instruction::Keep { layer, micro_batch });
                }
                out.push(instruction);
                if group.is_some() {
                    out.push(Instruction::Discard { layer, micro_batch });
                }
            }
            Instruction::Backward { layer, micro_batch } | Instruction::BackwardInput { layer, micro_batch } => {
                if let Some(group) = group_of(layer).filter(|group| group.end == layer + 1) {
                    out.extend(group.clone().map(|layer| Instruction::Recompute { layer, micro_batch }));
                }
                out.push(instruction);
            }
            _ => out.push(instruction),
        }
    }
    Program { instructions: out, micro_batches: program.micro_batches }
}

//! Activation checkpointing: frees the activations of forwards and recomputes them for the backward.
//!
//! Follows Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016: layers form groups, the
//! inputs of a group's first layer are kept, and the whole group is recomputed before its backward.

use std::ops::Range;

use zero_pipeline::{Instruction, LayerId, Program, StageId, Stages};

/// Options of recomputation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecomputeOptions {
    /// Whether to recompute each layer of the model; `false` beyond the end of the list. The last layer is never
    /// recomputed, because its forward is part of its backward.
    pub layers: Vec<bool>,
    /// Maximum layers per group, at least 1. Larger groups keep fewer inputs but need more memory while a group is
    /// recomputed.
    pub interval: usize,
    /// Whether the kept inputs are offloaded to a disk.
    pub on_disk: bool,
}

impl RecomputeOptions {
    /// Returns options without recomputation.
    #[must_use]
    pub fn none() -> Self {
        Self { layers: vec![], interval: 1, on_disk: false }
    }

    /// Returns the groups of a stage: consecutive layers of one chunk.
    #[must_use]
    pub fn groups(&self, stages: &Stages, stage: StageId) -> Vec<Range<LayerId>> {
        let last = stages.layers() - 1;
        let is_chosen = |layer: LayerId| layer < last && self.layers.get(layer).copied().unwrap_or(false);
        let mut groups: Vec<Range<LayerId>> = vec![];
        for chunk in stages.chunks().iter().skip(stage).step_by(stages.count()) {
            // A group never extends past the end of a chunk.
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

/// Inserts [`Instruction::Keep`], [`Instruction::Discard`] and [`Instruction::Recompute`] into a training step.
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

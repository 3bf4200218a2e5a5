//! Counts the micro-batches whose activations a rank holds.

use std::collections::BTreeMap;

use crate::instruction::{Instruction, Program};
use crate::stages::Stages;

/// Returns the peak number of micro-batches alive on this rank. A micro-batch is alive in a chunk from the start of its
/// forward to the end of its backward in this chunk. A micro-batch that is alive in two chunks counts twice. Returns 0
/// for a program that does not train.
#[must_use]
pub fn alive(program: &Program, stages: &Stages) -> usize {
    if !program.trains() {
        return 0;
    }
    let chunks = stages.chunks().iter().enumerate();
    let chunks: Vec<usize> = chunks.flat_map(|(index, chunk)| chunk.clone().map(move |_| index)).collect();
    // By chunk and micro-batch: the number of layers whose forward has run and whose backward has not.
    let mut layers: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut peak = 0;
    let trained = program.instructions.iter().filter_map(|instruction| match *instruction {
        Instruction::Backward { layer, .. } | Instruction::BackwardWeight { layer, .. } => Some(layer),
        _ => None,
    });
    // Layers before the first trained layer keep no activations.
    let first_trained = trained.min().unwrap_or(usize::MAX);
    for instruction in &program.instructions {
        match *instruction {
            Instruction::Forward { layer, micro_batch } if layer >= first_trained => {
                *layers.entry((chunks[layer], micro_batch)).or_default() += 1;
                peak = layers.len().max(peak);
            }
            Instruction::Backward { layer, micro_batch } | Instruction::BackwardWeight { layer, micro_batch } => {
                let key = (chunks[layer], micro_batch);
                match layers.get(&key) {
                    Some(&count) if count > 1 => drop(layers.insert(key, count - 1)),
                    _ => drop(layers.remove(&key)),
                }
            }
            _ => {}
        }
    }
    peak
}

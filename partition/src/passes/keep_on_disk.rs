//! Offloads the inputs kept for recomputation to a disk.

use std::collections::{BTreeMap, BTreeSet};

use zero_pipeline::{Instruction, Item, LayerId, Program};

/// Inserts [`Instruction::Offload`] and [`Instruction::Fetch`] for activations, with their awaits, into a training
/// step.
///
/// Inputs are written while the next layers run, and read during the backward that runs just before the backward of
/// their own group. Inputs stay in memory if the program keeps or recomputes nothing else before they are needed.
#[must_use]
pub fn keep_on_disk(program: Program) -> Program {
    let Program { instructions, micro_batches } = program;
    // Positions at which inputs are kept and used, in order.
    let mut events: Vec<(usize, (LayerId, usize))> = vec![];
    let mut kept = BTreeSet::new();
    for (at, instruction) in instructions.iter().enumerate() {
        match *instruction {
            Instruction::Keep { layer, micro_batch } => {
                kept.insert((layer, micro_batch));
                events.push((at, (layer, micro_batch)));
            }
            Instruction::Recompute { layer, micro_batch } if kept.contains(&(layer, micro_batch)) => {
                events.push((at, (layer, micro_batch)));
            }
            _ => {}
        }
    }
    let mut before: BTreeMap<usize, Vec<Instruction>> = BTreeMap::new();
    for (index, &(at, subject)) in events.iter().enumerate() {
        let Some(used) = events[index + 1..].iter().position(|(_, other)| *other == subject) else { continue };
        if used == 0 {
            continue;
        }
        let item = Item::Activations { layer: subject.0, micro_batch: subject.1 };
        let (next, used) = (events[index + 1].0, index + 1 + used);
        // At most one write and one read are in flight: each is awaited where the next begins.
        before.entry(at + 1).or_default().push(Instruction::Offload { item });
        before.entry(next).or_default().push(Instruction::AwaitOffload { item });
        before.entry(events[used - 1].0.max(next)).or_default().push(Instruction::Fetch { item });
        before.entry(events[used].0).or_default().push(Instruction::AwaitFetch { item });
    }
    let mut out = Vec::with_capacity(instructions.len());
    for (at, instruction) in instructions.into_iter().enumerate() {
        out.extend(before.remove(&at).unwrap_or_default());
        out.push(instruction);
    }
    Program { instructions: out, micro_batches }
}

//! `memory_breakdown`: what is held in each part of a step, by category.

use zero_partition::{CATEGORIES, Category, Ledger};
use zero_pipeline::Instruction;

/// A part of a step: from its first instruction on until one of another part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Forward,
    Backward,
    Update,
}

/// Bytes of each category, and of all at a time.
pub type Bytes = [u64; CATEGORIES.len() + 1];

/// The most of each part of the last step, and what its last instruction held.
#[derive(Debug, Clone, Copy)]
pub struct Points {
    part: Part,
    most: [Bytes; 4],
}

impl Points {
    /// What the rows of [`Points::bytes`] are called.
    pub const NAMES: [&'static str; 4] = ["forward", "backward", "step", "its end"];

    pub(crate) fn new() -> Self {
        Self { part: Part::Forward, most: [[0; CATEGORIES.len() + 1]; 4] }
    }

    /// An instruction of a training step is done, while which layers have held so many bytes beside what the ledger knows.
    pub(crate) fn note(&mut self, instruction: &Instruction, index: usize, ledger: &Ledger, activations: u64) {
        if index == 0 {
            *self = Self::new();
        }
        self.part = match instruction {
            Instruction::Forward { .. } => Part::Forward,
            Instruction::Recompute { .. }
            | Instruction::Backward { .. }
            | Instruction::BackwardInput { .. }
            | Instruction::BackwardWeight { .. } => Part::Backward,
            Instruction::GradientNorm | Instruction::Update { .. } | Instruction::UpdateTile { .. } => Part::Update,
            _ => self.part,
        };
        let held = held(ledger, activations);
        let most = &mut self.most[self.part as usize];
        most.iter_mut().zip(held).for_each(|(most, held)| *most = (*most).max(held));
        self.most[3] = held;
    }

    /// By part of the step, then at its last instruction.
    pub fn bytes(&self) -> &[Bytes; 4] {
        &self.most
    }
}

fn held(ledger: &Ledger, activations: u64) -> Bytes {
    let of = |category: Category| match category {
        Category::Activations => activations,
        other => ledger.now(other),
    };
    let total = CATEGORIES.into_iter().map(of).sum();
    std::array::from_fn(|column| CATEGORIES.get(column).map_or(total, |category| of(*category)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_its_most_and_a_step_begins_anew() {
        let (mut points, mut ledger) = (Points::new(), Ledger::default());
        ledger.add(Category::Parameters, 10, 4);
        for _ in 0..2 {
            points.note(&Instruction::Load { micro_batch: 0 }, 0, &ledger, 0);
            points.note(&Instruction::Forward { layer: 0, micro_batch: 0 }, 1, &ledger, 100);
            ledger.add(Category::Staging, 1, 7);
            points.note(&Instruction::Gather { segment: 0 }, 2, &ledger, 60);
            ledger.remove(Category::Staging, 1, 7);
            points.note(&Instruction::Backward { layer: 0, micro_batch: 0 }, 3, &ledger, 200);
            points.note(&Instruction::GradientNorm, 4, &ledger, 0);
        }
        let row = |part: usize| {
            let row = points.bytes()[part];
            [Category::Parameters, Category::Activations, Category::Staging].map(|c| row[c as usize])
        };
        assert_eq!([row(0), row(1), row(2), row(3)], [[40, 100, 7], [40, 200, 0], [40, 0, 0], [40, 0, 0]]);
        assert_eq!(points.bytes().map(|row| row[CATEGORIES.len()]), [140, 240, 40, 40], "at a time");
    }
}

//! `memory_breakdown`: peak memory in each part of a step, by category.

use zero_partition::{CATEGORIES, Category, Ledger};
use zero_pipeline::Instruction;

/// A part of a step. It lasts from its first instruction until the first instruction of another part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Forward,
    Backward,
    Update,
}

/// Bytes of each category, followed by the total. The total of a peak is the peak of the sum of all categories, not the
/// sum of their peaks.
pub type Bytes = [u64; CATEGORIES.len() + 1];

/// Peak memory in each part of the last step, and the memory in use at its last instruction, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Points {
    part: Part,
    most: [Bytes; 4],
}

impl Points {
    /// Names of the rows of [`Points::bytes`].
    pub const NAMES: [&'static str; 4] = ["forward", "backward", "step", "end"];

    pub(crate) fn new() -> Self {
        Self { part: Part::Forward, most: [[0; CATEGORIES.len() + 1]; 4] }
    }

    /// Records an instruction of a training step, during which `activations` bytes were held in addition to the ledger.
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
            Instruction::GradientNorm
            | Instruction::Update { .. }
            | Instruction::MeasureTile { .. }
            | Instruction::UpdateTile { .. } => Part::Update,
            _ => self.part,
        };
        let held = held(ledger, activations);
        let most = &mut self.most[self.part as usize];
        most.iter_mut().zip(held).for_each(|(most, held)| *most = (*most).max(held));
        self.most[3] = held;
    }

    /// Returns the peak memory of forward, backward and update, then the memory in use at the last instruction.
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
    fn memory_peaks_are_per_part_and_per_step() {
        let (mut points, mut ledger) = (Points::new(), Ledger::default());
        ledger.add(Category::Parameters, 10, 4);
        for _ in 0..2 {
            points.note(&Instruction::Load { micro_batch: 0 }, 0, &ledger, 0);
            points.note(&Instruction::Forward { layer: 0, micro_batch: 0 }, 1, &ledger, 100);
            ledger.add(Category::Staging, 1, 7);
            points.note(&Instruction::Gather { segments: vec![0] }, 2, &ledger, 60);
            ledger.remove(Category::Staging, 1, 7);
            points.note(&Instruction::Backward { layer: 0, micro_batch: 0 }, 3, &ledger, 200);
            points.note(&Instruction::GradientNorm, 4, &ledger, 0);
        }
        let row = |part: usize| {
            let row = points.bytes()[part];
            [Category::Parameters, Category::Activations, Category::Staging].map(|c| row[c as usize])
        };
        assert_eq!([row(0), row(1), row(2), row(3)], [[40, 100, 7], [40, 200, 0], [40, 0, 0], [40, 0, 0]]);
        assert_eq!(points.bytes().map(|row| row[CATEGORIES.len()]), [140, 240, 40, 40], "total");
    }
}

//! Measures the bytes that this rank has allocated, to compare a step with its memory plan.

use zero_comm::{Communicator, heap};
use zero_partition::{CATEGORIES, ShardedState};
use zero_pipeline::Instruction;

use crate::error::Error;
use crate::format::bytes;

/// Allocated bytes relative to the creation of the engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tracked {
    /// Bytes allocated before the engine was created. `None` if the program does not count allocations, or several
    /// ranks share the process.
    before: Option<usize>,
}

impl Tracked {
    pub(crate) fn begin(comm: &dyn Communicator) -> Self {
        let is_alone = comm.size() == 1 || comm.transport() != "threads";
        Self { before: (heap::counted() && is_alone).then(|| heap::now() + zero_tier::mapped()) }
    }

    /// Resets the peaks before an instruction.
    pub(crate) fn start(&self) {
        if self.before.is_some() {
            heap::reset_peak();
            zero_tier::reset_mapped_peak();
        }
    }

    /// Reads the peaks after an instruction. Bytes that the ledger of `ShardedState` does not count belong to layers
    /// and to messages between stages: records them in the ledger as activations, and returns them.
    pub(crate) fn stop(&self, zero: &mut ShardedState) -> u64 {
        zero.count_idle();
        let Some(before) = self.before else { return 0 };
        let total = (heap::peak() + zero_tier::mapped_peak()).saturating_sub(before) as u64;
        let beside = total.saturating_sub(zero.ledger().total());
        zero.note_activations(beside, total);
        beside
    }
}

/// Checks the peak against `training.memory_limit`.
///
/// # Errors
/// Fails if this rank exceeded the limit; the error lists the peak of each category.
pub(crate) fn within(limit: u64, zero: &ShardedState, instruction: &Instruction) -> Result<(), Error> {
    let ledger = zero.ledger();
    if ledger.peak_total() <= limit {
        return Ok(());
    }
    let (rank, held) = (zero.groups().rank(), bytes(ledger.peak_total()));
    let mut text = format!("rank {rank} needed {held} at `{instruction}`, more than its limit of {}", bytes(limit));
    text += "\n  in: training.memory_limit";
    for category in CATEGORIES {
        text += &format!("\n    {category}: peak {}", bytes(ledger.peak(category)));
    }
    Err(Error::Memory(text + "\n  help: run `zero-train plan` to see which settings need less"))
}

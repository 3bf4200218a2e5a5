//! Bytes that a rank has been given, as the program's allocator counts them: what a step took, held against its plan.

use zero_comm::{Communicator, heap};
use zero_partition::{CATEGORIES, ShardedState};
use zero_pipeline::Instruction;

use crate::error::Error;
use crate::format::bytes;

/// Counts from when the engine was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tracked {
    /// What there was before; `None` where the program does not count, or several ranks share a process.
    before: Option<usize>,
}

impl Tracked {
    pub(crate) fn begin(comm: &dyn Communicator) -> Self {
        let is_alone = comm.size() == 1 || comm.transport() != "threads";
        Self { before: (heap::counted() && is_alone).then(|| heap::now() + zero_tier::mapped()) }
    }

    /// An instruction begins.
    pub(crate) fn start(&self) {
        if self.before.is_some() {
            heap::reset_peak();
            zero_tier::reset_mapped_peak();
        }
    }

    /// It has ended: what was there beside what `ShardedState` knows of was there for layers, and for messages between stages. Gives that back.
    pub(crate) fn stop(&self, zero: &mut ShardedState) -> u64 {
        zero.count_idle();
        let Some(before) = self.before else { return 0 };
        let total = (heap::peak() + zero_tier::mapped_peak()).saturating_sub(before) as u64;
        let beside = total.saturating_sub(zero.ledger().total());
        zero.note_activations(beside, total);
        beside
    }
}

/// # Errors
/// If a rank has held more than it may, with what it was for.
pub(crate) fn within(limit: u64, zero: &ShardedState, instruction: &Instruction) -> Result<(), Error> {
    let ledger = zero.ledger();
    if ledger.peak_total() <= limit {
        return Ok(());
    }
    let (rank, held) = (zero.groups().world().rank(), bytes(ledger.peak_total()));
    let mut text = format!("rank {rank} held {held} and may hold {}, at `{instruction}`", bytes(limit));
    text += "\n  in: training.memory_limit";
    for category in CATEGORIES {
        text += &format!("\n    {category}: {} at most", bytes(ledger.peak(category)));
    }
    Err(Error::Memory(text + "\n  help: `zero-train plan` says what needs less"))
}

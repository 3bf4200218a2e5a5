//! Checks the programs of all ranks together before anything runs.
//!
//! First, each rank's program is checked against the preconditions and effects of its instructions. Then the ranks are
//! compared: the members of a group must start the same collectives in the same order, messages must be received in the
//! order in which they are sent, and no deadlock may occur. A violation names the rank, the instruction and the reason.

mod check;
mod micro_batch;
mod tiers;
mod together;
mod walk;

use std::fmt;

use crate::instruction::Program;
use crate::world::World;

/// A defect in the programs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Violation {
    /// Rank of the faulty program.
    pub rank: usize,
    /// Index of the faulty instruction, or the program's length if an instruction is missing at the end.
    pub index: usize,
    /// Text of the instruction.
    pub instruction: String,
    /// Reason.
    pub reason: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, instruction {} ({}): {}", self.rank, self.index, self.instruction, self.reason)
    }
}

/// Checks the programs of all ranks, one program per rank.
///
/// # Errors
/// Returns the first violation.
///
/// # Panics
/// Panics if the number of programs differs from the number of ranks, or the mesh and `stages` differ in the number of
/// stages.
pub fn validate(programs: &[Program], world: &World) -> Result<(), Violation> {
    assert_eq!(programs.len(), world.mesh.world_size(), "there must be one program per rank");
    assert_eq!(world.stages.count(), world.mesh.pipe(), "the mesh must have as many stages as the model");
    for (rank, program) in programs.iter().enumerate() {
        walk::walk(rank, program, world)?;
    }
    together::same_collectives(programs, world)?;
    together::paired(programs, world)?;
    together::flows(programs, world)
}

pub(crate) fn violation(rank: usize, program: &Program, index: usize, reason: String) -> Violation {
    let instruction = program.instructions.get(index).map_or("end".into(), ToString::to_string);
    Violation { rank, index, instruction, reason }
}

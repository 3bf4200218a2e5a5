//! Checks the programs of all ranks together, before anything runs.
//!
//! Every rank's program is walked with a model of what each instruction needs and leaves. Then the ranks are compared: groups
//! start the same collectives in the same order, every message that is sent is received, in the same order, and nobody waits
//! for somebody who waits. A violation names rank, instruction and reason.

mod tiers;
mod together;
mod walk;

use std::fmt;

use crate::instruction::Program;
use crate::mesh::Mesh;
use crate::shape::ModelShape;
use crate::stages::Stages;

/// Why a program must not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Violation {
    /// Rank whose program it is.
    pub rank: usize,
    /// Index of the instruction, or the program's length if it is what is missing at the end.
    pub index: usize,
    /// The instruction, as text.
    pub instruction: String,
    /// What is wrong.
    pub reason: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, instruction {} ({}): {}", self.rank, self.index, self.instruction, self.reason)
    }
}

/// What programs run on.
#[derive(Debug, Clone, Copy)]
pub struct World<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// Which stage has which layers.
    pub stages: &'a Stages,
    /// Where each rank is.
    pub mesh: Mesh,
    /// How many messages a channel holds that nobody has made room for yet. 0 is a rendezvous: a send is through when its
    /// receive has been posted. What runs with 0 runs with any transport.
    pub capacity: usize,
}

impl<'a> World<'a> {
    /// A model on one pipeline stage.
    ///
    /// # Panics
    /// If there are no ranks.
    #[must_use]
    pub fn data_parallel(shape: &'a ModelShape, stages: &'a Stages, ranks: usize) -> Self {
        Self { shape, stages, mesh: Mesh::new(ranks, 1).expect("there are ranks"), capacity: 0 }
    }
}

/// Checks the programs of all ranks, one for each.
///
/// # Errors
/// The first violation.
///
/// # Panics
/// If there is another number of programs than of ranks, or of stages in the mesh than in the cut: the caller's defect.
pub fn validate(programs: &[Program], world: &World) -> Result<(), Violation> {
    assert_eq!(programs.len(), world.mesh.world_size(), "a program for every rank");
    assert_eq!(world.stages.count(), world.mesh.pipe(), "a mesh for as many stages");
    for (rank, program) in programs.iter().enumerate() {
        walk::walk(rank, program, world)?;
    }
    together::same_collectives(programs, world)?;
    together::paired(programs, world)?;
    together::flows(programs, world)
}

fn violation(rank: usize, program: &Program, index: usize, reason: String) -> Violation {
    let instruction = program.instructions.get(index).map_or("end".into(), ToString::to_string);
    Violation { rank, index, instruction, reason }
}

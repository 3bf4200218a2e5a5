//! The ranks that a rank acts with: all of them, those of its pipeline stage, and those of the other stages with its place on
//! the data axis.

use std::sync::Arc;

use zero_comm::{CommError, Communicator, SizeCounter, Stats};
use zero_pipeline::{Coordinates, Kind, Mesh};

/// The communicators of one rank.
#[derive(Clone)]
pub struct Groups {
    mesh: Mesh,
    at: Coordinates,
    world: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
    /// One for each [`Kind`] of message, so that those of one kind do not wait for those of another. None on one stage.
    pipe: Vec<Arc<dyn Communicator>>,
}

/// Kinds of messages, in the order of their groups.
const KINDS: [Kind; 3] = [Kind::Activations, Kind::Gradients, Kind::Tied];

impl Groups {
    /// The groups of a rank in a mesh; a collective.
    ///
    /// # Errors
    /// A lost rank.
    ///
    /// # Panics
    /// If the mesh has another number of ranks than the world: the caller's defect.
    pub fn new(world: Arc<dyn Communicator>, mesh: Mesh) -> Result<Self, CommError> {
        assert_eq!(world.size(), mesh.world_size(), "the mesh is for another number of ranks");
        let at = mesh.coordinates(world.rank());
        if mesh.pipe() == 1 {
            return Ok(Self { mesh, at, data: world.clone(), world, pipe: vec![] });
        }
        let data = world.split(at.stage, at.replica)?;
        let pipe = KINDS.iter().map(|_| world.split(at.replica, at.stage)).collect::<Result<_, _>>()?;
        Ok(Self { mesh, at, world, data, pipe })
    }

    /// Plain data parallelism: one pipeline stage.
    ///
    /// # Panics
    /// Never: a world has ranks.
    #[must_use]
    pub fn data_parallel(world: Arc<dyn Communicator>) -> Self {
        let mesh = Mesh::new(world.size(), 1).expect("a world has ranks");
        let at = mesh.coordinates(world.rank());
        Self { mesh, at, data: world.clone(), world, pipe: vec![] }
    }

    /// How ranks are arranged.
    #[must_use]
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// Where this rank is.
    #[must_use]
    pub fn at(&self) -> Coordinates {
        self.at
    }

    /// All ranks.
    #[must_use]
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// The ranks of this rank's stage.
    #[must_use]
    pub fn data(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    /// The ranks of all stages at this rank's place on the data axis, by stage: for messages of a kind. `None` on one stage.
    #[must_use]
    pub fn pipe(&self, kind: Kind) -> Option<&Arc<dyn Communicator>> {
        let index = KINDS.iter().position(|&k| k == kind)?;
        self.pipe.get(index)
    }

    /// What all of them did so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.splits().fold(self.world.stats(), |sum, group| sum + group.stats())
    }

    /// The same by size: of each group its own.
    #[must_use]
    pub fn sizes(&self) -> Vec<SizeCounter> {
        std::iter::once(&self.world).chain(self.splits()).flat_map(|group| group.sizes()).collect()
    }

    /// The groups that are not the world itself.
    fn splits(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        let is_split = self.mesh.pipe() > 1;
        self.pipe.iter().chain(is_split.then_some(&self.data))
    }
}

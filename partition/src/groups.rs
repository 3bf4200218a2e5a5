//! The communicators of a rank: all ranks, the ranks of its pipeline stage, and the ranks of all stages at its position
//! on the data axis.

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
    /// One communicator per [`Kind`] of message, so that kinds do not wait for each other. Empty with one stage.
    pipe: Vec<Arc<dyn Communicator>>,
}

/// Kinds of messages, in the order of their communicators.
const KINDS: [Kind; 3] = [Kind::Activations, Kind::Gradients, Kind::Tied];

impl Groups {
    /// Creates the communicators of a rank in a mesh. Collective: every rank must call it.
    ///
    /// # Errors
    /// Fails if a rank is lost.
    ///
    /// # Panics
    /// Panics if the mesh has another number of ranks than the world.
    pub fn new(world: Arc<dyn Communicator>, mesh: Mesh) -> Result<Self, CommError> {
        assert_eq!(world.size(), mesh.world_size(), "the mesh must have as many ranks as the world");
        let at = mesh.coordinates(world.rank());
        if mesh.pipe() == 1 {
            return Ok(Self { mesh, at, data: world.clone(), world, pipe: vec![] });
        }
        let data = world.split(at.stage, at.replica)?;
        let pipe = KINDS.iter().map(|_| world.split(at.replica, at.stage)).collect::<Result<_, _>>()?;
        Ok(Self { mesh, at, world, data, pipe })
    }

    /// Creates the communicators for plain data parallelism, with one pipeline stage.
    ///
    /// # Panics
    /// Never panics: a world has at least one rank.
    #[must_use]
    pub fn data_parallel(world: Arc<dyn Communicator>) -> Self {
        let mesh = Mesh::new(world.size(), 1).expect("a world has ranks");
        let at = mesh.coordinates(world.rank());
        Self { mesh, at, data: world.clone(), world, pipe: vec![] }
    }

    /// Returns the arrangement of the ranks.
    #[must_use]
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// Returns the position of this rank.
    #[must_use]
    pub fn at(&self) -> Coordinates {
        self.at
    }

    /// Returns the communicator of all ranks.
    #[must_use]
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// Returns the communicator of this rank's stage: its data-parallel group.
    #[must_use]
    pub fn data(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    /// Returns the communicator for one kind of message, with the ranks of all stages at this rank's position on the
    /// data axis, ordered by stage. `None` with one stage.
    #[must_use]
    pub fn pipe(&self, kind: Kind) -> Option<&Arc<dyn Communicator>> {
        let index = KINDS.iter().position(|&k| k == kind)?;
        self.pipe.get(index)
    }

    /// Returns the statistics summed over all communicators.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.splits().fold(self.world.stats(), |sum, group| sum + group.stats())
    }

    /// Returns the statistics by message size, separately for each communicator.
    #[must_use]
    pub fn sizes(&self) -> Vec<SizeCounter> {
        std::iter::once(&self.world).chain(self.splits()).flat_map(|group| group.sizes()).collect()
    }

    /// Returns the communicators other than the world itself.
    fn splits(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        let is_split = self.mesh.pipe() > 1;
        self.pipe.iter().chain(is_split.then_some(&self.data))
    }
}

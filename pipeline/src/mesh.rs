//! The arrangement of ranks: a grid of pipeline stages by data-parallel replicas.
//!
//! Consecutive ranks are neighbours on the data axis: rank = stage × data + replica, as in DeepSpeed. A launcher puts
//! consecutive ranks on one host, and the data axis has the heavier traffic: each step it moves about twice a stage's
//! parameters (three times at ZeRO stage 3, for each micro-batch), and every rank of the group waits for the slowest
//! link. The pipe axis moves one activation per micro-batch between two stages, usually a few megabytes, and can do so
//! while computing. When a job spans several hosts, each data-parallel group therefore stays on one host and the
//! pipeline crosses hosts.

use crate::message::StageId;

/// The degrees of the two axes. Their product is the world size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mesh {
    pipe: usize,
    data: usize,
}

/// Error: the ranks cannot be divided evenly into that many stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cannot divide {world_size} ranks evenly into {stages} pipeline stages")]
pub struct MeshError {
    /// Number of ranks.
    pub world_size: usize,
    /// Number of pipeline stages.
    pub stages: usize,
}

/// Position of a rank in the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Position on the pipe axis.
    pub stage: StageId,
    /// Position on the data axis: the rank within its data-parallel group.
    pub replica: usize,
}

impl Mesh {
    /// Creates a mesh of all ranks.
    ///
    /// # Errors
    /// Fails if `world_size` is not a multiple of `stages`, or if either is zero.
    pub fn new(world_size: usize, stages: usize) -> Result<Self, MeshError> {
        if stages == 0 || world_size == 0 || !world_size.is_multiple_of(stages) {
            return Err(MeshError { world_size, stages });
        }
        Ok(Self { pipe: stages, data: world_size / stages })
    }

    /// Returns the number of pipeline stages.
    #[must_use]
    pub fn pipe(&self) -> usize {
        self.pipe
    }

    /// Returns the data-parallel degree: the number of ranks per stage.
    #[must_use]
    pub fn data(&self) -> usize {
        self.data
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.pipe * self.data
    }

    /// Returns the position of a rank.
    #[must_use]
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        Coordinates { stage: rank / self.data, replica: rank % self.data }
    }

    /// Returns the rank at a position.
    #[must_use]
    pub fn rank(&self, at: Coordinates) -> usize {
        at.stage * self.data + at.replica
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_data_parallel_group_are_neighbours() {
        let mesh = Mesh::new(12, 3).unwrap();
        assert_eq!((mesh.pipe(), mesh.data(), mesh.world_size()), (3, 4, 12));
        for rank in 0..12 {
            let at = mesh.coordinates(rank);
            assert_eq!((at.stage, at.replica), (rank / 4, rank % 4));
            assert_eq!(mesh.rank(at), rank);
        }
        for (world_size, stages) in [(6, 4), (4, 0), (0, 1), (2, 3)] {
            assert_eq!(Mesh::new(world_size, stages), Err(MeshError { world_size, stages }));
        }
    }
}

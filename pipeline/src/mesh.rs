//! The arrangement of ranks: a grid of pipeline stages × replicates × shards × tensor ranks.
//!
//! Ranks of a *shard group* hold different shards of one copy of ZeRO's state. Ranks at the same position of several
//! shard groups hold the same shard: they are *replicates* of each other. All ranks of a stage, over the shard axis and
//! the replicate axis, are its data-parallel group. Each rank of the group trains on different samples or on different
//! slices of samples, and the group has replicates × shards *replicas* of the model.
//!
//! Inside a shard group, consecutive ranks can form *near groups*: ranks on the same host, where links are fast. ZeRO++
//! keeps secondary shards within near groups.
//!
//! Consecutive ranks of a shard group can also form *context groups*: they train on the same samples, and each of them
//! computes a slice of every sequence. ZeRO also shards over the ranks of a context group, since they have the same
//! parameters. Only the data loading and the attention treat slices specially; for everything else, a slice is a
//! shorter sample.
//!
//! Consecutive world ranks can form *tensor groups*: the parameters of each layer are cut into one part per rank of the
//! group. The ranks with the same index in their tensor groups are a *plane*. A plane is a mesh without a tensor axis:
//! its ranks have the same parameters, apart from sharding by ZeRO. ZeRO, data parallelism and pipelines work within
//! planes, and all planes run the same programs.
//!
//! Consecutive ranks are neighbours on the tensor axis, then on the shard axis, then on the replicate axis: rank =
//! ((stage × replicates + replicate) × shards + shard) × tensor + index. Inside a layer, all ranks of a tensor group
//! wait for each other several times. A launcher puts consecutive ranks on one host. Of the other axes, the shard axis
//! has the heaviest traffic: each step it moves about twice a stage's parameters (at ZeRO stage 3, three times for each
//! micro-batch), and every rank of the group waits for the slowest link. The replicate axis moves the gradients of one
//! shard. The pipe axis moves one activation per micro-batch between two stages, usually a few megabytes, and this
//! transfer can overlap with compute. When a job spans several hosts, each shard group therefore stays on one host, and
//! the pipeline crosses hosts.

use std::ops::Range;

use crate::message::StageId;

/// The degrees of the axes. The world size is the product of the first three axes and `tensor`. Near and context groups
/// are parts of shard groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mesh {
    pipe: usize,
    replicates: usize,
    shards: usize,
    near: usize,
    context: usize,
    tensor: usize,
}

/// The ranks cannot be divided evenly among the groups of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// The ranks cannot be divided evenly into that many stages.
    #[error("cannot divide {world_size} ranks evenly into {stages} pipeline stages")]
    Stages {
        /// Number of ranks.
        world_size: usize,
        /// Number of pipeline stages.
        stages: usize,
    },
    /// The ranks of a stage cannot be divided evenly into that many shard groups.
    #[error("cannot divide {data} data-parallel ranks evenly into {replicates} replicates")]
    Replicates {
        /// Number of ranks of a stage.
        data: usize,
        /// Number of replicates.
        replicates: usize,
    },
    /// The ranks of a shard group cannot be divided evenly into near groups of that many ranks.
    #[error("cannot divide a shard group of {shards} ranks evenly into groups of {near}")]
    Near {
        /// Number of ranks of a shard group.
        shards: usize,
        /// Number of ranks of a near group.
        near: usize,
    },
    /// The ranks of a shard group cannot be divided evenly into context groups of that many ranks.
    #[error("cannot divide a shard group of {shards} ranks evenly into groups of {context} that share sequences")]
    Context {
        /// Number of ranks of a shard group.
        shards: usize,
        /// Number of ranks of a context group.
        context: usize,
    },
    /// The ranks of a stage cannot be divided evenly into tensor groups of that many ranks.
    #[error("cannot divide {ranks} ranks of a stage evenly into groups of {tensor} that split layers among them")]
    Tensor {
        /// Number of ranks of a stage.
        ranks: usize,
        /// Number of ranks of a tensor group.
        tensor: usize,
    },
}

/// Position of a rank in the mesh. All ranks of a tensor group have the same position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Position on the pipe axis.
    pub stage: StageId,
    /// Position on the replicate axis: the index of its shard group.
    pub replicate: usize,
    /// Position on the shard axis: the rank within its shard group.
    pub shard: usize,
}

impl Coordinates {
    /// Returns the position of the first rank of a stage.
    #[must_use]
    pub fn first(stage: StageId) -> Self {
        Self { stage, replicate: 0, shard: 0 }
    }
}

impl Mesh {
    /// Creates a mesh of all ranks with one shard group per stage.
    ///
    /// # Errors
    /// Fails if `world_size` is not a multiple of `stages`, or if either is zero.
    pub fn new(world_size: usize, stages: usize) -> Result<Self, MeshError> {
        if stages == 0 || world_size == 0 || !world_size.is_multiple_of(stages) {
            return Err(MeshError::Stages { world_size, stages });
        }
        let shards = world_size / stages;
        Ok(Self { pipe: stages, replicates: 1, shards, near: shards, context: 1, tensor: 1 })
    }

    /// Divides the ranks of each stage into tensor groups of `tensor` consecutive ranks. Calls such as `replicated`
    /// after this one divide the ranks of each plane.
    ///
    /// # Errors
    /// Fails if the number of ranks of a stage is not a multiple of `tensor`, or if `tensor` is zero.
    pub fn with_tensor(self, tensor: usize) -> Result<Self, MeshError> {
        let ranks = self.data();
        if tensor == 0 || !ranks.is_multiple_of(tensor) {
            return Err(MeshError::Tensor { ranks, tensor });
        }
        let shards = ranks / tensor;
        Ok(Self { replicates: 1, shards, near: shards, tensor, ..self })
    }

    /// Returns the mesh of one plane: the ranks at the same index of all tensor groups.
    #[must_use]
    pub fn plane(self) -> Self {
        Self { tensor: 1, ..self }
    }

    /// Divides the ranks of each stage into `replicates` shard groups. Each shard group is one near group.
    ///
    /// # Errors
    /// Fails if the number of ranks of a stage is not a multiple of `replicates`, or if `replicates` is zero.
    pub fn replicated(self, replicates: usize) -> Result<Self, MeshError> {
        let data = self.data();
        if replicates == 0 || !data.is_multiple_of(replicates) {
            return Err(MeshError::Replicates { data, replicates });
        }
        let shards = data / replicates;
        Ok(Self { replicates, shards, near: shards, ..self })
    }

    /// Returns the mesh of a single replicate.
    #[must_use]
    pub fn of_one_replicate(self) -> Self {
        Self { replicates: 1, ..self }
    }

    /// Divides each shard group into near groups of `near` consecutive ranks.
    ///
    /// # Errors
    /// Fails if the number of ranks of a shard group is not a multiple of `near`, or if `near` is zero.
    pub fn with_near(self, near: usize) -> Result<Self, MeshError> {
        if near == 0 || !self.shards.is_multiple_of(near) {
            return Err(MeshError::Near { shards: self.shards, near });
        }
        Ok(Self { near, ..self })
    }

    /// Divides each shard group into context groups of `context` consecutive ranks.
    ///
    /// # Errors
    /// Fails if the number of ranks of a shard group is not a multiple of `context`, or if `context` is zero.
    pub fn with_context(self, context: usize) -> Result<Self, MeshError> {
        if context == 0 || !self.shards.is_multiple_of(context) {
            return Err(MeshError::Context { shards: self.shards, context });
        }
        Ok(Self { context, ..self })
    }

    /// Returns the number of pipeline stages.
    #[must_use]
    pub fn pipe(&self) -> usize {
        self.pipe
    }

    /// Returns the number of ranks per tensor group.
    #[must_use]
    pub fn tensor(&self) -> usize {
        self.tensor
    }

    /// Returns the number of ranks per stage and plane: the data-parallel degree times the number of ranks per context
    /// group.
    #[must_use]
    pub fn data(&self) -> usize {
        self.replicates * self.shards
    }

    /// Returns the number of shard groups per stage.
    #[must_use]
    pub fn replicates(&self) -> usize {
        self.replicates
    }

    /// Returns the number of ranks per shard group.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// Returns the number of ranks per near group: all ranks of a shard group, unless it is divided.
    #[must_use]
    pub fn near(&self) -> usize {
        self.near
    }

    /// Returns the number of ranks per context group.
    #[must_use]
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the data-parallel degree: the number of context groups per stage and plane. Each of them trains on
    /// different samples.
    #[must_use]
    pub fn data_parallel(&self) -> usize {
        self.data() / self.context
    }

    /// Returns the ranks of the context group of a rank, in the order of their slices.
    #[must_use]
    pub fn context_ranks(&self, rank: usize) -> Vec<usize> {
        let (of_plane, index) = (rank / self.tensor, rank % self.tensor);
        let first = of_plane / self.context * self.context;
        (first..first + self.context).map(|of_plane| of_plane * self.tensor + index).collect()
    }

    /// Returns the ranks of the tensor group of a rank.
    #[must_use]
    pub fn tensor_ranks(&self, rank: usize) -> Vec<usize> {
        let first = rank / self.tensor * self.tensor;
        (first..first + self.tensor).collect()
    }

    /// Returns the positions, within the shard group, of the ranks of the near group at `at`.
    #[must_use]
    pub fn near_shards(&self, at: Coordinates) -> Range<usize> {
        let first = at.shard / self.near * self.near;
        first..first + self.near
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.pipe * self.data() * self.tensor
    }

    /// Returns the position of a rank.
    #[must_use]
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        let of_plane = rank / self.tensor;
        let group = of_plane / self.shards;
        let (stage, replicate) = (group / self.replicates, group % self.replicates);
        Coordinates { stage, replicate, shard: of_plane % self.shards }
    }

    /// Returns the index of a rank in its tensor group.
    #[must_use]
    pub fn tensor_index(&self, rank: usize) -> usize {
        rank % self.tensor
    }

    /// Returns the rank at a position: the first rank of its tensor group.
    #[must_use]
    pub fn rank(&self, at: Coordinates) -> usize {
        (at.stage * self.data() + self.replica(at)) * self.tensor
    }

    /// Returns the index of a position within its data-parallel group.
    #[must_use]
    pub fn replica(&self, at: Coordinates) -> usize {
        at.replicate * self.shards + at.shard
    }

    /// Returns the ranks of a stage. Without tensor groups, these are its data-parallel group.
    #[must_use]
    pub fn ranks(&self, stage: StageId) -> Range<usize> {
        let each = self.data() * self.tensor;
        stage * each..(stage + 1) * each
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_data_parallel_group_are_neighbours() {
        let mesh = Mesh::new(12, 3).unwrap();
        assert_eq!((mesh.pipe(), mesh.data(), mesh.world_size()), (3, 4, 12));
        assert_eq!((mesh.replicates(), mesh.shards(), mesh.ranks(1)), (1, 4, 4..8));
        for rank in 0..12 {
            let at = mesh.coordinates(rank);
            assert_eq!((at.stage, mesh.replica(at), at.shard), (rank / 4, rank % 4, rank % 4));
            assert_eq!(mesh.rank(at), rank);
        }
        for (world_size, stages) in [(6, 4), (4, 0), (0, 1), (2, 3)] {
            assert_eq!(Mesh::new(world_size, stages), Err(MeshError::Stages { world_size, stages }));
        }
    }

    #[test]
    fn ranks_of_a_shard_group_are_neighbours() {
        let mesh = Mesh::new(24, 2).unwrap().replicated(3).unwrap();
        assert_eq!((mesh.pipe(), mesh.data(), mesh.replicates(), mesh.shards()), (2, 12, 3, 4));
        assert_eq!(mesh.coordinates(21), Coordinates { stage: 1, replicate: 2, shard: 1 });
        for rank in 0..24 {
            let at = mesh.coordinates(rank);
            assert_eq!((mesh.rank(at), mesh.replica(at)), (rank, rank % 12));
            assert!(mesh.ranks(at.stage).contains(&rank));
        }
        for replicates in [0, 5, 24] {
            let error = MeshError::Replicates { data: 12, replicates };
            assert_eq!(Mesh::new(24, 2).unwrap().replicated(replicates), Err(error));
        }
    }

    #[test]
    fn ranks_of_a_secondary_group_are_neighbours() {
        let mesh = Mesh::new(16, 1).unwrap().replicated(2).unwrap();
        assert_eq!((mesh.near(), mesh.near_shards(mesh.coordinates(13))), (8, 0..8));
        let near = mesh.with_near(2).unwrap();
        assert_eq!((near.near(), near.shards(), near.replicates()), (2, 8, 2));
        for rank in 0..16 {
            let at = near.coordinates(rank);
            assert_eq!(at, mesh.coordinates(rank));
            let first = rank % 8 / 2 * 2;
            assert_eq!(near.near_shards(at), first..first + 2);
        }
        for near in [0, 3, 16] {
            assert_eq!(mesh.with_near(near), Err(MeshError::Near { shards: 8, near }));
        }
    }

    #[test]
    fn ranks_of_a_tensor_group_are_neighbours() {
        let mesh = Mesh::new(24, 2).unwrap().with_tensor(3).unwrap().replicated(2).unwrap();
        assert_eq!((mesh.world_size(), mesh.tensor(), mesh.data(), mesh.shards()), (24, 3, 4, 2));
        assert_eq!((mesh.plane().world_size(), mesh.ranks(1)), (8, 12..24));
        for rank in 0..24 {
            let (at, index) = (mesh.coordinates(rank), mesh.tensor_index(rank));
            assert_eq!((mesh.rank(at) + index, mesh.plane().coordinates(rank / 3)), (rank, at));
        }
        for tensor in [0, 5, 24] {
            let error = MeshError::Tensor { ranks: 12, tensor };
            assert_eq!(Mesh::new(24, 2).unwrap().with_tensor(tensor), Err(error));
        }
    }

    #[test]
    fn context_groups_divide_shard_groups() {
        let mesh = Mesh::new(16, 1).unwrap().replicated(2).unwrap();
        assert_eq!((mesh.context(), mesh.data_parallel()), (1, 16));
        let cut = mesh.with_context(4).unwrap();
        assert_eq!((cut.context(), cut.data_parallel(), cut.data(), cut.shards()), (4, 4, 16, 8));
        for rank in 0..16 {
            let group = cut.context_ranks(rank);
            assert_eq!((group.len(), group.contains(&rank)), (4, true));
            let shards = group.into_iter().map(|rank| cut.coordinates(rank)).map(|at| (at.replicate, at.shard / 4));
            assert!(shards.clone().all(|of| Some(of) == shards.clone().next()));
        }
        for context in [0, 3, 16] {
            assert_eq!(mesh.with_context(context), Err(MeshError::Context { shards: 8, context }));
        }
    }
}

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
//! shorter sample. In attention, consecutive ranks of a context group can exchange heads (a *head group*), and ranks at
//! the same position in their head groups can share keys and values (a *query group*).
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

/// The degrees that a configuration chooses. The shard axis gets the remaining ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Degrees {
    /// Number of pipeline stages.
    pub pipe: usize,
    /// Number of shard groups per stage and plane.
    pub replicates: usize,
    /// Number of ranks per near group; `None` if each shard group is one near group.
    pub near: Option<usize>,
    /// Number of ranks per head group: ranks that exchange heads of the same sequences.
    pub heads: usize,
    /// Number of ranks per query group: ranks that share keys and values of the same sequences.
    pub queries: usize,
    /// Number of ranks per tensor group.
    pub tensor: usize,
}

impl Degrees {
    /// Chooses `pipe` pipeline stages of one shard group each.
    #[must_use]
    pub fn stages(pipe: usize) -> Self {
        Self { pipe, replicates: 1, near: None, heads: 1, queries: 1, tensor: 1 }
    }
}

/// The arrangement of ranks, whose degrees divide the ranks evenly. The world size is the product of the pipe,
/// replicate, shard and tensor axes. Near groups and context groups are parts of shard groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mesh {
    pipe: usize,
    replicates: usize,
    shards: usize,
    near: usize,
    heads: usize,
    queries: usize,
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
    /// Arranges `world_size` ranks.
    ///
    /// # Errors
    /// Fails if the ranks cannot be divided evenly, or if a degree is zero.
    pub fn new(world_size: usize, degrees: Degrees) -> Result<Self, MeshError> {
        let Degrees { pipe: stages, replicates, near, heads, queries, tensor } = degrees;
        let divided = |ranks: usize, by: usize| (by > 0 && ranks.is_multiple_of(by)).then(|| ranks / by);
        let ranks = divided(world_size, stages).filter(|&ranks| ranks > 0);
        let ranks = ranks.ok_or(MeshError::Stages { world_size, stages })?;
        let data = divided(ranks, tensor).ok_or(MeshError::Tensor { ranks, tensor })?;
        let shards = divided(data, replicates).ok_or(MeshError::Replicates { data, replicates })?;
        let context = heads.saturating_mul(queries);
        divided(shards, context).ok_or(MeshError::Context { shards, context })?;
        let near = near.unwrap_or(shards);
        divided(shards, near).ok_or(MeshError::Near { shards, near })?;
        Ok(Self { pipe: stages, replicates, shards, near, heads, queries, tensor })
    }

    /// Returns the mesh of one plane: the ranks at the same index of all tensor groups.
    #[must_use]
    pub fn plane(self) -> Self {
        Self { tensor: 1, ..self }
    }

    /// Returns the mesh of a single replicate.
    #[must_use]
    pub fn of_one_replicate(self) -> Self {
        Self { replicates: 1, ..self }
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
        self.heads * self.queries
    }

    /// Returns the number of ranks per head group.
    #[must_use]
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Returns the number of ranks per query group.
    #[must_use]
    pub fn queries(&self) -> usize {
        self.queries
    }

    /// Returns the data-parallel degree: the number of context groups per stage and plane. Each of them trains on
    /// different samples.
    #[must_use]
    pub fn data_parallel(&self) -> usize {
        self.data() / self.context()
    }

    /// Returns the ranks of the context group of a rank, in the order of their slices.
    #[must_use]
    pub fn context_ranks(&self, rank: usize) -> Vec<usize> {
        self.consecutive(rank, self.context())
    }

    /// Returns the ranks of the head group of a rank, in the order of their slices.
    #[must_use]
    pub fn head_ranks(&self, rank: usize) -> Vec<usize> {
        self.consecutive(rank, self.heads)
    }

    /// Returns the ranks of the query group of a rank, in the order of their slices.
    #[must_use]
    pub fn query_ranks(&self, rank: usize) -> Vec<usize> {
        let place = rank / self.tensor % self.heads;
        self.context_ranks(rank).into_iter().skip(place).step_by(self.heads).collect()
    }

    /// Returns the rank to which a rank sends its keys and values in ring attention: the next one of its query group.
    #[must_use]
    pub fn next_in_ring(&self, rank: usize) -> usize {
        let (queries, place) = (self.query_ranks(rank), rank / self.tensor / self.heads % self.queries);
        queries[(place + 1) % self.queries]
    }

    /// Returns the ranks of a plane that form groups of `size` with this rank.
    fn consecutive(&self, rank: usize, size: usize) -> Vec<usize> {
        let first = rank / self.tensor / size * size;
        (first..first + size).map(|of_plane| of_plane * self.tensor + self.tensor_index(rank)).collect()
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

    /// Returns the rank at the position of `rank` in another stage.
    #[must_use]
    pub fn peer(&self, rank: usize, stage: StageId) -> usize {
        let ranks = self.ranks(stage);
        ranks.start + rank % ranks.len()
    }

    /// Returns the data-parallel group of a rank: the ranks of its stage and plane.
    pub fn group(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let ranks = self.ranks(self.coordinates(rank).stage);
        (ranks.start + self.tensor_index(rank)..ranks.end).step_by(self.tensor)
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
mod tests;

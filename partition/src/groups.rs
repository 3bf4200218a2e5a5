//! The communicators of a rank: its tensor group, all ranks of its plane, the ranks of its pipeline stage, its shard
//! group, its near group, its context group, its replicates, and the ranks of all stages at its position in the
//! data-parallel group.

use std::sync::Arc;

use zero_comm::{CommError, Communicator, SizeCounter, Stats};
use zero_pipeline::{Coordinates, Degrees, Kind, Mesh};

/// The communicators of one rank.
///
/// If layers are cut over tensor groups, the mesh, the world and all groups except [`Groups::tensor`] describe this
/// rank's plane only: the ranks with its index in their tensor groups.
///
/// If replicates train independently, they communicate only in outer steps and evaluations. The mesh, the world and the
/// data-parallel group then describe one replicate only.
#[derive(Clone)]
pub struct Groups {
    mesh: Mesh,
    at: Coordinates,
    world: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
    shard: Arc<dyn Communicator>,
    /// The ranks with the same shard, if their gradients are summed; `None` if a stage has one shard group.
    replicate: Option<Arc<dyn Communicator>>,
    /// If replicates train independently: the ranks with the same shard, and the ranks of this stage in all replicates.
    apart: Option<[Arc<dyn Communicator>; 2]>,
    /// The ranks of the near group, and the ranks at the same position in all near groups of the shard group. `None` if
    /// the shard group is one near group, or if each near group has one rank.
    near: Option<[Arc<dyn Communicator>; 2]>,
    /// The ranks that share sequences; `None` if each rank has its own sequences.
    context: Option<Arc<dyn Communicator>>,
    /// The ranks over which layers are cut; `None` if layers are whole.
    tensor: Option<Arc<dyn Communicator>>,
    /// One communicator per [`Kind`] of message, so that messages of one kind do not wait for another kind. Empty with
    /// one stage.
    pipe: Vec<Arc<dyn Communicator>>,
    /// All communicators of this rank, each of them once.
    all: Vec<Arc<dyn Communicator>>,
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
    /// Panics if the mesh and the world have different numbers of ranks.
    pub fn new(world: Arc<dyn Communicator>, mesh: Mesh) -> Result<Self, CommError> {
        assert_eq!(world.size(), mesh.world_size(), "the mesh must have as many ranks as the world");
        let (rank, at) = (world.rank(), mesh.coordinates(world.rank()));
        let replica = mesh.replica(at);
        let mut all = vec![world.clone()];
        let mut split = |of: &Arc<dyn Communicator>, color, key| {
            let part = of.split(color, key)?;
            all.push(part.clone());
            Ok::<_, CommError>(part)
        };
        let (world, tensor) = match mesh.tensor() {
            1 => (world, None),
            size => (split(&world, rank % size, rank / size)?, Some(split(&world, rank / size, rank % size)?)),
        };
        let mesh = mesh.plane();
        let (data, pipe) = match mesh.pipe() {
            1 => (world.clone(), vec![]),
            _ => {
                let data = split(&world, at.stage, replica)?;
                (data, KINDS.iter().map(|_| split(&world, replica, at.stage)).collect::<Result<_, _>>()?)
            }
        };
        let (shard, replicate) = match (mesh.replicates(), mesh.shards()) {
            (1, _) => (data.clone(), None),
            (_, 1) => (split(&data, at.replicate, 0)?, Some(data.clone())),
            _ => (split(&data, at.replicate, at.shard)?, Some(split(&data, at.shard, at.replicate)?)),
        };
        let near = match mesh.near() {
            1 => None,
            near if near == mesh.shards() => None,
            near => {
                let (host, place) = (at.shard / near, at.shard % near);
                Some([split(&shard, host, place)?, split(&shard, place, host)?])
            }
        };
        let context = match mesh.context() {
            1 => None,
            size => Some(split(&shard, at.shard / size, at.shard % size)?),
        };
        Ok(Self { mesh, at, world, data, shard, replicate, apart: None, near, context, tensor, pipe, all })
    }

    /// Creates the communicators of a rank in a mesh whose replicates train independently. Collective: every rank must
    /// call it.
    ///
    /// # Errors
    /// Fails if a rank is lost.
    ///
    /// # Panics
    /// Panics if the mesh and the world have different numbers of ranks.
    pub fn of_replicates_alone(world: Arc<dyn Communicator>, mesh: Mesh) -> Result<Self, CommError> {
        let whole = Self::new(world, mesh)?;
        let Self { mesh, at, world, data, shard, replicate, near, context, tensor, pipe, mut all, .. } = whole;
        let own = match mesh.pipe() {
            1 => shard.clone(),
            _ => {
                let own = world.split(at.replicate, world.rank())?;
                all.push(own.clone());
                own
            }
        };
        let (apart, at) = (replicate.map(|replicate| [replicate, data]), Coordinates { replicate: 0, ..at });
        let (mesh, data) = (mesh.of_one_replicate(), shard.clone());
        Ok(Self { mesh, at, world: own, data, shard, replicate: None, apart, near, context, tensor, pipe, all })
    }

    /// Creates the communicators for plain data parallelism, with one pipeline stage.
    ///
    /// # Panics
    /// Never panics: a world has at least one rank.
    #[must_use]
    pub fn data_parallel(world: Arc<dyn Communicator>) -> Self {
        let mesh = Mesh::new(world.size(), Degrees::stages(1)).expect("a world has ranks");
        let at = mesh.coordinates(world.rank());
        let (data, shard, all) = (world.clone(), world.clone(), vec![world.clone()]);
        Self {
            mesh,
            at,
            data,
            shard,
            replicate: None,
            apart: None,
            near: None,
            context: None,
            tensor: None,
            world,
            pipe: vec![],
            all,
        }
    }

    /// Returns the mesh of all ranks, or of one replicate if replicates train independently.
    #[must_use]
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// Returns the position of this rank.
    #[must_use]
    pub fn at(&self) -> Coordinates {
        self.at
    }

    /// Returns the communicator of all ranks, or of this rank's replicate if replicates train independently.
    #[must_use]
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// Returns the communicator of this rank's stage: its data-parallel group.
    #[must_use]
    pub fn data(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    /// Returns the communicator of this rank's shard group: the ranks over which one copy of ZeRO's state is sharded.
    /// If a stage has one shard group, it is the communicator of the data-parallel group.
    #[must_use]
    pub fn shard(&self) -> &Arc<dyn Communicator> {
        &self.shard
    }

    /// Returns the communicator of the ranks that hold the same shard as this rank, in the order of their shard groups.
    /// `None` if a stage has one shard group, since no other rank then holds the shard, and also if replicates train
    /// independently.
    #[must_use]
    pub fn replicate(&self) -> Option<&Arc<dyn Communicator>> {
        self.replicate.as_ref()
    }

    /// Returns the communicator of this rank's near group: consecutive ranks of its shard group on one host. `None` if
    /// the near group is the whole shard group or has one rank.
    #[must_use]
    pub fn near(&self) -> Option<&Arc<dyn Communicator>> {
        self.near.as_ref().map(|[near, _]| near)
    }

    /// Returns the communicator of the ranks at this rank's position in all near groups of the shard group, in the
    /// order of the groups. `None` if [`Groups::near`] is `None`.
    #[must_use]
    pub fn across(&self) -> Option<&Arc<dyn Communicator>> {
        self.near.as_ref().map(|[_, across]| across)
    }

    /// Returns the communicator of this rank's context group: the consecutive ranks of its shard group that share
    /// sequences, in the order of their slices. `None` if each rank has its own sequences.
    #[must_use]
    pub fn context(&self) -> Option<&Arc<dyn Communicator>> {
        self.context.as_ref()
    }

    /// Divides this rank's context group into groups of `inner` consecutive ranks. Returns two communicators: of this
    /// rank's group, and of the ranks at this rank's position in all groups. Collective.
    ///
    /// # Errors
    /// Fails if a rank is lost.
    pub fn divide_context(&mut self, inner: usize) -> Result<Option<[Arc<dyn Communicator>; 2]>, CommError> {
        let Some(context) = &self.context else { return Ok(None) };
        let (group, place) = (context.rank() / inner, context.rank() % inner);
        let parts = [context.split(group, place)?, context.split(place, group)?];
        self.all.extend(parts.iter().cloned());
        Ok(Some(parts))
    }

    /// Returns the communicator of this rank's tensor group: the consecutive ranks over which layers are cut. `None` if
    /// layers are whole.
    #[must_use]
    pub fn tensor(&self) -> Option<&Arc<dyn Communicator>> {
        self.tensor.as_ref()
    }

    /// Returns the index of this rank in its tensor group.
    #[must_use]
    pub fn tensor_index(&self) -> usize {
        self.tensor.as_ref().map_or(0, |tensor| tensor.rank())
    }

    /// Returns the index of this rank's context group in its stage. The index decides the part of the data on which the
    /// rank trains.
    #[must_use]
    pub fn data_rank(&self) -> usize {
        self.mesh.replica(self.at) / self.mesh.context()
    }

    /// Returns the communicator for one kind of message, with the ranks of all stages at this rank's position in
    /// their data-parallel groups, ordered by stage. `None` with one stage.
    #[must_use]
    pub fn pipe(&self, kind: Kind) -> Option<&Arc<dyn Communicator>> {
        let index = KINDS.iter().position(|&k| k == kind)?;
        self.pipe.get(index)
    }

    /// Returns the communicator of the ranks that hold the same shard in replicates that train independently, in the
    /// order of the replicates. `None` if gradients are summed over all data-parallel ranks.
    #[must_use]
    pub fn apart(&self) -> Option<&Arc<dyn Communicator>> {
        self.apart.as_ref().map(|[same, _]| same)
    }

    /// Returns the communicator over which evaluations are summed: the ranks of this rank's stage in all replicates.
    #[must_use]
    pub fn evaluating(&self) -> &Arc<dyn Communicator> {
        self.apart.as_ref().map_or(&self.data, |[_, stage]| stage)
    }

    /// Returns this rank's index among all ranks.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.all[0].rank()
    }

    /// Returns the world rank that has the stage and the shard of `at`, belongs to replicate `replicate`, and has index
    /// `index` in its tensor group.
    #[must_use]
    pub fn rank_of(&self, at: Coordinates, replicate: usize, index: usize) -> usize {
        let of_plane = match &self.apart {
            Some([same, _]) => {
                let Coordinates { stage, shard, .. } = at;
                (stage * same.size() + replicate) * self.mesh.shards() + shard
            }
            None => self.mesh.rank(Coordinates { replicate, ..at }),
        };
        of_plane * self.tensor.as_ref().map_or(1, |tensor| tensor.size()) + index
    }

    /// Returns the statistics summed over all communicators.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.all.iter().skip(1).fold(self.all[0].stats(), |sum, group| sum + group.stats())
    }

    /// Returns the statistics by message size, separately for each communicator.
    #[must_use]
    pub fn sizes(&self) -> Vec<SizeCounter> {
        self.all.iter().flat_map(|group| group.sizes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use zero_comm::{Buffer, Options, ReduceOp};

    use super::*;

    /// Returns the rank's index in the group, and the sum of all members' `rank`.
    fn sum(comm: &Arc<dyn Communicator>, rank: usize) -> (usize, i64) {
        let own = Buffer::I64(vec![rank as i64]);
        let all = comm.all_reduce(own, ReduceOp::Sum).wait().unwrap().into_i64().unwrap();
        (comm.rank(), all[0])
    }

    #[test]
    fn secondary_groups_are_inside_shard_groups() {
        let mesh = Mesh::new(16, Degrees { replicates: 2, near: Some(2), ..Degrees::stages(1) }).unwrap();
        let threads: Vec<_> = zero_comm::threads(16, &Options::default())
            .into_iter()
            .map(|world| {
                std::thread::spawn(move || {
                    let rank = world.rank();
                    let groups = Groups::new(world, mesh).unwrap();
                    let before = groups.stats().sent_bytes();
                    let near = sum(groups.near().unwrap(), rank);
                    let across = sum(groups.across().unwrap(), rank);
                    assert!(groups.stats().sent_bytes() > before);
                    (rank, near, across)
                })
            })
            .collect();
        for thread in threads {
            let (rank, near, across) = thread.join().unwrap();
            let (first, place) = (rank / 2 * 2, rank % 8);
            assert_eq!(near, (rank % 2, (2 * first + 1) as i64));
            let of_shards = (rank / 8 * 8..rank / 8 * 8 + 8).filter(|other| other % 2 == rank % 2);
            assert_eq!(across, (place / 2, of_shards.sum::<usize>() as i64));
        }
    }

    #[test]
    fn secondary_groups_of_one_or_all_ranks_do_not_exist() {
        for near in [1, 2] {
            let mesh = Mesh::new(2, Degrees { near: Some(near), ..Degrees::stages(1) }).unwrap();
            let threads: Vec<_> = zero_comm::threads(2, &Options::default())
                .into_iter()
                .map(|world| std::thread::spawn(move || Groups::new(world, mesh).unwrap()))
                .collect();
            for thread in threads {
                let groups = thread.join().unwrap();
                assert!(groups.near().is_none() && groups.across().is_none());
            }
        }
    }
}

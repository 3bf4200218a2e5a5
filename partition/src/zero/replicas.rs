//! Compares values that several ranks hold, to detect a faulty processor or memory before training continues with wrong
//! values.
//!
//! All replicas of a value come from the same operations, so a difference of a single bit means that one of the ranks
//! is faulty. Ranks exchange one 8-byte checksum for each parameter, shard or optimizer state that they compare. A
//! shard has replicas if a stage has several shard groups.

use std::sync::Arc;

use candle_core::Storage;
use crc32fast::Hasher;
use zero_comm::{Buffer, Communicator};
use zero_model::sink::FlatBuffer;
use zero_pipeline::Placement;

use super::ShardedState;
use crate::Kind;
use crate::error::ZeroError;
use crate::states::StateBuffer;

/// Values that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compared {
    /// Values that all ranks of a data-parallel group hold.
    Replicated,
    /// Shards, which the ranks at the same position of all shard groups hold.
    Sharded,
    /// Values that an outer step averages, sharded or not.
    Averaged,
}

impl Compared {
    fn has(self, placement: Placement) -> bool {
        match self {
            Self::Replicated => placement == Placement::Replicated,
            Self::Sharded => placement == Placement::Sharded,
            Self::Averaged => true,
        }
    }
}

impl ShardedState {
    /// Compares parameters and optimizer state in memory over the ranks that hold them. Collective over all ranks; call
    /// it between steps. Replicates that train independently are compared with each other only if
    /// `replicates_are_equal`, as they are after an outer step. Only their parameters and f32 copies are compared,
    /// since each replicate has its own optimizer state.
    ///
    /// # Errors
    /// Returns [`ZeroError::Differs`] on every rank of a group in which values differ. The error names world ranks.
    pub fn compare_replicas(&self, replicates_are_equal: bool) -> Result<(), ZeroError> {
        let groups = &self.rank.groups;
        let at = groups.at();
        // A data-parallel group consists of consecutive ranks of a plane.
        let step = groups.tensor().map_or(1, |tensor| tensor.size());
        let first = groups.rank() - groups.data().rank() * step;
        self.compare(groups.data(), Compared::Replicated, |replica| first + replica * step)?;
        let of_replicate = |replicate| groups.rank_of(at, replicate, groups.tensor_index());
        if let Some(comm) = groups.replicate() {
            self.compare(comm, Compared::Sharded, of_replicate)?;
        }
        if let Some(comm) = groups.tensor() {
            let first = groups.rank() - comm.rank();
            compare(comm, self.uncut()?, |index| first + index)?;
        }
        match groups.apart().filter(|_| replicates_are_equal) {
            Some(comm) => self.compare(comm, Compared::Averaged, of_replicate),
            None => Ok(()),
        }
    }

    /// Compares values over the ranks of a group. `world` converts an index in the group to a world rank.
    fn compare(
        &self,
        comm: &Arc<dyn Communicator>,
        compared: Compared,
        world: impl Fn(usize) -> usize,
    ) -> Result<(), ZeroError> {
        compare(comm, self.checksums(compared)?, world)
    }

    /// Returns the names and checksums of the values that this rank holds for parameters that are not cut. All ranks of
    /// its tensor group hold the same values.
    fn uncut(&self) -> Result<(Vec<String>, Vec<u32>), ZeroError> {
        let (mut names, mut checksums) = (vec![], vec![]);
        for kind in self.kinds() {
            for range in self.held_ranges(kind) {
                let parameter = &self.rank.model.parameters()[range.parameter];
                if parameter.cut().is_some() || parameter.quantization().is_some() {
                    continue;
                }
                names.push(match kind {
                    Kind::State(index) => format!("state {index} of `{}`", parameter.name()),
                    _ => format!("`{}`", parameter.name()),
                });
                checksums.push(crc32fast::hash(bytemuck::cast_slice(&self.read(kind, &range)?)));
            }
        }
        Ok((names, checksums))
    }

    /// Returns the names and checksums of the compared values that are in memory.
    fn checksums(&self, compared: Compared) -> Result<(Vec<String>, Vec<u32>), ZeroError> {
        let (mut names, mut checksums) = (vec![], vec![]);
        for (id, segment) in self.rank.layout.segments().iter().enumerate().filter(|&(id, _)| self.holds(id)) {
            let first = segment.pieces.first().map_or("", |p| self.rank.model.parameters()[p.parameter].name());
            match (segment.placements.parameters, self.parameters.shard(id)) {
                (of, _) if !compared.has(of) => {}
                (Placement::Replicated, _) => {
                    for piece in &segment.pieces {
                        let parameter = &self.rank.model.parameters()[piece.parameter];
                        names.push(format!("`{}`", parameter.name()));
                        checksums.push(parameter.read(|values| Ok(checksum(values)))?);
                    }
                }
                (Placement::Sharded, Some(Storage::Cpu(shard))) => {
                    names.push(format!("the shard of the segment of `{first}`"));
                    checksums.push(checksum(shard));
                }
                (Placement::Sharded, _) => {}
            }
            if compared.has(segment.placements.optimizer) && self.owns(id) {
                let state = self.optimizer.segment(id);
                let states: &[StateBuffer] = if compared == Compared::Averaged { &[] } else { &state.states };
                for (name, values) in self.rank.state_names(id).iter().zip(states) {
                    names.push(format!("`{name}` of the segment of `{first}`"));
                    checksums.push(match values {
                        StateBuffer::F32(values) => checksum_of(values)?,
                        StateBuffer::Bf16(values) => crc32fast::hash(bytemuck::cast_slice(values)),
                        StateBuffer::EightBit(_, indices, largest) => {
                            crc32fast::hash(indices) ^ crc32fast::hash(bytemuck::cast_slice(largest))
                        }
                    });
                }
                names.push(format!("the f32 copy of the segment of `{first}`"));
                checksums.push(checksum_of(&state.master)?);
            }
        }
        Ok((names, checksums))
    }
}

/// Compares checksums over the ranks of a group. `world` converts an index in the group to a world rank.
fn compare(
    comm: &Arc<dyn Communicator>,
    (names, checksums): (Vec<String>, Vec<u32>),
    world: impl Fn(usize) -> usize,
) -> Result<(), ZeroError> {
    let (ranks, count) = (comm.size(), checksums.len());
    let own = Buffer::I64(checksums.into_iter().map(i64::from).collect());
    let all = comm.all_gather(own, Buffer::I64(vec![0; ranks * count]), &vec![count; ranks]);
    let all = all.wait()?.output.into_i64()?;
    for (index, name) in names.into_iter().enumerate() {
        let of_ranks: Vec<i64> = (0..ranks).map(|rank| all[rank * count + index]).collect();
        let odd = odd_ones_out(&of_ranks);
        if !odd.is_empty() {
            return Err(ZeroError::Differs { ranks: odd.into_iter().map(&world).collect(), of: ranks, what: name });
        }
    }
    Ok(())
}

fn checksum_of(values: &FlatBuffer) -> Result<u32, ZeroError> {
    if let Some(values) = values.host() {
        return Ok(crc32fast::hash(bytemuck::cast_slice(values)));
    }
    let mut copied = vec![0.0; values.len()];
    values.read(0..values.len(), &mut copied)?;
    Ok(crc32fast::hash(bytemuck::cast_slice(&copied)))
}

fn checksum(values: &candle_core::CpuStorage) -> u32 {
    use candle_core::CpuStorage::{BF16, F6E2M3, F16, F32};
    let mut hasher = Hasher::new();
    match values {
        F32(values) => hasher.update(bytemuck::cast_slice(values)),
        BF16(values) => hasher.update(bytemuck::cast_slice(values)),
        F16(values) => hasher.update(bytemuck::cast_slice(values)),
        F6E2M3(bytes) => hasher.update(bytes),
        // Parameters have one of the dtypes above.
        _ => {}
    }
    hasher.finalize()
}

/// Returns the ranks whose value differs from the majority; all ranks if no value has a majority.
fn odd_ones_out(values: &[i64]) -> Vec<usize> {
    let count = |value: i64| values.iter().filter(|&&other| other == value).count();
    let most = values.iter().copied().find(|&value| 2 * count(value) > values.len());
    (0..values.len()).filter(|&rank| most != Some(values[rank])).collect()
}

#[cfg(test)]
mod tests {
    use super::odd_ones_out;

    #[test]
    fn ranks_that_differ_from_the_majority_are_found() {
        assert_eq!(odd_ones_out(&[7]), [] as [usize; 0]);
        assert_eq!(odd_ones_out(&[7, 7, 7]), [] as [usize; 0]);
        assert_eq!(odd_ones_out(&[7, 8, 7]), [1]);
        assert_eq!(odd_ones_out(&[8, 7, 7, 9, 7]), [0, 3]);
        assert_eq!(odd_ones_out(&[7, 8]), [0, 1], "two ranks have no majority");
        assert_eq!(odd_ones_out(&[1, 1, 2, 2]), [0, 1, 2, 3]);
    }
}

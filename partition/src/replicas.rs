//! What several ranks hold alike, compared: a processor or a memory that errs is found before its errors are trained on.
//!
//! Ranks that hold a value alike have made it by the same operations, so a difference of one bit is an error of one of them. Checksums are
//! compared, 4 bytes for each parameter; what every rank is alone with, its shards, has nothing to be compared with.

use crc32fast::Hasher;
use zero_comm::Buffer;
use zero_model::sink::FlatBuffer;
use zero_pipeline::{Coordinates, Placement};

use crate::error::ZeroError;
use crate::zero::ShardedState;

impl ShardedState {
    /// Compares the parameters that are replicated, and the optimizer's state where that is, over the ranks that hold them alike; a
    /// collective of all ranks, between steps.
    ///
    /// # Errors
    /// [`ZeroError::Differs`] on every rank of the group in which one differs.
    pub fn compare_replicas(&self) -> Result<(), ZeroError> {
        let (mut names, mut checksums) = (vec![], vec![]);
        for (id, segment) in self.layout.segments().iter().enumerate().filter(|&(id, _)| self.holds(id)) {
            if segment.placements.parameters == Placement::Replicated {
                for piece in &segment.pieces {
                    let parameter = &self.model.parameters()[piece.parameter];
                    names.push(format!("`{}`", parameter.name()));
                    checksums.push(parameter.read(|values| Ok(checksum(values)))?);
                }
            }
            if segment.placements.optimizer == Placement::Replicated && self.owns(id) {
                let state = &self.segments[id];
                let first = segment.pieces.first().map_or("", |p| self.model.parameters()[p.parameter].name());
                for (name, values) in self.state_names().iter().zip(&state.optimizer) {
                    names.push(format!("`{name}` of the segment of `{first}`"));
                    checksums.push(checksum_of(values)?);
                }
                names.push(format!("the f32 values of the segment of `{first}`"));
                checksums.push(checksum_of(&state.master)?);
            }
        }
        let (ranks, count) = (self.comm.size(), checksums.len());
        let own = Buffer::I64(checksums.into_iter().map(i64::from).collect());
        let all = self.comm.all_gather(own, Buffer::I64(vec![0; ranks * count]), &vec![count; ranks]);
        let all = all.wait()?.output.into_i64()?;
        for (index, name) in names.into_iter().enumerate() {
            let of_ranks: Vec<i64> = (0..ranks).map(|rank| all[rank * count + index]).collect();
            let odd = odd_ones_out(&of_ranks);
            if !odd.is_empty() {
                let at = self.groups.at();
                let world = |replica| self.groups.mesh().rank(Coordinates { replica, ..at });
                return Err(ZeroError::Differs { ranks: odd.into_iter().map(world).collect(), of: ranks, what: name });
            }
        }
        Ok(())
    }
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
    use candle_core::CpuStorage::{BF16, F16, F32};
    let mut hasher = Hasher::new();
    match values {
        F32(values) => hasher.update(bytemuck::cast_slice(values)),
        BF16(values) => hasher.update(bytemuck::cast_slice(values)),
        F16(values) => hasher.update(bytemuck::cast_slice(values)),
        // Parameters are of these.
        _ => {}
    }
    hasher.finalize()
}

/// Those that do not have what most have; all of them where no value is that of more than half.
fn odd_ones_out(values: &[i64]) -> Vec<usize> {
    let count = |value: i64| values.iter().filter(|&&other| other == value).count();
    let most = values.iter().copied().find(|&value| 2 * count(value) > values.len());
    (0..values.len()).filter(|&rank| most != Some(values[rank])).collect()
}

#[cfg(test)]
mod tests {
    use super::odd_ones_out;

    #[test]
    fn the_majority_is_right() {
        assert_eq!(odd_ones_out(&[7]), [] as [usize; 0]);
        assert_eq!(odd_ones_out(&[7, 7, 7]), [] as [usize; 0]);
        assert_eq!(odd_ones_out(&[7, 8, 7]), [1]);
        assert_eq!(odd_ones_out(&[8, 7, 7, 9, 7]), [0, 3]);
        assert_eq!(odd_ones_out(&[7, 8]), [0, 1], "two cannot say who is wrong");
        assert_eq!(odd_ones_out(&[1, 1, 2, 2]), [0, 1, 2, 3]);
    }
}

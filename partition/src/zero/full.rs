//! Gathers all values of a parameter on every rank.

use zero_comm::Buffer;
use zero_model::ParameterId;
use zero_model::ops::Run;
use zero_pipeline::{Coordinates, SegmentId};

use super::ShardedState;
use super::shards::{Kind, Range};
use crate::error::ZeroError;

impl ShardedState {
    /// Gathers all values of a parameter on every rank; if it is cut, the values of the whole parameter. Collective:
    /// every rank must call it.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn full(&mut self, kind: Kind, parameter: ParameterId) -> Result<Vec<f32>, ZeroError> {
        let local = self.full_of_rank(kind, parameter)?;
        let Some((cut, group)) = self.rank.model.parameters()[parameter].cut().zip(self.rank.groups.tensor()) else {
            return Ok(local);
        };
        let (len, ranks) = (local.len(), group.size());
        let output = Buffer::F32(vec![0.0; len * ranks]);
        let all = group.all_gather(Buffer::F32(local), output, &vec![len; ranks]).wait()?.output.into_f32()?;
        let mut whole = vec![0.0; cut.whole().iter().product()];
        for (index, local) in all.chunks_exact(len).enumerate() {
            for Run { local: from, whole: to } in cut.of(index).runs(0..len) {
                whole[to..to + from.len()].copy_from_slice(&local[from]);
            }
        }
        Ok(whole)
    }

    /// Gathers all values of a parameter, or of this plane's part of it if the parameter is cut.
    fn full_of_rank(&mut self, kind: Kind, parameter: ParameterId) -> Result<Vec<f32>, ZeroError> {
        let elements = self.rank.model.parameters()[parameter].elements();
        let stored = self.rank.model.parameters()[parameter].stored_elements();
        let (id, at) = self.locate(&Range { parameter, elements: 0..stored })?;
        let values = match self.owns(id) {
            false => vec![0.0; elements],
            true if self.rank.is_quantized(id) => self.full_of_quantized(parameter, id)?,
            true => self.full_of_owned(kind, parameter, id, at)?,
        };
        let mesh = self.rank.groups.mesh();
        if mesh.pipe() == 1 {
            return Ok(values);
        }
        let root = mesh.rank(Coordinates::first(self.rank.stages.owner(id)));
        Ok(self.rank.groups.world().broadcast(Buffer::F32(values), root).wait()?.into_f32()?)
    }

    /// Gathers all values of a parameter that this rank's stage owns. Collective over the shard group.
    fn full_of_owned(
        &self,
        kind: Kind,
        parameter: ParameterId,
        id: SegmentId,
        at: std::ops::Range<usize>,
    ) -> Result<Vec<f32>, ZeroError> {
        let segment = &self.rank.layout.segments()[id];
        let part = |rank: usize| {
            let shard = segment.shard(rank);
            shard.start.max(at.start).min(at.end)..shard.end.max(at.start).min(at.end)
        };
        let counts: Vec<usize> = (0..self.rank.shards().size()).map(|rank| part(rank).len()).collect();
        let own = part(self.rank.shards().rank());
        let shard = if own.is_empty() {
            vec![]
        } else {
            self.read(kind, &Range { parameter, elements: own.start - at.start..own.end - at.start })?
        };
        let output = Buffer::F32(vec![0.0; at.len()]);
        match self.rank.shards().all_gather(Buffer::F32(shard), output, &counts).wait()?.output {
            Buffer::F32(values) => Ok(values),
            _ => Err(ZeroError::internal("a collective returned values of an unexpected dtype")),
        }
    }
}

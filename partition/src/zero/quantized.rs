//! Reads, writes and quantizes the bytes of quantized parameters, for checkpoints and the user.

use std::sync::Arc;

use candle_core::{CpuStorage, Storage};
use zero_comm::Buffer;
use zero_model::ParameterId;
use zero_model::ops::{quantized_bytes, quantized_storage};

use super::ShardedState;
use super::shards::{Kind, Range};
use crate::disk::Stored;
use crate::error::{ZeroError, missing};
use crate::storage::{self, overwrite};

impl ShardedState {
    /// Reads stored bytes of a quantized parameter that this rank holds.
    ///
    /// # Errors
    /// Fails if the parameter is not quantized, or the rank does not hold the range.
    pub fn read_bytes_into(&self, range: &Range, out: &mut [u8]) -> Result<(), ZeroError> {
        let (id, at) = self.locate(range)?;
        let start = at.start.wrapping_sub(self.rank.own_range(id).start);
        if out.len() != range.elements.len() {
            return Err(ZeroError::internal("the number of values differs from the length of their range"));
        }
        if self.disk.has(id, Stored::Parameters) {
            return self.disk.read_bytes(id, start, out);
        }
        let copy = |storage: &CpuStorage, start: usize, out: &mut [u8]| {
            let bytes = quantized_bytes(storage).and_then(|bytes| bytes.get(start..start.wrapping_add(out.len())));
            out.copy_from_slice(bytes.ok_or_else(missing)?);
            Ok(())
        };
        match self.parameters.shard(id) {
            Some(Storage::Cpu(shard)) => copy(shard, start, out),
            Some(_) => Err(missing()),
            None => {
                let (full, _) = self.rank.model.parameters()[range.parameter].leaf().storage_and_layout();
                let Storage::Cpu(full) = &*full else { return Err(missing()) };
                copy(full, range.elements.start, out)
            }
        }
    }

    /// Overwrites stored bytes of a quantized parameter that this rank holds.
    ///
    /// # Errors
    /// Fails in the same cases as [`ShardedState::read_bytes_into`].
    pub fn write_bytes(&mut self, range: &Range, bytes: &[u8]) -> Result<(), ZeroError> {
        let (id, at) = self.locate(range)?;
        let start = at.start.wrapping_sub(self.rank.own_range(id).start);
        if bytes.len() != range.elements.len() || !self.rank.is_quantized(id) {
            return Err(missing());
        }
        if self.disk.has(id, Stored::Parameters) {
            return self.disk.write_bytes(id, start, bytes);
        }
        let values = Storage::Cpu(quantized_storage(bytes.to_vec()));
        match self.parameters.shard_mut(id) {
            Some(shard) => storage::copy(&values, 0..bytes.len(), shard, start..start + bytes.len()),
            None => {
                let parameter = &self.rank.model.parameters()[range.parameter];
                overwrite(parameter, range.elements.clone(), &values, 0..bytes.len())
            }
        }
    }

    /// Quantizes the new values of a parameter that this rank holds. Returns `false` and reads nothing if the parameter
    /// is not quantized. `read` fills a slice with elements of the whole parameter starting at an index. Each call
    /// reads a few MiB.
    ///
    /// # Errors
    /// Fails if a value is not finite. Returns errors of `read`.
    pub fn quantize<E: From<ZeroError>>(
        &mut self,
        parameter: ParameterId,
        mut read: impl FnMut(usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let model = Arc::clone(&self.rank.model);
        let of = &model.parameters()[parameter];
        if of.quantization().is_none() {
            return Ok(false);
        }
        let held = self.held_ranges(Kind::Parameter).into_iter().filter(|range| range.parameter == parameter);
        for range in held.collect::<Vec<_>>() {
            let mut failed = None;
            let bytes = of.quantize(range.elements.clone(), |start, out| {
                read(start, out).map_err(|error| {
                    failed = Some(error);
                    candle_core::Error::Msg(String::new())
                })
            });
            match (bytes, failed) {
                (_, Some(error)) => return Err(error),
                (Err(error), None) => return Err(ZeroError::from(error.context(format!("`{}`", of.name()))).into()),
                (Ok(bytes), None) => self.write_bytes(&range, &bytes.unwrap_or_default())?,
            }
        }
        Ok(true)
    }

    /// Gathers a quantized parameter that this rank's stage owns and returns its values in f32. Collective over the
    /// shard group.
    pub(super) fn full_of_quantized(&self, parameter: ParameterId, id: usize) -> Result<Vec<f32>, ZeroError> {
        let segment = self.rank.segment(id);
        let counts = segment.counts();
        let own = self.rank.shard(id);
        let mut shard = vec![0; own.len()];
        self.read_bytes_into(&Range { parameter, elements: own }, &mut shard)?;
        let output = Buffer::U8(vec![0; segment.elements()]);
        let Buffer::U8(bytes) = self.rank.shards().all_gather(Buffer::U8(shard), output, &counts).wait()?.output else {
            return Err(ZeroError::internal("a collective returned values of an unexpected dtype"));
        };
        let Some(quantization) = segment.quantization else { return Err(missing()) };
        Ok(quantization.dequantize(&bytes)?)
    }
}

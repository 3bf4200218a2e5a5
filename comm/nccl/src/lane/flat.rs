//! One NCCL call for all vectors whose ranges differ in length.
//!
//! NCCL gathers and scatters ranges of one length only; other ranges would need a broadcast or a reduction for each
//! rank and vector. Such vectors go through a flat buffer instead. It has a block for each rank, with room for the
//! longest range of each vector. Ranges are copied into it before the call, and out of it afterwards, at the rate of
//! the device's memory.
#![allow(unsafe_code)]

use std::ffi::c_void;

use zero_comm::{DeviceWork, Dtype, ShardedMemory, flat_block};
use zero_cuda::{CudaError, Stream};

use super::Lane;
use super::calls::ranges;

/// A flat buffer in use. It is allocated and freed in the order of the lane's stream.
pub(super) struct Flat {
    address: u64,
    /// Size of a rank's block in bytes.
    pub(super) block: usize,
    /// The common type of the vectors of a reduction.
    pub(super) dtype: Dtype,
    /// Copies to make after the call: source, destination, bytes.
    copies: Vec<(u64, u64, usize)>,
}

impl Flat {
    pub(super) fn block_of(&self, rank: usize) -> *mut c_void {
        (self.address as usize + rank * self.block) as *mut c_void
    }

    /// Enqueues the copies out of the buffer, and frees it.
    pub(super) fn finish(self, stream: &Stream) -> Result<(), CudaError> {
        for &(from, to, bytes) in &self.copies {
            // SAFETY: both ranges have that many bytes in live buffers that do not overlap.
            unsafe { stream.copy(from, to, bytes) }?;
        }
        self.discard(stream)
    }

    /// Frees the buffer.
    pub(super) fn discard(self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: allocated on this stream, and freed behind its last use.
        unsafe { stream.free(self.address) }
    }
}

impl Lane {
    /// Prepares the flat buffer if the operation has vectors for it.
    pub(super) fn flatten(&mut self, work: &DeviceWork<'_>) -> Result<(), CudaError> {
        let (vectors, is_reduced) = match work {
            DeviceWork::AllGather { vectors } => (vectors, false),
            DeviceWork::ReduceScatter { vectors, .. } => (vectors, true),
            _ => return Ok(()),
        };
        let Some(first) = vectors.iter().find(|vector| is_flat(vector)) else { return Ok(()) };
        let ranks = first.counts.len();
        let dtype = first.whole.dtype();
        let flat = || vectors.iter().filter(|vector| is_flat(vector));
        // Separate calls reduce vectors of different types.
        if is_reduced && flat().any(|vector| vector.whole.dtype() != dtype) {
            return Ok(());
        }
        let block: usize = flat().filter_map(room).sum();
        let address = self.stream.allocate(block * ranks)?;
        let (mut before, mut after, mut place) = (vec![], vec![], address);
        for vector in flat() {
            let ShardedMemory { whole, shard, counts } = *vector;
            let size = whole.dtype().size();
            let own = (place + (self.rank * block) as u64, shard.address(), counts[self.rank] * size);
            let all = ranges(counts).map(|(rank, (start, count))| {
                (place + (rank * block) as u64, whole.address() + (start * size) as u64, count * size)
            });
            let into = |(flat, vector, bytes): (u64, u64, usize)| (vector, flat, bytes);
            match is_reduced {
                true => {
                    before.extend(all.map(into));
                    after.push(own);
                }
                false => {
                    before.push(into(own));
                    after.extend(all);
                }
            }
            place += room(vector).unwrap_or(0) as u64;
        }
        before.retain(|(.., bytes)| *bytes > 0);
        after.retain(|(.., bytes)| *bytes > 0);
        self.flat = Some(Flat { address, block, dtype, copies: after });
        for (from, to, bytes) in before {
            // SAFETY: both ranges have that many bytes in live buffers that do not overlap.
            unsafe { self.stream.copy(from, to, bytes) }?;
        }
        Ok(())
    }

    /// Returns the vectors that have their own calls.
    pub(super) fn separate<'v, 'm>(
        &self,
        vectors: &'v [ShardedMemory<'m>],
    ) -> impl Iterator<Item = &'v ShardedMemory<'m>> + use<'v, 'm> {
        let has_flat = self.flat.is_some();
        vectors.iter().filter(move |vector| !(has_flat && is_flat(vector)))
    }
}

fn is_flat(vector: &ShardedMemory<'_>) -> bool {
    room(vector).is_some()
}

/// Returns the bytes of a vector's place in a block; `None` if it does not go through the flat buffer.
fn room(vector: &ShardedMemory<'_>) -> Option<usize> {
    flat_block(vector.counts, vector.whole.dtype().size())
}

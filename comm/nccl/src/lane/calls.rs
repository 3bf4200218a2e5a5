//! The NCCL calls of each operation.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t};
use zero_comm::{DeviceMemory, DeviceWork, Dtype, ReduceOp, ShardedMemory};

use super::Lane;

impl Lane {
    /// Issues all NCCL calls of an operation. The caller opens and closes the NCCL group around it.
    pub(super) fn launch(&self, work: &DeviceWork<'_>) -> Result<(), String> {
        let (comm, stream) = (self.comm, self.stream.raw().cast());
        self.launch_flat(work)?;
        match *work {
            DeviceWork::AllReduce { ref buffers, op } => buffers.iter().try_for_each(|buffer| {
                let (at, count, dtype) = place(*buffer);
                // SAFETY: here and below, the buffers hold `count` elements of `dtype` on this lane's device and live
                // until the stream is done with them; communicator and stream are valid.
                let result = unsafe { sys::ncclAllReduce(at, at, count, dtype, reduction(op), comm, stream) };
                self.check("ncclAllReduce", result)
            }),
            DeviceWork::Broadcast { buffer, root } => {
                let (at, count, dtype) = place(buffer);
                // SAFETY: as in `AllReduce`.
                let result = unsafe { sys::ncclBroadcast(at, at, count, dtype, root as c_int, comm, stream) };
                self.check("ncclBroadcast", result)
            }
            DeviceWork::AllGather { ref vectors } => self.separate(vectors).try_for_each(|vector| {
                let ShardedMemory { whole, shard, counts } = *vector;
                let ((from, count, dtype), (to, ..)) = (place(shard), place(whole));
                if let Some(count) = even(counts) {
                    // SAFETY: as in `AllReduce`.
                    let result = unsafe { sys::ncclAllGather(from, to, count, dtype, comm, stream) };
                    return self.check("ncclAllGather", result);
                }
                for (root, range) in ranges(counts).filter(|(_, (_, count))| *count > 0) {
                    let (to, elements) = (offset(to, range.0, shard.dtype()), range.1);
                    // On other ranks NCCL does not read the send buffer.
                    let from = if root == self.rank { from } else { to };
                    debug_assert!(root != self.rank || elements == count);
                    // SAFETY: as in `AllReduce`, and the ranges lie within the output.
                    let result = unsafe { sys::ncclBroadcast(from, to, elements, dtype, root as c_int, comm, stream) };
                    self.check("ncclBroadcast", result)?;
                }
                Ok(())
            }),
            DeviceWork::ReduceScatter { ref vectors, op } => self.separate(vectors).try_for_each(|vector| {
                let ShardedMemory { whole, shard, counts } = *vector;
                let ((from, _, dtype), (to, ..), op) = (place(whole), place(shard), reduction(op));
                if let Some(count) = even(counts) {
                    // SAFETY: as in `AllReduce`.
                    let result = unsafe { sys::ncclReduceScatter(from, to, count, dtype, op, comm, stream) };
                    return self.check("ncclReduceScatter", result);
                }
                for (root, (start, count)) in ranges(counts).filter(|(_, (_, count))| *count > 0) {
                    let from = offset(from, start, whole.dtype());
                    // SAFETY: as in `AllReduce`; the ranges lie within the input, and NCCL writes only to the root's
                    // shard.
                    let result = unsafe { sys::ncclReduce(from, to, count, dtype, op, root as c_int, comm, stream) };
                    self.check("ncclReduce", result)?;
                }
                Ok(())
            }),
            DeviceWork::AllToAll { input, output, send_counts, receive_counts } => {
                let (sends, receives) = (parts(input, send_counts), parts(output, receive_counts));
                let (dtype, size) = (dtype(input.dtype()), sends.len());
                for distance in 0..size {
                    let (to, from) = ((self.rank + distance) % size, (self.rank + size - distance) % size);
                    let ((at, count), (place, room)) = (sends[to], receives[from]);
                    // SAFETY: as in `AllReduce`; the parts lie within the input.
                    let result = unsafe { sys::ncclSend(at, count, dtype, to as c_int, comm, stream) };
                    self.check("ncclSend", result)?;
                    // SAFETY: as in `AllReduce`; the parts lie within the output.
                    let result = unsafe { sys::ncclRecv(place, room, dtype, from as c_int, comm, stream) };
                    self.check("ncclRecv", result)?;
                }
                Ok(())
            }
            DeviceWork::Send { buffer, to } => {
                let (at, count, dtype) = place(buffer);
                // SAFETY: as in `AllReduce`.
                self.check("ncclSend", unsafe { sys::ncclSend(at, count, dtype, to as c_int, comm, stream) })
            }
            DeviceWork::Recv { buffer, from } => {
                let (at, count, dtype) = place(buffer);
                // SAFETY: as in `AllReduce`.
                self.check("ncclRecv", unsafe { sys::ncclRecv(at, count, dtype, from as c_int, comm, stream) })
            }
        }
    }

    /// Makes the one call for the vectors in the flat buffer.
    fn launch_flat(&self, work: &DeviceWork<'_>) -> Result<(), String> {
        let Some(flat) = &self.flat else { return Ok(()) };
        let (comm, stream) = (self.comm, self.stream.raw().cast());
        let (all, own) = (flat.block_of(0), flat.block_of(self.rank));
        match *work {
            DeviceWork::ReduceScatter { op, .. } => {
                let (count, dtype, op) = (flat.block / flat.dtype.size(), dtype(flat.dtype), reduction(op));
                // SAFETY: the flat buffer has a block of this size for each rank, and lives until the stream is done
                // with it; communicator and stream are valid. The call works in place.
                let result = unsafe { sys::ncclReduceScatter(all, own, count, dtype, op, comm, stream) };
                self.check("ncclReduceScatter", result)
            }
            _ => {
                let bytes = ncclDataType_t::ncclUint8;
                // SAFETY: as above.
                let result = unsafe { sys::ncclAllGather(own, all, flat.block, bytes, comm, stream) };
                self.check("ncclAllGather", result)
            }
        }
    }
}

fn dtype(dtype: Dtype) -> ncclDataType_t {
    match dtype {
        Dtype::F32 => ncclDataType_t::ncclFloat32,
        Dtype::Bf16 => ncclDataType_t::ncclBfloat16,
        Dtype::F16 => ncclDataType_t::ncclFloat16,
        Dtype::I64 => ncclDataType_t::ncclInt64,
        Dtype::U8 => ncclDataType_t::ncclUint8,
    }
}

fn reduction(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
    }
}

/// Returns the address, length and NCCL type of a buffer.
fn place(buffer: &dyn DeviceMemory) -> (*mut c_void, usize, ncclDataType_t) {
    (buffer.address() as usize as *mut c_void, buffer.len(), dtype(buffer.dtype()))
}

fn offset(start: *mut c_void, elements: usize, dtype: Dtype) -> *mut c_void {
    start.wrapping_byte_add(elements * dtype.size())
}

/// Returns the address and the length of each rank's part of a buffer. An empty part has the buffer's address.
///
/// Empty parts are sent too, so that all ranks take part; NCCL transfers messages of 0 bytes since 2.12.10.
fn parts(buffer: &dyn DeviceMemory, counts: &[usize]) -> Vec<(*mut c_void, usize)> {
    let (start, ..) = place(buffer);
    let part = |(_, (at, count)): (usize, (usize, usize))| {
        (if count == 0 { start } else { offset(start, at, buffer.dtype()) }, count)
    };
    ranges(counts).map(part).collect()
}

/// Returns the common count if all counts are equal, otherwise `None`.
pub(super) fn even(counts: &[usize]) -> Option<usize> {
    let first = *counts.first()?;
    counts.iter().all(|count| *count == first).then_some(first)
}

/// Iterates over the ranks as (rank, (start of its range, number of elements)).
pub(super) fn ranges(counts: &[usize]) -> impl Iterator<Item = (usize, (usize, usize))> {
    let mut end = 0;
    counts.iter().enumerate().map(move |(rank, count)| {
        end += count;
        (rank, (end - count, *count))
    })
}

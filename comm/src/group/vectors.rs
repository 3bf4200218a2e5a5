//! The vectors of an operation in two forms: the description that a rank sends to the others, and the form that
//! transports execute.

use crate::buffers::buffer::Buffer;
use crate::buffers::ranges::{consecutive, even_counts};
use crate::collective::signature::{Operation, Signature, digest};
use crate::collective::step::Vector;
use crate::communicator::{ToGather, ToScatter};
use crate::device::{DeviceMemory, ShardedMemory};

impl ToGather {
    pub(super) fn vector(&mut self) -> Vector<'_> {
        let ToGather { shard, output, counts } = self;
        let (dtype, source) = (output.dtype(), Some(shard.as_bytes()));
        let ranges = consecutive(counts.iter().copied(), dtype.size());
        Vector { source, ..Vector::new(dtype, output.as_bytes_mut(), ranges) }
    }

    pub(super) fn on_device(&self) -> ShardedMemory<'_> {
        ShardedMemory { whole: memory(&self.output), shard: memory(&self.shard), counts: &self.counts }
    }
}

impl ToScatter {
    pub(super) fn vector(&mut self) -> Vector<'_> {
        let ToScatter { input, shard, counts } = self;
        let (dtype, shard) = (input.dtype(), Some(shard.as_bytes_mut()));
        let ranges = consecutive(counts.iter().copied(), dtype.size());
        Vector { shard, ..Vector::new(dtype, input.as_bytes_mut(), ranges) }
    }

    pub(super) fn on_device(&self) -> ShardedMemory<'_> {
        ShardedMemory { whole: memory(&self.input), shard: memory(&self.shard), counts: &self.counts }
    }
}

/// Divides a buffer evenly between the ranks.
pub(super) fn divided(buffer: &mut Buffer, ranks: usize) -> Vector<'_> {
    let (dtype, length) = (buffer.dtype(), buffer.len());
    Vector::new(dtype, buffer.as_bytes_mut(), consecutive(even_counts(length, ranks), dtype.size()))
}

/// Returns the memory of a buffer on the device.
pub(super) fn memory(buffer: &Buffer) -> &dyn DeviceMemory {
    match buffer {
        Buffer::Device(buffer) => buffer.memory(),
        _ => unreachable!("`place` has looked"),
    }
}

/// Describes an operation on one buffer.
pub(super) fn describe(operation: Operation, buffer: &Buffer) -> Signature {
    Signature { layout: 0, ..coalesced(operation, [(buffer, &[][..])].into_iter()) }
}

/// Describes an operation on several buffers. Each comes with its counts, which must agree between ranks.
pub(super) fn coalesced<'a>(
    operation: Operation,
    wholes: impl Iterator<Item = (&'a Buffer, &'a [usize])> + Clone,
) -> Signature {
    let first = wholes.clone().next().map(|(buffer, _)| buffer);
    let dtype = first.map(Buffer::dtype).filter(|first| wholes.clone().all(|(buffer, _)| buffer.dtype() == *first));
    let length = |(buffer, _): (&Buffer, _)| if dtype.is_some() { buffer.len() } else { buffer.size_bytes() };
    let layout =
        wholes.clone().flat_map(|(buffer, counts)| [buffer.dtype() as usize].into_iter().chain(counts.iter().copied()));
    Signature {
        operation,
        sequence: 0,
        vectors: wholes.clone().count().try_into().unwrap_or(u16::MAX),
        dtype,
        length: wholes.clone().map(length).sum::<usize>() as u64,
        reduce: None,
        layout: digest("counts", &layout.collect::<Vec<_>>()),
        on_device: first.is_some_and(Buffer::is_on_device),
    }
}

//! Embeddings: rows of a table looked up by index.

use super::indices::{Indices, limits};
use super::{count32, deliver, room_like};
use crate::device::{Gpu, Operand, begin};
use crate::tensor::OwnEntries;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaStorage, DType, Layout, Result, Tensor};
use zero_kernels::Dtype;
use zero_kernels::embedding::{Lookup, gather, keys, scatter, sort};
use zero_kernels::rows::Onto;

fn lookup(op: &'static str, ids: &Indices, [entries, size]: [usize; 2], dtype: Dtype) -> Result<Lookup> {
    Ok(Lookup { count: ids.count, entries: count32(op, entries)?, size: count32(op, size)?, dtype })
}

/// Returns rows of a table of `[entries, size]`. If ranks split the entries, the rows of other ranks' entries are
/// zeros.
pub(crate) fn forward(
    op: &'static str,
    (ws, wl): (&CudaStorage, &Layout),
    ids: (&CudaStorage, &Layout),
    [entries, size]: [usize; 2],
    own: Option<&OwnEntries>,
) -> Result<CudaStorage> {
    let gpu = Gpu::new(&ws.device)?;
    let (table, ids) = (Operand::new(op, ws, wl)?, Indices::new(op, &gpu, ids, &limits(op, entries, own)?)?);
    let (y, at) = room_like(op, &gpu, ws.dtype(), ids.count as usize * size)?;
    let of = lookup(op, &ids, [entries, size], table.dtype)?;
    // SAFETY: the table has this many rows, and y was allocated for the rows that are looked up.
    unsafe { gpu.launch_some(gather(&of, table.address, ids.address(), at)) }?;
    Ok(y)
}

/// Computes the gradient of a table, bit-identical to the CPU.
pub(crate) fn backward(
    op: &'static str,
    [weight, ids, dy]: [&Tensor; 3],
    own: Option<&OwnEntries>,
) -> Result<Option<Tensor>> {
    let ((entries, size), gpu) = (weight.dims2()?, Gpu::of(op, dy)?);
    deliver(op, &gpu, weight, |to, onto| {
        let (ids, dy) = (Indices::of(op, &gpu, ids, &limits(op, entries, own)?)?, Operand::of(op, dy)?);
        let of = lookup(op, &ids, [entries, size], dy.dtype)?;
        if onto == Onto::Nothing {
            // SAFETY: the place has an f32 for each element of the table.
            unsafe { gpu.zero(to, entries * size * DType::F32.size_in_bytes()) }?;
        }
        if ids.count == 0 {
            return Ok(());
        }
        // SAFETY: the first launch writes all keys.
        let room: CudaSlice<u64> = unsafe { gpu.device().alloc(keys(ids.count) as usize) }?;
        for launch in sort(ids.count, ids.address(), begin(&room)) {
            // SAFETY: the indices and the keys have the requested numbers of elements.
            unsafe { gpu.launch(&launch) }?;
        }
        // SAFETY: dy has a row for each index, the keys are sorted, and the place belongs to the table.
        unsafe { gpu.launch_some(scatter(&of, dy.address, begin(&room), to, onto != Onto::Nothing)) }
    })
}

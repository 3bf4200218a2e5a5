//! Copies candle's storages of parameters between devices, and converts them to and from the buffers of collectives.

use std::ops::Range;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Storage, Tensor};
use zero_comm::Buffer;
use zero_model::Parameter;
use zero_model::ops::quantized_storage;

use crate::error::ZeroError;
use crate::gpu;

/// The dtype of the storage of quantized parameters, whose elements are bytes.
pub(crate) const QUANTIZED: DType = DType::F6E2M3;

/// Overwrites a range of a parameter with values from any device.
pub(crate) fn overwrite(
    parameter: &Parameter,
    range: Range<usize>,
    from: &Storage,
    source: Range<usize>,
) -> Result<(), ZeroError> {
    let mut full = parameter.take()?;
    let copied = copy(from, source, &mut full, range);
    parameter.put(full)?;
    copied
}

/// Copies a range between storages of the same dtype, on any devices.
pub(crate) fn copy(
    from: &Storage,
    source: Range<usize>,
    to: &mut Storage,
    target: Range<usize>,
) -> Result<(), ZeroError> {
    match (from, to) {
        (Storage::Cpu(from), Storage::Cpu(to)) => Ok(copy_on_host(from, source, to, target)?),
        (from, to) => gpu::copy(from, source, to, target),
    }
}

pub(crate) fn copy_on_host(
    from: &CpuStorage,
    source: Range<usize>,
    to: &mut CpuStorage,
    target: Range<usize>,
) -> candle_core::Result<()> {
    match (from, to) {
        (CpuStorage::F32(from), CpuStorage::F32(to)) => to[target].copy_from_slice(&from[source]),
        (CpuStorage::BF16(from), CpuStorage::BF16(to)) => to[target].copy_from_slice(&from[source]),
        (CpuStorage::F16(from), CpuStorage::F16(to)) => to[target].copy_from_slice(&from[source]),
        (CpuStorage::F6E2M3(from), CpuStorage::F6E2M3(to)) => to[target].copy_from_slice(&from[source]),
        _ => candle_core::bail!("cannot copy parameters: their dtypes differ, or one is released"),
    }
    Ok(())
}

/// Converts parameters to a buffer of `len` values. Values on a GPU stay there if `by_gpu`, and are copied to the host
/// otherwise.
pub(crate) fn outgoing(values: Storage, len: usize, by_gpu: bool) -> Result<Buffer, ZeroError> {
    match values {
        Storage::Cpu(values) => buffer(values),
        Storage::Cuda(values) if by_gpu => gpu::to_send(values, len),
        values => on_host(&values, len),
    }
}

/// Copies `len` parameters from a GPU to the host.
pub(crate) fn on_host(values: &Storage, len: usize) -> Result<Buffer, ZeroError> {
    match values {
        Storage::Cuda(values) => buffer(gpu::download(values, 0..len)?),
        _ => Err(ZeroError::internal("cannot copy parameters to the host: they are not on a CUDA GPU")),
    }
}

/// Converts received parameters to a storage on the same device.
pub(crate) fn incoming(values: Buffer) -> Result<Storage, ZeroError> {
    match values.is_on_device() {
        true => Ok(Storage::Cuda(gpu::storage_of(values)?)),
        false => Ok(Storage::Cpu(storage(values)?)),
    }
}

/// Converts a received buffer to a tensor, which is a leaf of the autograd graph if `is_leaf`.
///
/// # Errors
/// Fails if [`gpu_room`](gpu::gpu_room) did not create the buffer.
pub fn gpu_tensor(buffer: Buffer, dims: &[usize], is_leaf: bool) -> Result<Tensor, ZeroError> {
    Ok(Tensor::from_storage(incoming(buffer)?, dims, BackpropOp::none(), is_leaf))
}

pub(crate) fn buffer(storage: CpuStorage) -> Result<Buffer, ZeroError> {
    match storage {
        CpuStorage::F32(v) => Ok(Buffer::F32(v)),
        CpuStorage::BF16(v) => Ok(Buffer::Bf16(v)),
        CpuStorage::F16(v) => Ok(Buffer::F16(v)),
        CpuStorage::F6E2M3(v) => Ok(Buffer::U8(v)),
        _ => Err(not_floats()),
    }
}

pub(crate) fn storage(buffer: Buffer) -> Result<CpuStorage, ZeroError> {
    match buffer {
        Buffer::F32(v) => Ok(CpuStorage::F32(v)),
        Buffer::Bf16(v) => Ok(CpuStorage::BF16(v)),
        Buffer::F16(v) => Ok(CpuStorage::F16(v)),
        Buffer::U8(v) => Ok(quantized_storage(v)),
        _ => Err(not_floats()),
    }
}

pub(crate) fn not_floats() -> ZeroError {
    ZeroError::internal("parameters must be f32, bf16 or f16")
}

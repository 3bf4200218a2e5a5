//! Converts values to and from the buffers of collectives.
//!
//! Values on a GPU are sent directly if the communicators reach other GPUs, and through the host otherwise.

use candle_core::op::BackpropOp;
use candle_core::{DType, Storage, Tensor};
use half::{bf16, f16};
use zero_comm::Buffer;
use zero_model::sink::FlatBuffer;
use zero_optim::HalfFloat;
use zero_pipeline::SegmentId;

use crate::error::ZeroError;
use crate::gpu;
use crate::parameters::{buffer, storage};
use crate::threads::{rounded, widen};
use crate::zero::ShardedState;

impl ShardedState {
    /// Returns whether ranks exchange values directly between GPUs.
    #[must_use]
    pub fn transfers_by_gpu(&self) -> bool {
        self.options.on_gpu.layers && self.options.on_gpu.gathers
    }

    /// Converts a gradient to the communication dtype.
    pub(crate) fn packed(&mut self, values: FlatBuffer) -> Result<Buffer, ZeroError> {
        let values = match values {
            values if values.host().is_none() && self.options.on_gpu.sums => {
                return gpu::packed(values, self.options.communication);
            }
            values => values.into_host()?,
        };
        let packed = match self.options.communication {
            DType::BF16 => Buffer::Bf16(rounded(&values)),
            DType::F16 => Buffer::F16(rounded(&values)),
            _ => return Ok(Buffer::F32(values)),
        };
        self.pool.give(values);
        Ok(packed)
    }

    /// Allocates a buffer for `len` gradient values in the communication dtype.
    pub(crate) fn room_for_packed(&mut self, id: SegmentId, len: usize) -> Result<Buffer, ZeroError> {
        if self.is_resident(id) && self.options.on_gpu.sums {
            return self.gpu()?.blank_to_receive(self.options.communication, len);
        }
        Ok(match self.options.communication {
            DType::BF16 => Buffer::Bf16(vec![bf16::ZERO; len]),
            DType::F16 => Buffer::F16(vec![f16::ZERO; len]),
            _ => Buffer::F32(self.pool.take(len)),
        })
    }

    /// Converts a received gradient to f32 on the device of the segment's gradients.
    pub(crate) fn unpacked(&mut self, id: SegmentId, buffer: Buffer) -> Result<FlatBuffer, ZeroError> {
        let values = match buffer {
            Buffer::F32(values) => values,
            Buffer::Bf16(rounded) => self.widened(&rounded)?,
            Buffer::F16(rounded) => self.widened(&rounded)?,
            Buffer::Device(_) => return gpu::unpacked(buffer),
            _ => return Err(ZeroError::internal("a collective gave back another dtype")),
        };
        self.settled(id, values)
    }

    fn widened<H: HalfFloat + Sync>(&mut self, rounded: &[H]) -> Result<Vec<f32>, ZeroError> {
        let mut values = self.pool.take(rounded.len());
        widen(rounded, &mut values)?;
        Ok(values)
    }
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
        _ => Err(ZeroError::internal("parameters on a device that is not known here")),
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

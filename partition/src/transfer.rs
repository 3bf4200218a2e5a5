//! Converts values to and from the buffers of collectives.
//!
//! Values on a GPU are sent directly if the communicators reach other GPUs, and through the host otherwise.
#![cfg_attr(feature = "cuda", allow(unsafe_code))]

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Storage, Tensor};
use half::{bf16, f16};
use zero_comm::Buffer;
use zero_model::sink::FlatBuffer;
use zero_optim::HalfFloat;

use zero_pipeline::SegmentId;

use crate::error::ZeroError;
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
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(array) if self.options.on_gpu.sums => {
                let len = array.len();
                let packed = match self.options.communication {
                    DType::F32 => array.into_storage(),
                    dtype => array.rounded(dtype)?,
                };
                return moving::sized(packed, len);
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
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(crate) fn room_for_packed(&mut self, id: SegmentId, len: usize) -> Result<Buffer, ZeroError> {
        #[cfg(feature = "cuda")]
        if self.is_resident(id) && self.options.on_gpu.sums {
            return moving::sized(zero_model::device::room(self.gpu()?, self.options.communication, len)?, len);
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
            #[cfg(feature = "cuda")]
            Buffer::Device(_) => {
                let len = buffer.len();
                return Ok(FlatBuffer::Device(zero_model::device::Array::widened(moving::storage(buffer)?, len)?));
            }
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
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(crate) fn outgoing(values: Storage, len: usize, by_gpu: bool) -> Result<Buffer, ZeroError> {
    match values {
        Storage::Cpu(values) => buffer(values),
        #[cfg(feature = "cuda")]
        Storage::Cuda(values) if by_gpu => moving::sized(values, len),
        values => on_host(&values, len),
    }
}

/// Copies `len` parameters from a GPU to the host.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(crate) fn on_host(values: &Storage, len: usize) -> Result<Buffer, ZeroError> {
    match values {
        #[cfg(feature = "cuda")]
        Storage::Cuda(values) => buffer(zero_model::device::download(values, 0..len)?),
        _ => Err(ZeroError::internal("parameters on a device that is not known here")),
    }
}

/// Converts received parameters to a storage on the same device.
pub(crate) fn incoming(values: Buffer) -> Result<Storage, ZeroError> {
    #[cfg(feature = "cuda")]
    if values.is_on_device() {
        return Ok(Storage::Cuda(moving::storage(values)?));
    }
    Ok(Storage::Cpu(storage(values)?))
}

/// Copies a tensor on a GPU, of dtype f32, bf16 or f16, into a buffer that can be sent from there.
///
/// # Errors
/// Fails if the tensor is on another device or has another dtype, or if the GPU is out of memory.
pub fn gpu_copy(tensor: &Tensor) -> Result<Buffer, ZeroError> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = tensor.device() {
        let (elements, tensor) = (tensor.elem_count(), tensor.contiguous()?);
        let mut copied = zero_model::device::room(device, tensor.dtype(), elements)?;
        let (storage, layout) = tensor.storage_and_layout();
        if let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
            zero_model::device::copy(storage, start..end, &mut copied, 0..elements)?;
            return moving::sized(copied, elements);
        }
    }
    Err(on_no_gpu(tensor.device()))
}

/// Allocates a buffer on a GPU to receive values from another GPU.
///
/// # Errors
/// Fails if the GPU is out of memory, or the dtype is not f32, bf16 or f16.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub fn gpu_room(device: &Device, dtype: DType, elements: usize) -> Result<Buffer, ZeroError> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return moving::sized(zero_model::device::room(device, dtype, elements)?, elements);
    }
    Err(on_no_gpu(device))
}

/// Converts a received buffer to a tensor, which is a leaf of the autograd graph if `is_leaf`.
///
/// # Errors
/// Fails if [`gpu_room`] did not create the buffer.
pub fn gpu_tensor(buffer: Buffer, dims: &[usize], is_leaf: bool) -> Result<Tensor, ZeroError> {
    Ok(Tensor::from_storage(incoming(buffer)?, dims, BackpropOp::none(), is_leaf))
}

fn on_no_gpu(device: &Device) -> ZeroError {
    ZeroError::internal(format!("values that travel between GPUs are on {device:?}"))
}

#[cfg(feature = "cuda")]
mod moving {
    //! Passes candle's storages to collectives as GPU memory.

    use candle_core::backend::BackendStorage;
    use candle_core::{CudaStorage, DType};
    use zero_comm::{Buffer, DeviceBuffer, DeviceMemory, Dtype};
    use zero_model::device::{Mark, address_of, copy, download, elements_of, room};

    use crate::error::ZeroError;

    /// Values on the GPU. They are complete once the stream has passed `written`.
    struct Moving {
        storage: CudaStorage,
        len: usize,
        dtype: Dtype,
        address: u64,
        written: Mark,
    }

    impl std::fmt::Debug for Moving {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{} {} at {:#x}", self.len, self.dtype, self.address)
        }
    }

    fn dtype_of(storage: &CudaStorage) -> Result<Dtype, ZeroError> {
        match storage.dtype() {
            DType::F32 => Ok(Dtype::F32),
            DType::BF16 => Ok(Dtype::Bf16),
            DType::F16 => Ok(Dtype::F16),
            _ => Err(ZeroError::internal("a collective of parameters that are released")),
        }
    }

    /// Wraps the first `len` values of a storage.
    pub(super) fn sized(storage: CudaStorage, len: usize) -> Result<Buffer, ZeroError> {
        let dtype = dtype_of(&storage)?;
        if len > elements_of(&storage) {
            return Err(ZeroError::internal("a collective of more than there is"));
        }
        let (address, written) = (address_of(&storage)?, Mark::new(&storage.device)?);
        Ok(Buffer::Device(DeviceBuffer::new(Moving { storage, len, dtype, address, written })))
    }

    pub(super) fn storage(buffer: Buffer) -> Result<CudaStorage, ZeroError> {
        let Buffer::Device(buffer) = buffer else {
            return Err(ZeroError::internal("a collective gave back another memory"));
        };
        let moving = buffer.downcast::<Moving>().map_err(|_| ZeroError::internal("memory of somebody else's"))?;
        Ok(moving.storage)
    }

    // SAFETY: the storage holds at least `len` elements of `dtype` at `address`, nothing else refers to it, and it is
    // freed after all of candle's work on its stream; collectives return it, or keep it alive, until they are done with
    // it.
    unsafe impl DeviceMemory for Moving {
        fn dtype(&self) -> Dtype {
            self.dtype
        }

        fn len(&self) -> usize {
            self.len
        }

        fn device(&self) -> usize {
            self.storage.device.cuda_stream().context().ordinal()
        }

        fn address(&self) -> u64 {
            self.address
        }

        fn written(&self) -> Option<u64> {
            Some(self.written.raw())
        }

        fn to_host(&self) -> Result<Buffer, String> {
            let values = download(&self.storage, 0..self.len).map_err(|error| error.to_string())?;
            crate::parameters::buffer(values).map_err(|error| error.to_string())
        }

        fn duplicate(&self) -> Result<Box<dyn DeviceMemory>, String> {
            let dtype: DType = self.storage.dtype();
            let copied = || {
                let mut to = room(&self.storage.device, dtype, self.len)?;
                copy(&self.storage, 0..self.len, &mut to, 0..self.len)?;
                let (address, written) = (address_of(&to)?, Mark::new(&to.device)?);
                Ok::<_, candle_core::Error>(Moving { storage: to, len: self.len, dtype: self.dtype, address, written })
            };
            Ok(Box::new(copied().map_err(|error| error.to_string())?))
        }
    }
}

//! Passes candle's storages to collectives as GPU memory.
#![allow(unsafe_code)]

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
        _ => Err(ZeroError::internal("a collective cannot use released parameters")),
    }
}

/// Wraps the first `len` values of a storage.
pub(crate) fn to_send(storage: CudaStorage, len: usize) -> Result<Buffer, ZeroError> {
    let dtype = dtype_of(&storage)?;
    if len > elements_of(&storage) {
        return Err(ZeroError::internal("a collective needs more values than the storage holds"));
    }
    let (address, written) = (address_of(&storage)?, Mark::new(&storage.device)?);
    Ok(Buffer::Device(DeviceBuffer::new(Moving { storage, len, dtype, address, written })))
}

/// Returns the storage that a buffer wraps.
pub(crate) fn storage_of(buffer: Buffer) -> Result<CudaStorage, ZeroError> {
    let Buffer::Device(buffer) = buffer else {
        return Err(ZeroError::internal("a collective returned values on the host instead of a GPU"));
    };
    let moving = buffer
        .downcast::<Moving>()
        .map_err(|_| ZeroError::internal("a collective returned a buffer that this rank did not pass in"))?;
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
        crate::storage::buffer(values).map_err(|error| error.to_string())
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

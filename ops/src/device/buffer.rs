//! Passes candle's storages to collectives as GPU memory.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, DType, Device, Result, Storage, Tensor, bail};
use zero_comm::{Buffer, DeviceBuffer, DeviceEvent, DeviceMemory, Dtype};

use super::memory::wait_for;
use super::{Mark, address_of, copy, download, elements_of, room};

/// Values on the GPU. They are complete once the stream has passed the event `written`, or `used` if there is one.
struct Moving {
    /// `None` once the storage has been taken.
    storage: Option<CudaStorage>,
    len: usize,
    dtype: Dtype,
    address: u64,
    written: Mark,
    /// The end of the last collective that used the values, if it may still run.
    used: Mutex<Option<Arc<dyn DeviceEvent>>>,
}

impl Moving {
    fn new(storage: CudaStorage, len: usize, dtype: Dtype) -> Result<Self> {
        let (address, written) = (address_of(&storage)?, Mark::new(&storage.device)?);
        Ok(Self { storage: Some(storage), len, dtype, address, written, used: Mutex::default() })
    }

    fn used(&self) -> Option<Arc<dyn DeviceEvent>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the storage, after making its stream wait for the last collective.
    fn storage(&self) -> Result<&CudaStorage> {
        let Some(storage) = &self.storage else { bail!("{OP}: the values have been taken") };
        match self.used() {
            None => Ok(storage),
            Some(used) => wait_for(&storage.device, &*used).map(|()| storage),
        }
    }

    fn take(&mut self) -> Result<CudaStorage> {
        self.storage()?;
        match self.storage.take() {
            Some(storage) => Ok(storage),
            None => bail!("{OP}: the values have been taken"),
        }
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        // The storage is freed in the order of its stream, which must wait for the last collective.
        if self.storage.is_some() && self.storage().is_err() {
            std::mem::forget(self.storage.take());
        }
    }
}

impl std::fmt::Debug for Moving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} at {:#x}", self.len, self.dtype, self.address)
    }
}

const OP: &str = "collective";

fn dtype_of(storage: &CudaStorage) -> Result<Dtype> {
    match storage.dtype() {
        DType::F32 => Ok(Dtype::F32),
        DType::BF16 => Ok(Dtype::Bf16),
        DType::F16 => Ok(Dtype::F16),
        DType::U8 => Ok(Dtype::U8),
        other => bail!("{OP}: expected f32, bf16, f16 or u8, got {other:?}"),
    }
}

/// Wraps the first `len` values of a storage.
///
/// # Errors
/// Fails if the storage has fewer values, or its dtype is not f32, bf16, f16 or u8.
pub fn to_send(storage: CudaStorage, len: usize) -> Result<Buffer> {
    let dtype = dtype_of(&storage)?;
    if len > elements_of(&storage) {
        bail!("{OP}: cannot take {len} values from a storage of {}", elements_of(&storage));
    }
    Ok(Buffer::Device(DeviceBuffer::new(Moving::new(storage, len, dtype)?)))
}

/// Copies a tensor on a GPU, of dtype f32, bf16 or f16, into a GPU buffer that collectives can send.
///
/// # Errors
/// Fails if the tensor is on another device or has a different dtype, or if the GPU is out of memory.
pub fn copied_to_send(tensor: &Tensor) -> Result<Buffer> {
    with_elements(tensor, |storage, range| {
        let elements = range.len();
        let mut copied = room(&storage.device, tensor.dtype(), elements)?;
        copy(storage, range, &mut copied, 0..elements)?;
        to_send(copied, elements)
    })
}

/// Copies a tensor on a GPU, of dtype f32, bf16 or f16, into a buffer on the host. Waits for the GPU.
pub(crate) fn copied_to_host(tensor: &Tensor) -> Result<Buffer> {
    with_elements(tensor, on_host)
}

/// Calls `then` with the elements of a tensor on a GPU in row-major order, as a range of a storage.
fn with_elements<R>(tensor: &Tensor, then: impl FnOnce(&CudaStorage, Range<usize>) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cuda(storage), Some((start, end))) => then(storage, start..end),
        _ => bail!("{OP}: expected values on a GPU, got some on {:?}", tensor.device()),
    }
}

/// Copies a range of a storage into a buffer on the host.
fn on_host(storage: &CudaStorage, range: Range<usize>) -> Result<Buffer> {
    match download(storage, range)? {
        CpuStorage::F32(values) => Ok(Buffer::F32(values)),
        CpuStorage::BF16(values) => Ok(Buffer::Bf16(values)),
        CpuStorage::F16(values) => Ok(Buffer::F16(values)),
        CpuStorage::U8(values) => Ok(Buffer::U8(values)),
        other => bail!("{OP}: expected f32, bf16, f16 or u8, got {:?}", other.dtype()),
    }
}

/// Allocates a buffer on a GPU to receive values from other GPUs.
///
/// # Errors
/// Fails if the GPU is out of memory, or the dtype is not f32, bf16, f16 or u8.
pub fn room_to_receive(device: &Device, dtype: DType, elements: usize) -> Result<Buffer> {
    match device {
        Device::Cuda(device) => to_send(room(device, dtype, elements)?, elements),
        other => bail!("{OP}: cannot allocate GPU memory on {other:?}"),
    }
}

/// Returns the storage that a buffer wraps.
///
/// # Errors
/// Fails if [`to_send`] did not make the buffer.
pub fn storage_of(buffer: Buffer) -> Result<CudaStorage> {
    let Buffer::Device(buffer) = buffer else { bail!("{OP}: values on the host instead of a GPU") };
    match buffer.downcast::<Moving>() {
        Ok(mut moving) => moving.take(),
        Err(_) => bail!("{OP}: this module did not create the GPU buffer"),
    }
}

// SAFETY: the storage holds at least `len` elements of `dtype` at `address`, nothing else refers to it, and it is freed
// after all of candle's work on its stream. The stream waits for the end of the last collective before the storage is
// used or freed. Collectives that do not run ahead of the host return the storage only when they are done with it.
unsafe impl DeviceMemory for Moving {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn len(&self) -> usize {
        self.len
    }

    fn device(&self) -> usize {
        self.storage.as_ref().map_or(usize::MAX, |storage| storage.device.cuda_stream().context().ordinal())
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn written(&self) -> Option<u64> {
        Some(self.used().map_or(self.written.raw(), |used| used.raw()))
    }

    fn used_until(&self, event: Arc<dyn DeviceEvent>) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Some(event);
    }

    fn to_host(&self) -> std::result::Result<Buffer, String> {
        self.storage().and_then(|storage| on_host(storage, 0..self.len)).map_err(|error| error.to_string())
    }

    fn duplicate(&self) -> std::result::Result<Box<dyn DeviceMemory>, String> {
        let copied = || {
            let storage = self.storage()?;
            let mut to = room(&storage.device, storage.dtype(), self.len)?;
            copy(storage, 0..self.len, &mut to, 0..self.len)?;
            Moving::new(to, self.len, self.dtype)
        };
        Ok(Box::new(copied().map_err(|error| error.to_string())?))
    }
}

//! Copies from the host to a GPU, ordered on the compute stream, without blocking the host.
//!
//! If the source is pageable memory, the driver copies a small piece during the call. For a large piece, the call
//! returns only when the stream has reached the copy, that is, after all earlier work. Large copies therefore go
//! through pinned host memory.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, DeviceId};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, Result, Storage, Tensor, bail};
use zero_cuda::Event;
use zero_kernels::Address;

use super::ring::Ring;
use super::{Gpu, begin, cached, on_stream};

/// Limit in bytes up to which the driver copies pageable memory during the call.
const SMALL: usize = 64 << 10;
/// Size limits in bytes of one piece and of all copies in flight.
const PIECE: usize = 8 << 20;
const LEAVING: usize = 4 * PIECE;

/// Pinned pieces for each candle device, since each has its own stream.
static PIECES: Mutex<Vec<(DeviceId, Arc<Mutex<Ring>>)>> = Mutex::new(vec![]);

impl Gpu {
    /// Copies host values to new memory, in stream order.
    pub(crate) fn upload<T: DeviceRepr + bytemuck::Pod>(&self, values: &[T]) -> Result<CudaSlice<T>> {
        if size_of_val(values) <= SMALL {
            return self.device.clone_htod(values);
        }
        // SAFETY: the copy below writes all elements before anything reads them.
        let slice = unsafe { self.device.alloc::<T>(values.len()) }?;
        // SAFETY: the slice has room for the values.
        unsafe { self.overwrite(values, begin(&slice)) }?;
        Ok(slice)
    }

    /// Overwrites the memory at an address with host values, in stream order.
    ///
    /// # Safety
    /// The address must have room for the values when the stream reaches the copy.
    pub(crate) unsafe fn overwrite<T: bytemuck::Pod>(&self, values: &[T], to: Address) -> Result<()> {
        let of = self.kernels.device();
        let pieces = cached(&PIECES, self.device.id(), || Ok(Mutex::new(Ring::new(of, LEAVING))))?;
        let mut pieces = pieces.lock().unwrap_or_else(PoisonError::into_inner);
        on_stream(&self.device, of, |stream| {
            for (index, part) in bytemuck::cast_slice::<T, u8>(values).chunks(PIECE).enumerate() {
                let event = Event::new(of)?;
                // Powers of two give few distinct sizes, so that pieces are reused.
                let mut pinned = pieces.take_to_leave(part.len().next_power_of_two())?;
                pinned[..part.len()].copy_from_slice(part);
                let to = to + (index * PIECE) as u64;
                // SAFETY: the caller guarantees room for all of `values`, of which this part is a slice. `leave` keeps
                // `pinned` until the stream has passed `event`, so it outlives the copy.
                let done = unsafe { stream.upload(&pinned, to, part.len()) }.and_then(|()| stream.record(&event));
                if done.is_err() {
                    // If the event was not recorded, nothing else would wait for the copy.
                    let _ = stream.synchronize();
                }
                pieces.leave(event, pinned);
                done?;
            }
            Ok(())
        })
    }
}

/// Copies a tensor to a device without waiting. Returns the tensor itself if it is already on that device.
///
/// # Errors
/// Fails if memory is exhausted. Returns errors of the driver.
pub fn onto(device: &Device, x: &Tensor) -> Result<Tensor> {
    let (Device::Cuda(gpu), Device::Cpu) = (device, x.device()) else { return x.to_device(device) };
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let is_small = x.elem_count() * x.dtype().size_in_bytes() <= SMALL;
    let (Storage::Cpu(values), Some((start, end)), false) = (&*storage, layout.contiguous_offsets(), is_small) else {
        return x.to_device(device);
    };
    match part(gpu, values, start, Some(end))? {
        Some(values) => Ok(Tensor::from_storage(Storage::Cuda(values), x.shape(), BackpropOp::none(), false)),
        None => x.to_device(device),
    }
}

/// Copies values to a GPU without waiting.
///
/// # Errors
/// Fails if memory is exhausted. Returns errors of the driver.
pub fn sent(gpu: &CudaDevice, values: CpuStorage) -> Result<CudaStorage> {
    match part(gpu, &values, 0, None)? {
        Some(values) => Ok(values),
        None => gpu.storage_from_cpu_storage_owned(values),
    }
}

/// Copies the elements from `start` to `end`, or to the last element if `end` is `None`. Returns `None` for dtypes that
/// neither batches nor activations have.
fn part(gpu: &CudaDevice, values: &CpuStorage, start: usize, end: Option<usize>) -> Result<Option<CudaStorage>> {
    fn of<T: CudaDType + DeviceRepr + bytemuck::Pod>(
        gpu: &CudaDevice,
        values: &[T],
        (start, end): (usize, Option<usize>),
    ) -> Result<Option<CudaStorage>> {
        let Some(values) = values.get(start..end.unwrap_or(values.len())) else {
            bail!("the tensor ends beyond its storage");
        };
        Ok(Some(CudaStorage::wrap_cuda_slice(Gpu::new(gpu)?.upload(values)?, gpu.clone())))
    }
    let range = (start, end);
    match values {
        CpuStorage::U8(values) => of(gpu, values, range),
        CpuStorage::U32(values) => of(gpu, values, range),
        CpuStorage::I64(values) => of(gpu, values, range),
        CpuStorage::F32(values) => of(gpu, values, range),
        CpuStorage::BF16(values) => of(gpu, values, range),
        CpuStorage::F16(values) => of(gpu, values, range),
        _ => Ok(None),
    }
}

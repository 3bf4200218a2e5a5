//! Copies of what the host has to a GPU, in the order of the stream that computes, without a wait of the host.
//!
//! The driver takes a small piece of pageable memory over during the call. For a large one the call comes back when the stream has come to
//! the copy: when everything is done that the host has put there before. So large ones go through memory of the host that is pinned.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, DeviceId};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, Result, Storage, Tensor, bail};
use zero_cuda::Event;
use zero_kernels::Address;

use super::ring::Ring;
use super::{Gpu, begin, known, on_stream};

/// Bytes that the driver takes over at once.
const SMALL: usize = 64 << 10;
/// The most bytes of a piece, and of all that are being copied.
const PIECE: usize = 8 << 20;
const LEAVING: usize = 4 * PIECE;

/// Pinned pieces for each device of candle's, each of which has a stream of its own.
static PIECES: Mutex<Vec<(DeviceId, Arc<Mutex<Ring>>)>> = Mutex::new(vec![]);

impl Gpu {
    /// A copy of what the host has, behind what is on the stream.
    pub(crate) fn upload<T: DeviceRepr + bytemuck::Pod>(&self, values: &[T]) -> Result<CudaSlice<T>> {
        if size_of_val(values) <= SMALL {
            return self.device.clone_htod(values);
        }
        // SAFETY: all of it is written before anybody reads.
        let slice = unsafe { self.device.alloc::<T>(values.len()) }?;
        // SAFETY: it has room for the values.
        unsafe { self.overwrite(values, begin(&slice)) }?;
        Ok(slice)
    }

    /// Puts a copy of what the host has over what is at an address.
    ///
    /// # Safety
    /// There is room for the values when the stream gets to it.
    pub(crate) unsafe fn overwrite<T: bytemuck::Pod>(&self, values: &[T], to: Address) -> Result<()> {
        let of = self.kernels.device();
        let pieces = known(&PIECES, self.device.id(), || Ok(Mutex::new(Ring::new(of, LEAVING))))?;
        let mut pieces = pieces.lock().unwrap_or_else(PoisonError::into_inner);
        on_stream(&self.device, of, |stream| {
            for (index, part) in bytemuck::cast_slice::<T, u8>(values).chunks(PIECE).enumerate() {
                let there = Event::new(of)?;
                // Of few sizes, so that they are used again.
                let mut pinned = pieces.take_to_leave(part.len().next_power_of_two())?;
                pinned[..part.len()].copy_from_slice(part);
                let to = to + (index * PIECE) as u64;
                // SAFETY: there is room, as the caller says; the piece is kept until the event.
                let done = unsafe { stream.upload(&pinned, to, part.len()) }.and_then(|()| stream.record(&there));
                if done.is_err() {
                    // Without the event nobody would wait for the copy.
                    let _ = stream.synchronize();
                }
                pieces.leave(there, pinned);
                done?;
            }
            Ok(())
        })
    }
}

/// A copy of a tensor on a device, without a wait; of what is there already, itself.
///
/// # Errors
/// The memory does not suffice, or what the driver says.
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

/// A copy of values on a GPU, without a wait.
///
/// # Errors
/// The memory does not suffice, or what the driver says.
pub fn sent(gpu: &CudaDevice, values: CpuStorage) -> Result<CudaStorage> {
    match part(gpu, &values, 0, None)? {
        Some(values) => Ok(values),
        None => gpu.storage_from_cpu_storage_owned(values),
    }
}

/// From a place on, to another or the end; `None` of types that neither batches nor activations have.
fn part(gpu: &CudaDevice, values: &CpuStorage, start: usize, end: Option<usize>) -> Result<Option<CudaStorage>> {
    fn of<T: CudaDType + DeviceRepr + bytemuck::Pod>(
        gpu: &CudaDevice,
        values: &[T],
        (start, end): (usize, Option<usize>),
    ) -> Result<Option<CudaStorage>> {
        let Some(values) = values.get(start..end.unwrap_or(values.len())) else {
            bail!("a tensor that ends beyond its storage");
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

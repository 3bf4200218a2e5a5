//! Copies of what the host has to a GPU, in the order of the stream that computes, without a wait of the host.
//!
//! The driver takes a small piece of pageable memory over during the call. For a large one the call comes back when the stream has come to
//! the copy: when everything is done that the host has put there before. So large ones go through memory of the host that is pinned.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, DeviceId};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, Result, Storage, Tensor, bail};
use zero_cuda::{CudaError, Event, Pinned, Stream};
use zero_kernels::Address;

use super::{Gpu, begin, known, on_stream};

/// Bytes that the driver takes over at once.
const SMALL: usize = 64 << 10;
/// Bytes of a piece, at most, and how many there are.
const PIECE: usize = 8 << 20;
const PIECES: usize = 4;

/// Pinned pieces of the host's memory, in the order in which they were last put on the stream.
struct Uploads {
    of: Arc<zero_cuda::Device>,
    leaving: VecDeque<(Event, Pinned)>,
}

/// Those of each device of candle's, each of which has a stream of its own.
static UPLOADS: Mutex<Vec<(DeviceId, Arc<Mutex<Uploads>>)>> = Mutex::new(vec![]);

impl Uploads {
    /// A piece with room for `bytes` that no copy reads. It waits for a copy only if all pieces are being copied.
    fn piece(&mut self, bytes: usize) -> std::result::Result<(Event, Pinned), CudaError> {
        let fits = |pinned: &Pinned| pinned.len() >= bytes;
        let is_free = match self.leaving.front() {
            Some((there, pinned)) => self.leaving.len() == PIECES || (fits(pinned) && there.is_done()?),
            None => false,
        };
        if is_free && let Some((there, pinned)) = self.leaving.pop_front() {
            there.wait()?;
            if fits(&pinned) {
                return Ok((there, pinned));
            }
        }
        Ok((Event::new(&self.of)?, Pinned::new(&self.of, bytes.next_power_of_two().min(PIECE))?))
    }

    /// Puts copies on the stream. The host may change its own when this returns.
    ///
    /// # Safety
    /// There is room for as many bytes at `to` when the stream gets to it.
    unsafe fn put(&mut self, bytes: &[u8], to: Address, stream: &Stream) -> std::result::Result<(), CudaError> {
        for (index, part) in bytes.chunks(PIECE).enumerate() {
            let (there, mut pinned) = self.piece(part.len())?;
            pinned[..part.len()].copy_from_slice(part);
            let to = to + (index * PIECE) as u64;
            // SAFETY: there is room, as the caller says; the piece is kept until the event.
            let done = unsafe { stream.upload(&pinned, to, part.len()) }.and_then(|()| stream.record(&there));
            if done.is_err() {
                // Without the event nobody would wait for the copy.
                let _ = stream.synchronize();
            }
            self.leaving.push_back((there, pinned));
            done?;
        }
        Ok(())
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        for (there, _) in &self.leaving {
            // The device still reads it.
            let _ = there.wait();
        }
    }
}

impl Gpu {
    /// A copy of what the host has, behind what is on the stream.
    pub(crate) fn upload<T: DeviceRepr + bytemuck::Pod>(&self, values: &[T]) -> Result<CudaSlice<T>> {
        if size_of_val(values) <= SMALL {
            return self.device.clone_htod(values);
        }
        // SAFETY: all of it is written before anybody reads.
        let slice = unsafe { self.device.alloc::<T>(values.len()) }?;
        // SAFETY: it has room for as many.
        unsafe { self.overwrite(values, begin(&slice)) }?;
        Ok(slice)
    }

    /// Puts a copy of what the host has over what is at an address.
    ///
    /// # Safety
    /// There is room for as many values when the stream gets to it.
    pub(crate) unsafe fn overwrite<T: bytemuck::Pod>(&self, values: &[T], to: Address) -> Result<()> {
        let of = self.kernels.device();
        let uploads = known(&UPLOADS, self.device.id(), || {
            Ok(Mutex::new(Uploads { of: Arc::clone(of), leaving: VecDeque::new() }))
        })?;
        let mut uploads = uploads.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller answers for the room.
        on_stream(&self.device, of, |stream| unsafe { uploads.put(bytemuck::cast_slice(values), to, stream) })
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

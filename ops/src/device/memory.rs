//! GPU memory for values of a parameter's dtype and for bytes: allocation, copies, and events on the stream that writes
//! them.

use std::ops::Range;
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaStorageSlice, cudarc};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, DType, Error, Result, bail};
use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::CUevent;
use zero_comm::DeviceEvent;
use zero_cuda::Event;
use zero_kernels::Address;

use super::{Gpu, address, driver, on_stream};

/// Allocates `len` values of f32, bf16, f16 or u8 with arbitrary content.
///
/// # Errors
/// Fails if memory is exhausted.
pub fn room(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    Gpu::new(device)?.room("parameters", dtype, len)
}

/// Copies host values to the GPU.
///
/// # Errors
/// Fails if memory is exhausted, or the dtype is not f32, bf16, f16 or u8.
pub fn upload(device: &CudaDevice, values: &CpuStorage) -> Result<CudaStorage> {
    if elements(values) == 0 {
        return room(device, values.dtype(), 0);
    }
    device.storage_from_cpu_storage(values)
}

fn elements(values: &CpuStorage) -> usize {
    match values {
        CpuStorage::F32(values) => values.len(),
        CpuStorage::BF16(values) => values.len(),
        CpuStorage::F16(values) => values.len(),
        CpuStorage::U8(values) => values.len(),
        _ => 0,
    }
}

/// Returns the number of values in a storage of f32, bf16, f16 or u8, and 0 for any other dtype.
#[must_use]
pub fn elements_of(storage: &CudaStorage) -> usize {
    match &storage.slice {
        CudaStorageSlice::F32(slice) => slice.len(),
        CudaStorageSlice::BF16(slice) => slice.len(),
        CudaStorageSlice::F16(slice) => slice.len(),
        CudaStorageSlice::U8(slice) => slice.len(),
        _ => 0,
    }
}

/// Copies a range to a range of another storage of the same dtype on the same GPU.
///
/// # Errors
/// Fails if the dtypes differ. Returns errors of the driver.
///
/// # Panics
/// Panics if a range is out of bounds or the lengths differ.
pub fn copy(from: &CudaStorage, source: Range<usize>, to: &mut CudaStorage, target: Range<usize>) -> Result<()> {
    fn of<T: DeviceRepr>(
        device: &CudaDevice,
        (from, source): (&CudaSlice<T>, Range<usize>),
        (to, target): (&mut CudaSlice<T>, Range<usize>),
    ) -> Result<()> {
        assert_eq!(source.len(), target.len());
        if source.is_empty() {
            return Ok(());
        }
        device.memcpy_dtod(&from.slice(source), &mut to.slice_mut(target))
    }
    use CudaStorageSlice::{BF16, F16, F32, U8};
    let device = to.device.clone();
    match (&from.slice, &mut to.slice) {
        (F32(from), F32(to)) => of(&device, (from, source), (to, target)),
        (BF16(from), BF16(to)) => of(&device, (from, source), (to, target)),
        (F16(from), F16(to)) => of(&device, (from, source), (to, target)),
        (U8(from), U8(to)) => of(&device, (from, source), (to, target)),
        _ => bail!("the parameters have different dtypes, or one is released"),
    }
}

/// Waits for all earlier work on the stream and copies a range to the host.
///
/// # Errors
/// Fails if the dtype is not f32, bf16, f16 or u8. Returns errors of the driver.
///
/// # Panics
/// Panics if the range is out of bounds.
pub fn download(from: &CudaStorage, range: Range<usize>) -> Result<CpuStorage> {
    fn of<T: DeviceRepr + Clone + Default>(
        from: &CudaStorage,
        slice: &CudaSlice<T>,
        range: Range<usize>,
    ) -> Result<Vec<T>> {
        let mut values = vec![T::default(); range.len()];
        if !range.is_empty() {
            from.device.cuda_stream().memcpy_dtoh(&slice.slice(range), &mut values).map_err(Error::wrap)?;
        }
        Ok(values)
    }
    match &from.slice {
        CudaStorageSlice::F32(slice) => Ok(CpuStorage::F32(of(from, slice, range)?)),
        CudaStorageSlice::BF16(slice) => Ok(CpuStorage::BF16(of(from, slice, range)?)),
        CudaStorageSlice::F16(slice) => Ok(CpuStorage::F16(of(from, slice, range)?)),
        CudaStorageSlice::U8(slice) => Ok(CpuStorage::U8(of(from, slice, range)?)),
        _ => bail!("expected values of dtype f32, bf16, f16 or u8, got {:?}", from.dtype()),
    }
}

/// Returns the address of a storage, for code that copies its values.
///
/// # Errors
/// Fails if the dtype is not f32, bf16, f16, u8, u32 or i64.
pub fn begin(storage: &CudaStorage) -> Result<Address> {
    address("parameters", storage)
}

/// An event that completes after all work that was on a GPU's stream when the event was created.
#[derive(Debug)]
pub struct Mark(Event);

impl Mark {
    /// Records an event on the stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let of = Arc::clone(Gpu::new(device)?.kernels.device());
        let event = Event::new(&of).map_err(driver)?;
        on_stream(device, &of, |stream| stream.record(&event))?;
        Ok(Self(event))
    }

    pub(super) fn event(&self) -> &Event {
        &self.0
    }

    /// Returns the driver's handle of the event (a `CUevent`), which is valid as long as this value lives.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.0.raw() as u64
    }
}

/// Makes later work on the stream wait for the event.
///
/// # Errors
/// Returns the driver's error.
pub(super) fn wait_for(device: &CudaDevice, event: &dyn DeviceEvent) -> Result<()> {
    let of = Arc::clone(Gpu::new(device)?.kernels.device());
    // SAFETY: the event lives during the call, and the driver does not need it afterwards.
    on_stream(device, &of, |stream| unsafe { stream.wait_for_raw(event.raw() as usize as CUevent) })
}

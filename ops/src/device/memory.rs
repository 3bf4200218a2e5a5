//! Values of a parameter's type in the memory of a GPU: room for them, copies, and marks on the stream that makes them.

use std::ops::Range;
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::{CudaStorageSlice, cudarc};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, DType, Error, Result, bail};
use cudarc::driver::DeviceRepr;
use zero_cuda::Event;
use zero_kernels::Address;

use super::{Gpu, address, driver, on_stream};

/// Room for `len` values of f32, bf16 or f16, which are arbitrary at first.
///
/// # Errors
/// The memory does not suffice.
pub fn room(device: &CudaDevice, dtype: DType, len: usize) -> Result<CudaStorage> {
    Gpu::new(device)?.room("parameters", dtype, len)
}

/// A copy of what the host has.
///
/// # Errors
/// The memory does not suffice.
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
        _ => 0,
    }
}

/// Values that a storage of f32, bf16 or f16 holds; none of any other.
#[must_use]
pub fn elements_of(storage: &CudaStorage) -> usize {
    match &storage.slice {
        CudaStorageSlice::F32(slice) => slice.len(),
        CudaStorageSlice::BF16(slice) => slice.len(),
        CudaStorageSlice::F16(slice) => slice.len(),
        _ => 0,
    }
}

/// Copies a range over one of another storage of the same type and GPU.
///
/// # Errors
/// They are of different types, or what the driver says.
///
/// # Panics
/// If a range is not in its storage, or they differ in length.
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
    use CudaStorageSlice::{BF16, F16, F32};
    let device = to.device.clone();
    match (&from.slice, &mut to.slice) {
        (F32(from), F32(to)) => of(&device, (from, source), (to, target)),
        (BF16(from), BF16(to)) => of(&device, (from, source), (to, target)),
        (F16(from), F16(to)) => of(&device, (from, source), (to, target)),
        _ => bail!("parameters of different dtypes, or a released one"),
    }
}

/// Copies a range to the host, when all is done that came before.
///
/// # Errors
/// A storage of another type, or what the driver says.
///
/// # Panics
/// If the range is not in it.
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
        _ => bail!("parameters are f32, bf16 or f16, got {:?}", from.dtype()),
    }
}

/// Where a storage of f32, bf16 or f16 begins, for whoever brings its values elsewhere.
///
/// # Errors
/// It is of another type.
pub fn begin(storage: &CudaStorage) -> Result<Address> {
    address("parameters", storage)
}

/// A mark behind all that is on a GPU's stream now.
#[derive(Debug)]
pub struct Mark(Event);

impl Mark {
    /// Behind what is on the stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let of = Arc::clone(Gpu::new(device)?.kernels.device());
        let event = Event::new(&of).map_err(driver)?;
        on_stream(device, &of, |stream| stream.record(&event))?;
        Ok(Self(event))
    }

    pub(super) fn event(&self) -> &Event {
        &self.0
    }

    /// The event, as the driver knows it (a `CUevent`); it lives as long as this.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.0.raw() as u64
    }
}

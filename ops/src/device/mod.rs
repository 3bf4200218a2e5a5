//! A GPU: its kernels, its memory, and what operations read of it.
//!
//! Everything is put on the one stream that candle's device has, in the order of the program: nothing here waits. What reads results
//! on the host ([`Array::to_host`], candle's own copies) does.

#![allow(unsafe_code)]

mod array;
mod fault;
mod memory;
pub mod optimizer;
mod pool;
mod product;
mod ring;
mod staging;
mod timeline;
mod uploads;

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::result::memset_d8_async;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice, DeviceId};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Error, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};
use zero_cuda::{CudaError, Stream};
use zero_kernels::{Address, Dtype, Kernels, Launch};

pub use array::Array;
pub use fault::check;
pub(crate) use fault::{Faults, Finding};
pub use memory::{Mark, begin as address_of, copy, download, elements_of, room, upload};
pub use pool::{peak, reserved};
pub use staging::{Arriving, Staging};
pub use timeline::Timeline;
pub use uploads::{onto, sent};

/// Opens GPU `ordinal` of those that are visible.
///
/// # Errors
/// There is no driver, no such GPU, or a library that candle needs is missing.
pub fn open(ordinal: usize) -> Result<Device> {
    let device = CudaDevice::new_with_stream(ordinal)?;
    // SAFETY: all work is on the device's one stream, so nothing is used before it is there, or freed before its last use.
    unsafe { device.disable_event_tracking() };
    pool::keep_what_is_freed(&device)?;
    pool::share_with_peers(&device)?;
    Ok(Device::Cuda(device))
}

/// Loads all kernels that training launches, ours and candle's. Whoever loads one later waits for all that the GPU does: perhaps for a
/// collective, which waits for a rank that may wait for this one. `CUDA_MODULE_LOADING=EAGER` says the same of the kernels of libraries, and
/// of all of a file of kernels.
///
/// # Errors
/// The program was built without kernels for this GPU, or what the driver says.
pub fn load_kernels(device: &Device) -> Result<()> {
    use candle_core::cuda_backend::kernels::{AFFINE, BINARY, CAST, FILL, INDEXING, REDUCE, TERNARY, UNARY};
    let Device::Cuda(device) = device else { return Ok(()) };
    Gpu::new(device)?.kernels.load_all().map_err(driver)?;
    // A file is loaded for one of its kernels.
    let files = [
        (&AFFINE, "affine_f32"),
        (&BINARY, "badd_f32"),
        (&CAST, "cast_f32_f32"),
        (&FILL, "fill_f32"),
        (&INDEXING, "gather_u32_f32"),
        (&REDUCE, "fast_sum_f32"),
        (&TERNARY, "where_u32_f32"),
        (&UNARY, "ucopy_f32"),
    ];
    files.into_iter().try_for_each(|(file, kernel)| device.get_or_load_func(kernel, file).map(drop))
}

/// A storage for no elements, of a float type or of one that no operation takes. It holds one, since the driver gives no memory of no size.
pub(crate) fn nothing(dtype: DType, device: &CudaDevice) -> Result<CudaStorage> {
    // SAFETY: nobody reads it: a tensor has elements, or is refused for its type.
    let slice = unsafe {
        match dtype {
            DType::F32 => CudaStorageSlice::F32(device.alloc(1)?),
            DType::BF16 => CudaStorageSlice::BF16(device.alloc(1)?),
            DType::F16 => CudaStorageSlice::F16(device.alloc(1)?),
            _ => CudaStorageSlice::F4(device.alloc(1)?),
        }
    };
    Ok(CudaStorage { slice, device: device.clone() })
}

/// A GPU as operations see it: where they put what they do.
#[derive(Clone)]
pub(crate) struct Gpu {
    device: CudaDevice,
    kernels: Arc<Kernels>,
    faults: Arc<Faults>,
}

/// The kernels of each GPU that has been asked for.
static KERNELS: Mutex<Vec<(usize, Arc<Kernels>)>> = Mutex::new(vec![]);
/// What was found on each device of candle's, each of which has a stream of its own.
static FAULTS: Mutex<Vec<(DeviceId, Arc<Faults>)>> = Mutex::new(vec![]);

/// What is known by `key`, or what `make` makes of it, which is then known.
fn known<K: PartialEq, V>(all: &Mutex<Vec<(K, Arc<V>)>>, key: K, make: impl FnOnce() -> Result<V>) -> Result<Arc<V>> {
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, value)) = all.iter().find(|(of, _)| *of == key) {
        return Ok(Arc::clone(value));
    }
    let value = Arc::new(make()?);
    all.push((key, Arc::clone(&value)));
    Ok(value)
}

fn driver(error: CudaError) -> Error {
    Error::wrap(error)
}

/// What `then` does with the stream that candle's device has; `of` is the same GPU.
fn on_stream<R>(
    device: &CudaDevice,
    of: &Arc<zero_cuda::Device>,
    then: impl FnOnce(&Stream) -> std::result::Result<R, CudaError>,
) -> Result<R> {
    let stream = device.cuda_stream();
    // SAFETY: candle's stream is one of its device, and lives until the end of the call.
    then(&unsafe { Stream::borrow(of, stream.cu_stream()) }).map_err(driver)
}

impl Gpu {
    /// That of a device of candle's.
    pub(crate) fn new(device: &CudaDevice) -> Result<Self> {
        let ordinal = device.cuda_stream().context().ordinal();
        let kernels =
            known(&KERNELS, ordinal, || Ok(Kernels::new(&zero_cuda::Device::open(ordinal).map_err(driver)?)))?;
        let faults = known(&FAULTS, device.id(), || Faults::new(kernels.device()))?;
        Ok(Self { device: device.clone(), kernels, faults })
    }

    /// That of a tensor.
    pub(crate) fn of(op: &'static str, tensor: &Tensor) -> Result<Self> {
        match tensor.device() {
            Device::Cuda(device) => Self::new(device),
            other => bail!("{op}: a tensor on a GPU expected, got one on {other:?}"),
        }
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Puts a launch on the stream.
    ///
    /// # Safety
    /// What the functions that made the launch say of its addresses is so when the stream gets to it.
    pub(crate) unsafe fn launch<A>(&self, launch: &Launch<A>) -> Result<()> {
        // SAFETY: the caller's promise.
        on_stream(&self.device, self.kernels.device(), |stream| unsafe { self.kernels.launch(launch, stream) })
    }

    /// [`Gpu::launch`] of what there may be nothing of.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn launch_some<A>(&self, launch: Option<Launch<A>>) -> Result<()> {
        // SAFETY: the caller's promise.
        launch.map_or(Ok(()), |launch| unsafe { self.launch(&launch) })
    }

    /// Puts zeros on the stream.
    ///
    /// # Safety
    /// There are as many bytes at the address when the stream gets to it.
    pub(crate) unsafe fn zero(&self, at: Address, bytes: usize) -> Result<()> {
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        // SAFETY: the stream lives until the end of the call; the caller answers for the bytes.
        unsafe { memset_d8_async(at, 0, bytes, stream.cu_stream()) }.map_err(Error::wrap)
    }

    /// Room for `count` elements, or one, whose content is arbitrary.
    pub(crate) fn room(&self, op: &'static str, dtype: DType, count: usize) -> Result<CudaStorage> {
        fn of<T: CudaDType + DeviceRepr>(device: &CudaDevice, count: usize) -> Result<CudaStorage> {
            // SAFETY: whoever asks for room writes before anybody reads: floats of any bits are floats.
            let slice: CudaSlice<T> = unsafe { device.alloc(count.max(1)) }?;
            Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
        }
        match dtype {
            DType::F32 => of::<f32>(&self.device, count),
            DType::BF16 => of::<bf16>(&self.device, count),
            DType::F16 => of::<f16>(&self.device, count),
            other => bail!("{op}: f32, bf16 or f16 expected, got {other:?}"),
        }
    }

    /// Room for `count` f32.
    pub(crate) fn floats(&self, count: usize) -> Result<CudaStorage> {
        self.room("floats", DType::F32, count)
    }
}

/// The type by which kernels are named.
pub(crate) fn kernel_dtype(op: &'static str, dtype: DType) -> Result<Dtype> {
    match dtype {
        DType::F32 => Ok(Dtype::F32),
        DType::BF16 => Ok(Dtype::Bf16),
        DType::F16 => Ok(Dtype::F16),
        other => bail!("{op}: f32, bf16 or f16 expected, got {other:?}"),
    }
}

/// Where a slice begins.
pub(crate) fn begin<T>(slice: &CudaSlice<T>) -> Address {
    slice.device_ptr(slice.stream()).0
}

/// Where a storage begins.
pub(crate) fn address(op: &'static str, storage: &CudaStorage) -> Result<Address> {
    match &storage.slice {
        CudaStorageSlice::F32(slice) => Ok(begin(slice)),
        CudaStorageSlice::BF16(slice) => Ok(begin(slice)),
        CudaStorageSlice::F16(slice) => Ok(begin(slice)),
        CudaStorageSlice::U8(slice) => Ok(begin(slice)),
        CudaStorageSlice::U32(slice) => Ok(begin(slice)),
        CudaStorageSlice::I64(slice) => Ok(begin(slice)),
        // How a released parameter is stored.
        CudaStorageSlice::F4(_) => bail!("{op}: reads a parameter that is released"),
        _ => bail!("{op}: f32, bf16, f16 or indices expected, got {:?}", storage.dtype()),
    }
}

/// Elements that a kernel reads, in row-major order.
///
/// The address is good for launches that are put on the stream while this lives, or the storage that it was made of.
pub(crate) struct Operand {
    pub(crate) address: Address,
    pub(crate) dtype: Dtype,
    pub(crate) count: usize,
    /// What is not contiguous is copied.
    _copy: Option<CudaStorage>,
}

impl Operand {
    /// What lies somewhere in memory that somebody else keeps.
    pub(crate) fn at(address: Address, dtype: Dtype, count: usize) -> Self {
        Self { address, dtype, count, _copy: None }
    }

    pub(crate) fn new(op: &'static str, storage: &CudaStorage, layout: &Layout) -> Result<Self> {
        let (count, dtype) = (layout.shape().elem_count(), storage.dtype());
        let base = address(op, storage)?;
        if let Some((start, _)) = layout.contiguous_offsets() {
            let address = base + (start * dtype.size_in_bytes()) as u64;
            return Ok(Self { address, dtype: kernel_dtype(op, dtype)?, count, _copy: None });
        }
        let mut copy = Gpu::new(&storage.device)?.room(op, dtype, count)?;
        storage.copy_strided_src(&mut copy, 0, layout)?;
        Ok(Self { address: address(op, &copy)?, dtype: kernel_dtype(op, dtype)?, count, _copy: Some(copy) })
    }

    /// That of a tensor. What frees the tensor's storage later is behind these launches on the stream.
    pub(crate) fn of(op: &'static str, tensor: &Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => Self::new(op, storage, layout),
            _ => bail!("{op}: a tensor on a GPU expected, got one on {:?}", tensor.device()),
        }
    }
}

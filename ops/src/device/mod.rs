//! A GPU: its kernels, its memory and the operands of its operations.
//!
//! All work goes to the single stream of candle's device, in program order. The host waits only when it reads results
//! ([`Array::to_host`], candle's own copies).

#![allow(unsafe_code)]

mod array;
mod buffer;
mod codes;
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
use candle_core::cuda_backend::cudarc::cublas::sys::{cublasMath_t, cublasSetMathMode};
use candle_core::cuda_backend::cudarc::driver::result::{memcpy_dtod_async, memset_d8_async};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice, DeviceId};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Error, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};
use zero_cuda::{CudaError, Stream};
use zero_kernels::{Address, Dtype, Kernels, Launch};

pub use array::Array;
pub(crate) use buffer::copied_to_host;
pub use buffer::{copied_to_send, room_to_receive, storage_of, to_send};
pub use codes::{add_codes, dequantized, quantize};
pub use fault::check;
pub(crate) use fault::{Faults, Finding};
pub use memory::{Mark, begin as address_of, copy, download, elements_of, room, upload};
pub use pool::{peak, reserved};
pub use staging::{Arriving, Staging};
pub use timeline::Timeline;
pub use uploads::{onto, sent};

/// Opens the visible GPU with the number `ordinal`.
///
/// # Errors
/// Fails if the driver, the GPU or a library that candle needs is missing.
pub fn open(ordinal: usize) -> Result<Device> {
    let device = CudaDevice::new_with_stream(ordinal)?;
    // SAFETY: all work is on the device's single stream, so memory is never used before it is written, or freed
    // before its last use.
    unsafe { device.disable_event_tracking() };
    let opened = zero_cuda::Device::open(ordinal).map_err(driver)?;
    pool::keep_freed_memory(&opened)?;
    Ok(Device::Cuda(device))
}

/// Makes cuBLAS add the partial sums of a product in f32, even if the result has 16 bits.
fn sum_in_f32(device: &CudaDevice) -> Result<()> {
    let mode = cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the handle lives as long as the device.
    let status = unsafe { cublasSetMathMode(*device.cublas_handle().handle(), mode) };
    status.result().map_err(Error::wrap)
}

/// Loads all kernels that training launches, ours and candle's. Loading a kernel later would wait for all work on the
/// GPU. If this work includes a collective that waits for another rank, and the other rank waits for this one, the
/// ranks deadlock. With `CUDA_MODULE_LOADING=EAGER` the driver also loads the kernels of libraries early, and all
/// kernels of each module.
///
/// # Errors
/// Fails if the program was built without kernels for this GPU. Returns errors of the driver.
pub fn load_kernels(device: &Device) -> Result<()> {
    use candle_core::cuda_backend::kernels::{AFFINE, BINARY, CAST, FILL, INDEXING, REDUCE, TERNARY, UNARY};
    let Device::Cuda(device) = device else { return Ok(()) };
    Gpu::new(device)?.kernels.load_all().map_err(driver)?;
    // One kernel of each module suffices: loading it loads the module.
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

/// Returns storage for an empty tensor, of `dtype` if that is a float, otherwise of a dtype that no operation accepts.
/// Allocates one element, since the driver rejects allocations of size zero.
pub(crate) fn nothing(dtype: DType, device: &CudaDevice) -> Result<CudaStorage> {
    // SAFETY: no operation reads the element: an empty tensor has no elements to read, and operations reject F4.
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

/// The kernels and the stream of a GPU, on which operations launch their work.
#[derive(Clone)]
pub(crate) struct Gpu {
    device: CudaDevice,
    kernels: Arc<Kernels>,
    faults: Arc<Faults>,
}

/// The kernels of each GPU that is in use.
static KERNELS: Mutex<Vec<(usize, Arc<Kernels>)>> = Mutex::new(vec![]);
/// The recorded errors of each candle device, since each has its own stream.
static FAULTS: Mutex<Vec<(DeviceId, Arc<Faults>)>> = Mutex::new(vec![]);

/// Returns the value of `key`, which `make` creates at the first use.
fn cached<K: PartialEq, V>(all: &Mutex<Vec<(K, Arc<V>)>>, key: K, make: impl FnOnce() -> Result<V>) -> Result<Arc<V>> {
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

/// Calls `then` with the stream of candle's device. `of` is the same GPU as `device`.
fn on_stream<R>(
    device: &CudaDevice,
    of: &Arc<zero_cuda::Device>,
    then: impl FnOnce(&Stream) -> std::result::Result<R, CudaError>,
) -> Result<R> {
    let stream = device.cuda_stream();
    // SAFETY: candle's stream belongs to its device and outlives the call.
    then(&unsafe { Stream::borrow(of, stream.cu_stream()) }).map_err(driver)
}

impl Gpu {
    /// Returns the GPU of a candle device.
    pub(crate) fn new(device: &CudaDevice) -> Result<Self> {
        let ordinal = device.cuda_stream().context().ordinal();
        let kernels =
            cached(&KERNELS, ordinal, || Ok(Kernels::new(&zero_cuda::Device::open(ordinal).map_err(driver)?)))?;
        let faults = cached(&FAULTS, device.id(), || {
            sum_in_f32(device)?;
            Faults::new(kernels.device())
        })?;
        Ok(Self { device: device.clone(), kernels, faults })
    }

    /// Returns the GPU of a tensor.
    pub(crate) fn of(op: &'static str, tensor: &Tensor) -> Result<Self> {
        match tensor.device() {
            Device::Cuda(device) => Self::new(device),
            other => bail!("{op}: expected a tensor on a GPU, got one on {other:?}"),
        }
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Launches a kernel on the stream.
    ///
    /// # Safety
    /// The function that creates the launch documents its requirements on the addresses. They must hold when the stream
    /// reaches the launch.
    pub(crate) unsafe fn launch<A>(&self, launch: &Launch<A>) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        on_stream(&self.device, self.kernels.device(), |stream| unsafe { self.kernels.launch(launch, stream) })
    }

    /// Calls [`Gpu::launch`] unless there are no elements to process.
    ///
    /// # Safety
    /// The requirements of [`Gpu::launch`] apply.
    pub(crate) unsafe fn launch_some<A>(&self, launch: Option<Launch<A>>) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        launch.map_or(Ok(()), |launch| unsafe { self.launch(&launch) })
    }

    /// Sets `bytes` bytes at an address to zero, in stream order.
    ///
    /// # Safety
    /// The address must be valid for that many bytes when the stream reaches this.
    pub(crate) unsafe fn zero(&self, at: Address, bytes: usize) -> Result<()> {
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        // SAFETY: the stream outlives the call; the caller guarantees that the bytes are valid.
        unsafe { memset_d8_async(at, 0, bytes, stream.cu_stream()) }.map_err(Error::wrap)
    }

    /// Copies `bytes` bytes from one address to another, in stream order.
    ///
    /// # Safety
    /// Both addresses must be valid for that many bytes when the stream reaches this.
    pub(crate) unsafe fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<()> {
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        // SAFETY: the stream outlives the call; the caller guarantees that the bytes are valid.
        unsafe { memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.map_err(Error::wrap)
    }

    /// Allocates `count` elements, but at least one, with arbitrary content.
    pub(crate) fn room(&self, op: &'static str, dtype: DType, count: usize) -> Result<CudaStorage> {
        fn of<T: CudaDType + DeviceRepr>(device: &CudaDevice, count: usize) -> Result<CudaStorage> {
            // SAFETY: callers write the memory before they read it, and any bits are valid.
            let slice: CudaSlice<T> = unsafe { device.alloc(count.max(1)) }?;
            Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
        }
        match dtype {
            DType::F32 => of::<f32>(&self.device, count),
            DType::BF16 => of::<bf16>(&self.device, count),
            DType::F16 => of::<f16>(&self.device, count),
            DType::U8 => of::<u8>(&self.device, count),
            other => bail!("{op}: expected f32, bf16, f16 or u8, got {other:?}"),
        }
    }

    /// Allocates `count` f32.
    pub(crate) fn floats(&self, count: usize) -> Result<CudaStorage> {
        self.room("floats", DType::F32, count)
    }
}

/// Returns the dtype in the form that kernel names use.
pub(crate) fn kernel_dtype(op: &'static str, dtype: DType) -> Result<Dtype> {
    match dtype {
        DType::F32 => Ok(Dtype::F32),
        DType::BF16 => Ok(Dtype::Bf16),
        DType::F16 => Ok(Dtype::F16),
        other => bail!("{op}: expected f32, bf16 or f16, got {other:?}"),
    }
}

/// Returns the address of a slice.
pub(crate) fn begin<T>(slice: &CudaSlice<T>) -> Address {
    slice.device_ptr(slice.stream()).0
}

/// Returns the address of a storage.
pub(crate) fn address(op: &'static str, storage: &CudaStorage) -> Result<Address> {
    match &storage.slice {
        CudaStorageSlice::F32(slice) => Ok(begin(slice)),
        CudaStorageSlice::BF16(slice) => Ok(begin(slice)),
        CudaStorageSlice::F16(slice) => Ok(begin(slice)),
        CudaStorageSlice::U8(slice) => Ok(begin(slice)),
        CudaStorageSlice::U32(slice) => Ok(begin(slice)),
        CudaStorageSlice::I64(slice) => Ok(begin(slice)),
        // The storage of a released parameter.
        CudaStorageSlice::F4(_) => bail!("{op}: the operation reads a released parameter"),
        _ => bail!("{op}: expected f32, bf16, f16 or indices, got {:?}", storage.dtype()),
    }
}

/// The elements that a kernel reads, in row-major order.
///
/// The address is valid for launches that are enqueued while this value, or the storage that it was made from, is
/// alive.
pub(crate) struct Operand {
    pub(crate) address: Address,
    pub(crate) dtype: Dtype,
    pub(crate) count: usize,
    /// The copy of an operand that is not contiguous.
    _copy: Option<CudaStorage>,
}

impl Operand {
    /// Describes elements in memory that the caller keeps alive.
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

    /// Returns the elements of a tensor. The stream frees the tensor's storage only after launches that were enqueued
    /// before.
    pub(crate) fn of(op: &'static str, tensor: &Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => Self::new(op, storage, layout),
            _ => bail!("{op}: expected a tensor on a GPU, got one on {:?}", tensor.device()),
        }
    }
}

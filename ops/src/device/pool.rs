//! The memory pool of a GPU: the driver's stream-ordered pool.

use std::ffi::c_void;

use candle_core::cuda_backend::cudarc::driver::sys::{self, CUdevice, CUmemPool_attribute, CUmemoryPool, CUresult};
use candle_core::{CudaDevice, Device, Result, bail};

fn check(call: &str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => bail!("{call}: {code:?}"),
    }
}

/// Returns the pool, or `None` if the device has no stream-ordered pools.
fn pool(device: &CudaDevice) -> Result<Option<CUmemoryPool>> {
    let stream = device.cuda_stream();
    let context = stream.context();
    context.bind_to_thread().map_err(candle_core::Error::wrap)?;
    let (of, mut pool): (CUdevice, _) = (context.cu_device(), std::ptr::null_mut());
    // SAFETY: the call writes one handle.
    match unsafe { sys::cuDeviceGetMemPool(&raw mut pool, of) } {
        CUresult::CUDA_ERROR_NOT_SUPPORTED => Ok(None),
        code => check("cuDeviceGetMemPool", code).map(|()| Some(pool)),
    }
}

/// Keeps freed memory in the pool for reuse. By default the driver returns it to the system whenever the host waits
/// for the stream, so each step would have to allocate it again.
pub(super) fn keep_freed_memory(device: &CudaDevice) -> Result<()> {
    let (Some(pool), mut all) = (pool(device)?, u64::MAX) else { return Ok(()) };
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is a 64-bit number, which the call reads.
    let code = unsafe { sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut all).cast::<c_void>()) };
    check("cuMemPoolSetAttribute", code)
}

/// Returns the peak number of bytes in use by this process on the GPU, or `None` on the CPU.
///
/// # Errors
/// Returns the driver's error.
pub fn peak(device: &Device) -> Result<Option<u64>> {
    most(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
}

/// Returns the peak number of bytes that the pool reserved on the GPU. It exceeds [`peak`] by the freed memory that
/// could not be reused immediately.
///
/// # Errors
/// Returns the driver's error.
pub fn reserved(device: &Device) -> Result<Option<u64>> {
    most(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
}

fn most(device: &Device, attribute: CUmemPool_attribute) -> Result<Option<u64>> {
    let Device::Cuda(device) = device else { return Ok(None) };
    let (Some(pool), mut bytes) = (pool(device)?, 0u64) else { return Ok(None) };
    // SAFETY: these attributes are 64-bit numbers, which the call writes.
    let code = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast::<c_void>()) };
    check("cuMemPoolGetAttribute", code)?;
    Ok(Some(bytes))
}

//! The memory pool of a GPU: the driver's stream-ordered pool.

use std::ffi::c_void;

use candle_core::cuda_backend::cudarc::driver::sys::{self, CUmemPool_attribute};
use candle_core::{Device, Result};
use zero_cuda::check;

use super::{Gpu, driver};

/// Keeps freed memory in the pool for reuse. By default the driver returns it to the system whenever the host waits
/// for the stream, so each step would have to allocate it again.
pub(super) fn keep_freed_memory(device: &zero_cuda::Device) -> Result<()> {
    let (Some(pool), mut all) = (device.pool().map_err(driver)?, u64::MAX) else { return Ok(()) };
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is a 64-bit number, which the call reads.
    let code = unsafe { sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut all).cast::<c_void>()) };
    check("cuMemPoolSetAttribute", code).map_err(driver)
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
    let (pool, mut bytes) = (Gpu::new(device)?.kernels.device().pool().map_err(driver)?, 0u64);
    let Some(pool) = pool else { return Ok(None) };
    // SAFETY: these attributes are 64-bit numbers, which the call writes.
    let code = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast::<c_void>()) };
    check("cuMemPoolGetAttribute", code).map_err(driver)?;
    Ok(Some(bytes))
}

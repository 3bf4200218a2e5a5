//! The pool out of which a GPU's memory is taken: the driver's own, in the order of the stream.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUmemLocationType, CUmemPool_attribute,
    CUmemoryPool, CUresult,
};
use candle_core::{CudaDevice, Device, Result, bail};

fn said(call: &str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => bail!("{call}: {code:?}"),
    }
}

/// `None` where the device takes memory in another way.
fn pool(device: &CudaDevice) -> Result<Option<CUmemoryPool>> {
    let stream = device.cuda_stream();
    let context = stream.context();
    context.bind_to_thread().map_err(candle_core::Error::wrap)?;
    let (of, mut pool): (CUdevice, _) = (context.cu_device(), std::ptr::null_mut());
    // SAFETY: writes one handle.
    match unsafe { sys::cuDeviceGetMemPool(&raw mut pool, of) } {
        CUresult::CUDA_ERROR_NOT_SUPPORTED => Ok(None),
        code => said("cuDeviceGetMemPool", code).map(|()| Some(pool)),
    }
}

/// What is freed stays in the pool for the next time. Without that the driver gives it back to the machine whenever the host waits for the
/// stream, and each step would begin by taking it anew.
pub(super) fn keep_what_is_freed(device: &CudaDevice) -> Result<()> {
    let (Some(pool), mut all) = (pool(device)?, u64::MAX) else { return Ok(()) };
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is a number of 64 bits, which is read.
    let code = unsafe { sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut all).cast::<c_void>()) };
    said("cuMemPoolSetAttribute", code)
}

/// The devices whose pools this process uses.
static USED: Mutex<Vec<(CUdevice, Pool)>> = Mutex::new(vec![]);

/// The driver's own, which is there as long as the process.
#[derive(Clone, Copy)]
struct Pool(CUmemoryPool);

// SAFETY: the driver may be called from every thread.
unsafe impl Send for Pool {}

/// Lets the other devices that this process uses read and write what is taken out of this one's pool, and this one theirs, as far as they
/// reach each other. NCCL, of ranks that are threads of one process, copies from one device to another without a
/// buffer between; for memory out of a pool `cuCtxEnablePeerAccess` does not open that way.
pub(super) fn share_with_peers(device: &CudaDevice) -> Result<()> {
    let Some(own_pool) = pool(device)? else { return Ok(()) };
    let own = device.cuda_stream().context().cu_device();
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    if used.iter().any(|(device, _)| *device == own) {
        return Ok(());
    }
    for &(peer, Pool(peer_pool)) in used.iter() {
        admit(peer, own, own_pool)?;
        admit(own, peer, peer_pool)?;
    }
    used.push((own, Pool(own_pool)));
    Ok(())
}

/// Lets `reader` read and write the memory of a pool of `owner`'s, if it can.
fn admit(reader: CUdevice, owner: CUdevice, pool: CUmemoryPool) -> Result<()> {
    let mut reaches = 0;
    // SAFETY: writes one number.
    said("cuDeviceCanAccessPeer", unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, reader, owner) })?;
    if reaches == 0 {
        // NCCL finds another way.
        return Ok(());
    }
    let location = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: reader };
    let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    // SAFETY: reads one description.
    said("cuMemPoolSetAccess", unsafe { sys::cuMemPoolSetAccess(pool, &raw const access, 1) })
}

/// Bytes that were in use at most, of all that this process has on the GPU; none on the processor.
///
/// # Errors
/// What the driver says.
pub fn peak(device: &Device) -> Result<Option<u64>> {
    most(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
}

/// Bytes that the pool took from the GPU at most: more than were in use, by what was freed and could not be used again at once.
///
/// # Errors
/// What the driver says.
pub fn reserved(device: &Device) -> Result<Option<u64>> {
    most(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
}

fn most(device: &Device, attribute: CUmemPool_attribute) -> Result<Option<u64>> {
    let Device::Cuda(device) = device else { return Ok(None) };
    let (Some(pool), mut bytes) = (pool(device)?, 0u64) else { return Ok(None) };
    // SAFETY: these attributes are numbers of 64 bits, which are written.
    let code = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast::<c_void>()) };
    said("cuMemPoolGetAttribute", code)?;
    Ok(Some(bytes))
}

//! The driver's stream-ordered memory pools, and access of the devices of a process to each other's pools.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{
    self, CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUmemLocationType, CUmemoryPool, CUresult,
};

use crate::{CudaError, Device, check};

/// The devices whose pools this process uses.
static USED: Mutex<Vec<(CUdevice, Pool)>> = Mutex::new(vec![]);

/// The driver's pool, which lives as long as the process.
#[derive(Clone, Copy)]
struct Pool(CUmemoryPool);

// SAFETY: the driver may be called from any thread.
unsafe impl Send for Pool {}

impl Device {
    /// Returns the device's stream-ordered memory pool, or `None` if it has none.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn pool(&self) -> Result<Option<CUmemoryPool>, CudaError> {
        self.make_current()?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        match unsafe { sys::cuDeviceGetMemPool(&raw mut pool, self.raw()) } {
            CUresult::CUDA_ERROR_NOT_SUPPORTED => Ok(None),
            code => check("cuDeviceGetMemPool", code).map(|()| Some(pool)),
        }
    }

    /// Gives the other devices of this process access to this device's stream-ordered memory pool, and gives this
    /// device access to their pools, where peer access is possible. If ranks are threads of one process, NCCL copies
    /// directly from one device to another and needs this access, because `cuCtxEnablePeerAccess` does not cover memory
    /// from a pool. Returns whether the device has such a pool.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn share_pool_with_peers(&self) -> Result<bool, CudaError> {
        let Some(pool) = self.pool()? else { return Ok(false) };
        let own = self.raw();
        let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
        if used.iter().any(|(device, _)| *device == own) {
            return Ok(true);
        }
        for &(peer, Pool(peer_pool)) in used.iter() {
            admit(peer, own, pool)?;
            admit(own, peer, peer_pool)?;
        }
        used.push((own, Pool(pool)));
        Ok(true)
    }
}

/// Lets `reader` access the memory of a pool of `owner`, if the devices support peer access.
fn admit(reader: CUdevice, owner: CUdevice, pool: CUmemoryPool) -> Result<(), CudaError> {
    let mut reaches = 0;
    // SAFETY: the call writes one number.
    check("cuDeviceCanAccessPeer", unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, reader, owner) })?;
    if reaches == 0 {
        // NCCL uses another path.
        return Ok(());
    }
    let location = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: reader };
    let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    // SAFETY: the call reads one description.
    check("cuMemPoolSetAccess", unsafe { sys::cuMemPoolSetAccess(pool, &raw const access, 1) })
}

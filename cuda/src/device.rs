//! A device, and the context in which everything on it happens.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUdevice};

use crate::{CudaError, check};

/// A device with its primary context, which candle uses as well.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    device: CUdevice,
    context: CUcontext,
}

// SAFETY: the driver may be called from every thread; a context is no thread's own.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens device `ordinal`, as `CUDA_VISIBLE_DEVICES` numbers them.
    ///
    /// # Errors
    /// There is no driver, or no such device.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // A number that is too large for the driver is no device's.
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: initialisation may be repeated; the others write what their first argument points to.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, number))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        Ok(Arc::new(Device { ordinal, device, context }))
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// There is no driver.
    pub fn count() -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: initialisation may be repeated; the other writes one number.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
        }
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// What no other device in the world has; an instance of a device that is cut into several has one of its own.
    ///
    /// # Errors
    /// What the driver says.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes sixteen bytes.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.device) })?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Makes it the one that the calling thread's calls are about.
    ///
    /// # Errors
    /// The context is gone: the driver was shut down, or an earlier kernel has destroyed it.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as this lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once, released once. Whatever it says, there is nothing left to do.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

//! A device and its context.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUdevice};

use crate::{CudaError, check};

/// A device with its primary context. candle uses the same context.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    device: CUdevice,
    context: CUcontext,
}

// SAFETY: the driver may be called from every thread, and a context does not belong to a thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens device `ordinal`, in the numbering of `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// Fails if the machine has no driver, or no such device.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // No device has an ordinal that is too large for the driver's integer type.
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: initialisation may be repeated; the other functions write to the target of their first argument.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, number))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        Ok(Arc::new(Device { ordinal, device, context }))
    }

    /// Counts the devices.
    ///
    /// # Errors
    /// Fails if the machine has no driver.
    pub fn count() -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: initialisation may be repeated; the other function writes one number.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
        }
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(crate) fn raw(&self) -> CUdevice {
        self.device
    }

    /// Returns the device's ordinal.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Returns the device's globally unique identifier. Each instance of a partitioned device has its own.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes sixteen bytes.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.device) })?;
        Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// Makes this device's context current in the calling thread.
    ///
    /// # Errors
    /// Fails if the context no longer exists: the driver was shut down, or a kernel corrupted it.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the context was retained once and is released once. An error is ignored: nothing is left to clean up.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

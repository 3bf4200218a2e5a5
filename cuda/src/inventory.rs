//! Finds the NVIDIA hardware and libraries of this machine, for `zero-train doctor`.
#![cfg_attr(feature = "cuda", allow(unsafe_code))]

/// The driver, devices and libraries that were found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// The newest CUDA release that the driver supports, such as (13, 0).
    pub driver: (u32, u32),
    /// The devices in order of their ordinals; may be empty.
    pub devices: Vec<Found>,
    /// The version of NCCL, such as (2, 28, 9), or the reason why NCCL is missing.
    pub nccl: Result<(u32, u32, u32), String>,
    /// Other missing libraries that training needs, each with the dynamic linker's message.
    pub missing: Vec<String>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The product name.
    pub name: String,
    /// Compute capability, such as (9, 0) for an H200.
    pub capability: (u32, u32),
    /// Memory in bytes.
    pub memory: u64,
    /// The devices whose memory this one can access without a copy through the host.
    pub peers: Vec<usize>,
}

/// Looks for a driver, devices and NCCL.
///
/// # Errors
/// Returns one line with the reason: the program was built without CUDA, or the machine has no driver, or the driver
/// does not answer.
#[cfg(not(feature = "cuda"))]
pub fn inventory() -> Result<Inventory, String> {
    Err("this program was built without CUDA support; see docs/gpu.md".into())
}

/// Looks for a driver, devices and NCCL.
///
/// # Errors
/// Returns one line with the reason: the program was built without CUDA, or the machine has no driver, or the driver
/// does not answer.
#[cfg(feature = "cuda")]
pub fn inventory() -> Result<Inventory, String> {
    found::inventory()
}

#[cfg(feature = "cuda")]
mod found {
    use std::ffi::{CStr, c_int};

    use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

    use super::{Found, Inventory};
    use crate::{CudaError, Library, check};

    pub(super) fn inventory() -> Result<Inventory, String> {
        Library::Cuda.available().map_err(|said| format!("no NVIDIA driver: {said}"))?;
        let ask = || -> Result<_, CudaError> {
            let (mut version, mut count) = (0, 0);
            // SAFETY: initialisation may be repeated; the other functions write one number each.
            unsafe {
                check("cuInit", sys::cuInit(0))?;
                check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
                check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            }
            Ok((version, (0..count).map(|device| describe(device, count)).collect::<Result<_, _>>()?))
        };
        let (version, devices) = ask().map_err(|error| format!("the driver does not respond: {error}"))?;
        let others = [Library::Cublas, Library::CublasLt, Library::Curand, Library::Nvrtc];
        Ok(Inventory {
            driver: ((version / 1000).unsigned_abs(), (version % 1000 / 10).unsigned_abs()),
            devices,
            nccl: nccl(),
            missing: others.into_iter().filter_map(|library| library.available().err()).collect(),
        })
    }

    fn describe(ordinal: c_int, count: c_int) -> Result<Found, CudaError> {
        let mut device = 0;
        let mut name = [0; 256];
        let mut memory = 0;
        // SAFETY: each function writes to the target of its first argument; the name is truncated to the buffer, with a
        // zero at the end.
        let name = unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal))?;
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device))?;
            check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut memory, device))?;
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        };
        let capability = (
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let mut peers = Vec::new();
        for other in (0..count).filter(|other| *other != ordinal) {
            let (mut peer, mut reaches) = (0, 0);
            // SAFETY: as above.
            unsafe {
                check("cuDeviceGet", sys::cuDeviceGet(&raw mut peer, other))?;
                check("cuDeviceCanAccessPeer", sys::cuDeviceCanAccessPeer(&raw mut reaches, device, peer))?;
            }
            if reaches != 0 {
                peers.push(other as usize);
            }
        }
        Ok(Found { name, capability, memory: memory as u64, peers })
    }

    fn attribute(device: sys::CUdevice, attribute: Attribute) -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one number.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
        Ok(value.unsigned_abs())
    }

    fn nccl() -> Result<(u32, u32, u32), String> {
        Library::Nccl.available()?;
        let mut version = 0;
        // SAFETY: writes one number.
        let result = unsafe { cudarc::nccl::sys::ncclGetVersion(&raw mut version) };
        match (result as u32, version.unsigned_abs()) {
            // Since NCCL 2.9 a version is major × 10,000 + minor × 100 + patch.
            (0, version) => Ok((version / 10_000, version / 100 % 100, version % 100)),
            (code, _) => Err(format!("{} did not return its version: code {code}", Library::Nccl.file())),
        }
    }
}

#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    #[test]
    fn a_build_without_cuda_says_so() {
        assert!(super::inventory().is_err_and(|reason| reason.contains("built without CUDA")));
    }
}

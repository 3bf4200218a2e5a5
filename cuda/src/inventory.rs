//! What this machine has of NVIDIA's, for `zero-train doctor`.
#![cfg_attr(feature = "cuda", allow(unsafe_code))]

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// The newest release of CUDA that the driver can run: (13, 0).
    pub driver: (u32, u32),
    /// The devices, in the order of their numbers. There may be none.
    pub devices: Vec<Found>,
    /// The version of NCCL, (2, 28, 9), or why there is none.
    pub nccl: Result<(u32, u32, u32), String>,
    /// Other libraries that training needs, each with what the dynamic linker says.
    pub missing: Vec<String>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What its maker calls it.
    pub name: String,
    /// Compute capability: (9, 0) for an H200.
    pub capability: (u32, u32),
    /// Bytes of its memory.
    pub memory: u64,
    /// The devices whose memory it can reach without a copy through the host.
    pub peers: Vec<usize>,
}

/// Looks for a driver, devices and NCCL.
///
/// # Errors
/// Why there are none, in one line: the program was built without CUDA, or there is no driver, or it does not answer.
#[cfg(not(feature = "cuda"))]
pub fn inventory() -> Result<Inventory, String> {
    Err("this program was built without CUDA; docs/gpu.md says how to build it with".into())
}

/// Looks for a driver, devices and NCCL.
///
/// # Errors
/// Why there are none, in one line: the program was built without CUDA, or there is no driver, or it does not answer.
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
        Library::Cuda.available().map_err(|said| format!("there is no driver of NVIDIA's: {said}"))?;
        let ask = || -> Result<_, CudaError> {
            let (mut version, mut count) = (0, 0);
            // SAFETY: initialisation may be repeated; the others write one number each.
            unsafe {
                check("cuInit", sys::cuInit(0))?;
                check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
                check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            }
            Ok((version, (0..count).map(|device| describe(device, count)).collect::<Result<_, _>>()?))
        };
        let (version, devices) = ask().map_err(|error| format!("the driver does not answer: {error}"))?;
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
        // SAFETY: each writes what its first argument points to; the name is cut to its room, with a zero at the end.
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
            // Since 2.9 the parts are 10,000, 100 and 1.
            (0, version) => Ok((version / 10_000, version / 100 % 100, version % 100)),
            (code, _) => Err(format!("{} does not say its version: code {code}", Library::Nccl.file())),
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

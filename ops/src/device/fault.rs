//! Errors that only the GPU can detect, after the host has gone on, such as an index out of range.
//!
//! The host cannot check indices itself without waiting, in every step, for all earlier work on the stream. A kernel
//! checks them instead and records an error in host memory, which the host reads without waiting. Every operation that
//! takes indices checks this memory before it starts. Code that has waited for the stream anyway, for example for a
//! loss, can call [`check`]. Until an error is reported, an index out of range produces NaN in the forward and in the
//! backward, so a wrong result cannot look correct.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CudaDevice, Device, Error, Result};
use zero_cuda::Pinned;
use zero_kernels::Address;
use zero_kernels::indices::Fault;

use super::{Gpu, driver};

/// Waits for all work on a GPU's stream and reports the first error since the last check. On the CPU operations
/// report their errors at once, so this does nothing.
///
/// # Errors
/// Fails if a kernel found an index out of range, or if the gradient of a loss differs from the gradient that the
/// forward assumed. Returns errors of the driver.
pub fn check(device: &Device) -> Result<()> {
    let Device::Cuda(device) = device else { return Ok(()) };
    device.cuda_stream().synchronize().map_err(Error::wrap)?;
    Gpu::new(device)?.check()
}

/// A kind of error that a kernel can record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// An index is out of range. The details are the index, its position and the limit.
    Index,
    /// The gradient of a loss differs from the gradient that the forward assumed. The details are the bits of both
    /// gradients.
    Gradient,
}

/// The memory in which the kernels of one stream record errors.
pub(crate) struct Faults {
    fault: *mut Fault,
    /// Operations that have requested a code, in the order of their codes.
    operations: Mutex<Vec<&'static str>>,
    _memory: Pinned,
}

// SAFETY: the pointer refers to pinned memory that this value owns; the device writes it and the host reads it.
unsafe impl Send for Faults {}
// SAFETY: all accesses are volatile, and a torn value is read again after a synchronization.
unsafe impl Sync for Faults {}

impl Faults {
    pub(super) fn new(device: &Arc<zero_cuda::Device>) -> Result<Self> {
        // All zeros means no error. Pinned memory begins at a page boundary, so a `Fault` is aligned.
        let mut memory = Pinned::new(device, size_of::<Fault>()).map_err(driver)?;
        Ok(Self { fault: memory.as_mut_ptr().cast(), operations: Mutex::default(), _memory: memory })
    }

    /// Returns the device address of the memory, which for pinned memory equals the host address.
    pub(crate) fn address(&self) -> Address {
        self.fault.expose_provenance() as Address
    }

    /// Returns the code with which a kernel of `op` records this kind of error. The code is never 0.
    pub(crate) fn what(&self, op: &'static str, finding: Finding) -> u64 {
        let mut operations = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        let number = operations.iter().position(|known| *known == op).unwrap_or_else(|| {
            operations.push(op);
            operations.len() - 1
        });
        2 * number as u64 + if finding == Finding::Index { 1 } else { 2 }
    }

    /// Returns the recorded error, if any, and clears it.
    fn take(&self, device: &CudaDevice) -> Result<Option<String>> {
        // SAFETY: `_memory` keeps the memory alive.
        if unsafe { (&raw const (*self.fault).what).read_volatile() } == 0 {
            return Ok(None);
        }
        // Wait for the kernel that is writing the record.
        device.cuda_stream().synchronize().map_err(Error::wrap)?;
        // SAFETY: as above, and nothing on the stream writes it now.
        let fault = unsafe {
            let fault = self.fault.read_volatile();
            self.fault.write_volatile(Fault::default());
            fault
        };
        let operations = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        let op = operations.get((fault.what as usize).wrapping_sub(1) / 2).copied().unwrap_or("an operation");
        let [first, second, third] = fault.details;
        let number = |bits: u64| f32::from_bits(bits as u32);
        Ok(Some(match fault.what % 2 {
            1 => format!("{op}: index {} at position {second} is not below {third}", first as i64),
            _ => format!(
                "{op}: the gradient of the loss is {}, but the forward assumed {}",
                number(first),
                number(second)
            ),
        }))
    }
}

impl Gpu {
    /// Reports an error that a kernel has recorded so far. Waits for the stream only if an error is recorded.
    pub(crate) fn check(&self) -> Result<()> {
        match self.faults.take(&self.device)? {
            None => Ok(()),
            Some(fault) => Err(Error::Msg(format!("{fault} (in an earlier operation on the GPU)"))),
        }
    }

    pub(crate) fn faults(&self) -> &Faults {
        &self.faults
    }
}

//! What a GPU finds out after the host has gone on, such as an index that is out of range.
//!
//! The host cannot look at indices without waiting for all that is on the stream in front of them, in every step. So a kernel does, and
//! leaves what it finds in memory of the host, which costs nothing to look at. Every operation that takes indices looks first, and so can
//! whoever has waited for the stream anyway, for a loss say ([`check`]). Until then nothing comes out right by chance: such an index makes
//! NaN, forward and backward.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CudaDevice, Device, Error, Result};
use zero_cuda::Pinned;
use zero_kernels::Address;
use zero_kernels::indices::Fault;

use super::{Gpu, driver};

/// Waits for all that was put on a GPU's stream, and says what went wrong there since the last time. On the processor errors come at
/// once: there is nothing to say.
///
/// # Errors
/// The first of: an index out of range, a gradient of a loss that was computed for another one; or what the driver says.
pub fn check(device: &Device) -> Result<()> {
    let Device::Cuda(device) = device else { return Ok(()) };
    device.cuda_stream().synchronize().map_err(Error::wrap)?;
    Gpu::new(device)?.check()
}

/// What an operation finds out on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// An index that is out of range: the index, its position and the limit.
    Index,
    /// A loss's gradient that was not foreseen: the bits of what it is, and of what it was computed for.
    Gradient,
}

/// The memory in which kernels of one stream leave what they find.
pub(crate) struct Faults {
    fault: *mut Fault,
    /// Operations that have asked, in the order of their numbers.
    operations: Mutex<Vec<&'static str>>,
    _memory: Pinned,
}

// SAFETY: what the pointer points to is written by the device and read by the host, and is its own as long as this lives.
unsafe impl Send for Faults {}
// SAFETY: as above; all accesses are volatile, and a value that is torn is read again behind a wait.
unsafe impl Sync for Faults {}

impl Faults {
    pub(super) fn new(device: &Arc<zero_cuda::Device>) -> Result<Self> {
        // Zeros: nothing is wrong. Pinned memory begins at a page.
        let mut memory = Pinned::new(device, size_of::<Fault>()).map_err(driver)?;
        Ok(Self { fault: memory.as_mut_ptr().cast(), operations: Mutex::default(), _memory: memory })
    }

    /// Where kernels leave it: the device knows the host's pinned memory by the host's addresses.
    pub(crate) fn address(&self) -> Address {
        self.fault.expose_provenance() as Address
    }

    /// By which a kernel says what it has found. Not 0.
    pub(crate) fn what(&self, op: &'static str, finding: Finding) -> u64 {
        let mut operations = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        let number = operations.iter().position(|known| *known == op).unwrap_or_else(|| {
            operations.push(op);
            operations.len() - 1
        });
        2 * number as u64 + if finding == Finding::Index { 1 } else { 2 }
    }

    /// What has been found, which is then forgotten.
    fn take(&self, device: &CudaDevice) -> Result<Option<String>> {
        // SAFETY: the memory lives.
        if unsafe { (&raw const (*self.fault).what).read_volatile() } == 0 {
            return Ok(None);
        }
        // The kernel that has begun to write is done after that.
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
                "{op}: a gradient of {} for a loss that was computed for one of {}",
                number(first),
                number(second)
            ),
        }))
    }
}

impl Gpu {
    /// What was found on the stream so far, without waiting for it.
    pub(crate) fn check(&self) -> Result<()> {
        match self.faults.take(&self.device)? {
            None => Ok(()),
            Some(fault) => Err(Error::Msg(format!("{fault} (found on the GPU, in what ran before)"))),
        }
    }

    pub(crate) fn faults(&self) -> &Faults {
        &self.faults
    }
}

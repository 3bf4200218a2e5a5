//! A vector in device memory.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent;
use zero_comm::{Buffer, DeviceBuffer, DeviceEvent, DeviceMemory, Dtype};
use zero_cuda::{Allocation, CudaError, Device, Event, Pinned, Stream};

/// How long dropping a vector waits for an operation that runs ahead. After that, the vector leaks its memory. An
/// operation ends much earlier, at its deadline, unless it cannot be aborted.
const LET_GO: Duration = Duration::from_secs(300);

/// A vector in device memory, filled from the host.
pub struct DeviceVector {
    // Fields are dropped in this order, after `drop` has waited for the copy into `allocation`.
    allocation: Allocation,
    dtype: Dtype,
    len: usize,
    /// Recorded after the copy from `_source`.
    written: Event,
    /// The end of the last operation that used the vector.
    used: Mutex<Option<Arc<dyn DeviceEvent>>>,
    stream: Arc<Stream>,
    _source: Option<Pinned>,
}

impl fmt::Debug for DeviceVector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {:#x}", self.len, self.dtype, self.allocation.address())
    }
}

impl DeviceVector {
    /// Copies a host buffer to the device.
    ///
    /// Returns before the copy is complete. Operations wait for the vector's event [`written`](DeviceMemory::written)
    /// on the device.
    ///
    /// # Errors
    /// Fails if device memory or pinnable host memory runs out.
    ///
    /// # Panics
    /// Panics if `buffer` is on a device.
    pub fn upload(buffer: &Buffer, device: &Arc<Device>) -> Result<DeviceVector, CudaError> {
        let stream = Arc::new(Stream::new(device)?);
        let mut source = Pinned::new(device, buffer.size_bytes())?;
        source.copy_from_slice(buffer.as_bytes());
        let mut allocation = Allocation::new(device, source.len())?;
        let written = Event::new(device)?;
        // SAFETY: source and allocation live in the vector, whose drop waits for the event.
        unsafe { allocation.fill_from(&source, &stream) }?;
        if let Err(error) = stream.record(&written) {
            // Without the event, dropping the vector would not wait for the copy.
            let _ = stream.synchronize();
            return Err(error);
        }
        Ok(DeviceVector {
            allocation,
            dtype: buffer.dtype(),
            len: buffer.len(),
            written,
            used: Mutex::default(),
            stream,
            _source: Some(source),
        })
    }

    /// Copies the vector to the host, after the copy into it has completed.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn download(&self) -> Result<Buffer, CudaError> {
        self.wait_on(&self.stream)?;
        let mut host = Buffer::zeros(self.dtype, self.len);
        self.allocation.copy_to(host.as_bytes_mut(), &self.stream)?;
        Ok(host)
    }

    fn copy(&self) -> Result<DeviceVector, CudaError> {
        let device = self.allocation.device();
        let stream = Arc::new(Stream::new(device)?);
        let mut allocation = Allocation::new(device, self.allocation.len())?;
        self.wait_on(&stream)?;
        allocation.copy_from(&self.allocation, &stream)?;
        let (written, used) = (Event::new(device)?, Mutex::default());
        Ok(DeviceVector { allocation, dtype: self.dtype, len: self.len, written, used, stream, _source: None })
    }

    fn used(&self) -> Option<Arc<dyn DeviceEvent>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes later work on a stream wait until the values are written.
    fn wait_on(&self, stream: &Stream) -> Result<(), CudaError> {
        match self.used() {
            None => stream.wait_for(&self.written),
            // SAFETY: the event lives during the call, and the driver does not need it afterwards.
            Some(used) => unsafe { stream.wait_for_raw(used.raw() as usize as CUevent) },
        }
    }
}

// SAFETY: the allocation has room for the elements and is owned by this vector alone.
unsafe impl DeviceMemory for DeviceVector {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn len(&self) -> usize {
        self.len
    }

    fn device(&self) -> usize {
        self.allocation.device().ordinal()
    }

    fn address(&self) -> u64 {
        self.allocation.address()
    }

    fn written(&self) -> Option<u64> {
        Some(self.used().map_or(self.written.raw() as u64, |used| used.raw()))
    }

    fn used_until(&self, event: Arc<dyn DeviceEvent>) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Some(event);
    }

    fn to_host(&self) -> Result<Buffer, String> {
        self.download().map_err(|error| error.to_string())
    }

    fn duplicate(&self) -> Result<Box<dyn DeviceMemory>, String> {
        let copy = self.copy().map_err(|error| error.to_string())?;
        Ok(Box::new(copy))
    }
}

impl From<DeviceVector> for Buffer {
    fn from(vector: DeviceVector) -> Buffer {
        Buffer::Device(DeviceBuffer::new(vector))
    }
}

impl Drop for DeviceVector {
    fn drop(&mut self) {
        // Waits for the copy into the vector, and for the last operation if it runs ahead. Any other operation that is
        // still in flight would keep the vector alive.
        let is_used = || self.used().is_some_and(|used| used.has_happened() == Ok(false));
        let until = Instant::now() + LET_GO;
        while self.written.is_done() == Ok(false) || is_used() {
            if Instant::now() >= until {
                // The device may still write to the memory of an operation that could not be aborted.
                if let Ok(nothing) = Allocation::new(&Arc::clone(self.allocation.device()), 0) {
                    std::mem::forget(std::mem::replace(&mut self.allocation, nothing));
                }
                return;
            }
            yield_now();
        }
    }
}

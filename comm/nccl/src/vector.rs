//! A vector in the memory of a device.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::thread::yield_now;

use zero_comm::{Buffer, DeviceBuffer, DeviceMemory, Dtype};
use zero_cuda::{Allocation, CudaError, Device, Event, Pinned, Stream};

/// A vector in the memory of a device, filled from the host.
#[derive(Debug)]
pub struct DeviceVector {
    // Dropped in this order, after the copy into it is done.
    allocation: Allocation,
    dtype: Dtype,
    len: usize,
    /// When the copy from `_source` is done.
    written: Event,
    stream: Arc<Stream>,
    _source: Option<Pinned>,
}

impl DeviceVector {
    /// A copy of a buffer of the host. Returns before the copy is made; whoever uses the vector on the device waits there for
    /// [`written`](DeviceMemory::written).
    ///
    /// # Errors
    /// The memory of the device, or that of the host which may be pinned, does not suffice.
    ///
    /// # Panics
    /// If `buffer` is on a device.
    pub fn upload(buffer: &Buffer, device: &Arc<Device>) -> Result<DeviceVector, CudaError> {
        let stream = Arc::new(Stream::new(device)?);
        let mut source = Pinned::new(device, buffer.size_bytes())?;
        source.copy_from_slice(buffer.as_bytes());
        let mut allocation = Allocation::new(device, source.len())?;
        let written = Event::new(device)?;
        // SAFETY: both live in the vector, whose drop waits for the event.
        unsafe { allocation.fill_from(&source, &stream) }?;
        if let Err(error) = stream.record(&written) {
            // Without the event nobody would wait for the copy.
            let _ = stream.synchronize();
            return Err(error);
        }
        Ok(DeviceVector {
            allocation,
            dtype: buffer.dtype(),
            len: buffer.len(),
            written,
            stream,
            _source: Some(source),
        })
    }

    /// A copy on the host, of what is there when everything that was begun with the vector is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn download(&self) -> Result<Buffer, CudaError> {
        self.stream.wait_for(&self.written)?;
        let mut host = Buffer::zeros(self.dtype, self.len);
        self.allocation.copy_to(host.as_bytes_mut(), &self.stream)?;
        Ok(host)
    }

    fn copy(&self) -> Result<DeviceVector, CudaError> {
        let device = self.allocation.device();
        let stream = Arc::new(Stream::new(device)?);
        let mut allocation = Allocation::new(device, self.allocation.len())?;
        stream.wait_for(&self.written)?;
        allocation.copy_from(&self.allocation, &stream)?;
        let written = Event::new(device)?;
        Ok(DeviceVector { allocation, dtype: self.dtype, len: self.len, written, stream, _source: None })
    }
}

// SAFETY: the allocation has room for the elements and belongs to the vector alone.
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
        Some(self.written.raw() as u64)
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
        // Only the copy into it; what else used it has given it back, or keeps it.
        while self.written.is_done() == Ok(false) {
            yield_now();
        }
    }
}

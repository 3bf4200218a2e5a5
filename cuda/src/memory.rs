//! Device memory, and pinned host memory that devices copy from and to.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use cudarc::driver::sys;

use crate::{CudaError, Device, Stream, check};

/// A buffer in the memory of a device, aligned to 256 bytes and initially uninitialized.
#[derive(Debug)]
pub struct Allocation {
    device: Arc<Device>,
    /// 0 if the buffer is empty.
    address: u64,
    bytes: usize,
}

impl Allocation {
    /// Allocates `bytes` bytes of device memory; `bytes` may be 0.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Allocation, CudaError> {
        let mut address = 0;
        if bytes > 0 {
            device.make_current()?;
            // SAFETY: writes one address.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) })?;
        }
        Ok(Allocation { device: Arc::clone(device), address, bytes })
    }

    /// Returns the device that holds the memory.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the start of the buffer in the device's address space.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Enqueues a copy of all bytes from host memory on a stream, without waiting for it.
    ///
    /// # Safety
    /// `from` must live and stay unchanged, and `self` must live, until the stream has done the copy.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Panics
    /// Panics if the sizes differ.
    pub unsafe fn fill_from(&mut self, from: &Pinned, stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(self.bytes, from.len());
        // SAFETY: both buffers have `self.bytes` bytes; the caller ensures that they live long enough.
        unsafe { stream.upload(from, self.address, self.bytes) }
    }

    /// Enqueues a copy of all bytes to host memory on the stream and waits for it. The copy runs after the work already
    /// on the stream.
    ///
    /// # Errors
    /// Returns the driver's error; the contents of `to` are then unspecified.
    ///
    /// # Panics
    /// Panics if the sizes differ.
    pub fn copy_to(&self, to: &mut [u8], stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(self.bytes, to.len());
        if self.is_empty() {
            return Ok(());
        }
        let mut pinned = Pinned::new(&self.device, self.bytes)?;
        // SAFETY: both buffers have that many bytes, and live until the stream is done with them, because this function
        // waits.
        unsafe { stream.download(self.address, &mut pinned, self.bytes) }?;
        stream.synchronize()?;
        to.copy_from_slice(&pinned);
        Ok(())
    }

    /// Enqueues a copy of all bytes from other memory of the same device on the stream and waits for it. The copy runs
    /// after the work already on the stream.
    ///
    /// # Errors
    /// Returns the driver's error; the contents are then unspecified.
    ///
    /// # Panics
    /// Panics if the sizes differ.
    pub fn copy_from(&mut self, from: &Allocation, stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(self.bytes, from.bytes);
        if self.is_empty() {
            return Ok(());
        }
        // SAFETY: both buffers have that many bytes, and live until the stream is done with them, because this function
        // waits.
        unsafe { stream.copy(from.address, self.address, self.bytes) }?;
        stream.synchronize()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.is_empty() && self.device.make_current().is_ok() {
            // SAFETY: allocated once, freed once.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Pinned host memory, zeroed at first. A device copies from and to it while the host does other work.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    /// Dangling if the buffer is empty.
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory that only its owner accesses.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `bytes` bytes of pinned host memory; `bytes` may be 0.
    ///
    /// # Errors
    /// Fails if the system cannot pin that much memory.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Pinned, CudaError> {
        // Without bytes, use a dangling pointer that is aligned for every element type.
        let mut start = std::ptr::NonNull::<u128>::dangling().as_ptr().cast::<c_void>();
        if bytes > 0 {
            device.make_current()?;
            // Pass no flags: with the flag for write-combined memory, the host's reads would be slow.
            // SAFETY: writes one pointer, to `bytes` bytes.
            unsafe {
                check("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut start, bytes, 0))?;
                start.cast::<u8>().write_bytes(0, bytes);
            }
        }
        Ok(Pinned { device: Arc::clone(device), start: start.cast(), bytes })
    }
}

impl Stream {
    /// Enqueues a copy of `bytes` bytes from device address `from` to host memory, without waiting for it.
    ///
    /// # Safety
    /// `from` must point to `bytes` bytes. Both buffers must live, and `to` must not be read or written, until the
    /// stream has done the copy.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Panics
    /// Panics if `to` is shorter than `bytes`.
    pub unsafe fn download(&self, from: u64, to: &mut Pinned, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= to.bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.device().make_current()?;
        let target = to.start.cast::<c_void>();
        // SAFETY: both buffers have `bytes` bytes; the caller ensures that they live long enough.
        check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(target, from, bytes, self.raw()) })
    }

    /// Enqueues a copy of the first `bytes` bytes of host memory to device address `to`, without waiting for it.
    ///
    /// # Safety
    /// `to` must point to room for `bytes` bytes. Both buffers must live, and `from` must stay unchanged, until the
    /// stream has done the copy.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Panics
    /// Panics if `from` is shorter than `bytes`.
    pub unsafe fn upload(&self, from: &Pinned, to: u64, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= from.bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.device().make_current()?;
        let source = from.start.cast::<c_void>();
        // SAFETY: both buffers have `bytes` bytes; the caller ensures that they live long enough.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, source, bytes, self.raw()) })
    }

    /// Frees memory in the order of the stream's work.
    ///
    /// # Safety
    /// The memory must come from [`allocate`](Stream::allocate). All work that uses it must have been enqueued earlier
    /// on this stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub unsafe fn free(&self, address: u64) -> Result<(), CudaError> {
        self.device().make_current()?;
        // SAFETY: the caller ensures that the memory is allocated and no longer used.
        check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(address, self.raw()) })
    }

    /// Enqueues a copy of `bytes` bytes within the device's memory, without waiting for it.
    ///
    /// # Safety
    /// `from` and `to` must point to `bytes` bytes each that do not overlap, and both must live until the stream has
    /// done the copy.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.device().make_current()?;
        // SAFETY: both buffers have `bytes` bytes; the caller ensures that they live long enough.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw()) })
    }

    /// Allocates `bytes` bytes from the device's memory pool, for work that is enqueued later on this stream. The
    /// caller must free them.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
    pub fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        self.device().make_current()?;
        let mut address = 0;
        // SAFETY: writes one address. The driver rejects a size of 0.
        check("cuMemAllocAsync", unsafe { sys::cuMemAllocAsync(&raw mut address, bytes.max(1), self.raw()) })?;
        Ok(address)
    }
}

impl Deref for Pinned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start` points to `bytes` initialized bytes that `self` owns.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `start` points to `bytes` initialized bytes that `self` owns.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 && self.device.make_current().is_ok() {
            // SAFETY: allocated once, freed once.
            unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}

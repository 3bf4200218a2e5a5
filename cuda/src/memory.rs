//! Memory of a device, and memory of the host that a device reads and writes by itself.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use cudarc::driver::sys;

use crate::{CudaError, Device, Stream, check};

/// Bytes in the memory of a device, aligned to 256. What is in them at first is not said.
#[derive(Debug)]
pub struct Allocation {
    device: Arc<Device>,
    /// 0 where there are no bytes.
    address: u64,
    bytes: usize,
}

impl Allocation {
    /// Takes `bytes` of the device's memory; none is fine.
    ///
    /// # Errors
    /// There is not as much.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Allocation, CudaError> {
        let mut address = 0;
        if bytes > 0 {
            device.make_current()?;
            // SAFETY: writes one address.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) })?;
        }
        Ok(Allocation { device: Arc::clone(device), address, bytes })
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Where it begins, for the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Puts a copy of all bytes, from memory of the host, on a stream. Returns before it is done.
    ///
    /// # Safety
    /// `from` must live and stay as it is, and this must live, until the stream has done it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the sizes differ.
    pub unsafe fn fill_from(&mut self, from: &Pinned, stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(self.bytes, from.len());
        if self.is_empty() {
            return Ok(());
        }
        self.device.make_current()?;
        let source = from.as_ptr().cast::<c_void>();
        // SAFETY: both have that many bytes; the caller answers for how long.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(self.address, source, self.bytes, stream.raw()) })
    }

    /// Copies all bytes to memory of the host, behind what is on the stream already. Returns when it is done.
    ///
    /// # Errors
    /// What the driver says; then the bytes of `to` may be anything.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn copy_to(&self, to: &mut [u8], stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(self.bytes, to.len());
        if self.is_empty() {
            return Ok(());
        }
        let mut pinned = Pinned::new(&self.device, self.bytes)?;
        let target = pinned.as_mut_ptr().cast::<c_void>();
        // SAFETY: both have that many bytes, and live until the stream is done with them, which is waited for.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(target, self.address, self.bytes, stream.raw())
        })?;
        stream.synchronize()?;
        to.copy_from_slice(&pinned);
        Ok(())
    }

    /// Copies all bytes from other memory of the same device, behind what is on the stream already. Returns when it is done.
    ///
    /// # Errors
    /// What the driver says; then the bytes may be anything.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn copy_from(&mut self, from: &Allocation, stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(self.bytes, from.bytes);
        if self.is_empty() {
            return Ok(());
        }
        // SAFETY: both have that many bytes, and live until the stream is done with them, which is waited for.
        unsafe { stream.copy(from.address, self.address, self.bytes) }?;
        stream.synchronize()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.is_empty() && self.device.make_current().is_ok() {
            // SAFETY: taken once, given back once.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Bytes of the host that stay where they are, zeros at first: a device copies from and to them while the host does something else.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    /// Dangling where there are no bytes.
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, which only its owner reaches.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Takes `bytes` of the host's memory; none is fine.
    ///
    /// # Errors
    /// There is not as much that may be pinned.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Pinned, CudaError> {
        let mut start = std::ptr::NonNull::<u8>::dangling().as_ptr().cast::<c_void>();
        if bytes > 0 {
            device.make_current()?;
            // No flags: write-combined memory would be slow to read.
            // SAFETY: writes one pointer, to as many bytes.
            unsafe {
                check("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut start, bytes, 0))?;
                start.cast::<u8>().write_bytes(0, bytes);
            }
        }
        Ok(Pinned { device: Arc::clone(device), start: start.cast(), bytes })
    }
}

impl Stream {
    /// Puts a copy of `bytes` bytes of the device onto memory of the host on the stream. Returns before it is made.
    ///
    /// # Safety
    /// There must be as many bytes at `from`, and both must live, and `to` not be read or written, until the stream has done it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If `to` has not as many bytes.
    pub unsafe fn download(&self, from: u64, to: &mut Pinned, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= to.bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.device().make_current()?;
        let target = to.start.cast::<c_void>();
        // SAFETY: both have that many bytes; the caller answers for how long.
        check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(target, from, bytes, self.raw()) })
    }

    /// Puts a copy of the first `bytes` bytes of memory of the host onto the device on the stream. Returns before it is made.
    ///
    /// # Safety
    /// There must be room for as many bytes at `to`, and both must live, and `from` stay as it is, until the stream has done it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If `from` has not as many bytes.
    pub unsafe fn upload(&self, from: &Pinned, to: u64, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= from.bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.device().make_current()?;
        let source = from.start.cast::<c_void>();
        // SAFETY: both have that many bytes; the caller answers for how long.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, source, bytes, self.raw()) })
    }

    /// Puts a copy of `bytes` bytes of the device to other memory of it on the stream. Returns before it is made.
    ///
    /// # Safety
    /// `from` and `to` must be `bytes` bytes each that do not overlap, and both must live, until the stream has done it.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.device().make_current()?;
        // SAFETY: both have that many bytes; the caller answers for how long.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw()) })
    }

    /// Takes `bytes` bytes out of the device's pool, for what comes later on the stream. Who takes them gives them back.
    ///
    /// # Errors
    /// There is not as much.
    pub fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        self.device().make_current()?;
        let mut address = 0;
        // SAFETY: writes one address. The driver gives no memory of no size.
        check("cuMemAllocAsync", unsafe { sys::cuMemAllocAsync(&raw mut address, bytes.max(1), self.raw()) })?;
        Ok(address)
    }
}

impl Deref for Pinned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: as many initialised bytes, which this owns.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as many initialised bytes, which this owns.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 && self.device.make_current().is_ok() {
            // SAFETY: taken once, given back once.
            unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}

//! Streams, which execute work in order, and events, which order work across streams.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};

use crate::{CudaError, Device, check};

/// A queue of work on a device. It does not synchronize with the device's default stream.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    raw: CUstream,
    /// Whether dropping this destroys the stream.
    is_own: bool,
}

// SAFETY: the driver may be called from every thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;
/// Lower numbers are higher priorities.
const DEFAULT_PRIORITY: c_int = 0;
/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;

impl Stream {
    /// Creates a stream of the default priority, which is the lowest.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn new(device: &Arc<Device>) -> Result<Stream, CudaError> {
        Self::with_priority(device, DEFAULT_PRIORITY)
    }

    /// Creates a stream of the device's highest priority, for copies and collectives: other streams wait for these, and
    /// they occupy few multiprocessors. Its kernels start before waiting kernels of other streams.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn urgent(device: &Arc<Device>) -> Result<Stream, CudaError> {
        device.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two numbers, both 0 if the device has no priorities.
        let asked = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", asked)?;
        Self::with_priority(device, greatest)
    }

    fn with_priority(device: &Arc<Device>, priority: c_int) -> Result<Stream, CudaError> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let made = unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, NON_BLOCKING, priority) };
        check("cuStreamCreateWithPriority", made)?;
        Ok(Stream { device: Arc::clone(device), raw, is_own: true })
    }

    /// Wraps a stream that other code owns and destroys.
    ///
    /// # Safety
    /// `raw` must be a stream of this device that outlives the result.
    pub unsafe fn borrow(device: &Arc<Device>, raw: CUstream) -> Stream {
        Stream { device: Arc::clone(device), raw, is_own: false }
    }

    /// Returns the stream's device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the raw handle, for calls of other libraries. Valid as long as `self` lives.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Makes later work on this stream wait for the event.
    ///
    /// # Safety
    /// `event` must be a live event of the driver.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub unsafe fn wait_for_raw(&self, event: CUevent) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: the stream lives, and the caller ensures that the event does.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event, 0) })
    }

    /// Makes later work on this stream wait for the event.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: the event lives during the call, and the driver does not need it afterwards.
        unsafe { self.wait_for_raw(event.raw) }
    }

    /// Records the event: it completes when all earlier work on this stream is done.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: both live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    /// Returns whether all work on this stream is done.
    ///
    /// # Errors
    /// Returns an error of the stream's work.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.device.make_current()?;
        // SAFETY: the stream lives.
        ready("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) })
    }

    /// Waits until all work on this stream is done.
    ///
    /// # Errors
    /// Returns an error of the stream's work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_own {
            // SAFETY: created once, destroyed once; the driver finishes the work on the stream.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A marker on a stream.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    /// Keeps the context alive as long as the event.
    device: Arc<Device>,
}

// SAFETY: the driver may be called from every thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event, which counts as completed until it is recorded.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn new(device: &Arc<Device>) -> Result<Event, CudaError> {
        Self::with(device, NO_TIMING)
    }

    /// Creates an event with a timestamp, for [`milliseconds_until`](Event::milliseconds_until).
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn timed(device: &Arc<Device>) -> Result<Event, CudaError> {
        Self::with(device, 0)
    }

    fn with(device: &Arc<Device>, flags: u32) -> Result<Event, CudaError> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        Ok(Event { raw, device: Arc::clone(device) })
    }

    /// Returns the milliseconds between this event and a later one, with a resolution of about half a microsecond. Both
    /// must be timed and completed.
    ///
    /// # Errors
    /// Returns the driver's error, for example if an event is not timed or not completed.
    pub fn milliseconds_until(&self, later: &Event) -> Result<f32, CudaError> {
        self.device.make_current()?;
        let mut elapsed = 0.0;
        // SAFETY: both events live; writes one value.
        let code = unsafe { sys::cuEventElapsedTime_v2(&raw mut elapsed, self.raw, later.raw) };
        check("cuEventElapsedTime", code).map(|()| elapsed)
    }

    /// Returns the raw handle, for calls of other libraries. Valid as long as `self` lives.
    pub fn raw(&self) -> CUevent {
        self.raw
    }

    /// Waits until the event has completed.
    ///
    /// # Errors
    /// Returns an error of the work on its stream.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Returns whether the event has completed.
    ///
    /// # Errors
    /// Returns an error of the work on its stream.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        ready("cuEventQuery", unsafe { sys::cuEventQuery(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; a stream that still waits for the event is not affected.
        unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

fn ready(call: &'static str, code: CUresult) -> Result<bool, CudaError> {
    match code {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => check(call, code).map(|()| true),
    }
}

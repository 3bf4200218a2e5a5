//! Streams, which do one thing after another, and events, by which they wait for each other.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};

use crate::{CudaError, Device, check};

/// A queue of work on a device. It does not wait for the device's default stream, nor that for it.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    raw: CUstream,
    /// Whether it goes when this does.
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
    /// A new stream, of the priority that streams have by default: the lowest.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Stream, CudaError> {
        Self::with_priority(device, DEFAULT_PRIORITY)
    }

    /// A new stream of the highest priority that the device has: for copies and collectives, which others wait for and which keep few
    /// multiprocessors busy. Their kernels begin before waiting kernels of other streams.
    ///
    /// # Errors
    /// What the driver says.
    pub fn urgent(device: &Arc<Device>) -> Result<Stream, CudaError> {
        device.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two numbers, both 0 where the device has no priorities.
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

    /// A stream of somebody else's, who destroys it.
    ///
    /// # Safety
    /// It must be one of this device's, and live longer than this.
    pub unsafe fn borrow(device: &Arc<Device>, raw: CUstream) -> Stream {
        Stream { device: Arc::clone(device), raw, is_own: false }
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// For calls of other libraries. Valid as long as this lives.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// What comes later on this stream begins when the event has happened.
    ///
    /// # Safety
    /// `event` must be an event of the driver's that lives.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn wait_for_raw(&self, event: CUevent) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: the stream lives, and the caller answers for the event.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event, 0) })
    }

    /// What comes later on this stream begins when the event has happened.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: the event lives; the driver remembers what it needs of it.
        unsafe { self.wait_for_raw(event.raw) }
    }

    /// The event happens when all is done that came before on this stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: both live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    /// Whether all is done that was put on this stream.
    ///
    /// # Errors
    /// What went wrong on the stream.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.device.make_current()?;
        // SAFETY: the stream lives.
        ready("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) })
    }

    /// Waits until all is done that was put on this stream.
    ///
    /// # Errors
    /// What went wrong on the stream.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_own {
            // SAFETY: created once, destroyed once; the driver finishes what is on it.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A mark on a stream.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    /// Its context must not go before it.
    device: Arc<Device>,
}

// SAFETY: the driver may be called from every thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, which counts as happened until it is recorded.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>) -> Result<Event, CudaError> {
        Self::with(device, NO_TIMING)
    }

    /// The same, of which [`milliseconds_until`](Event::milliseconds_until) can be asked.
    ///
    /// # Errors
    /// What the driver says.
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

    /// Between this and a later one, both of which have happened and are timed, in steps of about half a microsecond.
    ///
    /// # Errors
    /// What the driver says, also of an event that is not timed or has not happened.
    pub fn milliseconds_until(&self, later: &Event) -> Result<f32, CudaError> {
        self.device.make_current()?;
        let mut elapsed = 0.0;
        // SAFETY: both live; writes one value.
        let code = unsafe { sys::cuEventElapsedTime_v2(&raw mut elapsed, self.raw, later.raw) };
        check("cuEventElapsedTime", code).map(|()| elapsed)
    }

    /// For calls of other libraries. Valid as long as this lives.
    pub fn raw(&self) -> CUevent {
        self.raw
    }

    /// Waits until it has happened.
    ///
    /// # Errors
    /// What went wrong on its stream.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.device.make_current()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Whether it has happened.
    ///
    /// # Errors
    /// What went wrong on its stream.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        ready("cuEventQuery", unsafe { sys::cuEventQuery(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; a stream that still waits for it may go on.
        unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

fn ready(call: &'static str, code: CUresult) -> Result<bool, CudaError> {
    match code {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => check(call, code).map(|()| true),
    }
}

//! Timelines of a GPU: what it executed, and when.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::DeviceId;
use candle_core::{CudaDevice, Result};
use zero_cuda::{Begun, Recorder, Span, Track};

use super::{Gpu, driver, on_stream};

/// The recorders of the candle devices that have a timeline.
static RECORDERS: Mutex<Vec<(DeviceId, Arc<Recorder>)>> = Mutex::new(vec![]);

/// Returns the recorder of a device, if it has one.
pub(super) fn recorder(device: &CudaDevice) -> Option<Arc<Recorder>> {
    let all = RECORDERS.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().find(|(of, _)| *of == device.id()).map(|(_, recorder)| Arc::clone(recorder))
}

/// The timeline of a device. It records candle's stream, the copies of every [`Staging`](super::Staging) that is
/// created later, and any stream that is given the recorder.
#[derive(Debug)]
pub struct Timeline {
    recorder: Arc<Recorder>,
    device: CudaDevice,
    of: Arc<zero_cuda::Device>,
    entered: Option<Begun>,
}

impl Timeline {
    /// Creates the timeline of a device that has none.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let of = Arc::clone(Gpu::new(device)?.kernels.device());
        let recorder = Recorder::new(&of).map_err(driver)?;
        RECORDERS.lock().unwrap_or_else(PoisonError::into_inner).push((device.id(), Arc::clone(&recorder)));
        Ok(Self { recorder, device: device.clone(), of, entered: None })
    }

    /// Returns the recorder, for other streams.
    #[must_use]
    pub fn recorder(&self) -> Arc<Recorder> {
        Arc::clone(&self.recorder)
    }

    /// Begins the span `number`, which covers all work that is enqueued until [`leave`](Timeline::leave).
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn enter(&mut self, number: usize) -> Result<()> {
        self.recorder.set_number(Some(number));
        self.entered = on_stream(&self.device, &self.of, |stream| self.recorder.begin(stream, Track::Compute))?;
        Ok(())
    }

    /// Ends the span that [`enter`](Timeline::enter) began.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn leave(&mut self) -> Result<()> {
        let entered = self.entered.take();
        on_stream(&self.device, &self.of, |stream| self.recorder.end(stream, entered))
    }

    /// Waits for the device and returns the spans recorded since the last call. Nothing is recorded until the next
    /// `enter`.
    ///
    /// # Errors
    /// Returns an error of the recorded work.
    pub fn take(&mut self) -> Result<Vec<Span>> {
        self.recorder.set_number(None);
        self.recorder.take().map_err(driver)
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        let mut all = RECORDERS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(_, recorder)| !Arc::ptr_eq(recorder, &self.recorder));
    }
}

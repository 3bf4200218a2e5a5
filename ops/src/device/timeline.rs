//! What a GPU did when, while the host put its program on the stream.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::DeviceId;
use candle_core::{CudaDevice, Result};
use zero_cuda::{Begun, Recorder, Span, Track};

use super::{Gpu, driver, on_stream};

/// The recorders of devices of candle's that have a timeline.
static RECORDERS: Mutex<Vec<(DeviceId, Arc<Recorder>)>> = Mutex::new(vec![]);

/// That of a device, if it has one.
pub(super) fn recorder(device: &CudaDevice) -> Option<Arc<Recorder>> {
    let all = RECORDERS.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().find(|(of, _)| *of == device.id()).map(|(_, recorder)| Arc::clone(recorder))
}

/// The timeline of a device: of candle's stream, of the copies of every [`Staging`](super::Staging) that is made later, and of whoever else is given
/// the recorder.
#[derive(Debug)]
pub struct Timeline {
    recorder: Arc<Recorder>,
    device: CudaDevice,
    of: Arc<zero_cuda::Device>,
    entered: Option<Begun>,
}

impl Timeline {
    /// One for a device that has none.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let of = Arc::clone(Gpu::new(device)?.kernels.device());
        let recorder = Recorder::new(&of).map_err(driver)?;
        RECORDERS.lock().unwrap_or_else(PoisonError::into_inner).push((device.id(), Arc::clone(&recorder)));
        Ok(Self { recorder, device: device.clone(), of, entered: None })
    }

    /// For streams that are not known here.
    #[must_use]
    pub fn recorder(&self) -> Arc<Recorder> {
        Arc::clone(&self.recorder)
    }

    /// What is put on streams until [`leave`](Timeline::leave) belongs to this number.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(&mut self, number: usize) -> Result<()> {
        self.recorder.set_number(Some(number));
        self.entered = on_stream(&self.device, &self.of, |stream| self.recorder.begin(stream, Track::Compute))?;
        Ok(())
    }

    /// # Errors
    /// What the driver says.
    pub fn leave(&mut self) -> Result<()> {
        let entered = self.entered.take();
        on_stream(&self.device, &self.of, |stream| self.recorder.end(stream, entered))
    }

    /// What has been recorded since the last time, when the device has done it. Until something is entered again nothing is recorded.
    ///
    /// # Errors
    /// What went wrong on the device.
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

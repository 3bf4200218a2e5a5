//! Copies between a GPU and the host that overlap with compute, on streams of their own and through pinned host
//! memory.
//!
//! The gradients of a layer are copied to the host while the next layer's backward runs, and the values of the next
//! layer are copied to the GPU while the current one computes. The host waits only when it reads values that were
//! copied to it.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, DType, Result, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use zero_cuda::{CudaError, Event, Pinned, Recorder, Stream, Track};

use super::ring::Ring;
use super::timeline::recorder;
use super::{Array, Gpu, Mark, driver, on_stream};
use crate::convert;

/// The copy streams and a ring of pinned host memory.
pub struct Staging {
    device: CudaDevice,
    of: Arc<zero_cuda::Device>,
    down: Stream,
    up: Stream,
    /// Set if the device has a timeline.
    recorder: Option<Arc<Recorder>>,
    ring: Ring,
    /// Marks where candle's stream was at the first upload after the latest release.
    begun: Option<Mark>,
    /// Whether uploaded values were released since `begun`.
    released: bool,
}

/// Limit on the pinned host memory in flight for uploads: enough for two large layers.
const LEAVING: usize = 512 << 20;

/// Values that are being copied to the host.
pub struct Arriving {
    event: Event,
    len: usize,
    /// The destination and the source, until the values are taken.
    ends: Option<(Pinned, CudaStorage)>,
}

impl Staging {
    /// Creates the copy streams for a GPU.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let of = Arc::clone(Gpu::new(device)?.kernels.device());
        let (down, up) = (Stream::urgent(&of).map_err(driver)?, Stream::urgent(&of).map_err(driver)?);
        let recorder = recorder(device);
        let ring = Ring::new(&of, LEAVING);
        Ok(Self { device: device.clone(), of, down, up, recorder, ring, begun: None, released: false })
    }

    /// Enqueues a copy on one of the streams, followed by an event.
    fn put(
        &self,
        stream: &Stream,
        track: Track,
        event: &Event,
        copy: impl FnOnce() -> std::result::Result<(), CudaError>,
    ) -> Result<()> {
        let recorded = || match &self.recorder {
            Some(recorder) => {
                let begun = recorder.begin(stream, track)?;
                copy()?;
                recorder.end(stream, begun)
            }
            None => copy(),
        };
        let done = recorded().and_then(|()| stream.record(event));
        if done.is_err() {
            // If the event was not recorded, nothing else would wait for the copy.
            let _ = stream.synchronize();
        }
        done.map_err(driver)
    }

    /// Enqueues a copy of the values to the host, ordered after the work that writes them. They are first rounded to
    /// `dtype`: f32, bf16 or f16.
    ///
    /// # Errors
    /// Fails if `dtype` is none of these, or if pinned host memory is exhausted. Returns errors of the driver.
    pub fn download(&mut self, source: Array, dtype: DType) -> Result<Arriving> {
        let len = source.len();
        let source = if dtype == DType::F32 { source.into_storage() } else { source.rounded(dtype)? };
        let bytes = len * dtype.size_in_bytes();
        let mut pinned = self.ring.take(bytes).map_err(driver)?;
        let event = Event::new(&self.of).map_err(driver)?;
        let made = Mark::new(&self.device)?;
        self.down.wait_for(made.event()).map_err(driver)?;
        let address = super::address_of(&source)?;
        // SAFETY: the returned value owns both the storage and the host memory, and its drop waits for the event.
        let copy = || unsafe { self.down.download(address, &mut pinned, bytes) };
        self.put(&self.down, Track::ToHost, &event, copy)?;
        Ok(Arriving { event, len, ends: Some((pinned, source)) })
    }

    /// Waits for values and copies them to `to`, in f32.
    ///
    /// # Errors
    /// Returns an error of earlier work on the device.
    ///
    /// # Panics
    /// Panics if `to` has a different length.
    pub fn take(&mut self, mut arriving: Arriving, to: &mut [f32]) -> Result<()> {
        assert_eq!(arriving.len, to.len());
        arriving.event.wait().map_err(driver)?;
        if let Some((pinned, source)) = arriving.ends.take() {
            let dtype = source.dtype();
            let from = &pinned[..to.len() * dtype.size_in_bytes()];
            match dtype {
                DType::BF16 => {
                    convert(bytemuck::cast_slice::<_, bf16>(from), to, |from, to| from.convert_to_f32_slice(to));
                }
                DType::F16 => {
                    convert(bytemuck::cast_slice::<_, f16>(from), to, |from, to| from.convert_to_f32_slice(to));
                }
                _ => convert(bytemuck::cast_slice::<_, f32>(from), to, |from, to| to.copy_from_slice(from)),
            }
            self.ring.give(pinned);
        }
        Ok(())
    }

    /// Copies host values to the GPU. All later work on candle's stream sees them. The host may change its values as
    /// soon as this returns.
    ///
    /// # Errors
    /// Fails if memory is exhausted, or the dtype is not f32, bf16, f16 or u8.
    pub fn upload(&mut self, values: &CpuStorage) -> Result<CudaStorage> {
        match values {
            CpuStorage::F32(values) => self.upload_slice(values),
            CpuStorage::BF16(values) => self.upload_slice(values),
            CpuStorage::F16(values) => self.upload_slice(values),
            CpuStorage::U8(values) => self.upload_slice(values),
            _ => bail!("values must be f32, bf16, f16 or u8"),
        }
    }

    /// Records that uploaded values have been freed.
    ///
    /// Uploaded values are freed on candle's stream, but memory for the next ones is allocated on the upload stream.
    /// The pool can reuse the memory only if the upload stream waits for candle's. Otherwise the pool may take new
    /// memory from the GPU for each upload. The uploads of a layer therefore wait until the layer before the previous
    /// one has freed its uploads. Thus the uploads of two layers are in GPU memory at a time: one layer is copied while
    /// the other computes.
    pub fn released(&mut self) {
        self.released = true;
    }

    /// Copies a slice of host values to the GPU as [`Staging::upload`] does.
    ///
    /// # Errors
    /// Fails in the same cases as [`Staging::upload`].
    pub fn upload_slice<T: CudaDType + DeviceRepr + bytemuck::Pod + Send + Sync>(
        &mut self,
        values: &[T],
    ) -> Result<CudaStorage> {
        self.upload_with(values.len(), |to| convert(values, to, |from, to| to.copy_from_slice(from)))
    }

    /// Copies `len` values to the GPU as [`Staging::upload`] does. `write` writes all of them into pinned memory, whose
    /// content is arbitrary.
    ///
    /// # Errors
    /// Fails in the same cases as [`Staging::upload`].
    pub fn upload_with<T: CudaDType + DeviceRepr + bytemuck::Pod>(
        &mut self,
        len: usize,
        write: impl FnOnce(&mut [T]),
    ) -> Result<CudaStorage> {
        let bytes = len * size_of::<T>();
        let mut pinned = self.ring.take_to_leave(bytes).map_err(driver)?;
        write(bytemuck::cast_slice_mut(&mut pinned[..bytes]));
        let event = Event::new(&self.of).map_err(driver)?;
        if std::mem::take(&mut self.released)
            && let Some(before) = self.begun.replace(Mark::new(&self.device)?)
        {
            self.up.wait_for(before.event()).map_err(driver)?;
        }
        // Allocated on the upload stream: on candle's stream the memory would be available only after all earlier
        // work there.
        let address = self.up.allocate(bytes).map_err(driver)?;
        let stream = self.device.cuda_stream();
        // SAFETY: the address refers to an exclusive allocation of this size, which candle's stream frees after its
        // last use.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(address, len.max(1)) };
        // SAFETY: the slice has room, and the host memory is kept until the event has completed.
        let copy = || unsafe { self.up.upload(&pinned, address, bytes) };
        self.put(&self.up, Track::FromHost, &event, copy)?;
        if let Err(error) = on_stream(&self.device, &self.of, |candles| candles.wait_for(&event)) {
            let _ = self.up.synchronize();
            return Err(error);
        }
        self.ring.leave(event, pinned);
        Ok(CudaStorage::wrap_cuda_slice(slice, self.device.clone()))
    }
}

impl Arriving {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if self.ends.is_some() {
            // The copy may still be writing.
            let _ = self.event.wait();
        }
    }
}

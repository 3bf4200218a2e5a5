//! Copies between a GPU and the host beside what the GPU computes: on streams of their own, through memory of the host that stays where it
//! is.
//!
//! What a layer's backward has made goes to the host while the next layer's runs, and the values of the next layer come while this one
//! computes. The host waits only where it reads what has come.

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

/// The streams, and memory of the host that waits for its next use.
pub struct Staging {
    device: CudaDevice,
    of: Arc<zero_cuda::Device>,
    down: Stream,
    up: Stream,
    /// Where the device has a timeline.
    recorder: Option<Arc<Recorder>>,
    ring: Ring,
    /// Where candle's stream was when the uploads of this round began: behind what was released before.
    begun: Option<Mark>,
    /// Whether something was released since then.
    released: bool,
}

/// Memory of the host that uploads may hold at a time: two of the largest layers that are usual.
const LEAVING: usize = 512 << 20;

/// Values on their way to the host.
pub struct Arriving {
    there: Event,
    len: usize,
    /// Where they come to and from, until they are taken.
    ends: Option<(Pinned, CudaStorage)>,
}

impl Staging {
    /// For a GPU.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let of = Arc::clone(Gpu::new(device)?.kernels.device());
        let (down, up) = (Stream::urgent(&of).map_err(driver)?, Stream::urgent(&of).map_err(driver)?);
        let recorder = recorder(device);
        let ring = Ring::new(&of, LEAVING);
        Ok(Self { device: device.clone(), of, down, up, recorder, ring, begun: None, released: false })
    }

    /// Puts a copy on one of the streams, and an event behind it.
    fn put(
        &self,
        stream: &Stream,
        track: Track,
        there: &Event,
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
        let done = recorded().and_then(|()| stream.record(there));
        if done.is_err() {
            // Without the event nobody would wait for the copy.
            let _ = stream.synchronize();
        }
        done.map_err(driver)
    }

    /// Sends values to the host, behind what makes them; rounded to a type, f32, bf16 or f16, in which they travel.
    ///
    /// # Errors
    /// What the driver says, another type, or the memory of the host that may be pinned does not suffice.
    pub fn download(&mut self, source: Array, dtype: DType) -> Result<Arriving> {
        let len = source.len();
        let source = if dtype == DType::F32 { source.into_storage() } else { source.rounded(dtype)? };
        let bytes = len * dtype.size_in_bytes();
        let mut pinned = self.ring.take(bytes).map_err(driver)?;
        let there = Event::new(&self.of).map_err(driver)?;
        let made = Mark::new(&self.device)?;
        self.down.wait_for(made.event()).map_err(driver)?;
        let address = super::address_of(&source)?;
        // SAFETY: the storage and the memory live in what is returned, whose drop waits for the event.
        let copy = || unsafe { self.down.download(address, &mut pinned, bytes) };
        self.put(&self.down, Track::ToHost, &there, copy)?;
        Ok(Arriving { there, len, ends: Some((pinned, source)) })
    }

    /// Waits for values, and copies them to where they belong, in f32.
    ///
    /// # Errors
    /// What went wrong on the device.
    ///
    /// # Panics
    /// If `to` has another length.
    pub fn take(&mut self, mut arriving: Arriving, to: &mut [f32]) -> Result<()> {
        assert_eq!(arriving.len, to.len());
        arriving.there.wait().map_err(driver)?;
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

    /// Values of the host in the memory of the GPU: they are there for all that is put on candle's stream from now on. The host may change
    /// its own at once.
    ///
    /// # Errors
    /// A memory does not suffice, or values that are none of f32, bf16 and f16.
    pub fn upload(&mut self, values: &CpuStorage) -> Result<CudaStorage> {
        match values {
            CpuStorage::F32(values) => self.upload_slice::<f32>(values),
            CpuStorage::BF16(values) => self.upload_slice::<bf16>(values),
            CpuStorage::F16(values) => self.upload_slice::<f16>(values),
            _ => bail!("parameters are f32, bf16 or f16"),
        }
    }

    /// What was uploaded and is not in use any more has been given back.
    ///
    /// The driver knows no order between the stream that gives memory back, which is candle's, and the one that takes memory for uploads,
    /// unless one waits for the other; without it the pool may take new memory from the GPU for each upload. So the uploads of a layer wait
    /// until the layer before the last has given its uploads back: two layers have memory at a time, and one is copied while the other computes.
    pub fn released(&mut self) {
        self.released = true;
    }

    fn upload_slice<T: CudaDType + DeviceRepr + bytemuck::Pod>(&mut self, values: &[T]) -> Result<CudaStorage> {
        let mut pinned = self.ring.take_to_leave(size_of_val(values)).map_err(driver)?;
        pinned[..size_of_val(values)].copy_from_slice(bytemuck::cast_slice(values));
        let there = Event::new(&self.of).map_err(driver)?;
        if std::mem::take(&mut self.released)
            && let Some(before) = self.begun.replace(Mark::new(&self.device)?)
        {
            self.up.wait_for(before.event()).map_err(driver)?;
        }
        // Out of the pool for this stream: on candle's it would be there only when all is done that was put there before.
        let address = self.up.allocate(size_of_val(values)).map_err(driver)?;
        let stream = self.device.cuda_stream();
        // SAFETY: the address is of as many bytes, which nobody else has; candle's stream gives them back behind its last use of them.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(address, values.len().max(1)) };
        // SAFETY: the slice has room; the memory of the host is kept until the event.
        let copy = || unsafe { self.up.upload(&pinned, address, size_of_val(values)) };
        self.put(&self.up, Track::FromHost, &there, copy)?;
        if let Err(error) = on_stream(&self.device, &self.of, |candles| candles.wait_for(&there)) {
            let _ = self.up.synchronize();
            return Err(error);
        }
        self.ring.leave(there, pinned);
        Ok(CudaStorage::wrap_cuda_slice(slice, self.device.clone()))
    }
}

impl Arriving {
    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if self.ends.is_some() {
            // The copy still writes.
            let _ = self.there.wait();
        }
    }
}

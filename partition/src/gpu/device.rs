//! A GPU with CUDA.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, DType, Device, Storage, Tensor, TensorId};
use half::{bf16, f16};
use zero_comm::Buffer;
use zero_model::Tuning;
use zero_model::device::optimizer::{GpuRange, Norms, step};
use zero_model::device::{self, Array, Staging};
pub(crate) use zero_model::device::{Arriving, optimizer::Updated};
use zero_model::sink::{FlatBuffer, Gradients};
use zero_optim::norm::{Limits, Verdict};
use zero_optim::{BlockCodes, ExactSum, Factors};
use zero_pipeline::SegmentId;

use super::{CodedRange, elsewhere};
use crate::error::ZeroError;
use crate::optimizer::SegmentState;
use crate::rank::Rank;
use crate::rounding::working;
use crate::states::StateBuffer;
use crate::storage::copy_on_host;
use crate::threads::round_all;

/// The GPU that runs the layers.
pub(crate) struct Gpu {
    device: CudaDevice,
    /// Streams and host memory for copies between GPU and host.
    staging: Staging,
    norms: Norms,
}

impl Gpu {
    /// Prepares the GPU of the layers; `None` if they run on the CPU.
    pub(crate) fn open(device: &Device) -> Result<Option<Self>, ZeroError> {
        let Device::Cuda(device) = device else { return Ok(None) };
        Ok(Some(Self { device: device.clone(), staging: Staging::new(device)?, norms: Norms::new(device)? }))
    }

    /// Allocates uninitialized f32 values. The driver's pool reuses freed memory.
    pub(crate) fn room(&self, len: usize) -> Result<FlatBuffer, ZeroError> {
        Ok(FlatBuffer::Device(Array::room(&self.device, len)?))
    }

    /// Allocates zeros.
    pub(crate) fn zeros(&self, len: usize) -> Result<FlatBuffer, ZeroError> {
        let mut zeros = Array::room(&self.device, len)?;
        zeros.zero(0..len)?;
        Ok(FlatBuffer::Device(zeros))
    }

    /// Copies values from the host.
    pub(crate) fn buffer_of(&self, values: &[f32]) -> Result<FlatBuffer, ZeroError> {
        let mut array = Array::room(&self.device, values.len())?;
        array.upload(0, values)?;
        Ok(FlatBuffer::Device(array))
    }

    /// Copies values of the working dtype from the host.
    pub(crate) fn upload(&self, values: &CpuStorage) -> Result<Storage, ZeroError> {
        Ok(Storage::Cuda(device::upload(&self.device, values)?))
    }

    /// Allocates uninitialized values.
    pub(crate) fn blank(&self, dtype: DType, len: usize) -> Result<Storage, ZeroError> {
        Ok(Storage::Cuda(device::room(&self.device, dtype, len)?))
    }

    /// Allocates a buffer for `len` received values.
    pub(crate) fn blank_to_receive(&self, dtype: DType, len: usize) -> Result<Buffer, ZeroError> {
        to_send(device::room(&self.device, dtype, len)?, len)
    }

    /// Uploads host values on a separate stream. All work queued later waits for the upload.
    pub(crate) fn upload_staged(&mut self, values: &CpuStorage) -> Result<Storage, ZeroError> {
        Ok(Storage::Cuda(self.staging.upload(values)?))
    }

    /// Uploads values as [`Gpu::upload_staged`] does, rounded to `dtype`: f32, bf16 or f16.
    pub(crate) fn upload_rounded(&mut self, values: &[f32], dtype: DType) -> Result<Storage, ZeroError> {
        let len = values.len();
        Ok(Storage::Cuda(match dtype {
            DType::BF16 => self.staging.upload_with::<bf16>(len, |to| round_all(values, to))?,
            DType::F16 => self.staging.upload_with::<f16>(len, |to| round_all(values, to))?,
            _ => self.staging.upload_slice(values)?,
        }))
    }

    /// Allocates memory for codes.
    pub(crate) fn codes(&self, bytes: usize) -> Result<CudaStorage, ZeroError> {
        Ok(device::room(&self.device, DType::U8, bytes)?)
    }

    /// Returns received codes in GPU memory. Codes on the host are uploaded.
    pub(crate) fn arrived(&self, codes: Buffer) -> Result<CudaStorage, ZeroError> {
        match codes {
            Buffer::U8(bytes) => Ok(device::upload(&self.device, &CpuStorage::U8(bytes))?),
            codes => storage_of(codes),
        }
    }

    /// Records that GPU memory to which parameters were uploaded has been freed.
    pub(crate) fn released(&mut self) {
        self.staging.released();
    }

    /// Starts downloading a gradient in `dtype`.
    pub(crate) fn start_download(&mut self, values: FlatBuffer, dtype: DType) -> Result<Arriving, ZeroError> {
        let FlatBuffer::Device(array) = values else { return Err(elsewhere()) };
        Ok(self.staging.download(array, dtype)?)
    }

    /// Waits for a download and stores it as f32.
    pub(crate) fn await_download(&mut self, arriving: Arriving, to: &mut [f32]) -> Result<(), ZeroError> {
        Ok(self.staging.take(arriving, to)?)
    }

    /// Returns the sum of squares of ranges of gradients. Waits for the GPU.
    pub(crate) fn squares(&mut self, gradients: &[(&FlatBuffer, Vec<Range<usize>>)]) -> Result<ExactSum, ZeroError> {
        Ok(self.norms.sum(&parts(gradients)?)?)
    }

    /// Computes the norm of ranges of gradients and checks it against `limits`, without waiting.
    pub(crate) fn judge(
        &mut self,
        gradients: &[(&FlatBuffer, Vec<Range<usize>>)],
        limits: &Limits,
    ) -> Result<(), ZeroError> {
        Ok(self.norms.judge(&parts(gradients)?, limits)?)
    }

    /// Waits for the verdict of [`Gpu::judge`].
    pub(crate) fn verdict(&mut self) -> Result<Verdict, ZeroError> {
        Ok(self.norms.verdict()?)
    }

    /// Lists the values of this rank's part of a segment that an optimizer step needs. `gradients` are the reduced
    /// gradients.
    pub(crate) fn to_update<'a>(
        &self,
        rank: &'a Rank,
        id: SegmentId,
        gradients: &'a FlatBuffer,
        state: &'a mut SegmentState,
        shard: Option<&'a mut Storage>,
    ) -> Result<Vec<(Tuning, Updated<'a>)>, ZeroError> {
        let (segment, own) = (rank.segment(id), rank.own_range(id));
        let SegmentState { master, states } = state;
        let FlatBuffer::Device(gradients) = gradients else { return Err(elsewhere()) };
        let (offset, gradients) = (segment.begin_in_gradients(&own), GpuRange::read(gradients)?);
        let states = states.iter_mut().map(|kind| match kind {
            StateBuffer::F32(FlatBuffer::Device(kind)) => Ok(GpuRange::write(kind)?),
            _ => Err(elsewhere()),
        });
        let states = states.collect::<Result<Vec<_>, ZeroError>>()?;
        let master = match master {
            FlatBuffer::Device(master) if !master.is_empty() => Some(GpuRange::write(master)?),
            _ => None,
        };
        let shard = match shard {
            Some(Storage::Cuda(shard)) => Some(GpuRange::of_shard(shard)?),
            Some(_) => return Err(elsewhere()),
            None => None,
        };
        let mut updated = vec![];
        for (parameter, inside, at) in segment.overlaps(own) {
            let parameter = &rank.model.parameters()[parameter];
            let values = match shard {
                Some(shard) => shard.at(at.clone())?,
                None => GpuRange::of_leaf(parameter.leaf())?.at(inside)?,
            };
            let master = master.map(|master| master.at(at.clone())).transpose()?;
            let mut states = states.iter().map(|state| state.at(at.clone())).collect::<Result<Vec<_>, _>>()?;
            // The average of the weights is the first state.
            let averages = rank.options.average.map(|_| states.remove(0));
            let parts = Updated {
                parameters: master.unwrap_or(values),
                states,
                averages,
                gradients: gradients.at(at.start + offset..at.end + offset)?,
                working: master.is_some().then_some(values),
                decay: rank.options.decays(parameter),
            };
            updated.push((parameter.tuning(), parts));
        }
        Ok(updated)
    }

    /// Runs an optimizer step in as few launches as possible. With `is_judged`, the kernels read the verdict on the
    /// last norm from GPU memory.
    pub(crate) fn step(
        &self,
        factors: [&Factors; 2],
        updated: &[Updated<'_>],
        average_weight: f32,
        is_judged: bool,
    ) -> Result<(), ZeroError> {
        Ok(step(&self.device, factors, updated, average_weight, is_judged.then_some(&self.norms))?)
    }
}

fn parts<'a>(gradients: &[(&'a FlatBuffer, Vec<Range<usize>>)]) -> Result<Vec<GpuRange<'a>>, ZeroError> {
    let mut parts = vec![];
    for (buffer, ranges) in gradients {
        let FlatBuffer::Device(array) = buffer else { return Err(elsewhere()) };
        let whole = GpuRange::read(array)?;
        for range in ranges {
            parts.push(whole.at(range.clone())?);
        }
    }
    Ok(parts)
}

/// Waits for the gradients of these leaves in `made`, which are on the GPU, and adds them to the gradients on the host.
pub(crate) fn add_to_host(host: &mut Gradients, made: &Gradients, leaves: &[TensorId]) -> Result<(), ZeroError> {
    Ok(host.bring(made, leaves)?)
}

/// Copies a range between storages of the same dtype. At least one of them is on a GPU.
pub(crate) fn copy(
    from: &Storage,
    source: Range<usize>,
    to: &mut Storage,
    target: Range<usize>,
) -> Result<(), ZeroError> {
    match (from, to) {
        (Storage::Cuda(from), Storage::Cuda(to)) => device::copy(from, source, to, target)?,
        (Storage::Cuda(from), Storage::Cpu(to)) => {
            let values = device::download(from, source)?;
            copy_on_host(&values, 0..target.len(), to, target)?;
        }
        (Storage::Cpu(from), Storage::Cuda(to)) => {
            let len = source.len();
            let mut part = working(vec![0.0; len], BackendStorage::dtype(to));
            copy_on_host(from, source, &mut part, 0..len)?;
            let part = device::upload(&to.device, &part)?;
            device::copy(&part, 0..len, to, target)?;
        }
        _ => return Err(elsewhere()),
    }
    Ok(())
}

/// Copies a range to the host.
pub(crate) fn download(values: &CudaStorage, range: Range<usize>) -> Result<CpuStorage, ZeroError> {
    Ok(device::download(values, range)?)
}

/// Converts a gradient on a GPU to a GPU buffer of `dtype`.
pub(crate) fn packed(values: FlatBuffer, dtype: DType) -> Result<Buffer, ZeroError> {
    let FlatBuffer::Device(array) = values else { return Err(elsewhere()) };
    let len = array.len();
    let packed = match dtype {
        DType::F32 => array.into_storage(),
        dtype => array.rounded(dtype)?,
    };
    to_send(packed, len)
}

/// Converts a received gradient on a GPU to f32.
pub(crate) fn unpacked(buffer: Buffer) -> Result<FlatBuffer, ZeroError> {
    let len = buffer.len();
    Ok(FlatBuffer::Device(Array::widened(storage_of(buffer)?, len)?))
}

/// Writes the scales and codes of ranges of values.
pub(crate) fn quantize(
    codes: BlockCodes,
    values: &CudaStorage,
    places: &[CodedRange],
    to: &mut CudaStorage,
) -> Result<(), ZeroError> {
    Ok(device::quantize(codes, values, places, to)?)
}

/// Wraps codes to be sent: from the GPU if `by_gpu`, otherwise from the host.
pub(crate) fn leaving(written: CudaStorage, bytes: usize, by_gpu: bool) -> Result<Buffer, ZeroError> {
    if by_gpu {
        return to_send(written, bytes);
    }
    match device::download(&written, 0..bytes)? {
        CpuStorage::U8(bytes) => Ok(Buffer::U8(bytes)),
        _ => Err(ZeroError::internal("codes are not bytes")),
    }
}

/// Restores `len` values of `dtype` from codes.
pub(crate) fn dequantized(
    codes: BlockCodes,
    from: &CudaStorage,
    places: &[CodedRange],
    (dtype, len): (DType, usize),
) -> Result<Storage, ZeroError> {
    Ok(Storage::Cuda(device::dequantized(codes, from, places, (dtype, len))?))
}

/// Adds the values of several senders to a gradient, in the order of the senders. The codes of consecutive senders
/// start `apart` bytes after each other; `places` locates those of the first sender.
pub(crate) fn add_codes(
    codes: BlockCodes,
    from: &CudaStorage,
    (senders, apart): (usize, usize),
    places: &[CodedRange],
    to: &mut FlatBuffer,
) -> Result<(), ZeroError> {
    let FlatBuffer::Device(to) = to else { return Err(elsewhere()) };
    Ok(device::add_codes(codes, from, (senders, apart), places, to)?)
}

/// Returns the f32 values of a gradient on a GPU.
pub(crate) fn values_of(gradient: &FlatBuffer) -> Result<&CudaStorage, ZeroError> {
    match gradient {
        FlatBuffer::Device(array) => Ok(array.storage()),
        FlatBuffer::Host(_) => Err(elsewhere()),
    }
}

/// Marks a gradient on a GPU as rounded to `dtype`. Operations round its values when they read them.
pub(crate) fn communicated(values: FlatBuffer, dtype: DType) -> Result<FlatBuffer, ZeroError> {
    let FlatBuffer::Device(array) = values else { return Err(elsewhere()) };
    Ok(FlatBuffer::Device(array.communicated(dtype)?))
}

/// Wraps the first `len` values of a storage.
pub(crate) fn to_send(storage: CudaStorage, len: usize) -> Result<Buffer, ZeroError> {
    Ok(device::to_send(storage, len)?)
}

/// Returns the storage that a buffer wraps.
pub(crate) fn storage_of(buffer: Buffer) -> Result<CudaStorage, ZeroError> {
    Ok(device::storage_of(buffer)?)
}

/// Copies a GPU tensor of dtype f32, bf16 or f16 into a buffer that can be sent directly from the GPU.
///
/// # Errors
/// Fails if the tensor is on another device or has a different dtype, or if the GPU is out of memory.
pub fn gpu_copy(tensor: &Tensor) -> Result<Buffer, ZeroError> {
    Ok(device::copied_to_send(tensor)?)
}

/// Allocates a buffer on a GPU to receive values from another GPU.
///
/// # Errors
/// Fails if the GPU is out of memory, or the dtype is not f32, bf16 or f16.
pub fn gpu_room(device: &Device, dtype: DType, elements: usize) -> Result<Buffer, ZeroError> {
    Ok(device::room_to_receive(device, dtype, elements)?)
}

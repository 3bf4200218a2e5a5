//! The optimizer step on a GPU, and the gradient norm by which gradients are clipped.

use std::marker::PhantomData;
use std::ops;
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaDevice, CudaStorage, Error, Result, Storage, Tensor, bail};
use zero_cuda::Pinned;
use zero_kernels::gradient_norm::{
    SQUARES, SQUARES_RANGES, Squared, Verdict, VerdictArgs, limbs, partials, square_sums, verdict,
};
use zero_kernels::optimizer::{UPDATE_RANGES, Updated as Range, update};
use zero_kernels::{Address, Dtype, Launch};
use zero_optim::exact_sum::LIMBS;
use zero_optim::norm::Limits;
use zero_optim::{ExactSum, Factors};

use super::{Array, Gpu, Mark, address, begin, driver, elements_of, kernel_dtype};

const OP: &str = "optimizer";

/// A range of values that a step reads or writes.
#[derive(Clone, Copy)]
pub struct GpuRange<'a> {
    address: Address,
    dtype: Dtype,
    /// The dtype to which values are rounded when they are read.
    communicated: Dtype,
    count: usize,
    of: PhantomData<&'a ()>,
}

impl<'a> GpuRange<'a> {
    /// Wraps gradients.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn read(array: &'a Array) -> Result<Self> {
        let (address, count) = (array.address(&(0..array.len()))?, array.len());
        Ok(Self { address, dtype: Dtype::F32, communicated: array.communicated_as(), count, of: PhantomData })
    }

    /// Wraps optimizer state or master parameters.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn write(array: &'a mut Array) -> Result<Self> {
        Self::read(array)
    }

    /// Wraps a shard of parameters.
    ///
    /// # Errors
    /// Fails if the dtype is not f32, bf16 or f16.
    pub fn of_shard(shard: &'a mut CudaStorage) -> Result<Self> {
        Self::of_storage(shard)
    }

    /// Wraps the values of a parameter.
    ///
    /// # Errors
    /// Fails if the values are not on a GPU, or the parameter is released.
    pub fn of_leaf(leaf: &'a Tensor) -> Result<Self> {
        let (storage, _) = leaf.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("{OP}: expected a parameter on a GPU") };
        Self::of_storage(storage)
    }

    fn of_storage(storage: &CudaStorage) -> Result<Self> {
        let (address, dtype) = (address(OP, storage)?, kernel_dtype(OP, storage.dtype())?);
        Ok(Self { address, dtype, communicated: Dtype::F32, count: elements_of(storage), of: PhantomData })
    }

    /// Returns a part of this range: `range` counts from its start.
    ///
    /// # Errors
    /// Fails if the range is out of bounds.
    pub fn at(self, range: ops::Range<usize>) -> Result<Self> {
        if range.end > self.count || range.start > range.end {
            bail!("{OP}: the range {range:?} is outside the {} values", self.count);
        }
        let bytes = if self.dtype == Dtype::F32 { 4 } else { 2 };
        Ok(Self { address: self.address + (range.start * bytes) as u64, count: range.len(), ..self })
    }
}

/// Elements that one step updates in the same way. All ranges have the same number of elements.
pub struct Updated<'a> {
    /// Parameters, f32.
    pub parameters: GpuRange<'a>,
    /// States of the optimizer, f32.
    pub states: Vec<GpuRange<'a>>,
    /// Gradients, read as f32.
    pub gradients: GpuRange<'a>,
    /// Receives the new parameters, rounded to the dtype of this range.
    pub working: Option<GpuRange<'a>>,
    /// Averages of the parameters, f32.
    pub averages: Option<GpuRange<'a>>,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// Runs the optimizer in one pass over all ranges. `factors` holds the factors for elements with weight decay, then the
/// factors for all others. With `norms`, gradients are scaled by the clip coefficient of the last norm, and nothing is
/// updated if that norm was rejected. `average_weight` is the weight of the new parameters in the averages.
///
/// # Errors
/// Fails if the numbers of elements differ or parameters are not f32. Returns errors of the driver.
pub fn step(
    device: &CudaDevice,
    factors: [&Factors; 2],
    updated: &[Updated<'_>],
    average_weight: f32,
    norms: Option<&Norms>,
) -> Result<()> {
    let (gpu, verdict) = (Gpu::new(device)?, norms.map_or(0, |norms| begin(&norms.verdict)));
    for some in
        updated.chunk_by(|a, b| working_dtype(a) == working_dtype(b)).flat_map(|same| same.chunks(UPDATE_RANGES))
    {
        let ranges = some.iter().map(Updated::range).collect::<Result<Vec<_>>>()?;
        let launch = update(some.first().map_or(Dtype::F32, working_dtype), factors, &ranges, average_weight, verdict);
        // SAFETY: all parts of an update have the same number of elements, and the written ones are borrowed mutably
        // or are a leaf's own storage.
        unsafe { gpu.launch_some(launch) }?;
    }
    Ok(())
}

fn working_dtype(updated: &Updated<'_>) -> Dtype {
    updated.working.as_ref().map_or(Dtype::F32, |working| working.dtype)
}

impl Updated<'_> {
    fn range(&self) -> Result<Range> {
        let Self { parameters, states, gradients, working, averages, decay } = self;
        let f32s = [parameters, gradients].into_iter().chain(states).chain(averages);
        let all_f32 = f32s.clone().all(|part| part.dtype == Dtype::F32);
        if !all_f32 || f32s.chain(working).any(|part| part.count != gradients.count) || states.len() > 2 {
            bail!("{OP}: parameters, states and gradients have different lengths or devices");
        }
        let mut at = [0; 2];
        at.iter_mut().zip(states).for_each(|(at, state)| *at = state.address);
        Ok(Range {
            params: parameters.address,
            states: at,
            grads: gradients.address,
            communicated: gradients.communicated,
            working: working.map_or(0, |part| part.address),
            averages: averages.map_or(0, |part| part.address),
            count: gradients.count as u64,
            decay: *decay,
        })
    }
}

/// Gradient norms computed on a GPU. The verdict of the last norm is kept in GPU memory, where steps read it, and in
/// host memory.
pub struct Norms {
    device: CudaDevice,
    verdict: CudaSlice<u8>,
    /// Receives the verdict on a norm, or the limbs of a sum.
    host: Pinned,
    made: Option<Mark>,
}

impl Norms {
    /// Allocates the memory for norms on a GPU.
    ///
    /// # Errors
    /// Fails if GPU memory or pinned host memory is exhausted.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let of = Arc::clone(Gpu::new(device)?.kernels.device());
        let bytes = size_of::<Verdict>();
        // SAFETY: a step reads the verdict only after a norm has written it.
        let verdict = unsafe { device.alloc::<u8>(bytes) }?;
        let host = Pinned::new(&of, bytes.max(size_of::<[i64; LIMBS]>())).map_err(driver)?;
        Ok(Self { device: device.clone(), verdict, host, made: None })
    }

    /// Computes the norm of gradients and checks it against `limits`, without waiting. Each range must begin at the
    /// boundary of a partial sum.
    ///
    /// # Errors
    /// Fails if memory is exhausted. Returns errors of the driver.
    pub fn judge(&mut self, gradients: &[GpuRange<'_>], limits: &Limits) -> Result<()> {
        let to = [begin(&self.verdict), self.host_address()];
        self.launch(gradients, |count, partials| verdict(count, partials, limits, 0, to))
    }

    /// Waits for the last norm and returns its verdict.
    ///
    /// # Errors
    /// Fails if no norm was computed since the last call. Returns errors of the driver.
    pub fn verdict(&mut self) -> Result<zero_optim::norm::Verdict> {
        let [norm, clip, last] = self.words()?;
        let (scale, admitted) = (f32::from_bits(last as u32), (last >> 32) as u32);
        Ok(Verdict { norm: f64::from_bits(norm), clip: f64::from_bits(clip), scale, admitted }.into())
    }

    /// Waits for and returns the sum of squares of gradients as integers, so that it can be combined with the sums of
    /// other ranks or of the host.
    ///
    /// # Errors
    /// Fails in the same cases as [`Norms::judge`].
    pub fn sum(&mut self, gradients: &[GpuRange<'_>]) -> Result<ExactSum> {
        let (to, limits) = (
            self.host_address(),
            Limits { loss_scale: 1.0, max_norm: 0.0, max_value: 0.0, limit: 0.0, skips_overflow: true },
        );
        self.launch(gradients, |count, partials| verdict(count, partials, &limits, to, [0; 2]))?;
        let limbs: [u64; LIMBS] = self.words()?;
        ExactSum::from_limbs(&limbs.map(u64::cast_signed)).map_err(Error::wrap)
    }

    /// Returns the device address of the pinned host memory, which equals its host address.
    fn host_address(&mut self) -> Address {
        self.host.as_mut_ptr().expose_provenance() as Address
    }

    /// Waits for the result and returns its first words from host memory.
    fn words<const N: usize>(&mut self) -> Result<[u64; N]> {
        let Some(made) = self.made.take() else { bail!("{OP}: the gradient norm was not computed") };
        if !made.event().is_done().map_err(driver)? {
            made.event().wait().map_err(driver)?;
        }
        let mut words = self.host.as_chunks().0.iter().map(|&word| u64::from_ne_bytes(word));
        Ok(std::array::from_fn(|_| words.next().unwrap_or_default()))
    }

    fn launch(
        &mut self,
        gradients: &[GpuRange<'_>],
        finish: impl FnOnce(u64, Address) -> Launch<VerdictArgs>,
    ) -> Result<()> {
        if gradients.iter().any(|part| part.dtype != Dtype::F32) {
            bail!("{OP}: gradients must be f32");
        }
        let gpu = Gpu::new(&self.device)?;
        let sums_of = |part: &GpuRange<'_>| part.count.div_ceil(SQUARES as usize);
        let count: usize = gradients.iter().map(sums_of).sum();
        // SAFETY: kernels write both buffers before other kernels read them.
        let (sums, parts) = unsafe {
            (self.device.alloc::<f64>(count.max(1))?, self.device.alloc::<i64>(partials(count as u64).max(1))?)
        };
        let mut to = begin(&sums);
        for some in gradients.chunks(SQUARES_RANGES) {
            let squared = |part: &GpuRange<'_>| Squared {
                grads: part.address,
                count: part.count as u64,
                communicated: part.communicated,
            };
            let launch = square_sums(&some.iter().map(squared).collect::<Vec<_>>(), to);
            // SAFETY: `sums` has room for the result, and nothing else writes there.
            unsafe { gpu.launch_some(launch) }?;
            to += (some.iter().map(sums_of).sum::<usize>() * size_of::<f64>()) as u64;
        }
        let (count, from, to) = (count as u64, begin(&sums), begin(&parts));
        // SAFETY: as above; the other destinations belong to this value and outlive all work on the stream.
        unsafe {
            gpu.launch_some(limbs(count, from, to))?;
            gpu.launch(&finish(count, to))?;
        }
        self.made = Some(Mark::new(&self.device)?);
        Ok(())
    }
}

impl Drop for Norms {
    fn drop(&mut self) {
        // The device may still be writing the host memory.
        if let Some(made) = self.made.take() {
            let _ = made.event().wait();
        }
    }
}

//! The optimizer's step, and what the norm needs of gradients, on a GPU.

use std::marker::PhantomData;
use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaDevice, CudaStorage, Error, Result, Storage, Tensor, bail};
use zero_kernels::optimizer::{SQUARES, square_sums, update};
use zero_kernels::{Address, Dtype};
use zero_optim::Factors;

use super::{Array, Gpu, address, begin, elements_of, kernel_dtype};

const OP: &str = "optimizer";

/// A range of values that a step reads or writes.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    address: Address,
    dtype: Dtype,
    count: usize,
    of: PhantomData<&'a ()>,
}

impl<'a> Part<'a> {
    /// Of gradients.
    ///
    /// # Errors
    /// The range is not in them.
    pub fn read(array: &'a Array, range: Range<usize>) -> Result<Self> {
        Ok(Self { address: array.address(&range)?, dtype: Dtype::F32, count: range.len(), of: PhantomData })
    }

    /// Of the optimizer's state or of a master.
    ///
    /// # Errors
    /// The range is not in them.
    pub fn write(array: &'a mut Array, range: Range<usize>) -> Result<Self> {
        Self::read(array, range)
    }

    /// Of a shard of parameters.
    ///
    /// # Errors
    /// The range is not in them, or they are none of f32, bf16 and f16.
    pub fn of_shard(shard: &'a mut CudaStorage, range: Range<usize>) -> Result<Self> {
        Self::of_storage(shard, range)
    }

    /// Of a parameter's values.
    ///
    /// # Errors
    /// They are not on a GPU, released, or the range is not in them.
    pub fn of_leaf(leaf: &'a Tensor, range: Range<usize>) -> Result<Self> {
        let (storage, _) = leaf.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("{OP}: a parameter on a GPU expected") };
        Self::of_storage(storage, range)
    }

    fn of_storage(storage: &CudaStorage, range: Range<usize>) -> Result<Self> {
        let dtype = storage.dtype();
        let begin = address(OP, storage)?;
        let held = elements_of(storage);
        if range.end > held || range.start > range.end {
            bail!("{OP}: {range:?} of {held} values");
        }
        let address = begin + (range.start * dtype.size_in_bytes()) as u64;
        Ok(Self { address, dtype: kernel_dtype(OP, dtype)?, count: range.len(), of: PhantomData })
    }
}

/// One pass over f32 parameters and the optimizer's states, all of as many elements as there are gradients. `working` gets the new
/// parameters, rounded to its own type.
///
/// # Errors
/// Numbers of elements that differ, parameters that are not f32, or what the driver says.
pub fn step(
    device: &CudaDevice,
    factors: &Factors,
    parameters: Part<'_>,
    states: &[Part<'_>],
    gradients: Part<'_>,
    working: Option<Part<'_>>,
) -> Result<()> {
    let count = gradients.count;
    let f32s = [&parameters, &gradients].into_iter().chain(states);
    let all_f32 = f32s.clone().all(|part| part.dtype == Dtype::F32);
    if !all_f32 || f32s.chain(&working).any(|part| part.count != count) || states.len() > 2 {
        bail!("{OP}: parameters, states and gradients do not belong together");
    }
    let mut at = [0; 2];
    at.iter_mut().zip(states).for_each(|(at, state)| *at = state.address);
    let (dtype, to) = working.map_or((Dtype::F32, 0), |part| (part.dtype, part.address));
    let launch = update(dtype, count as u64, factors, parameters.address, at, gradients.address, to);
    // SAFETY: all have as many elements of their types; what is written is borrowed for that, or the leaf's own.
    unsafe { Gpu::new(device)?.launch_some(launch) }
}

/// Sums of the squares of gradients, each of as many as `zero_optim::norm` adds up at a time, that are being made.
pub struct SquareSums {
    sums: CudaSlice<f64>,
    device: CudaDevice,
    used: usize,
}

impl SquareSums {
    /// Room for the sums of `ranges` ranges of `elements` elements together.
    ///
    /// # Errors
    /// The memory does not suffice.
    pub fn room(device: &CudaDevice, elements: usize, ranges: usize) -> Result<Self> {
        let most = elements.div_ceil(SQUARES as usize) + ranges;
        // SAFETY: what is read was written before.
        let sums = unsafe { device.alloc::<f64>(most.max(1)) }?;
        Ok(Self { sums, device: device.clone(), used: 0 })
    }

    /// Adds a range, which begins where a sum begins.
    ///
    /// # Errors
    /// There is no room for it, or what the driver says.
    pub fn add(&mut self, gradients: Part<'_>) -> Result<()> {
        let sums = gradients.count.div_ceil(SQUARES as usize);
        if self.used + sums > self.sums.len() {
            bail!("{OP}: more sums of squares than there is room for");
        }
        let to = begin(&self.sums) + (self.used * size_of::<f64>()) as u64;
        self.used += sums;
        let launch = square_sums(gradients.dtype, gradients.count as u64, gradients.address, to);
        // SAFETY: there is room for as many sums, and nobody else writes there.
        unsafe { Gpu::new(&self.device)?.launch_some(launch) }
    }

    /// All sums, when they are made.
    ///
    /// # Errors
    /// What the driver says.
    pub fn to_host(&self) -> Result<Vec<f64>> {
        let mut sums = vec![0.0; self.used];
        if self.used > 0 {
            let stream = self.device.cuda_stream();
            stream.memcpy_dtoh(&self.sums.slice(0..self.used), &mut sums).map_err(Error::wrap)?;
        }
        Ok(sums)
    }
}

//! A flat vector of f32 in GPU memory.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Storage, Tensor, bail};
use zero_kernels::optimizer::{add_communicated, add_to, narrow, widen};
use zero_kernels::{Address, Dtype};

use super::{Gpu, Operand, address, kernel_dtype};

/// A flat vector of f32 in GPU memory.
pub struct Array {
    storage: CudaStorage,
    len: usize,
    /// The dtype to which readers round the values.
    communicated: Dtype,
}

const OP: &str = "array";

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Array").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Array {
    /// Allocates `len` values with arbitrary content.
    ///
    /// # Errors
    /// Fails if memory is exhausted.
    pub fn room(device: &CudaDevice, len: usize) -> Result<Self> {
        Ok(Self { storage: Gpu::new(device)?.floats(len)?, len, communicated: Dtype::F32 })
    }

    /// Copies a tensor's values.
    ///
    /// # Errors
    /// Fails if memory is exhausted, or the tensor does not hold floats on a GPU.
    pub(crate) fn of(device: &CudaDevice, values: &Tensor) -> Result<Self> {
        let mut array = Self::room(device, values.elem_count())?;
        array.take(0..array.len, values, false)?;
        Ok(array)
    }

    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the array is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Marks the values as sent between ranks in `dtype`. The kernels that read them (sum, norm and update) round them
    /// to that dtype, to nearest, ties to even.
    ///
    /// # Errors
    /// Fails if the dtype is not f32, bf16 or f16.
    pub fn communicated(self, dtype: DType) -> Result<Self> {
        Ok(Self { communicated: kernel_dtype(OP, dtype)?, ..self })
    }

    /// Rounds the values to the dtype of [`Array::communicated`] now, so that every kernel can read them.
    pub(crate) fn round_communicated(&mut self) -> Result<()> {
        if self.communicated == Dtype::F32 {
            return Ok(());
        }
        let mut rounded = Self::room(&self.storage.device, self.len)?;
        rounded.zero(0..self.len)?;
        rounded.add(self)?;
        *self = rounded;
        Ok(())
    }

    /// Returns the dtype to which readers round the values.
    pub(super) fn communicated_as(&self) -> Dtype {
        self.communicated
    }

    /// Returns the array for kernels that read the values as they are stored.
    ///
    /// # Panics
    /// Panics if readers must round the values ([`Array::communicated`]). Only the sum, the norm and the update round
    /// them.
    fn unrounded(&self) -> &Self {
        assert_eq!(self.communicated, Dtype::F32, "only the sum, the norm and the update read rounded values");
        self
    }

    /// Waits for all earlier work on the stream and copies a range to the host.
    ///
    /// # Errors
    /// Returns the driver's error, which an earlier kernel may have caused.
    ///
    /// # Panics
    /// Panics if the range is out of bounds, or its length differs from that of `to`.
    pub fn to_host(&self, range: Range<usize>, to: &mut [f32]) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let slice = self.unrounded().storage.as_cuda_slice::<f32>()?;
        self.storage.device.cuda_stream().memcpy_dtoh(&slice.slice(range), to).map_err(candle_core::Error::wrap)
    }

    /// Overwrites the values starting at `at` with host values. The host may change `from` as soon as this returns.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Panics
    /// Panics if the values do not fit.
    pub fn upload(&mut self, at: usize, from: &[f32]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        assert!(at + from.len() <= self.len);
        let to = self.address(&(at..at + from.len()))?;
        // SAFETY: `to` is the address of element `at`, and the assertion shows that the values fit from there on.
        unsafe { Gpu::new(&self.storage.device)?.overwrite(from, to) }
    }

    /// Overwrites the values starting at `at` with a range of another array.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Panics
    /// Panics if a range is out of bounds.
    pub fn copy(&mut self, at: usize, from: &Array, range: Range<usize>) -> Result<()> {
        let to = at..at + range.len();
        super::copy(&from.unrounded().storage, range, &mut self.storage, to)
    }

    /// Adds another array, element by element.
    ///
    /// # Errors
    /// Fails if the lengths differ. Returns errors of the driver.
    pub fn add(&mut self, other: &Array) -> Result<()> {
        if self.len != other.len {
            bail!("{OP}: cannot add {} values to {}", other.len, self.len);
        }
        let (gpu, from, to) =
            (Gpu::new(&self.storage.device)?, address(OP, &other.storage)?, address(OP, &self.storage)?);
        let (count, communicated) =
            (self.len as u64, [other.communicated, std::mem::replace(&mut self.communicated, Dtype::F32)]);
        // SAFETY: both arrays hold the same number of values and have different storages.
        unsafe {
            match communicated {
                [Dtype::F32, Dtype::F32] => gpu.launch_some(add_to(Dtype::F32, count, from, to)),
                communicated => gpu.launch_some(add_communicated(count, [from, to], communicated)),
            }
        }
    }

    /// Returns the values rounded to a dtype, to nearest, ties to even.
    ///
    /// # Errors
    /// Fails if memory is exhausted, or the dtype is not f32, bf16 or f16.
    pub fn rounded(&self, dtype: DType) -> Result<CudaStorage> {
        let gpu = Gpu::new(&self.storage.device)?;
        let rounded = gpu.room(OP, dtype, self.len)?;
        let (from, to) = (address(OP, &self.unrounded().storage)?, address(OP, &rounded)?);
        // SAFETY: both storages hold the same number of values.
        unsafe { gpu.launch_some(narrow(kernel_dtype(OP, dtype)?, self.len as u64, from, to)) }?;
        Ok(rounded)
    }

    /// Converts the first `len` values of a storage to f32, which is exact.
    ///
    /// # Errors
    /// Fails if memory is exhausted, or the storage is not f32, bf16 or f16.
    pub fn widened(values: CudaStorage, len: usize) -> Result<Self> {
        if values.dtype() == DType::F32 {
            return Ok(Self { storage: values, len, communicated: Dtype::F32 });
        }
        let array = Self::room(&values.device, len)?;
        let (from, to) = (address(OP, &values)?, address(OP, &array.storage)?);
        let dtype = kernel_dtype(OP, values.dtype())?;
        // SAFETY: both storages hold the same number of values.
        unsafe { Gpu::new(&values.device)?.launch_some(widen(dtype, len as u64, from, to)) }?;
        Ok(array)
    }

    /// Returns the f32 storage, which may be longer than the array.
    #[must_use]
    pub fn storage(&self) -> &CudaStorage {
        &self.unrounded().storage
    }

    /// Returns the f32 storage.
    #[must_use]
    pub fn into_storage(self) -> CudaStorage {
        self.unrounded();
        self.storage
    }

    /// Sets a range to zero.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn zero(&mut self, range: Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let stream = self.storage.device.cuda_stream();
        let slice = self.storage.as_cuda_slice_mut::<f32>()?;
        stream.memset_zeros(&mut slice.slice_mut(range)).map_err(candle_core::Error::wrap)
    }

    /// Writes the values of a tensor of any float dtype to a range, or adds them to it if `add` is set.
    ///
    /// # Errors
    /// Fails if the tensor has a different size or is on another device.
    pub(crate) fn take(&mut self, range: Range<usize>, values: &Tensor, add: bool) -> Result<()> {
        let from = Operand::of(OP, values)?;
        if from.count != range.len() {
            bail!("{OP}: got {} values for a range of {} elements", from.count, range.len());
        }
        let (gpu, to, count) = (Gpu::of(OP, values)?, self.address(&range)?, from.count as u64);
        match (add, from.dtype) {
            // SAFETY: both ranges hold the same number of values and are in different storages.
            (true, dtype) => unsafe { gpu.launch_some(add_to(dtype, count, from.address, to)) },
            (false, Dtype::F32) => {
                let (storage, layout) = values.storage_and_layout();
                let Storage::Cuda(storage) = &*storage else { bail!("{OP}: expected a tensor on a GPU") };
                match layout.contiguous_offsets() {
                    Some((start, end)) => {
                        let from = storage.as_cuda_slice::<f32>()?.slice(start..end);
                        let to = self.storage.as_cuda_slice_mut::<f32>()?;
                        gpu.device().memcpy_dtod(&from, &mut to.slice_mut(range))
                    }
                    None => {
                        self.zero(range)?;
                        // SAFETY: as above.
                        unsafe { gpu.launch_some(add_to(Dtype::F32, count, from.address, to)) }
                    }
                }
            }
            // SAFETY: as above.
            (false, dtype) => unsafe { gpu.launch_some(widen(dtype, count, from.address, to)) },
        }
    }

    /// Returns the address of a range.
    pub(crate) fn address(&self, range: &Range<usize>) -> Result<Address> {
        if range.end > self.len || range.start > range.end {
            bail!("{OP}: the range {range:?} is outside the {} values", self.len);
        }
        Ok(address(OP, &self.storage)? + (range.start * DType::F32.size_in_bytes()) as u64)
    }

    /// Returns the values as a one-dimensional tensor.
    pub(crate) fn into_tensor(self) -> Tensor {
        Tensor::from_storage(Storage::Cuda(self.storage), self.len, BackpropOp::none(), false)
    }
}

//! A flat vector of f32 in the memory of a GPU.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Storage, Tensor, bail};
use zero_kernels::optimizer::{add_to, add_travelled, narrow, widen};
use zero_kernels::{Address, Dtype};

use super::{Gpu, Operand, address, kernel_dtype};

/// f32 values in the memory of a GPU.
pub struct Array {
    storage: CudaStorage,
    len: usize,
    /// The type to which they are rounded when they are read.
    travelled: Dtype,
}

const OP: &str = "array";

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Array").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Array {
    /// Room for `len` values, which are arbitrary at first.
    ///
    /// # Errors
    /// The memory does not suffice.
    pub fn room(device: &CudaDevice, len: usize) -> Result<Self> {
        Ok(Self { storage: Gpu::new(device)?.floats(len)?, len, travelled: Dtype::F32 })
    }

    /// A tensor's values.
    ///
    /// # Errors
    /// The memory does not suffice, or the tensor is not of floats on a GPU.
    pub(crate) fn of(device: &CudaDevice, values: &Tensor) -> Result<Self> {
        let mut array = Self::room(device, values.elem_count())?;
        array.take(0..array.len, values, false)?;
        Ok(array)
    }

    /// How many values there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same values, as if they had gone between ranks in a type: they are rounded to it, to nearest, ties to even, by what reads them, which is
    /// a sum, the norm and the update.
    ///
    /// # Errors
    /// The type is none of f32, bf16 and f16.
    pub fn travelled(self, dtype: DType) -> Result<Self> {
        Ok(Self { travelled: kernel_dtype(OP, dtype)?, ..self })
    }

    /// How the values are to be rounded by who reads them.
    pub(super) fn travelled_as(&self) -> Dtype {
        self.travelled
    }

    /// Of values that are read as they are: everywhere but in those three places.
    fn as_they_are(&self) -> &Self {
        assert_eq!(self.travelled, Dtype::F32, "values that are rounded when they are read");
        self
    }

    /// Copies a range to the host, when all is done that came before.
    ///
    /// # Errors
    /// What the driver says, such as of an earlier kernel.
    ///
    /// # Panics
    /// If the range is not in it, or of another length than `to`.
    pub fn to_host(&self, range: Range<usize>, to: &mut [f32]) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let slice = self.as_they_are().storage.as_cuda_slice::<f32>()?;
        self.storage.device.cuda_stream().memcpy_dtoh(&slice.slice(range), to).map_err(candle_core::Error::wrap)
    }

    /// Copies what the host has over what begins at `at`. The host may change it when this returns.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If there are not as many values.
    pub fn upload(&mut self, at: usize, from: &[f32]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        assert!(at + from.len() <= self.len);
        let to = self.address(&(at..at + from.len()))?;
        // SAFETY: there is room for them.
        unsafe { Gpu::new(&self.storage.device)?.overwrite(from, to) }
    }

    /// Copies a range of another over what begins at `at`.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If one of them has not as many values.
    pub fn copy(&mut self, at: usize, from: &Array, range: Range<usize>) -> Result<()> {
        let to = at..at + range.len();
        super::copy(&from.as_they_are().storage, range, &mut self.storage, to)
    }

    /// Adds another, element by element.
    ///
    /// # Errors
    /// It is of another length, or what the driver says.
    pub fn add(&mut self, other: &Array) -> Result<()> {
        if self.len != other.len {
            bail!("{OP}: {} values added to {}", other.len, self.len);
        }
        let (gpu, from, to) =
            (Gpu::new(&self.storage.device)?, address(OP, &other.storage)?, address(OP, &self.storage)?);
        let (count, travelled) =
            (self.len as u64, [other.travelled, std::mem::replace(&mut self.travelled, Dtype::F32)]);
        // SAFETY: both hold as many values; they are of different storages.
        unsafe {
            match travelled {
                [Dtype::F32, Dtype::F32] => gpu.launch_some(add_to(Dtype::F32, count, from, to)),
                travelled => gpu.launch_some(add_travelled(count, [from, to], travelled)),
            }
        }
    }

    /// The values rounded to a type, to nearest, ties to even.
    ///
    /// # Errors
    /// The memory does not suffice, or the type is none of f32, bf16 and f16.
    pub fn rounded(&self, dtype: DType) -> Result<CudaStorage> {
        let gpu = Gpu::new(&self.storage.device)?;
        let rounded = gpu.room(OP, dtype, self.len)?;
        let (from, to) = (address(OP, &self.as_they_are().storage)?, address(OP, &rounded)?);
        // SAFETY: both hold as many values.
        unsafe { gpu.launch_some(narrow(kernel_dtype(OP, dtype)?, self.len as u64, from, to)) }?;
        Ok(rounded)
    }

    /// The first `len` values of a storage, in f32, exactly.
    ///
    /// # Errors
    /// The memory does not suffice, or the storage is none of f32, bf16 and f16.
    pub fn widened(values: CudaStorage, len: usize) -> Result<Self> {
        if values.dtype() == DType::F32 {
            return Ok(Self { storage: values, len, travelled: Dtype::F32 });
        }
        let array = Self::room(&values.device, len)?;
        let (from, to) = (address(OP, &values)?, address(OP, &array.storage)?);
        let dtype = kernel_dtype(OP, values.dtype())?;
        // SAFETY: both hold as many values.
        unsafe { Gpu::new(&values.device)?.launch_some(widen(dtype, len as u64, from, to)) }?;
        Ok(array)
    }

    /// The storage, of f32.
    #[must_use]
    pub fn into_storage(self) -> CudaStorage {
        self.as_they_are();
        self.storage
    }

    /// Zeros in a range.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the range is not in it.
    pub fn zero(&mut self, range: Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let stream = self.storage.device.cuda_stream();
        let slice = self.storage.as_cuda_slice_mut::<f32>()?;
        stream.memset_zeros(&mut slice.slice_mut(range)).map_err(candle_core::Error::wrap)
    }

    /// A tensor's values, of any float type, into a range: instead of what is there, or added to it.
    ///
    /// # Errors
    /// A tensor of another size, or on another device.
    pub(crate) fn take(&mut self, range: Range<usize>, values: &Tensor, add: bool) -> Result<()> {
        let from = Operand::of(OP, values)?;
        if from.count != range.len() {
            bail!("{OP}: {} values for {} places", from.count, range.len());
        }
        let (gpu, to, count) = (Gpu::of(OP, values)?, self.address(&range)?, from.count as u64);
        match (add, from.dtype) {
            // SAFETY: both ranges hold as many values; they are of different storages.
            (true, dtype) => unsafe { gpu.launch_some(add_to(dtype, count, from.address, to)) },
            (false, Dtype::F32) => {
                let (storage, layout) = values.storage_and_layout();
                let Storage::Cuda(storage) = &*storage else { bail!("{OP}: a tensor on a GPU expected") };
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

    /// Where a range begins.
    pub(crate) fn address(&self, range: &Range<usize>) -> Result<Address> {
        if range.end > self.len || range.start > range.end {
            bail!("{OP}: {range:?} of {} values", self.len);
        }
        Ok(address(OP, &self.storage)? + (range.start * DType::F32.size_in_bytes()) as u64)
    }

    /// The values as a tensor of one dimension.
    pub(crate) fn into_tensor(self) -> Tensor {
        Tensor::from_storage(Storage::Cuda(self.storage), self.len, BackpropOp::none(), false)
    }
}

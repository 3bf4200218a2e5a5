//! Indices in the form that kernels read.

use super::count32;
use crate::device::{Finding, Gpu, address, begin};
use crate::tensor::OwnEntries;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaStorage, DType, Layout, Result, Storage, Tensor, bail};
use zero_kernels::Address;
use zero_kernels::cross_entropy::Counted;
use zero_kernels::indices::{IndexType, Limits, indices};

/// u32 indices in row-major order. An index out of range becomes 2³² − 1 and is reported later: see
/// [`crate::device::check`].
pub(super) struct Indices {
    slice: CudaSlice<u32>,
    pub(super) count: u32,
    /// Whether the memory after the last index holds the number of targets.
    counts_targets: bool,
}

/// Returns the limits of the indices into a table. Without `own`, the table has `entries` rows; with `own`, this rank
/// holds a part of a larger table.
pub(super) fn limits(op: &'static str, entries: usize, own: Option<&OwnEntries>) -> Result<Limits> {
    let Some(own) = own else { return Ok(Limits::whole(count32(op, entries)?)) };
    let [all, begin, end] = [own.all, own.range().start, own.range().end].map(|count| count32(op, count));
    Ok(Limits { all: all?, own: begin?..end? })
}

impl Indices {
    /// Converts a view of u32, i64 or u8 within `limits`.
    ///
    /// # Errors
    /// Fails if the view has a different dtype; also reports errors that kernels recorded for earlier indices.
    pub(super) fn new(op: &'static str, gpu: &Gpu, view: (&CudaStorage, &Layout), limits: &Limits) -> Result<Self> {
        Self::converted(op, gpu, view, limits, false)
    }

    /// Does the same as [`Indices::new`], but an i64 may also be [`IGNORE_INDEX`](crate::IGNORE_INDEX).
    pub(super) fn targets(op: &'static str, gpu: &Gpu, view: (&CudaStorage, &Layout), limits: &Limits) -> Result<Self> {
        Self::converted(op, gpu, view, limits, true)
    }

    fn converted(
        op: &'static str,
        gpu: &Gpu,
        (storage, layout): (&CudaStorage, &Layout),
        limits: &Limits,
        are_targets: bool,
    ) -> Result<Self> {
        gpu.check()?;
        let of = match storage.dtype() {
            DType::U8 => IndexType::U8,
            DType::U32 => IndexType::U32,
            DType::I64 if are_targets => IndexType::Targets,
            DType::I64 => IndexType::I64,
            other => bail!("{op}: expected indices of dtype u32, i64 or u8, got {other:?}"),
        };
        let elements = layout.shape().elem_count();
        let count = count32(op, elements)?;
        // SAFETY: the launch below writes all memory that is read, before it is read. Only for targets, it also writes
        // their number after the indices.
        let slice: CudaSlice<u32> =
            unsafe { gpu.device().alloc(elements.max(1) + usize::from(of == IndexType::Targets)) }?;
        let copy = match layout.is_contiguous() {
            true => None,
            false => {
                // SAFETY: the copy writes all of it.
                let mut copy = unsafe { gpu.device().alloc_uninit(layout.shape(), storage.dtype()) }?;
                storage.copy_strided_src(&mut copy, 0, layout)?;
                Some(copy)
            }
        };
        let from = match &copy {
            Some(copy) => address(op, copy)?,
            None => address(op, storage)? + (layout.start_offset() * storage.dtype().size_in_bytes()) as u64,
        };
        let faults = gpu.faults();
        let (fault, what) = (faults.address(), faults.what(op, Finding::Index));
        // SAFETY: both have the same number of elements; either is freed after this launch, in stream order; the rest
        // lives as long as the device.
        unsafe { gpu.launch(&indices(of, count, limits, [from, begin(&slice)], fault, what)) }?;
        Ok(Self { slice, count, counts_targets: of == IndexType::Targets })
    }

    /// Does the same as [`Indices::new`], for a tensor.
    pub(super) fn of(op: &'static str, gpu: &Gpu, tensor: &Tensor, limits: &Limits) -> Result<Self> {
        Self::of_tensor(op, gpu, tensor, limits, false)
    }

    /// Does the same as [`Indices::targets`], for a tensor.
    pub(super) fn of_targets(op: &'static str, gpu: &Gpu, tensor: &Tensor, limits: &Limits) -> Result<Self> {
        Self::of_tensor(op, gpu, tensor, limits, true)
    }

    fn of_tensor(op: &'static str, gpu: &Gpu, tensor: &Tensor, limits: &Limits, are_targets: bool) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => Self::converted(op, gpu, (storage, layout), limits, are_targets),
            _ => bail!("{op}: expected indices on a GPU, got indices on {:?}", tensor.device()),
        }
    }

    /// Returns the number of rows with a target.
    pub(super) fn counted(&self) -> Counted {
        match self.counts_targets {
            true => Counted::At(begin(&self.slice) + 4 * u64::from(self.count)),
            false => Counted::Known(self.count),
        }
    }

    /// Returns the address of the indices.
    pub(super) fn address(&self) -> Address {
        begin(&self.slice)
    }
}

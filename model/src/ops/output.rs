//! From rows of f32 to what candle stores.
//!
//! All arithmetic is f32. bf16 results are rounded, to nearest even, while the rows are still in the first-level cache, so
//! that memory sees no more than the elements themselves.

use super::kernel::{Isa, bf16 as kernel};
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Result, Shape, Storage, Tensor, bail};
use half::bf16;
use std::marker::PhantomData;

/// Storage of `len` zeros of `dtype`.
pub(crate) fn zeros(op: &'static str, dtype: DType, len: usize) -> Result<CpuStorage> {
    match dtype {
        DType::F32 => Ok(CpuStorage::F32(vec![0.0; len])),
        DType::BF16 => Ok(CpuStorage::BF16(vec![bf16::ZERO; len])),
        other => bail!("{op}: f32 or bf16 expected, got {other:?}"),
    }
}

/// A tensor outside any graph: what a backward returns.
pub(crate) fn tensor(storage: CpuStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
}

/// A buffer in which threads write disjoint parts that are not contiguous, such as the columns of a head.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    start: Start,
    len: usize,
    buffer: PhantomData<&'a mut CpuStorage>,
}

#[derive(Clone, Copy)]
enum Start {
    F32(*mut f32),
    Bf16(*mut bf16),
}

// SAFETY: access is by `store` alone, whose caller promises that nobody else has the elements.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(crate) fn new(op: &'static str, storage: &'a mut CpuStorage) -> Result<Self> {
        let (start, len) = match storage {
            CpuStorage::F32(data) => (Start::F32(data.as_mut_ptr()), data.len()),
            CpuStorage::BF16(data) => (Start::Bf16(data.as_mut_ptr()), data.len()),
            other => bail!("{op}: f32 or bf16 expected, got {:?}", other.dtype()),
        };
        Ok(Self { start, len, buffer: PhantomData })
    }

    /// Stores `values` from element `at` on.
    ///
    /// # Safety
    /// Nobody else reads or writes these elements at the same time.
    pub(crate) unsafe fn store(&self, isa: Isa, at: usize, values: &[f32]) {
        let len = values.len();
        assert!(at + len <= self.len, "elements {at}..{} of {}", at + len, self.len);
        match self.start {
            // SAFETY: inside of the buffer by the assertion, alone by the caller's promise.
            Start::F32(start) => unsafe { std::slice::from_raw_parts_mut(start.add(at), len) }.copy_from_slice(values),
            Start::Bf16(start) => {
                // SAFETY: as above.
                let to = unsafe { std::slice::from_raw_parts_mut(start.add(at), len) };
                kernel::round(isa, values, to);
            }
        }
    }
}

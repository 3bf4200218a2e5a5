//! Converts rows of f32 to candle storage.
//!
//! All arithmetic is f32. bf16 and f16 results are rounded, to nearest even, while the rows are still in the
//! first-level cache, so only the 16-bit elements reach memory.

use crate::kernel::HalfFloat;
use crate::kernel::norm::ROWS;
use crate::parallel::split;
use crate::product::Elements;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Returns storage of `units` times `floats` elements of `dtype`, which `work` fills. `work` receives a range of units,
/// their part of each operand as f32, and their part of the storage as f32. That part has arbitrary content, and `work`
/// writes every element of it. Each operand is as long as the storage. Parts are small enough that the f32 values of
/// all operands and of the storage fit into the first-level cache.
pub(crate) fn build_as<const N: usize>(
    op: &'static str,
    dtype: DType,
    units: usize,
    floats: usize,
    operands: [Elements<'_>; N],
    work: impl Fn(Range<usize>, [&[f32]; N], &mut [f32]) + Sync,
) -> Result<CpuStorage> {
    let mut fresh = Fresh::new(op, dtype, units * floats)?;
    let out = fresh.shared();
    let at_once = at_once(floats);
    split::<f32, 0>(units, floats, [], |range, []| {
        let (mut room, mut operands) = (vec![], operands.map(Reader::new));
        for start in range.clone().step_by(at_once) {
            let part = start..range.end.min(start + at_once);
            let (at, len) = (start * floats, part.len() * floats);
            let operands = operands.each_mut().map(|operand| operand.floats(at..at + len));
            // SAFETY: each unit is in one part, and each part belongs to one thread.
            unsafe { out.write(at, len, &mut room, |out| work(part, operands, out)) };
        }
    });
    // SAFETY: the ranges of `split` cover all units, so all elements are written.
    Ok(unsafe { fresh.filled(units * floats) })
}

/// Converts values to storage of `dtype`.
pub(crate) fn stored(op: &'static str, values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    match dtype {
        DType::F32 => Ok(CpuStorage::F32(values)),
        _ => build_as(op, dtype, values.len(), 1, [Elements::F32(&values)], |_, [values], out| {
            out.copy_from_slice(values)
        }),
    }
}

/// Elements to process at a time in operations without rows. A first-level cache of 32 KiB holds this many elements of
/// five operands and results, each in 16 bits and again as f32.
pub(crate) const CACHED: usize = 1024;

/// Returns how many rows of `width` elements to process at a time: as many as have [`CACHED`] elements together. If
/// these are fewer than `ROWS`, the number of rows that kernels sum together, returns as many of those as fit the
/// second-level cache.
pub(crate) fn at_once(width: usize) -> usize {
    const ELEMENTS: usize = 16 * 1024;
    (CACHED / width.max(1)).max(ROWS.min(ELEMENTS / width.max(1))).max(1)
}

/// Reads an operand as f32, some elements at a time. 16-bit elements are widened into a buffer that is reused.
pub(crate) struct Reader<'a> {
    elements: Elements<'a>,
    room: Vec<f32>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(elements: Elements<'a>) -> Self {
        Self { elements, room: vec![] }
    }

    pub(crate) fn floats(&mut self, range: Range<usize>) -> &[f32] {
        self.elements.floats(range, &mut self.room)
    }
}

/// Returns the gradient of `of` that a backward computed in f32, or `None` if none is wanted.
pub(crate) fn gradient(op: &'static str, of: &Tensor, values: Vec<f32>) -> Result<Option<Tensor>> {
    of.track_op().then(|| Ok(tensor(stored(op, values, of.dtype())?, of.shape()))).transpose()
}

/// Returns a tensor outside any graph, such as a backward returns.
pub(crate) fn tensor(storage: CpuStorage, shape: impl Into<Shape>) -> Tensor {
    tensor_of(Storage::Cpu(storage), shape)
}

/// Does the same as [`tensor`], on any device.
pub(crate) fn tensor_of(storage: Storage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

/// Storage that is not yet written.
pub(crate) enum Fresh {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Fresh {
    /// Allocates `len` elements of `dtype`.
    pub(crate) fn new(op: &'static str, dtype: DType, len: usize) -> Result<Self> {
        match dtype {
            DType::F32 => Ok(Self::F32(Vec::with_capacity(len))),
            DType::BF16 => Ok(Self::Bf16(Vec::with_capacity(len))),
            DType::F16 => Ok(Self::F16(Vec::with_capacity(len))),
            other => bail!("{op}: expected f32, bf16 or f16, got {other:?}"),
        }
    }

    pub(crate) fn shared(&mut self) -> Shared<'_> {
        let (start, len) = match self {
            Self::F32(data) => (Start::F32(data.as_mut_ptr()), data.capacity()),
            Self::Bf16(data) => (Start::Bf16(data.as_mut_ptr()), data.capacity()),
            Self::F16(data) => (Start::F16(data.as_mut_ptr()), data.capacity()),
        };
        Shared { start, len, buffer: PhantomData }
    }

    /// Returns the storage once it is written.
    ///
    /// # Safety
    /// All `len` elements must have been written.
    pub(crate) unsafe fn filled(self, len: usize) -> CpuStorage {
        match self {
            Self::F32(mut data) => {
                // SAFETY: the caller guarantees that `len` elements are written.
                unsafe { data.set_len(len) };
                CpuStorage::F32(data)
            }
            Self::Bf16(mut data) => {
                // SAFETY: as above.
                unsafe { data.set_len(len) };
                CpuStorage::BF16(data)
            }
            Self::F16(mut data) => {
                // SAFETY: as above.
                unsafe { data.set_len(len) };
                CpuStorage::F16(data)
            }
        }
    }
}

/// A buffer in which threads write disjoint parts that need not be contiguous, such as the columns of a head.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    start: Start,
    len: usize,
    buffer: PhantomData<&'a mut Fresh>,
}

#[derive(Clone, Copy)]
enum Start {
    F32(*mut f32),
    Bf16(*mut bf16),
    F16(*mut f16),
}

impl<'a> From<&'a mut [f32]> for Shared<'a> {
    fn from(floats: &'a mut [f32]) -> Self {
        Self { start: Start::F32(floats.as_mut_ptr()), len: floats.len(), buffer: PhantomData }
    }
}

// SAFETY: access is only through `store` and `write`, whose callers guarantee exclusive access to the elements.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    /// Stores `values` starting at element `at`.
    ///
    /// # Safety
    /// No other code may read or write these elements at the same time.
    pub(crate) unsafe fn store(&self, at: usize, values: &[f32]) {
        match self.start {
            // SAFETY: guaranteed by the caller.
            Start::F32(start) => unsafe { self.part(start, at, values.len()) }.copy_from_slice(values),
            // SAFETY: as above.
            Start::Bf16(start) => bf16::round(values, unsafe { self.part(start, at, values.len()) }),
            // SAFETY: as above.
            Start::F16(start) => f16::round(values, unsafe { self.part(start, at, values.len()) }),
        }
    }

    /// Calls `work` with a slice of `len` elements of arbitrary content, which `work` overwrites. Stores the slice
    /// starting at element `at`. 16-bit elements are computed in `room`, whose memory is reused for the next part.
    ///
    /// # Safety
    /// The requirements of [`Shared::store`] apply.
    pub(crate) unsafe fn write(&self, at: usize, len: usize, room: &mut Vec<f32>, work: impl FnOnce(&mut [f32])) {
        match self.start {
            // SAFETY: guaranteed by the caller.
            Start::F32(start) => work(unsafe { self.part(start, at, len) }),
            Start::Bf16(_) | Start::F16(_) => {
                room.resize(len, 0.0);
                work(room);
                // SAFETY: guaranteed by the caller.
                unsafe { self.store(at, room) };
            }
        }
    }

    /// Returns some elements with arbitrary content. Zeroing them first would take a quarter of the time of light
    /// operations, such as a sum or a rotation.
    ///
    /// # Safety
    /// `start` must be the pointer of this buffer, and `T` a float. No other code may access these elements.
    unsafe fn part<'a, T>(&self, start: *mut T, at: usize, len: usize) -> &'a mut [T] {
        assert!(at + len <= self.len, "elements {at}..{} of {}", at + len, self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's guarantee.
        unsafe {
            let start = start.add(at);
            if zero_isa::IS_DEVELOPMENT {
                // Fill with NaN, so that tests find elements that a kernel does not write.
                start.write_bytes(0xFF, len);
            }
            // Fresh memory holds arbitrary bits, and any bits are a valid float. The compiler must treat it as
            // initialized from here on, since the assembly could have written it.
            std::arch::asm!("/* {0} */", in(reg) start, options(nostack, preserves_flags));
            std::slice::from_raw_parts_mut(start, len)
        }
    }
}

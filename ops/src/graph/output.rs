//! From rows of f32 to what candle stores.
//!
//! All arithmetic is f32. bf16 and f16 results are rounded, to nearest even, while the rows are still in the first-level cache, so
//! that memory sees no more than the elements themselves.

use crate::kernel::norm::ROWS;
use crate::kernel::{HalfFloat, Isa};
use crate::parallel::split;
use crate::product::Elements;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Storage of `units` times `floats` elements of `dtype`, filled by `work`. `work` gets a range of units, their part of each operand
/// as f32, and their part of the storage, as f32 of arbitrary content, of which it writes every element. Operands are as long as the
/// storage. Small parts at a time, so that the first-level cache holds a part's f32 of all operands and of the storage.
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
        let (isa, mut room, mut operands) = (Isa::current(), vec![], operands.map(Reader::new));
        for start in range.clone().step_by(at_once) {
            let part = start..range.end.min(start + at_once);
            let (at, len) = (start * floats, part.len() * floats);
            let operands = operands.each_mut().map(|operand| operand.floats(at..at + len));
            // SAFETY: each unit is in one part, and each part is one thread's.
            unsafe { out.write(isa, at, len, &mut room, |out| work(part, operands, out)) };
        }
    });
    // SAFETY: the ranges of `split` cover all units.
    Ok(unsafe { fresh.filled(units * floats) })
}

/// Storage of `dtype` with these values.
pub(crate) fn stored(op: &'static str, values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    match dtype {
        DType::F32 => Ok(CpuStorage::F32(values)),
        _ => build_as(op, dtype, values.len(), 1, [Elements::F32(&values)], |_, [values], out| {
            out.copy_from_slice(values)
        }),
    }
}

/// Elements that are read and written at a time, where they are not rows: a first-level cache of 32 KiB holds so many of five
/// operands and results in 16 bits, and as f32.
pub(crate) const CACHED: usize = 1024;

/// Rows of `width` elements that are read and written at a time: [`CACHED`] elements, but as many rows as kernels make sums of at a time
/// while these are no more than a second-level cache holds.
pub(crate) fn at_once(width: usize) -> usize {
    const ELEMENTS: usize = 16 * 1024;
    (CACHED / width.max(1)).max(ROWS.min(ELEMENTS / width.max(1))).max(1)
}

/// An operand of which some elements at a time are read as f32, those of 16 bits through the same memory.
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

/// A tensor outside any graph: what a backward returns.
pub(crate) fn tensor(storage: CpuStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
}

/// Storage that is still to be written.
pub(crate) enum Fresh {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Fresh {
    /// Room for `len` elements of `dtype`.
    pub(crate) fn new(op: &'static str, dtype: DType, len: usize) -> Result<Self> {
        match dtype {
            DType::F32 => Ok(Self::F32(Vec::with_capacity(len))),
            DType::BF16 => Ok(Self::Bf16(Vec::with_capacity(len))),
            DType::F16 => Ok(Self::F16(Vec::with_capacity(len))),
            other => bail!("{op}: f32, bf16 or f16 expected, got {other:?}"),
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

    /// The storage, now that it is written.
    ///
    /// # Safety
    /// All of the `len` elements have been.
    pub(crate) unsafe fn filled(self, len: usize) -> CpuStorage {
        match self {
            Self::F32(mut data) => {
                // SAFETY: the caller's promise.
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

// SAFETY: access is by `store` and `write` alone, whose callers promise that nobody else has the elements.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    /// Stores `values` from element `at` on.
    ///
    /// # Safety
    /// Nobody else reads or writes these elements at the same time.
    pub(crate) unsafe fn store(&self, isa: Isa, at: usize, values: &[f32]) {
        match self.start {
            // SAFETY: the caller's promise.
            Start::F32(start) => unsafe { self.part(start, at, values.len()) }.copy_from_slice(values),
            // SAFETY: as above.
            Start::Bf16(start) => bf16::round(isa, values, unsafe { self.part(start, at, values.len()) }),
            // SAFETY: as above.
            Start::F16(start) => f16::round(isa, values, unsafe { self.part(start, at, values.len()) }),
        }
    }

    /// Stores what `work` writes to a slice of `len`, from element `at` on. Its content is arbitrary before. Elements of 16 bits are
    /// made in `room`, which keeps its memory for the next part.
    ///
    /// # Safety
    /// As for [`Shared::store`].
    pub(crate) unsafe fn write(
        &self,
        isa: Isa,
        at: usize,
        len: usize,
        room: &mut Vec<f32>,
        work: impl FnOnce(&mut [f32]),
    ) {
        match self.start {
            // SAFETY: the caller's promise.
            Start::F32(start) => work(unsafe { self.part(start, at, len) }),
            Start::Bf16(_) | Start::F16(_) => {
                room.resize(len, 0.0);
                work(room);
                // SAFETY: the caller's promise.
                unsafe { self.store(isa, at, room) };
            }
        }
    }

    /// Some elements, of arbitrary content. Zeroing them would cost light operations, a sum or a rotation, a quarter of their time.
    ///
    /// # Safety
    /// `start` is this buffer's, T a float, and nobody else has these elements.
    unsafe fn part<'a, T>(&self, start: *mut T, at: usize, len: usize) -> &'a mut [T] {
        assert!(at + len <= self.len, "elements {at}..{} of {}", at + len, self.len);
        // SAFETY: inside of the buffer by the assertion, alone by the caller's promise.
        unsafe {
            let start = start.add(at);
            if cfg!(debug_assertions) {
                // NaN, which tests find where a kernel leaves an element out.
                start.write_bytes(0xFF, len);
            }
            // Fresh memory has some bits, and any bits are a float. To the compiler it is initialised from here on, since this
            // could have written it.
            std::arch::asm!("/* {0} */", in(reg) start, options(nostack, preserves_flags));
            std::slice::from_raw_parts_mut(start, len)
        }
    }
}

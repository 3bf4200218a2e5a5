//! Element types of tensors that travel between the ranks of a group.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, WithDType, bail};
use half::{bf16, f16};
use std::borrow::Cow;
use zero_comm::{Buffer, CommError};

use crate::product::Elements;

/// An element type that travels.
pub(crate) trait Element: WithDType {
    const ZERO: Self;

    fn buffer(values: Vec<Self>) -> Buffer;

    fn values(buffer: Buffer) -> std::result::Result<Vec<Self>, CommError>;

    fn elements(values: &[Self]) -> Elements<'_>;

    /// The sum, rounded once.
    fn plus(self, other: Self) -> Self;
}

/// Returns the elements of a view in row-major order.
pub(crate) fn dense<'a, T: Element>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [T]>> {
    if let Some((start, end)) = layout.contiguous_offsets() {
        let all = T::cpu_storage_as_slice(storage)?;
        return match all.get(start..end) {
            Some(view) => Ok(Cow::Borrowed(view)),
            None => bail!("the layout needs {end} elements, but the storage has {}", all.len()),
        };
    }
    let mut copy = T::to_cpu_storage_owned(vec![T::ZERO; layout.shape().elem_count()]);
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(Cow::Owned(T::cpu_storage_as_slice(&copy)?.to_vec()))
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    fn buffer(values: Vec<Self>) -> Buffer {
        Buffer::F32(values)
    }

    fn values(buffer: Buffer) -> std::result::Result<Vec<Self>, CommError> {
        buffer.into_f32()
    }

    fn elements(values: &[Self]) -> Elements<'_> {
        Elements::F32(values)
    }

    fn plus(self, other: Self) -> Self {
        self + other
    }
}

impl Element for bf16 {
    const ZERO: Self = Self::ZERO;

    fn buffer(values: Vec<Self>) -> Buffer {
        Buffer::Bf16(values)
    }

    fn values(buffer: Buffer) -> std::result::Result<Vec<Self>, CommError> {
        buffer.into_bf16()
    }

    fn elements(values: &[Self]) -> Elements<'_> {
        Elements::Bf16(values)
    }

    fn plus(self, other: Self) -> Self {
        Self::from_f32(self.to_f32() + other.to_f32())
    }
}

impl Element for f16 {
    const ZERO: Self = Self::ZERO;

    fn buffer(values: Vec<Self>) -> Buffer {
        Buffer::F16(values)
    }

    fn values(buffer: Buffer) -> std::result::Result<Vec<Self>, CommError> {
        buffer.into_f16()
    }

    fn elements(values: &[Self]) -> Elements<'_> {
        Elements::F16(values)
    }

    fn plus(self, other: Self) -> Self {
        Self::from_f32(self.to_f32() + other.to_f32())
    }
}

//! Reads candle storage as slices.

use crate::kernel::HalfFloat;
use crate::parallel::build;
use crate::product::Elements;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::Deref;

/// Returns the elements of a view in row-major order, as f32. Borrows a contiguous f32 view. Copies any other view,
/// never the whole storage behind it.
pub(crate) fn f32s<'a>(op: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    let count = layout.shape().elem_count();
    let mut copy = match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(data), Some(range)) => return Ok(Cow::Borrowed(part(op, data, range)?)),
        (CpuStorage::BF16(data), Some(range)) => return Ok(Cow::Owned(widened(part(op, data, range)?))),
        (CpuStorage::F16(data), Some(range)) => return Ok(Cow::Owned(widened(part(op, data, range)?))),
        (CpuStorage::F32(_), None) => CpuStorage::F32(vec![0.0; count]),
        (CpuStorage::BF16(_), None) => CpuStorage::BF16(vec![bf16::ZERO; count]),
        (CpuStorage::F16(_), None) => CpuStorage::F16(vec![f16::ZERO; count]),
        // The storage of a released parameter.
        (CpuStorage::F4(_), _) => bail!("{op}: the operation reads a released parameter"),
        (CpuStorage::F6E2M3(_), _) => bail!("{op}: the weight is quantized, and only a linear layer can read it"),
        (other, _) => bail!("{op}: expected f32, bf16 or f16, got {:?}", other.dtype()),
    };
    storage.copy_strided_src(&mut copy, 0, layout)?;
    match copy {
        CpuStorage::F32(copy) => Ok(Cow::Owned(copy)),
        CpuStorage::BF16(copy) => Ok(Cow::Owned(widened(&copy))),
        CpuStorage::F16(copy) => Ok(Cow::Owned(widened(&copy))),
        _ => bail!("{op}: the copy of a view changed its dtype"),
    }
}

/// Returns the elements of a contiguous view from `start` to `end`.
fn part<'a, T>(op: &'static str, data: &'a [T], (start, end): (usize, usize)) -> Result<&'a [T]> {
    match data.get(start..end) {
        Some(part) => Ok(part),
        None => bail!("{op}: the layout needs {end} elements, but the storage has {}", data.len()),
    }
}

/// Does the same as [`f32s`], for a tensor whose storage is held: `let held = x.storage_and_layout(); let x =
/// f32s_of("op", &held)?;`
pub(crate) fn f32s_of<'a, S: Deref<Target = Storage>>(
    op: &'static str,
    (storage, layout): &'a (S, &Layout),
) -> Result<Cow<'a, [f32]>> {
    match &**storage {
        Storage::Cpu(storage) => f32s(op, storage, layout),
        _ => bail!("{op}: the backward pass is not implemented for this device"),
    }
}

/// The elements of a view in row-major order, in their stored dtype.
pub(crate) enum View<'a> {
    F32(Cow<'a, [f32]>),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> View<'a> {
    /// Borrows a contiguous view. Copies any other view, as [`f32s`] does.
    pub(crate) fn new(op: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        match (storage, layout.contiguous_offsets()) {
            (CpuStorage::BF16(data), Some(range)) => Ok(Self::Bf16(part(op, data, range)?)),
            (CpuStorage::F16(data), Some(range)) => Ok(Self::F16(part(op, data, range)?)),
            _ => Ok(Self::F32(f32s(op, storage, layout)?)),
        }
    }

    /// Does the same as [`View::new`], for a tensor whose storage is held, as for [`f32s_of`].
    pub(crate) fn of<S: Deref<Target = Storage>>(
        op: &'static str,
        (storage, layout): &'a (S, &Layout),
    ) -> Result<Self> {
        match &**storage {
            Storage::Cpu(storage) => Self::new(op, storage, layout),
            _ => bail!("{op}: the backward pass is not implemented for this device"),
        }
    }

    /// Copies the elements to a new storage.
    pub(crate) fn into_storage(self) -> CpuStorage {
        match self {
            Self::F32(data) => CpuStorage::F32(data.into_owned()),
            Self::Bf16(data) => CpuStorage::BF16(data.to_vec()),
            Self::F16(data) => CpuStorage::F16(data.to_vec()),
        }
    }

    pub(crate) fn elements(&self) -> Elements<'_> {
        match self {
            Self::F32(data) => Elements::F32(data),
            Self::Bf16(data) => Elements::Bf16(data),
            Self::F16(data) => Elements::F16(data),
        }
    }
}

impl<'a> Elements<'a> {
    /// Views all elements of a storage.
    pub(crate) fn all(op: &'static str, storage: &'a CpuStorage) -> Result<Self> {
        match storage {
            CpuStorage::F32(data) => Ok(Self::F32(data)),
            CpuStorage::BF16(data) => Ok(Self::Bf16(data)),
            CpuStorage::F16(data) => Ok(Self::F16(data)),
            other => bail!("{op}: expected f32, bf16 or f16, got {:?}", other.dtype()),
        }
    }
}

/// Returns the elements of an integer view (u32, i64 or u8) as indices into `0..limit`. The error for any other value
/// states the value and its position.
pub(crate) fn indices(op: &'static str, storage: &CpuStorage, layout: &Layout, limit: usize) -> Result<Vec<usize>> {
    integers(op, storage, layout, limit, None)
}

/// The i64 target of a row that contributes nothing to a loss: PyTorch's default `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

/// The index that [`targets`] returns for a row without a target.
pub(crate) const NO_TARGET: usize = usize::MAX;

/// Does the same as [`indices`], but an i64 may also be [`IGNORE_INDEX`], which becomes
/// [`NO_TARGET`].
pub(crate) fn targets(op: &'static str, storage: &CpuStorage, layout: &Layout, limit: usize) -> Result<Vec<usize>> {
    integers(op, storage, layout, limit, Some(IGNORE_INDEX))
}

fn integers(
    op: &'static str,
    storage: &CpuStorage,
    layout: &Layout,
    limit: usize,
    ignored: Option<i64>,
) -> Result<Vec<usize>> {
    fn collect<T: Copy + TryInto<usize> + std::fmt::Display>(
        op: &'static str,
        data: &[T],
        limit: usize,
        is_ignored: impl Fn(T) -> bool,
    ) -> Result<Vec<usize>> {
        let mut indices = Vec::with_capacity(data.len());
        for (position, &value) in data.iter().enumerate() {
            match value.try_into() {
                Ok(index) if index < limit => indices.push(index),
                _ if is_ignored(value) => indices.push(NO_TARGET),
                _ => bail!("{op}: index {value} at position {position} is not below {limit}"),
            }
        }
        Ok(indices)
    }
    let count = layout.shape().elem_count();
    let mut view = match storage {
        CpuStorage::U32(_) => CpuStorage::U32(vec![0; count]),
        CpuStorage::I64(_) => CpuStorage::I64(vec![0; count]),
        CpuStorage::U8(_) => CpuStorage::U8(vec![0; count]),
        other => bail!("{op}: expected indices of dtype u32, i64 or u8, got {:?}", other.dtype()),
    };
    storage.copy_strided_src(&mut view, 0, layout)?;
    match &view {
        CpuStorage::U32(data) => collect(op, data, limit, |_| false),
        CpuStorage::I64(data) => collect(op, data, limit, |value| Some(value) == ignored),
        CpuStorage::U8(data) => collect(op, data, limit, |_| false),
        _ => bail!("{op}: the copy of a view changed its dtype"),
    }
}

/// Returns [`indices`] of a tensor.
pub(crate) fn indices_of(op: &'static str, tensor: &Tensor, limit: usize) -> Result<Vec<usize>> {
    on_host(op, tensor, |storage, layout| indices(op, storage, layout, limit))
}

/// Returns [`targets`] of a tensor.
pub(crate) fn targets_of(op: &'static str, tensor: &Tensor, limit: usize) -> Result<Vec<usize>> {
    on_host(op, tensor, |storage, layout| targets(op, storage, layout, limit))
}

fn on_host<R>(op: &'static str, tensor: &Tensor, read: impl FnOnce(&CpuStorage, &Layout) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => read(storage, layout),
        Storage::Cuda(storage) => read(&storage.to_cpu_storage()?, layout),
        Storage::Metal(_) => bail!("{op}: not implemented for this device"),
    }
}

fn widened<H: HalfFloat>(values: &[H]) -> Vec<f32> {
    build(values.len(), 1, |range, out| H::widen(&values[range], out))
}

/// Splits a shape into (rows, length of the last dimension).
pub(crate) fn rows(op: &'static str, shape: &Shape) -> Result<(usize, usize)> {
    match shape.dims().split_last() {
        Some((&last, leading)) if last > 0 => Ok((leading.iter().product(), last)),
        _ => bail!("{op}: the last dimension must be at least 1, got the shape {shape:?}"),
    }
}

/// Returns the shape with a different length of the last dimension.
pub(crate) fn with_last(shape: &Shape, length: usize) -> Shape {
    let mut dims = shape.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = length;
    }
    dims.into()
}

//! Element types of tensors that the ranks of a group exchange.

use crate::product::Elements;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Error, Layout, Result, WithDType, bail};
use half::{bf16, f16};
use std::borrow::Cow;
use zero_comm::Buffer;

/// An element type that ranks can exchange.
pub(crate) trait Element: WithDType {
    fn buffer(values: Vec<Self>) -> Buffer;

    fn values(buffer: Buffer) -> Result<Vec<Self>>;

    fn elements(values: &[Self]) -> Elements<'_>;

    /// Returns the elements of storage of this type.
    fn of_storage(storage: CpuStorage) -> Option<Vec<Self>>;
}

/// Evaluates an expression for the element type of a dtype. In the expression, the name before the arrow stands for the
/// type.
macro_rules! of_element {
    ($op:expr, $dtype:expr, $type:ident => $run:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $type = f32;
                $run
            }
            candle_core::DType::BF16 => {
                type $type = half::bf16;
                $run
            }
            candle_core::DType::F16 => {
                type $type = half::f16;
                $run
            }
            other => candle_core::bail!("{}: expected f32, bf16 or f16, got {other:?}", $op),
        }
    };
}

pub(crate) use of_element;

/// Returns the elements of a view in row-major order.
pub(crate) fn dense<'a, T: Element>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [T]>> {
    if let Some((start, end)) = layout.contiguous_offsets() {
        let all = T::cpu_storage_as_slice(storage)?;
        return match all.get(start..end) {
            Some(view) => Ok(Cow::Borrowed(view)),
            None => bail!("the layout needs {end} elements, but the storage has {}", all.len()),
        };
    }
    let mut copy = T::to_cpu_storage_owned(vec![T::zero(); layout.shape().elem_count()]);
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(Cow::Owned(T::cpu_storage_as_slice(&copy)?.to_vec()))
}

/// Returns the transposed matrix of `[rows, columns]` blocks, each of `block` elements.
pub(crate) fn transposed<T: Copy>(values: &[T], [rows, columns]: [usize; 2], block: usize) -> Vec<T> {
    let mut transposed = Vec::with_capacity(values.len());
    for column in 0..columns {
        for row in 0..rows {
            let at = (row * columns + column) * block;
            transposed.extend_from_slice(&values[at..at + block]);
        }
    }
    transposed
}

macro_rules! elements {
    ($($type:ty, $into:ident, $storage:ident, $elements:ident;)*) => {
        $(impl Element for $type {
            fn buffer(values: Vec<Self>) -> Buffer {
                values.into()
            }

            fn values(buffer: Buffer) -> Result<Vec<Self>> {
                buffer.$into().map_err(Error::wrap)
            }

            fn elements(values: &[Self]) -> Elements<'_> {
                Elements::$elements(values)
            }

            fn of_storage(storage: CpuStorage) -> Option<Vec<Self>> {
                match storage {
                    CpuStorage::$storage(values) => Some(values),
                    _ => None,
                }
            }
        })*
    };
}

elements! {
    f32, into_f32, F32, F32;
    bf16, into_bf16, BF16, Bf16;
    f16, into_f16, F16, F16;
}

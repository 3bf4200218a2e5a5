//! Dropout on a GPU.

use super::room_like;
use crate::device::{Gpu, Operand};
use candle_core::{CudaStorage, DType, Result};
use zero_kernels::dropout::{Mask, SampleLayout, dropout};

/// Applies a dropout's mask to the parts of x. Each part is given with the index of its first element.
pub(crate) fn apply(
    op: &'static str,
    gpu: &Gpu,
    x: &Operand,
    dtype: DType,
    parts: &[(usize, SampleLayout)],
    mask: &Mask,
) -> Result<CudaStorage> {
    let (y, at) = room_like(op, gpu, dtype, x.count)?;
    for (first, place) in parts {
        let offset = (first * dtype.size_in_bytes()) as u64;
        // SAFETY: both have the same number of elements of one dtype, and the part is within them.
        unsafe { gpu.launch_some(dropout(x.dtype, place, mask, [x.address + offset, at + offset])) }?;
    }
    Ok(y)
}

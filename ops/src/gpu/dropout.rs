//! Dropout on a GPU.

use super::room_like;
use crate::device::{Gpu, Operand};
use candle_core::{CudaStorage, DType, Result};
use zero_kernels::dropout::{Mask, dropout};

/// Applies a dropout's mask to x, whose first dimension has `samples` samples.
pub(crate) fn apply(
    op: &'static str,
    gpu: &Gpu,
    x: &Operand,
    dtype: DType,
    samples: usize,
    mask: &Mask,
) -> Result<CudaStorage> {
    let (y, at) = room_like(op, gpu, dtype, x.count)?;
    let shape = [samples as u64, (x.count / samples) as u64];
    // SAFETY: both have the same number of elements of one dtype.
    unsafe { gpu.launch_some(dropout(x.dtype, shape, mask, [x.address, at])) }?;
    Ok(y)
}

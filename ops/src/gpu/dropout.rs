//! Dropout.

use super::room_like;
use crate::device::{Gpu, Operand};
use candle_core::{CudaStorage, DType, Result};
use zero_kernels::dropout::{Mask, dropout};

/// The elements of x, of so many samples, that a mask keeps, and zeros.
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
    // SAFETY: both have as many elements, of one dtype.
    unsafe { gpu.launch_some(dropout(x.dtype, shape, mask, [x.address, at])) }?;
    Ok(y)
}

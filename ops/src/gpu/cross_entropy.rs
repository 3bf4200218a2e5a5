//! Softmax and negative log-likelihood. The loss and its gradient stay on the GPU, and nothing here waits for them.

use super::indices::{Indices, limits};
use super::{count32, room_like, tensor};
use crate::device::{Gpu, Operand, address};
use crate::graph::operand::rows;
use candle_core::{CudaStorage, DType, Layout, Result, Tensor};
use zero_kernels::cross_entropy::{self as kernels, Logits, Upstream};

fn logits(op: &'static str, x: &Operand, targets: &Indices, classes: usize, z_loss: f32) -> Result<Logits> {
    Ok(Logits {
        rows: targets.count,
        classes: count32(op, classes)?,
        stride: classes as u64,
        dtype: x.dtype,
        logits: x.address,
        targets: targets.address(),
        z_loss,
    })
}

/// Computes the loss, an f32, and the rows' statistics, for logits and targets whose shapes match.
pub(crate) fn forward(
    op: &'static str,
    (ls, ll): (&CudaStorage, &Layout),
    targets: (&CudaStorage, &Layout),
    z_loss: f32,
) -> Result<[CudaStorage; 2]> {
    let (gpu, (_, classes)) = (Gpu::new(&ls.device)?, rows(op, ll.shape())?);
    let (x, targets) = (Operand::new(op, ls, ll)?, Indices::targets(op, &gpu, targets, &limits(op, classes, None)?)?);
    let (statistics, loss) = (gpu.floats(3 * targets.count as usize)?, gpu.floats(1)?);
    let of = logits(op, &x, &targets, classes, z_loss)?;
    let at = address(op, &statistics)?;
    // SAFETY: the logits have a row for each target, and there is at least one; the rest was allocated for them.
    unsafe {
        gpu.launch(&kernels::forward(&of, at))?;
        gpu.launch(&kernels::mean_loss(of.rows, targets.counted(), at, z_loss, [address(op, &loss)?, 0]))?;
    }
    Ok([loss, statistics])
}

/// Returns the gradient of the logits.
pub(crate) fn backward(
    op: &'static str,
    x: &Tensor,
    targets: &Tensor,
    (statistics, z_loss): (&CudaStorage, f32),
    d_loss: &Tensor,
) -> Result<Tensor> {
    let (gpu, (_, classes)) = (Gpu::of(op, x)?, rows(op, x.shape())?);
    let (xs, targets) = (Operand::of(op, x)?, Indices::of_targets(op, &gpu, targets, &limits(op, classes, None)?)?);
    let upstream = d_loss.to_dtype(DType::F32)?;
    let upstream = Operand::of(op, &upstream)?;
    let (dx, at) = room_like(op, &gpu, x.dtype(), xs.count)?;
    let of = logits(op, &xs, &targets, classes, z_loss)?;
    let mean = (Upstream::At(upstream.address), targets.counted());
    // SAFETY: the statistics belong to these logits, dx has the size of the logits, and a loss is one f32.
    unsafe { gpu.launch(&kernels::backward(&of, address(op, statistics)?, mean, (xs.dtype, at))) }?;
    Ok(tensor(dx, x.shape()))
}

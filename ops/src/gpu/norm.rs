//! Layer norm and RMS norm on a GPU.

use super::{count32, deliver, room_like, tensor};
use crate::device::{Gpu, Operand, address};
use crate::graph::operand::rows;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, Tensor};
use zero_kernels::norm::{self, Parameter, Rows, Weights};
use zero_kernels::rows::Onto;

/// Returns the addresses of a norm's weight and bias. Only a layer norm has a bias.
fn weights([weight, bias]: [Option<&Operand>; 2]) -> Weights {
    let at = |operand: Option<&Operand>| operand.map_or(0, |operand| operand.address);
    match bias {
        Some(_) => Weights::Layer { weight: at(weight), bias: at(bias) },
        None => Weights::Rms { weight: at(weight) },
    }
}

fn of(op: &'static str, x: &Operand, shape: &candle_core::Shape, eps: f32) -> Result<Rows> {
    let (count, size) = rows(op, shape)?;
    Ok(Rows { rows: count32(op, count)?, size: count32(op, size)?, dtype: x.dtype, eps })
}

/// Computes the norm of rows, for a weight and (in a layer norm) a bias whose sizes match.
pub(crate) fn forward(
    op: &'static str,
    eps: f32,
    (xs, xl): (&CudaStorage, &Layout),
    (ws, wl): (&CudaStorage, &Layout),
    bias: Option<(&CudaStorage, &Layout)>,
) -> Result<CudaStorage> {
    let (gpu, x, w) = (Gpu::new(&xs.device)?, Operand::new(op, xs, xl)?, Operand::new(op, ws, wl)?);
    let bias = bias.map(|(storage, layout)| Operand::new(op, storage, layout)).transpose()?;
    let (y, at) = room_like(op, &gpu, xs.dtype(), x.count)?;
    let rows = of(op, &x, xl.shape(), eps)?;
    if rows.rows > 0 {
        // SAFETY: x and y have the same number of rows of one dtype, and the parameters' sizes match.
        unsafe { gpu.launch(&norm::forward(&rows, weights([Some(&w), bias.as_ref()]), x.address, at)) }?;
    }
    Ok(y)
}

/// Computes (x + branch, norm(x + branch)), bit-identical to the two operations in sequence. The shapes must match.
pub(crate) fn forward_residual(
    op: &'static str,
    eps: f32,
    [x, branch]: [&Tensor; 2],
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<[CudaStorage; 2]> {
    let gpu = Gpu::of(op, x)?;
    let (xs, ys, w) = (Operand::of(op, x)?, Operand::of(op, branch)?, Operand::of(op, weight)?);
    let bias = bias.map(|bias| Operand::of(op, bias)).transpose()?;
    let ((sum, at_sum), (y, at)) =
        (room_like(op, &gpu, x.dtype(), xs.count)?, room_like(op, &gpu, x.dtype(), xs.count)?);
    let rows = of(op, &xs, x.shape(), eps)?;
    if rows.rows > 0 {
        let weights = weights([Some(&w), bias.as_ref()]);
        // SAFETY: all have the same number of rows of one dtype, and the parameters' sizes match.
        unsafe { gpu.launch(&norm::forward_residual(&rows, weights, [xs.address, ys.address], [at_sum, at])) }?;
    }
    Ok([sum, y])
}

/// Returns the gradients of x, of the weight and, if there is one, of the bias. If `before`, an existing gradient of x,
/// is given, the returned gradient of x includes it.
pub(crate) fn backward(
    op: &'static str,
    eps: f32,
    [x, dy]: [&Tensor; 2],
    weight: &Tensor,
    bias: Option<&Tensor>,
    before: Option<Tensor>,
) -> Result<[Option<Tensor>; 3]> {
    let gpu = Gpu::of(op, x)?;
    let (xs, w, d) = (Operand::of(op, x)?, Operand::of(op, weight)?, Operand::of(op, dy)?);
    let of_bias = bias.map(|bias| Operand::of(op, bias)).transpose()?;
    // Both `before` and its operand must live until the launch is enqueued.
    let of_before = before.as_ref().map(|before| Operand::of(op, before)).transpose()?;
    if of_before.as_ref().is_some_and(|before| (before.dtype, before.count) != (xs.dtype, xs.count)) {
        candle_core::bail!("{op}: the gradient of x does not have the shape of x");
    }
    let rows = of(op, &xs, x.shape(), eps)?;
    let weights = weights([Some(&w), of_bias.as_ref()]);
    let (dx, at) = room_like(op, &gpu, x.dtype(), xs.count)?;
    let partials = gpu.floats(rows.partials(weights))?;
    let at_partials = address(op, &partials)?;
    if rows.rows > 0 {
        let from = [xs.address, d.address, of_before.as_ref().map_or(0, |before| before.address)];
        // SAFETY: x, dy, the existing gradient and dx have the same number of rows of one dtype, and the rest was
        // allocated for them.
        unsafe { gpu.launch(&norm::backward(&rows, weights, from, [at, at_partials])) }?;
    }
    // Each launch sums one parameter's gradient, since each gradient has its own destination.
    let sums = |of, to, onto| {
        let launch = norm::sums(&rows, weights, of, [at_partials, to], onto != Onto::Nothing);
        // SAFETY: earlier launches write the partial sums; the place has an f32 for each element of the parameter.
        unsafe { gpu.launch(&launch) }
    };
    let d_weight = deliver(op, &gpu, weight, |to, onto| sums(Parameter::Weight, to, onto))?;
    let d_bias = match bias {
        Some(bias) => deliver(op, &gpu, bias, |to, onto| sums(Parameter::Bias, to, onto))?,
        None => None,
    };
    Ok([x.track_op().then(|| tensor(dx, x.shape())), d_weight, d_bias])
}

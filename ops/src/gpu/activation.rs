//! Elementwise activations and sums, bit-identical to the CPU.

use super::{room_like, tensor};
use crate::device::{Gpu, Operand};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, Tensor};
use zero_kernels::activation::{self, Function, swiglu_backward};

/// Computes f(x).
pub(crate) fn forward(op: &'static str, f: Function, xs: &CudaStorage, xl: &Layout) -> Result<CudaStorage> {
    let (gpu, x) = (Gpu::new(&xs.device)?, Operand::new(op, xs, xl)?);
    let (y, at) = room_like(op, &gpu, xs.dtype(), x.count)?;
    // SAFETY: x and y hold the same number of elements of one dtype.
    unsafe { gpu.launch_some(activation::forward(f, x.dtype, x.count as u64, x.address, at)) }?;
    Ok(y)
}

/// Computes dy·f′(x), for a `dy` with the shape and dtype of x.
pub(crate) fn backward(op: &'static str, f: Function, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    backward_at(op, f, &Operand::of(op, x)?, dy)
}

/// Computes [`backward`] for an x that occupies a whole storage.
pub(crate) fn backward_from(op: &'static str, f: Function, x: &CudaStorage, dy: &Tensor) -> Result<Tensor> {
    backward_at(op, f, &Operand::new(op, x, &Layout::contiguous(dy.shape()))?, dy)
}

fn backward_at(op: &'static str, f: Function, x: &Operand, dy: &Tensor) -> Result<Tensor> {
    let (gpu, d) = (Gpu::of(op, dy)?, Operand::of(op, dy)?);
    let (dx, at) = room_like(op, &gpu, dy.dtype(), x.count)?;
    // SAFETY: all hold the same number of elements of one dtype.
    unsafe { gpu.launch_some(activation::backward(f, x.dtype, x.count as u64, x.address, d.address, at)) }?;
    Ok(tensor(dx, dy.shape()))
}

/// Computes gate·σ(gate)·up for tensors of one shape.
pub(crate) fn swiglu(
    op: &'static str,
    (gs, gl): (&CudaStorage, &Layout),
    (us, ul): (&CudaStorage, &Layout),
) -> Result<CudaStorage> {
    let (gpu, gate, up) = (Gpu::new(&gs.device)?, Operand::new(op, gs, gl)?, Operand::new(op, us, ul)?);
    let (y, at) = room_like(op, &gpu, gs.dtype(), gate.count)?;
    // SAFETY: all hold the same number of elements of one dtype.
    unsafe { gpu.launch_some(activation::swiglu(gate.dtype, gate.count as u64, [gate.address, up.address], at)) }?;
    Ok(y)
}

/// Returns the gradients of gate and up.
pub(crate) fn backward_of_swiglu(op: &'static str, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<[Tensor; 2]> {
    let (gpu, [gs, us, d]) = (Gpu::of(op, gate)?, [Operand::of(op, gate)?, Operand::of(op, up)?, Operand::of(op, dy)?]);
    let [(d_gate, at_gate), (d_up, at_up)] =
        [room_like(op, &gpu, gate.dtype(), gs.count)?, room_like(op, &gpu, up.dtype(), us.count)?];
    let launch = swiglu_backward(gs.dtype, gs.count as u64, [gs.address, us.address], d.address, [at_gate, at_up]);
    // SAFETY: all hold the same number of elements of one dtype.
    unsafe { gpu.launch_some(launch) }?;
    Ok([tensor(d_gate, gate.shape()), tensor(d_up, up.shape())])
}

/// Computes x + y for tensors of one shape and dtype.
pub(crate) fn sum(op: &'static str, x: &Tensor, y: &Tensor) -> Result<CudaStorage> {
    let (gpu, [xs, ys]) = (Gpu::of(op, x)?, [Operand::of(op, x)?, Operand::of(op, y)?]);
    let (sum, at) = room_like(op, &gpu, x.dtype(), xs.count)?;
    // SAFETY: all hold the same number of elements of one dtype.
    unsafe { gpu.launch_some(activation::add(xs.dtype, xs.count as u64, [xs.address, ys.address], at)) }?;
    Ok(sum)
}

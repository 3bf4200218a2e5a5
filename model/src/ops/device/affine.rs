//! Linear maps: products of cuBLAS's, the bias by kernels of ours.

use super::product::{Matrix, To, product};
use super::{count32, deliver, room_like, tensor};
use crate::device::{Gpu, Operand, address};
use crate::ops::affine::Affine;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};
use zero_kernels::rows::{BLOCK, Onto, spread, sums, total};

/// As [`Affine::forward`].
pub(crate) fn forward(
    affine: Affine,
    op: &'static str,
    (xs, xl): (&CudaStorage, &Layout),
    (ws, wl): (&CudaStorage, &Layout),
    bias: Option<(&CudaStorage, &Layout)>,
) -> Result<(CudaStorage, Shape)> {
    let sizes = affine.check(op, xl.shape(), wl.shape(), bias.map(|(_, layout)| layout.shape()))?;
    let (gpu, [count, inputs, outputs]) = (Gpu::new(&xs.device)?, [sizes.count, sizes.inputs, sizes.outputs]);
    let (x, w) = (Operand::new(op, xs, xl)?, Operand::new(op, ws, wl)?);
    let (y, at) = room_like(op, &gpu, xs.dtype(), count * outputs)?;
    let bias = bias.map(|(storage, layout)| Operand::new(op, storage, layout)).transpose()?;
    let add = bias.is_some();
    if let Some(bias) = &bias {
        let rows = [count32(op, count)?, count32(op, outputs)?];
        // SAFETY: a bias has as many elements as y has columns, of the dtype of both.
        unsafe { gpu.launch_some(spread(x.dtype, rows, bias.address, at)) }?;
    }
    let (x, w) = (Matrix::new(x.address, x.dtype, count, inputs), matrix(affine, &w, inputs, outputs));
    // SAFETY: the sizes were checked, and y was made for them.
    unsafe { product(op, &gpu, x, w, To { address: at, dtype: x.dtype, add }) }?;
    Ok((y, sizes.shape))
}

/// The weight as a matrix of inputs × outputs.
fn matrix(affine: Affine, weight: &Operand, inputs: usize, outputs: usize) -> Matrix {
    match affine {
        Affine::OutputsInputs => Matrix::new(weight.address, weight.dtype, outputs, inputs).t(),
        Affine::InputsOutputs => Matrix::new(weight.address, weight.dtype, inputs, outputs),
    }
}

/// As [`Affine::backward`], with the bias's gradient, for a `dy` of the dtype of x.
pub(crate) fn backward(
    affine: Affine,
    op: &'static str,
    [x, weight]: [&Tensor; 2],
    bias: Option<&Tensor>,
    dy: &Operand,
) -> Result<[Option<Tensor>; 3]> {
    let sizes = affine.check(op, x.shape(), weight.shape(), bias.map(Tensor::shape))?;
    let (gpu, [count, inputs, outputs]) = (Gpu::of(op, x)?, [sizes.count, sizes.inputs, sizes.outputs]);
    let d = Matrix::new(dy.address, dy.dtype, count, outputs);
    let dx = if x.track_op() {
        let w = Operand::of(op, weight)?;
        let (dx, at) = room_like(op, &gpu, x.dtype(), count * inputs)?;
        let to = To { address: at, dtype: dy.dtype, add: false };
        // SAFETY: the sizes were checked, and dx was made for them.
        unsafe { product(op, &gpu, d, matrix(affine, &w, inputs, outputs).t(), to) }?;
        Some(tensor(dx, x.shape()))
    } else {
        None
    };
    let d_weight = deliver(op, &gpu, weight, |to, onto| {
        let x = Operand::of(op, x)?;
        let x = Matrix::new(x.address, x.dtype, count, inputs);
        let (left, right) = match affine {
            Affine::OutputsInputs => (d.t(), x),
            Affine::InputsOutputs => (x.t(), d),
        };
        let to = To { address: to, dtype: zero_kernels::Dtype::F32, add: onto != Onto::Nothing };
        // SAFETY: the sizes were checked; the place is one for as many f32 as the weight has elements.
        unsafe { product(op, &gpu, left, right, to) }
    })?;
    let d_bias = match bias {
        Some(bias) => bias_gradient(op, &gpu, bias, dy)?,
        None => None,
    };
    Ok([dx, d_weight, d_bias])
}

/// As [`bias_gradient`](crate::ops::affine::bias_gradient), with its bits.
fn bias_gradient(op: &'static str, gpu: &Gpu, bias: &Tensor, dy: &Operand) -> Result<Option<Tensor>> {
    let outputs = bias.elem_count();
    let rows = [count32(op, dy.count / outputs)?, count32(op, outputs)?];
    deliver(op, gpu, bias, |to, onto| {
        let partials = gpu.floats(rows[0].div_ceil(BLOCK).max(1) as usize * outputs)?;
        let at = address(op, &partials)?;
        // SAFETY: dy has as many rows; the partial sums have room; the place is one for as many f32 as the bias has.
        unsafe {
            if rows[0] > 0 {
                gpu.launch(&sums(dy.dtype, rows, dy.address, at))?;
            }
            gpu.launch(&total(rows, at, to, onto))
        }
    })
}

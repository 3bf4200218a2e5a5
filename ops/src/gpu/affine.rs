//! Linear maps: products of cuBLAS's and cuBLASLt's.
//!
//! Where cuBLASLt can, a product adds the bias, and GELU behind it, before it writes its result, and that which makes the gradient of GELU
//! multiplies by its slope. Elsewhere (rows that are no multiple of 16 bytes, for one) these are kernels of ours. The gradient of a bias
//! always is: cuBLASLt's would go over what is there already, or be rounded to 16 bits.

use super::product::{Matrix, To, product, product_with};
use super::{count32, deliver, room_like, tensor};
use crate::device::{Gpu, Operand, address};
use crate::linear::affine::{Affine, Sizes};
use crate::linear::gelu::BeforeGelu;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor};
use zero_cuda::product::Epilogue;
use zero_kernels::Address;
use zero_kernels::activation::{self, Function};
use zero_kernels::rows::{BLOCK, Onto, spread, sums, total};

/// As [`Affine::forward`].
pub(crate) fn forward(
    affine: Affine,
    op: &'static str,
    (xs, xl): (&CudaStorage, &Layout),
    (ws, wl): (&CudaStorage, &Layout),
    bias: Option<(&CudaStorage, &Layout)>,
) -> Result<(CudaStorage, Shape)> {
    let map = Map::new(affine, op, (xs, xl), (ws, wl), bias)?;
    let (y, at) = map.room()?;
    map.put(at)?;
    Ok((y, map.sizes.shape))
}

/// [`forward`], and GELU's tanh form of it behind it: cuBLASLt's is of sums that are not rounded.
pub(crate) fn forward_gelu(
    affine: Affine,
    op: &'static str,
    (xs, xl): (&CudaStorage, &Layout),
    (ws, wl): (&CudaStorage, &Layout),
    bias: (&CudaStorage, &Layout),
) -> Result<([CudaStorage; 2], Shape)> {
    let map = Map::new(affine, op, (xs, xl), (ws, wl), Some(bias))?;
    let ((sum, at_sum), (y, at)) = (map.room()?, map.room()?);
    if !map.put_with(at, |bias| Epilogue::BiasGelu { bias, sum: at_sum })? {
        map.put(at_sum)?;
        let count = (map.sizes.count * map.sizes.outputs) as u64;
        // SAFETY: the sum and y hold the same number of elements of one dtype.
        unsafe { map.gpu.launch_some(activation::forward(Function::GeluTanh, map.x.dtype, count, at_sum, at)) }?;
    }
    Ok(([sum, y], map.sizes.shape))
}

/// A linear map of rows, checked.
struct Map {
    op: &'static str,
    gpu: Gpu,
    sizes: Sizes,
    dtype: DType,
    x: Operand,
    weight: Operand,
    bias: Option<Operand>,
    affine: Affine,
}

impl Map {
    fn new(
        affine: Affine,
        op: &'static str,
        (xs, xl): (&CudaStorage, &Layout),
        (ws, wl): (&CudaStorage, &Layout),
        bias: Option<(&CudaStorage, &Layout)>,
    ) -> Result<Self> {
        let sizes = affine.check(op, xl.shape(), wl.shape(), bias.map(|(_, layout)| layout.shape()))?;
        let (gpu, dtype) = (Gpu::new(&xs.device)?, xs.dtype());
        let (x, weight) = (Operand::new(op, xs, xl)?, Operand::new(op, ws, wl)?);
        let bias = bias.map(|(storage, layout)| Operand::new(op, storage, layout)).transpose()?;
        Ok(Self { op, gpu, sizes, dtype, x, weight, bias, affine })
    }

    /// For a result.
    fn room(&self) -> Result<(CudaStorage, Address)> {
        room_like(self.op, &self.gpu, self.dtype, self.sizes.count * self.sizes.outputs)
    }

    fn factors(&self) -> (Matrix, Matrix) {
        let Self { sizes: Sizes { count, inputs, outputs, .. }, x, .. } = self;
        (Matrix::new(x.address, x.dtype, *count, *inputs), matrix(self.affine, &self.weight, *inputs, *outputs))
    }

    /// The result with an epilogue, given where the bias is; false if that cannot be, or if there is no bias.
    fn put_with(&self, at: Address, epilogue: impl FnOnce(Address) -> Epilogue) -> Result<bool> {
        let (Some(bias), (x, w)) = (&self.bias, self.factors()) else { return Ok(false) };
        // SAFETY: the sizes were checked, and the room was made for them; a bias has an element for each column of the result.
        unsafe { product_with(self.op, &self.gpu, x, w, at, epilogue(bias.address)) }
    }

    /// The result.
    fn put(&self, at: Address) -> Result<()> {
        if self.put_with(at, |bias| Epilogue::Bias { bias })? {
            return Ok(());
        }
        let Self { op, gpu, sizes: Sizes { count, outputs, .. }, x, bias, .. } = self;
        if let Some(bias) = bias {
            let rows = [count32(op, *count)?, count32(op, *outputs)?];
            // SAFETY: as above, of the dtype of both.
            unsafe { gpu.launch_some(spread(x.dtype, rows, bias.address, at)) }?;
        }
        let to = To { address: at, dtype: x.dtype, add: bias.is_some() };
        let (x, w) = self.factors();
        // SAFETY: as above.
        unsafe { product(op, gpu, x, w, to) }
    }
}

/// The weight as a matrix of inputs × outputs.
fn matrix(affine: Affine, weight: &Operand, inputs: usize, outputs: usize) -> Matrix {
    match affine {
        Affine::OutputsInputs => Matrix::new(weight.address, weight.dtype, outputs, inputs).t(),
        Affine::InputsOutputs => Matrix::new(weight.address, weight.dtype, inputs, outputs),
    }
}

/// As [`Affine::backward`], with the bias's gradient, for a `dy` of the dtype of x. Where x is GELU of a sum, and cuBLASLt can, the gradient of x is the
/// gradient of that sum already.
pub(crate) fn backward(
    affine: Affine,
    op: &'static str,
    [x, weight]: [&Tensor; 2],
    bias: Option<&Tensor>,
    dy: &Operand,
    of: Option<&BeforeGelu>,
) -> Result<[Option<Tensor>; 3]> {
    let sizes = affine.check(op, x.shape(), weight.shape(), bias.map(Tensor::shape))?;
    let (gpu, [count, inputs, outputs]) = (Gpu::of(op, x)?, [sizes.count, sizes.inputs, sizes.outputs]);
    let d = Matrix::new(dy.address, dy.dtype, count, outputs);
    let dx = if x.track_op() {
        let w = Operand::of(op, weight)?;
        let (dx, at) = room_like(op, &gpu, x.dtype(), count * inputs)?;
        let w = matrix(affine, &w, inputs, outputs).t();
        let has_slope = match of {
            // SAFETY: the sizes were checked, and dx was made for them; the operand of GELU is like x.
            Some(of) => of.take_slope(|sum| unsafe {
                product_with(op, &gpu, d, w, at, Epilogue::GeluSlope { sum: address(op, sum)? })
            })?,
            None => false,
        };
        if !has_slope {
            let to = To { address: at, dtype: dy.dtype, add: false };
            // SAFETY: as above.
            unsafe { product(op, &gpu, d, w, to) }?;
        }
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

/// As [`bias_gradient`](crate::linear::affine::bias_gradient), with its bits.
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

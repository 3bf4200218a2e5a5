//! Linear maps: products by cuBLAS and cuBLASLt.
//!
//! If cuBLASLt supports the sizes, the forward's product adds the bias and applies GELU before it writes its result.
//! Likewise, the product that computes the gradient of GELU's output multiplies it by GELU's derivative. For other
//! sizes, such as rows that are not a multiple of 16 bytes, separate kernels do this. The gradient of a bias always has
//! a separate kernel, because cuBLASLt would overwrite existing contributions or round to 16 bits.

use super::product::{Matrix, To, product, product_with};
use super::{count32, deliver, room_like, tensor};
use crate::device::{Gpu, Operand, address};
use crate::linear::affine::{Affine, Sizes};
use crate::linear::gelu::BeforeGelu;
use crate::sink;
use crate::sink::deferred::{wait_for_exchange, waits_for_exchange};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor, bail};
use zero_cuda::product::Epilogue;
use zero_kernels::Address;
use zero_kernels::activation::{self, Function};
use zero_kernels::rows::{BLOCK, Onto, spread, sums, total};

/// Computes [`Affine::forward`] on a GPU.
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

/// Computes [`forward`] and then the tanh form of GELU. cuBLASLt applies GELU to the sums before they are rounded.
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

/// A linear map and its operands, after all checks.
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
        if let Affine::Quantized(_) = affine {
            bail!("{op}: quantized weights are not implemented on GPUs");
        }
        let (gpu, dtype) = (Gpu::new(&xs.device)?, xs.dtype());
        let (x, weight) = (Operand::new(op, xs, xl)?, Operand::new(op, ws, wl)?);
        let bias = bias.map(|(storage, layout)| Operand::new(op, storage, layout)).transpose()?;
        Ok(Self { op, gpu, sizes, dtype, x, weight, bias, affine })
    }

    /// Allocates the result.
    fn room(&self) -> Result<(CudaStorage, Address)> {
        room_like(self.op, &self.gpu, self.dtype, self.sizes.count * self.sizes.outputs)
    }

    fn factors(&self) -> (Matrix, Matrix) {
        let Self { sizes: Sizes { count, inputs, outputs, .. }, x, .. } = self;
        (Matrix::new(x.address, x.dtype, *count, *inputs), matrix(self.affine, &self.weight, *inputs, *outputs))
    }

    /// Computes the result with an epilogue, which `epilogue` makes from the address of the bias. Returns false if
    /// there is no bias or cuBLASLt does not support the product.
    fn put_with(&self, at: Address, epilogue: impl FnOnce(Address) -> Epilogue) -> Result<bool> {
        let (Some(bias), (x, w)) = (&self.bias, self.factors()) else { return Ok(false) };
        // SAFETY: the sizes were checked, and the room was allocated for them; a bias has one element for each column
        // of the result.
        unsafe { product_with(self.op, &self.gpu, x, w, at, epilogue(bias.address)) }
    }

    /// Computes the result.
    fn put(&self, at: Address) -> Result<()> {
        if self.put_with(at, |bias| Epilogue::Bias { bias })? {
            return Ok(());
        }
        let Self { op, gpu, sizes: Sizes { count, outputs, .. }, x, bias, .. } = self;
        if let Some(bias) = bias {
            let rows = [count32(op, *count)?, count32(op, *outputs)?];
            // SAFETY: the sizes were checked, and the bias and the result have the dtype of x.
            unsafe { gpu.launch_some(spread(x.dtype, rows, bias.address, at)) }?;
        }
        let to = To { address: at, dtype: x.dtype, add: bias.is_some() };
        let (x, w) = self.factors();
        // SAFETY: as above.
        unsafe { product(op, gpu, x, w, to) }
    }
}

/// Views the weight as a matrix of inputs × outputs.
fn matrix(affine: Affine, weight: &Operand, inputs: usize, outputs: usize) -> Matrix {
    match affine {
        // `Map::new` rejects a quantized weight.
        Affine::OutputsInputs | Affine::Quantized(_) => Matrix::new(weight.address, weight.dtype, outputs, inputs).t(),
        Affine::InputsOutputs => Matrix::new(weight.address, weight.dtype, inputs, outputs),
    }
}

/// Computes [`Affine::backward`] and the gradient of the bias, for a `dy` with the dtype of x. If x is GELU's result
/// and cuBLASLt supports the product, the returned gradient already includes GELU's derivative: it is the gradient of
/// GELU's input.
pub(crate) fn backward(
    affine: Affine,
    op: &'static str,
    [x, weight]: [&Tensor; 2],
    bias: Option<&Tensor>,
    upstream: &Tensor,
    of: Option<&BeforeGelu>,
) -> Result<[Option<Tensor>; 3]> {
    let upstream = &upstream.contiguous()?;
    let dy = Operand::of(op, upstream)?;
    let sizes = affine.check(op, x.shape(), weight.shape(), bias.map(Tensor::shape))?;
    let (gpu, [count, inputs, outputs]) = (Gpu::of(op, x)?, [sizes.count, sizes.inputs, sizes.outputs]);
    let d = Matrix::new(dy.address, dy.dtype, count, outputs);
    let dx = if x.track_op() {
        let w = Operand::of(op, weight)?;
        let (dx, at) = room_like(op, &gpu, x.dtype(), count * inputs)?;
        let w = matrix(affine, &w, inputs, outputs).t();
        let has_slope = match of {
            // SAFETY: the sizes were checked, and dx was allocated for them; GELU's input has the shape and dtype of
            // x.
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
    let d_weight = if waits_for_exchange() && sink::has(weight) {
        let ([x, weight, upstream], gpu) = ([x, weight, upstream].map(Tensor::clone), gpu.clone());
        wait_for_exchange(move || weight_gradient(affine, op, &gpu, [&x, &weight, &upstream], &sizes).map(drop));
        None
    } else {
        weight_gradient(affine, op, &gpu, [x, weight, upstream], &sizes)?
    };
    let d_bias = match bias {
        Some(bias) => bias_gradient(op, &gpu, bias, &dy)?,
        None => None,
    };
    Ok([dx, d_weight, d_bias])
}

/// Delivers the gradient of the weight, for operands of sizes that were checked.
fn weight_gradient(
    affine: Affine,
    op: &'static str,
    gpu: &Gpu,
    [x, weight, dy]: [&Tensor; 3],
    sizes: &Sizes,
) -> Result<Option<Tensor>> {
    deliver(op, gpu, weight, |to, onto| {
        let (x, dy) = (Operand::of(op, x)?, Operand::of(op, dy)?);
        let x = Matrix::new(x.address, x.dtype, sizes.count, sizes.inputs);
        let d = Matrix::new(dy.address, dy.dtype, sizes.count, sizes.outputs);
        let (left, right) = match affine {
            Affine::OutputsInputs | Affine::Quantized(_) => (d.t(), x),
            Affine::InputsOutputs => (x.t(), d),
        };
        let to = To { address: to, dtype: zero_kernels::Dtype::F32, add: onto != Onto::Nothing };
        // SAFETY: the sizes were checked; the place has an f32 for each element of the weight.
        unsafe { product(op, gpu, left, right, to) }
    })
}

/// Computes [`bias_gradient`](crate::linear::affine::bias_gradient) with bit-identical results.
pub(crate) fn bias_gradient(op: &'static str, gpu: &Gpu, bias: &Tensor, dy: &Operand) -> Result<Option<Tensor>> {
    let outputs = bias.elem_count();
    let rows = [count32(op, dy.count / outputs)?, count32(op, outputs)?];
    deliver(op, gpu, bias, |to, onto| {
        let partials = gpu.floats(rows[0].div_ceil(BLOCK).max(1) as usize * outputs)?;
        let at = address(op, &partials)?;
        // SAFETY: dy has this many rows; the partial sums have room; the place has an f32 for each element of the
        // bias.
        unsafe {
            if rows[0] > 0 {
                gpu.launch(&sums(dy.dtype, rows, dy.address, at))?;
            }
            gpu.launch(&total(rows, at, to, onto))
        }
    })
}

//! Layer norm and RMS norm over the last dimension, and batch norm.

mod batch;
mod rms;

pub use batch::BatchNorm;
pub use rms::RmsNorm;

#[cfg(feature = "cuda")]
use crate::gpu;
#[cfg(feature = "cuda")]
use crate::graph::addend;
use crate::graph::apply::{applied, apply};
use crate::graph::gradient::deliver;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{View, f32s, f32s_of, rows};
use crate::graph::output::{Fresh, Reader, at_once, build_as, tensor};
use crate::kernel::{Isa, norm as kernel};
use crate::measure;
use crate::meta;
use crate::meta::footprint::{Costs, DeferredCosts, Footprint, Reads, floats, rooms};
use crate::parallel::{Output, parts, split};
use crate::product::Elements;
use crate::residual::residual_norm;
#[cfg(feature = "cuda")]
use crate::residual::residual_norm_on_gpu;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};

/// Layer norm over the last dimension: y = (x − mean)/√(variance + ε)·weight + bias.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f32,
}

impl LayerNorm {
    /// Creates the norm from tensors of `[size]` each.
    pub fn from_tensors(weight: Tensor, bias: Tensor, eps: f32) -> Self {
        Self { weight, bias, eps }
    }

    /// Creates the norm with a weight of ones and a bias of zeros, named `weight` and `bias`.
    pub fn new(size: usize, eps: f32, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints(size, "weight", Init::Const(1.0))?;
        let bias = vb.get_with_hints(size, "bias", Init::Const(0.0))?;
        Ok(Self { weight, bias, eps })
    }

    /// Computes (x + branch, norm(x + branch)), both of the shape of x: a residual connection and the norm that
    /// follows it, in one pass over memory. The results are bit-identical to those of the two operations in sequence.
    ///
    /// # Errors
    /// Fails if shapes or dtypes do not match.
    pub fn forward_residual(&self, x: &Tensor, branch: &Tensor) -> Result<(Tensor, Tensor)> {
        let (_, size) = rows(LAYER_NORM, x.shape())?;
        fits(LAYER_NORM, "weight", self.weight.layout(), size)?;
        fits(LAYER_NORM, "bias", self.bias.layout(), size)?;
        let op = LayerNormOp { eps: self.eps };
        let record =
            |total: &Tensor, values| applied([total, &self.weight, &self.bias], op, (values, total.shape().clone()));
        #[cfg(feature = "cuda")]
        if gpu::holds(x) {
            let made =
                || gpu::norm::forward_residual(LAYER_NORM, self.eps, [x, branch], &self.weight, Some(&self.bias));
            return residual_norm_on_gpu(LAYER_NORM, [x, branch], made, |total| self.forward(total), record);
        }
        let held = (self.weight.storage_and_layout(), self.bias.storage_and_layout());
        let (w, b) = match meta::tracing() {
            true => Default::default(),
            false => (f32s_of(LAYER_NORM, &held.0)?, f32s_of(LAYER_NORM, &held.1)?),
        };
        residual_norm(
            LAYER_NORM,
            x,
            branch,
            |sums, normals| kernel::layer_norm(Isa::current(), sums, &w, &b, self.eps, normals),
            |total| self.forward(total),
            record,
        )
    }
}

impl Module for LayerNorm {
    /// Normalizes `[.., size]`; the result has the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply([x, &self.weight, &self.bias], LayerNormOp { eps: self.eps })
    }
}

/// # Errors
/// Fails if a parameter's size differs from the row length.
fn fits(op: &'static str, name: &str, layout: &Layout, size: usize) -> Result<()> {
    match layout.dims() == [size] {
        true => Ok(()),
        false => bail!("{op}: the {name} {:?} does not match rows of {size}", layout.shape()),
    }
}

/// Number of rows whose contributions to the parameters' gradients form one partial sum.
const BLOCK: usize = 64;

/// Runs `rows` for all rows. Each call of `rows` receives some rows of `x` and `dy`, writes the same rows of dx and
/// adds to the block's partial sums. Returns dx and the partial sums, `sums` numbers for each block.
fn backward(
    op: &'static str,
    operands: [Elements<'_>; 2],
    size: usize,
    sums: usize,
    dtype: DType,
    rows: impl Fn(&[f32], &[f32], &mut [f32], &mut [f32]) + Sync,
) -> Result<(CpuStorage, Vec<f32>)> {
    let len = operands[0].len();
    let count = len / size;
    let at_once = at_once(size).min(BLOCK);
    let mut partials = vec![0.0; count.div_ceil(BLOCK) * sums];
    let mut fresh = Fresh::new(op, dtype, len)?;
    let dx = fresh.shared();
    let outputs = [Output { data: &mut partials, floats: sums }];
    split(count.div_ceil(BLOCK), BLOCK * size, outputs, |blocks, [partials]| {
        let (mut room, mut operands) = (vec![], operands.map(Reader::new));
        for (block, partial) in blocks.zip(partials.chunks_exact_mut(sums)) {
            let block = block * BLOCK..count.min((block + 1) * BLOCK);
            for start in block.clone().step_by(at_once) {
                let part = start * size..block.end.min(start + at_once) * size;
                let [x, dy] = operands.each_mut().map(|operand| operand.floats(part.clone()));
                // SAFETY: each row is in one block, and each block belongs to one thread.
                unsafe { dx.write(part.start, part.len(), &mut room, |dx| rows(x, dy, dx, partial)) };
            }
        }
    });
    // SAFETY: the blocks cover all rows, so all elements are written.
    Ok((unsafe { fresh.filled(len) }, partials))
}

/// Returns the costs of a norm with `parameters` parameters. Their gradients are first combined in `sums` buffers of a
/// parameter's size.
fn footprint(op: &'static str, x: &Tensor, parameters: usize, sums: usize) -> Result<Costs> {
    let (count, size) = rows(op, x.shape())?;
    let (dtype, blocks) = (x.dtype(), count.div_ceil(BLOCK));
    let (wide, wide_weight, rooms_of_rows) = match dtype {
        DType::F32 => (0, 0, 0),
        _ => {
            let at_once = at_once(size).min(BLOCK).min(count);
            let rooms = parts(blocks, BLOCK * size) as u64 * 3 * floats(at_once * size);
            (floats(parameters * size), floats(size), rooms)
        }
    };
    let (partials, gradients) = (floats(blocks * parameters * size), floats(parameters * size));
    let (making, sums) = (wide_weight + partials, floats(sums * size));
    Ok(Costs {
        forward: wide + rooms(dtype, count, size, 1),
        backward: making + rooms_of_rows.max(sums),
        gradients: [true, false, false],
        deferred: Some(DeferredCosts {
            made: gradients,
            backward: making + rooms_of_rows.max(sums + gradients),
            ..DeferredCosts::default()
        }),
        ..Costs::new(x.shape(), dtype)
    })
}

#[derive(Clone, Copy, Debug)]
struct LayerNormOp {
    eps: f32,
}

const LAYER_NORM: &str = "layer-norm";

impl Footprint for LayerNormOp {
    const READS: Reads = Reads::inputs([true, true, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        footprint(LAYER_NORM, inputs[0], 2, 2)
    }
}

impl Op<3> for LayerNormOp {
    fn name(&self) -> &'static str {
        LAYER_NORM
    }

    fn cpu_fwd(&self, [(xs, xl), (ws, wl), (bs, bl)]: Inputs<'_, CpuStorage, 3>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(LAYER_NORM);
        let (count, size) = rows(LAYER_NORM, xl.shape())?;
        fits(LAYER_NORM, "weight", wl, size)?;
        fits(LAYER_NORM, "bias", bl, size)?;
        let (x, w, b) = (View::new(LAYER_NORM, xs, xl)?, f32s(LAYER_NORM, ws, wl)?, f32s(LAYER_NORM, bs, bl)?);
        let x = x.elements();
        let y = build_as(LAYER_NORM, xs.dtype(), count, size, [x], |_, [x], y| {
            kernel::layer_norm(Isa::current(), x, &w, &b, self.eps, y);
        })?;
        Ok((y, xl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl), (ws, wl), (bs, bl)]: Inputs<'_, CudaStorage, 3>) -> Result<(CudaStorage, Shape)> {
        let (_, size) = rows(LAYER_NORM, xl.shape())?;
        fits(LAYER_NORM, "weight", wl, size)?;
        fits(LAYER_NORM, "bias", bl, size)?;
        let y = gpu::norm::forward(LAYER_NORM, self.eps, (xs, xl), (ws, wl), Some((bs, bl)))?;
        Ok((y, xl.shape().clone()))
    }

    fn bwd(&self, [x, weight, bias]: [&Tensor; 3], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        #[cfg(feature = "cuda")]
        if gpu::holds(x) {
            return gpu::norm::backward(LAYER_NORM, self.eps, [x, dy], weight, Some(bias), addend::take(x));
        }
        let _timed = measure::backward(LAYER_NORM);
        let held = (x.storage_and_layout(), weight.storage_and_layout(), dy.storage_and_layout());
        let (xs, w, dy) =
            (View::of(LAYER_NORM, &held.0)?, f32s_of(LAYER_NORM, &held.1)?, View::of(LAYER_NORM, &held.2)?);
        let (isa, size) = (Isa::current(), w.len());
        // Each block's Σ dy·x̂ and Σ dy, next to each other.
        let (dx, partials) =
            backward(LAYER_NORM, [xs.elements(), dy.elements()], size, 2 * size, x.dtype(), |x, dy, dx, partial| {
                let (d_weight, d_bias) = partial.split_at_mut(size);
                kernel::layer_norm_backward(isa, x, &w, self.eps, dy, dx, d_weight, d_bias);
            })?;
        let mut sums = vec![0.0; 2 * size];
        kernel::add_rows(isa, &partials, &mut sums);
        Ok([
            x.track_op().then(|| tensor(dx, x.shape())),
            deliver(LAYER_NORM, weight, |out| out.copy_from_slice(&sums[..size]))?,
            deliver(LAYER_NORM, bias, |out| out.copy_from_slice(&sums[size..]))?,
        ])
    }
}

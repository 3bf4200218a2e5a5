//! The arithmetic of a linear layer, shared by the operations that contain one.

#[cfg(feature = "cuda")]
use crate::device::{Gpu, Operand};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::gradient::{Tile, deliver_tile};
use crate::graph::operand::{View, f32s, rows, with_last};
use crate::graph::output::{Reader, tensor};
use crate::kernel::{Isa, norm::add_rows};
use crate::measure;
use crate::meta;
use crate::meta::footprint::{Costs, DeferredCosts, floats};
use crate::parallel::{Output, parts, split};
use crate::product::{Elements, Matrix, Start, add_product, new_product, new_product_rounded, product, unrounded};
use crate::quantized::{Quantization, QuantizedWeight, quantized_bytes};
use crate::sink;
use crate::threads;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};

/// The order of a weight's two dimensions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Affine {
    /// `[outputs, inputs]`, as `torch.nn.Linear`.
    OutputsInputs,
    /// `[inputs, outputs]`, as GPT-2's `Conv1D`.
    InputsOutputs,
    /// A quantized weight. It is frozen, and stored as `[outputs, inputs]` whatever the order of the layer's
    /// dimensions.
    Quantized(Quantization),
}

/// Sizes of a linear layer that is applied to `count` rows.
pub(crate) struct Sizes {
    pub(crate) count: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Shape of the result.
    pub(crate) shape: Shape,
}

/// Number of rows of dy that form one partial sum of the bias gradient.
pub(crate) const BLOCK: usize = 64;

impl Affine {
    /// Computes b + x·W for x of `[.., inputs]`. Returns the values, in the dtype of x, and the shape `[.., outputs]`.
    pub(crate) fn forward(
        self,
        op: &'static str,
        (xs, xl): (&CpuStorage, &Layout),
        (ws, wl): (&CpuStorage, &Layout),
        bias: Option<(&CpuStorage, &Layout)>,
    ) -> Result<(CpuStorage, Shape)> {
        let Sizes { count, inputs, outputs, shape } =
            self.check(op, xl.shape(), wl.shape(), bias.map(|(_, layout)| layout.shape()))?;
        let bias = bias.map(|(storage, layout)| f32s(op, storage, layout)).transpose()?;
        let start = bias.as_deref().map_or(Start::Zero, Start::Row);
        let x = View::new(op, xs, xl)?;
        let x = Matrix::new(x.elements(), count, inputs);
        self.with_matrix(op, (ws, wl), [inputs, outputs], |w| Ok((new_storage(xs.dtype(), start, x, w), shape)))
    }

    /// Checks the shapes and returns the sizes of the layer for an input of `[.., inputs]`.
    ///
    /// # Errors
    /// Fails if the shapes do not match.
    pub(crate) fn check(self, op: &'static str, x: &Shape, weight: &Shape, bias: Option<&Shape>) -> Result<Sizes> {
        let (inputs, outputs) = self.sizes(op, weight)?;
        let (count, last) = rows(op, x)?;
        if last != inputs {
            bail!("{op}: the input {x:?} does not match a weight with {inputs} inputs");
        }
        if let Some(bias) = bias.filter(|bias| bias.dims() != [outputs]) {
            bail!("{op}: the bias {bias:?} does not match {outputs} outputs");
        }
        Ok(Sizes { count, inputs, outputs, shape: with_last(x, outputs) })
    }

    /// Returns (dx, dW): dx = dy·Wᵀ if the input is tracked, and dW = xᵀ·dy if the weight is.
    pub(crate) fn backward(
        self,
        op: &'static str,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; 2]> {
        let (inputs, outputs) = self.sizes(op, weight.shape())?;
        let (count, _) = rows(op, x.shape())?;
        let held = dy.storage_and_layout();
        let view = View::of(op, &held)?;
        let dx = if x.track_op() {
            let (w, wl) = weight.storage_and_layout();
            let Storage::Cpu(w) = &*w else { bail!("{op}: the backward pass is not implemented for this device") };
            let dy = Matrix::new(view.elements(), count, outputs);
            self.with_matrix(op, (w, wl), [inputs, outputs], |w| {
                Ok(Some(tensor(new_storage(x.dtype(), Start::Zero, dy, w.t()), x.shape())))
            })?
        } else {
            None
        };
        let d_weight = if weight.track_op() {
            if let Self::Quantized(_) = self {
                bail!("{op}: a quantized weight has no gradient");
            }
            if sink::defers(weight) {
                let (x, dy) = (x.clone(), dy.clone());
                sink::defer(weight, move |out| {
                    let held = (x.storage_and_layout(), dy.storage_and_layout());
                    let (x, dy) = (View::of(op, &held.0)?, View::of(op, &held.1)?);
                    let (x, dy) =
                        (Matrix::new(x.elements(), count, inputs), Matrix::new(dy.elements(), count, outputs));
                    self.weight_gradient(out, Tile::First, x, dy);
                    Ok(())
                });
                return Ok([dx, None]);
            }
            let held = x.storage_and_layout();
            let x = View::of(op, &held)?;
            let (x, dy) = (Matrix::new(x.elements(), count, inputs), Matrix::new(view.elements(), count, outputs));
            deliver_tile(op, weight, |out, tile| self.weight_gradient(out, tile, x, dy))?
        } else {
            None
        };
        Ok([dx, d_weight])
    }

    fn weight_gradient(self, out: &mut [f32], tile: Tile, x: Matrix<'_>, dy: Matrix<'_>) {
        let (left, right) = match self {
            Self::OutputsInputs | Self::Quantized(_) => (dy.t(), x),
            Self::InputsOutputs => (x.t(), dy),
        };
        match tile {
            Tile::First => product(out, left, right, threads()),
            Tile::Further => add_product(out, left, right, threads()),
        }
    }

    /// Returns the costs of [`Affine::forward`], [`Affine::backward`] and [`bias_gradient`].
    pub(crate) fn footprint(self, op: &'static str, inputs: &[&Tensor]) -> Result<Costs> {
        let (x, weight, has_bias) = (inputs[0], inputs[1], inputs.len() > 2);
        let (count, _) = rows(op, x.shape())?;
        let (_, outputs) = self.sizes(op, weight.shape())?;
        let (dtype, results) = (x.dtype(), count * outputs);
        let bias = if has_bias { floats(outputs) } else { 0 };
        let inputs = x.elem_count() / count.max(1);
        // Dtypes other than f32 need the bias as f32. If the inner dimension is too long for sums to be rounded block
        // by block, these dtypes also need all sums as f32.
        let (mut forward, mut dx, mut row) = (0, 0, 0);
        if dtype != DType::F32 {
            forward = bias + unrounded(inputs, results);
            dx = if x.track_op() { unrounded(outputs, x.elem_count()) } else { 0 };
            row = parts(count.div_ceil(BLOCK), BLOCK * outputs) as u64 * bias;
        }
        let partials = count.div_ceil(BLOCK) as u64 * bias + row;
        let backward = dx.max(meta::another(weight)).max(partials);
        let deferred = Some(DeferredCosts {
            keeps_input: weight.track_op(),
            keeps_gradient: weight.track_op(),
            made: bias,
            backward: dx.max(bias + partials),
            ..DeferredCosts::default()
        });
        let gradients = [true, false, false];
        Ok(Costs { forward, backward, gradients, deferred, ..Costs::new(with_last(x.shape(), outputs), dtype) })
    }

    /// Returns (inputs, outputs) of a weight of this shape.
    pub(crate) fn sizes(self, op: &'static str, weight: &Shape) -> Result<(usize, usize)> {
        let (first, second) = weight.dims2()?;
        if first == 0 || second == 0 {
            bail!("{op}: the weight {weight:?} has no elements");
        }
        Ok(match self {
            Self::OutputsInputs => (second, first),
            Self::InputsOutputs => (first, second),
            Self::Quantized(is) => is.sizes(),
        })
    }

    /// Calls `with` on the weight as a matrix of inputs × outputs.
    fn with_matrix<T>(
        self,
        op: &'static str,
        weight: (&CpuStorage, &Layout),
        [inputs, outputs]: [usize; 2],
        with: impl FnOnce(Matrix<'_>) -> Result<T>,
    ) -> Result<T> {
        self.with_elements(op, weight, |weight| {
            with(match self {
                Self::InputsOutputs => Matrix::new(weight, inputs, outputs),
                Self::OutputsInputs | Self::Quantized(_) => Matrix::new(weight, outputs, inputs).t(),
            })
        })
    }

    /// Calls `with` on the elements of the weight, in the order in which they are stored.
    pub(crate) fn with_elements<T>(
        self,
        op: &'static str,
        (storage, layout): (&CpuStorage, &Layout),
        with: impl FnOnce(Elements<'_>) -> Result<T>,
    ) -> Result<T> {
        let Self::Quantized(is) = self else { return with(View::new(op, storage, layout)?.elements()) };
        let Some(bytes) = quantized_bytes(storage) else { bail!("{op}: the operation reads a released parameter") };
        with(Elements::Quantized(QuantizedWeight::new(bytes, is)?))
    }
}

/// Returns a product in new storage of f32, bf16 or f16.
fn new_storage(dtype: DType, start: Start<'_>, left: Matrix<'_>, right: Matrix<'_>) -> CpuStorage {
    match dtype {
        DType::BF16 => CpuStorage::BF16(new_product_rounded(start, left, right, threads())),
        DType::F16 => CpuStorage::F16(new_product_rounded(start, left, right, threads())),
        _ => CpuStorage::F32(new_product(start, left, right, threads())),
    }
}

/// Returns the gradient of a bias, if there is one: the sum of the rows of `dy`. On the CPU, partial sums over blocks
/// of [`BLOCK`] rows are added in order.
pub(crate) fn bias_gradient(op: &'static str, bias: Option<&Tensor>, dy: &Tensor) -> Result<Option<Tensor>> {
    let Some(bias) = bias else { return Ok(None) };
    #[cfg(feature = "cuda")]
    if gpu::holds(dy) {
        return gpu::affine::bias_gradient(op, &Gpu::of(op, dy)?, bias, &Operand::of(op, dy)?);
    }
    let _timed = measure::backward("bias");
    let held = dy.storage_and_layout();
    let view = View::of(op, &held)?;
    let dy = view.elements();
    deliver_tile(op, bias, |out, tile| {
        let (isa, outputs) = (Isa::current(), out.len());
        let blocks = (dy.len() / outputs).div_ceil(BLOCK);
        let mut partials = vec![0.0; blocks * outputs];
        split(blocks, BLOCK * outputs, [Output { data: &mut partials, floats: outputs }], |range, [partials]| {
            let mut dy_rows = Reader::new(dy);
            for (block, partial) in range.zip(partials.chunks_exact_mut(outputs)) {
                let start = block * BLOCK * outputs;
                for start in (start..dy.len().min(start + BLOCK * outputs)).step_by(outputs) {
                    add_rows(isa, dy_rows.floats(start..start + outputs), partial);
                }
            }
        });
        if matches!(tile, Tile::First) {
            out.fill(0.0);
        }
        add_rows(isa, &partials, out);
    })
}

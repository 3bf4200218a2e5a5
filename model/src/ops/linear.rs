//! Linear layers that send their weight gradient straight to the sink and pay nothing for a frozen weight.

use super::kernel::{Isa, norm::add_rows};
use super::operand::{f32s, f32s_of, rows, stored, tensor};
use super::parallel::{Output, split};
use super::product::{Matrix, product, rows_product};
use super::{gradient::deliver, threads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};

/// y = x·Wᵀ + b with a weight of [outputs, inputs], as `candle_nn::Linear` and `torch.nn.Linear`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// From tensors: weight [outputs, inputs], bias [outputs].
    pub fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// With a bias of zeros and a normal weight of standard deviation `std`, named `weight` and `bias`.
    pub fn new(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
        Ok(Self { bias: Some(bias), ..Self::no_bias(inputs, outputs, std, vb)? })
    }

    /// Without a bias.
    pub fn no_bias(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints((outputs, inputs), "weight", Init::Randn { mean: 0.0, stdev: std })?;
        Ok(Self { weight, bias: None })
    }
}

impl Module for Linear {
    /// [.., inputs] to [.., outputs].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply(x, &self.weight, self.bias.as_ref(), Orientation::OutputsInputs)
    }
}

/// y = x·W + b with a weight of [inputs, outputs]: GPT-2's `Conv1D`.
#[derive(Clone, Debug)]
pub struct Conv1D {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1D {
    /// From tensors: weight [inputs, outputs], bias [outputs].
    pub fn from_tensors(weight: Tensor, bias: Tensor) -> Self {
        Self { weight, bias }
    }

    /// With a bias of zeros and a normal weight of standard deviation `std`, named `weight` and `bias`.
    pub fn new(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints((inputs, outputs), "weight", Init::Randn { mean: 0.0, stdev: std })?;
        let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
        Ok(Self { weight, bias })
    }
}

impl Module for Conv1D {
    /// [.., inputs] to [.., outputs].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply(x, &self.weight, Some(&self.bias), Orientation::InputsOutputs)
    }
}

fn apply(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, orientation: Orientation) -> Result<Tensor> {
    let op = Affine { orientation };
    match bias {
        Some(bias) => x.apply_op3(weight, bias, op),
        None => x.apply_op2(weight, op),
    }
}

/// The order of the weight's two dimensions.
#[derive(Clone, Copy, Debug)]
enum Orientation {
    OutputsInputs,
    InputsOutputs,
}

#[derive(Clone, Copy, Debug)]
struct Affine {
    orientation: Orientation,
}

const OP: &str = "linear";

/// Rows of dy whose sum is one partial sum of the bias gradient.
const BLOCK: usize = 64;

impl Affine {
    /// (inputs, outputs) of a weight of this shape.
    fn sizes(self, weight: &Shape) -> Result<(usize, usize)> {
        let (first, second) = weight.dims2()?;
        if first == 0 || second == 0 {
            bail!("{OP}: a weight of {weight:?} has no elements");
        }
        Ok(match self.orientation {
            Orientation::OutputsInputs => (second, first),
            Orientation::InputsOutputs => (first, second),
        })
    }

    /// The weight as a matrix of inputs × outputs.
    fn matrix(self, weight: &[f32], inputs: usize, outputs: usize) -> Matrix<'_> {
        match self.orientation {
            Orientation::OutputsInputs => Matrix::new(weight, outputs, inputs).t(),
            Orientation::InputsOutputs => Matrix::new(weight, inputs, outputs),
        }
    }

    fn forward(
        self,
        (xs, xl): (&CpuStorage, &Layout),
        (ws, wl): (&CpuStorage, &Layout),
        bias: Option<(&CpuStorage, &Layout)>,
    ) -> Result<(CpuStorage, Shape)> {
        let (inputs, outputs) = self.sizes(wl.shape())?;
        let (count, last) = rows(OP, xl.shape())?;
        if last != inputs {
            bail!("{OP}: an input of {:?} does not fit a weight for {inputs} inputs", xl.shape());
        }
        let (x, w) = (f32s(OP, xs, xl)?, f32s(OP, ws, wl)?);
        let mut y = rows_product(&x, count, self.matrix(&w, inputs, outputs), threads());
        if let Some((bs, bl)) = bias {
            let bias = f32s(OP, bs, bl)?;
            if bl.dims() != [outputs] {
                bail!("{OP}: a bias of {:?} does not fit {outputs} outputs", bl.shape());
            }
            split(count, outputs, [Output { data: &mut y, floats: outputs }], |_, [y]| {
                for row in y.chunks_exact_mut(outputs) {
                    for (y, b) in row.iter_mut().zip(&*bias) {
                        *y += b;
                    }
                }
            });
        }
        let mut dims = xl.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = outputs;
        }
        Ok((stored(OP, y, xs.dtype())?, Shape::from(dims)))
    }

    /// (dx, dW): dx = dy·Wᵀ where the input is tracked, dW = xᵀ·dy where the weight is.
    fn backward(self, x: &Tensor, weight: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (inputs, outputs) = self.sizes(weight.shape())?;
        let held = (x.storage_and_layout(), weight.storage_and_layout(), dy.storage_and_layout());
        let dy = f32s_of(OP, &held.2)?;
        let count = dy.len() / outputs;
        let dx = if x.track_op() {
            let w = f32s_of(OP, &held.1)?;
            let dx = rows_product(&dy, count, self.matrix(&w, inputs, outputs).t(), threads());
            tensor(OP, dx, x.shape().clone(), x.dtype())?
        } else {
            None
        };
        let d_weight = if weight.track_op() {
            let x = f32s_of(OP, &held.0)?;
            let (x, dy) = (Matrix::new(&x, count, inputs), Matrix::new(&dy, count, outputs));
            deliver(OP, weight, |out| match self.orientation {
                Orientation::OutputsInputs => product(out, dy.t(), x, threads()),
                Orientation::InputsOutputs => product(out, x.t(), dy, threads()),
            })?
        } else {
            None
        };
        Ok((dx, d_weight))
    }
}

/// Σ of the rows of `dy`: partial sums over blocks of [`BLOCK`] rows, added in order.
fn bias_gradient(dy: &[f32], outputs: usize, out: &mut [f32]) {
    let isa = Isa::best();
    let blocks = (dy.len() / outputs).div_ceil(BLOCK);
    let mut partials = vec![0.0; blocks * outputs];
    split(blocks, BLOCK * outputs, [Output { data: &mut partials, floats: outputs }], |range, [partials]| {
        for (block, partial) in range.zip(partials.chunks_exact_mut(outputs)) {
            let start = block * BLOCK * outputs;
            add_rows(isa, &dy[start..dy.len().min(start + BLOCK * outputs)], partial);
        }
    });
    out.fill(0.0);
    add_rows(isa, &partials, out);
}

impl CustomOp2 for Affine {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, xs: &CpuStorage, xl: &Layout, ws: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward((xs, xl), (ws, wl), None)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.backward(x, w, dy)
    }
}

impl CustomOp3 for Affine {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        xs: &CpuStorage,
        xl: &Layout,
        ws: &CpuStorage,
        wl: &Layout,
        bs: &CpuStorage,
        bl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward((xs, xl), (ws, wl), Some((bs, bl)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dx, d_weight) = self.backward(x, w, dy)?;
        let d_bias = if bias.track_op() {
            let held = dy.storage_and_layout();
            let dy = f32s_of(OP, &held)?;
            deliver(OP, bias, |out| bias_gradient(&dy, bias.elem_count(), out))?
        } else {
            None
        };
        Ok((dx, d_weight, d_bias))
    }
}

//! Linear layers that send their weight gradient straight to the sink and pay nothing for a frozen weight.

use super::affine::{Affine, bias_gradient};
use super::apply::{apply2, apply3};
use super::footprint::{Costs, Footprint, Reads};
use super::linear_gelu::linear_gelu;
use super::operand::View;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};
use candle_nn::{Init, Module, VarBuilder};

/// y = x·Wᵀ + b with a weight of `[outputs, inputs]`, as `candle_nn::Linear` and `torch.nn.Linear`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// From tensors: weight `[outputs, inputs]`, bias `[outputs]`.
    pub fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// With a bias of zeros and a normal weight of standard deviation `std`, named `weight` and `bias`.
    pub fn new(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
        Ok(Self { bias: Some(bias), ..Self::no_bias(inputs, outputs, std, vb)? })
    }

    pub(crate) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Without a bias.
    pub fn no_bias(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints((outputs, inputs), "weight", Init::Randn { mean: 0.0, stdev: std })?;
        Ok(Self { weight, bias: None })
    }
}

impl Module for Linear {
    /// `[.., inputs]` to `[.., outputs]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => apply3(x, &self.weight, bias, LinearOp(Affine::OutputsInputs)),
            None => apply2(x, &self.weight, LinearOp(Affine::OutputsInputs)),
        }
    }
}

/// y = x·W + b with a weight of `[inputs, outputs]`: GPT-2's `Conv1D`.
#[derive(Clone, Debug)]
pub struct Conv1D {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1D {
    /// From tensors: weight `[inputs, outputs]`, bias `[outputs]`.
    pub fn from_tensors(weight: Tensor, bias: Tensor) -> Self {
        Self { weight, bias }
    }

    /// With a bias of zeros and a normal weight of standard deviation `std`, named `weight` and `bias`.
    pub fn new(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints((inputs, outputs), "weight", Init::Randn { mean: 0.0, stdev: std })?;
        let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
        Ok(Self { weight, bias })
    }

    /// [`gelu`](super::gelu) of the output, in one operation: the same bits, fewer passes over memory.
    pub fn forward_gelu(&self, x: &Tensor) -> Result<Tensor> {
        linear_gelu(x, &self.weight, &self.bias, Affine::InputsOutputs)
    }
}

impl Module for Conv1D {
    /// `[.., inputs]` to `[.., outputs]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply3(x, &self.weight, &self.bias, LinearOp(Affine::InputsOutputs))
    }
}

#[derive(Clone, Copy, Debug)]
struct LinearOp(Affine);

const OP: &str = "linear";

impl Footprint for LinearOp {
    const READS: Reads = Reads::inputs([true, true, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        self.0.footprint(OP, inputs)
    }
}

impl CustomOp2 for LinearOp {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, xs: &CpuStorage, xl: &Layout, ws: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.forward(OP, (xs, xl), (ws, wl), None)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let held = dy.storage_and_layout();
        self.0.backward(OP, x, w, View::of(OP, &held)?.elements())
    }
}

impl CustomOp3 for LinearOp {
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
        self.0.forward(OP, (xs, xl), (ws, wl), Some((bs, bl)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let held = dy.storage_and_layout();
        let dy = View::of(OP, &held)?;
        let (dx, d_weight) = self.0.backward(OP, x, w, dy.elements())?;
        Ok((dx, d_weight, bias_gradient(OP, bias, dy.elements())?))
    }
}

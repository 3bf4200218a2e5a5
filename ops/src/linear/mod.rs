//! Linear layers that write their weight gradient straight to the sink and compute no gradient for a frozen weight.

pub(crate) mod affine;
pub(crate) mod cross_entropy;
pub(crate) mod dora;
pub(crate) mod gelu;
mod head;
pub(crate) mod log_probs;
pub(crate) mod lora;
pub(crate) mod module_names;

use crate::activation::activate;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::{apply, has_backward, unmade};
use crate::graph::op::{Inputs, Op, leading};
use crate::graph::operand::with_last;
use crate::linear::affine::{Affine, bias_gradient};
use crate::linear::gelu::{BeforeGelu, linear_gelu, linear_gelu_for};
use crate::linear::lora::Lora;
use crate::meta::footprint::{Costs, Footprint, Reads};
use crate::quantized::{Quantization, quantized_storage, weight};
use crate::tensor::{Parallel, RowParallel};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Result, Shape, Storage, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use std::sync::Arc;
use zero_model_options::Activation;

/// A linear layer y = x·Wᵀ + b with a weight of `[outputs, inputs]`, like `candle_nn::Linear` and `torch.nn.Linear`.
#[derive(Clone, Debug)]
pub struct Linear(Projection);

impl Linear {
    /// Creates the layer from tensors: weight `[outputs, inputs]`, bias `[outputs]`.
    pub fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self(Projection { weight, bias, affine: Affine::OutputsInputs, lora: None })
    }

    /// Creates a layer with a weight drawn from a normal distribution with standard deviation `std` and a bias of
    /// zeros, named `weight` and `bias`.
    pub fn new(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        Self::built([inputs, outputs], true, std, &vb, Parallel::Whole)
    }

    fn built(sizes: [usize; 2], bias: bool, std: f64, vb: &VarBuilder, parallel: Parallel<'_>) -> Result<Self> {
        let bias = if bias { parallel.bias(sizes[1], vb)? } else { None };
        Ok(Self(Projection { bias, ..Projection::built(Affine::OutputsInputs, sizes, std, vb, parallel)? }))
    }

    /// Creates a layer whose outputs are split among the ranks of a tensor group. The outputs are the concatenation of
    /// `parts`, and each rank computes an equal share of each part. Parameters are split only while a model is built
    /// for tensor parallelism.
    ///
    /// # Errors
    /// Fails if a part cannot be divided evenly, and returns errors of the builder.
    pub fn column_parallel(inputs: usize, parts: &[usize], bias: bool, std: f64, vb: VarBuilder) -> Result<Self> {
        Self::built([inputs, parts.iter().sum()], bias, std, &vb, Parallel::Outputs(parts))
    }

    /// Creates a layer whose inputs are split among the ranks of a tensor group, as the outputs of the previous layer
    /// are. See [`RowParallel`].
    ///
    /// # Errors
    /// Fails in the same cases as [`Linear::column_parallel`].
    pub fn row_parallel(
        inputs: usize,
        outputs: usize,
        bias: bool,
        std: f64,
        vb: VarBuilder,
    ) -> Result<RowParallel<Self>> {
        let Self(map) = Self::built([inputs, outputs], bias, std, &vb, Parallel::Inputs)?;
        Ok(RowParallel::new(map, Self))
    }

    /// Creates a layer without a bias from a quantized weight: the bytes that [`Quantization::quantize`] returns for
    /// the whole weight. The weight is frozen.
    ///
    /// # Errors
    /// Fails if the number of bytes is wrong.
    pub fn from_quantized(bytes: Vec<u8>, quantization: Quantization) -> Result<Self> {
        let (inputs, outputs) = quantization.sizes();
        if bytes.len() != quantization.bytes() {
            bail!("{OP}: the quantized weight needs {} bytes, got {}", quantization.bytes(), bytes.len());
        }
        let storage = Storage::Cpu(quantized_storage(bytes));
        let weight = Tensor::from_storage(storage, (outputs, inputs), BackpropOp::none(), false);
        Ok(Self(Projection { weight, bias: None, affine: Affine::Quantized(quantization), lora: None }))
    }

    /// Returns the weight.
    pub fn weight(&self) -> &Tensor {
        &self.0.weight
    }

    /// Creates a layer without a bias.
    pub fn no_bias(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        Self::built([inputs, outputs], false, std, &vb, Parallel::Whole)
    }
}

impl Module for Linear {
    /// Maps `[.., inputs]` to `[.., outputs]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}

/// A linear layer y = x·W + b with a weight of `[inputs, outputs]`, like GPT-2's `Conv1D`.
#[derive(Clone, Debug)]
pub struct Conv1D(Projection);

impl Conv1D {
    /// Creates the layer from tensors: weight `[inputs, outputs]`, bias `[outputs]`.
    pub fn from_tensors(weight: Tensor, bias: Tensor) -> Self {
        Self(Projection { weight, bias: Some(bias), affine: Affine::InputsOutputs, lora: None })
    }

    /// Creates a layer with a weight drawn from a normal distribution with standard deviation `std` and a bias of
    /// zeros, named `weight` and `bias`.
    pub fn new(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        Self::built([inputs, outputs], std, &vb, Parallel::Whole)
    }

    fn built(sizes: [usize; 2], std: f64, vb: &VarBuilder, parallel: Parallel<'_>) -> Result<Self> {
        let (weight, affine) = weight(Affine::InputsOutputs, sizes, std, vb, parallel)?;
        let bias = parallel.bias(sizes[1], vb)?;
        Ok(Self(Projection { weight, bias, affine, lora: Lora::of(Affine::InputsOutputs, sizes, vb, parallel)? }))
    }

    /// Creates a layer whose outputs are split among the ranks of a tensor group: see [`Linear::column_parallel`].
    ///
    /// # Errors
    /// Fails in the same cases as [`Linear::column_parallel`].
    pub fn column_parallel(inputs: usize, parts: &[usize], std: f64, vb: VarBuilder) -> Result<Self> {
        Self::built([inputs, parts.iter().sum()], std, &vb, Parallel::Outputs(parts))
    }

    /// Creates a layer whose inputs are split among the ranks of a tensor group: see [`RowParallel`].
    ///
    /// # Errors
    /// Fails in the same cases as [`Linear::column_parallel`].
    pub fn row_parallel(inputs: usize, outputs: usize, std: f64, vb: VarBuilder) -> Result<RowParallel<Self>> {
        let Self(map) = Self::built([inputs, outputs], std, &vb, Parallel::Inputs)?;
        Ok(RowParallel::new(map, Self))
    }

    /// Applies [`gelu`](crate::gelu) to the output in one operation. On the CPU the result is bit-identical to the two
    /// operations in sequence, with fewer passes over memory.
    pub fn forward_gelu(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward_activated(x, Activation::GeluNew)
    }

    /// Applies [`Conv1D::forward_gelu`] and then `down`: a transformer's feed-forward network. On a GPU, the product
    /// that computes the gradient of `down`'s input also applies GELU's derivative.
    pub fn forward_gelu_then(&self, x: &Tensor, down: &Self) -> Result<Tensor> {
        let (Self(up), Self(down)) = (self, down);
        // On the CPU `down` does not apply GELU's derivative, and sharing GELU's input would only extend its
        // lifetime.
        let takes_slope = x.device().is_cuda() && has_backward() && up.lora.is_none() && down.lora.is_none();
        let Some(bias) = up.bias.as_ref().filter(|_| takes_slope) else {
            return down.forward(&self.forward_gelu(x)?);
        };
        let before = Arc::default();
        let y = linear_gelu_for(x, &up.weight, bias, up.affine, Arc::clone(&before))?;
        down.apply(&y, Some(before))
    }
}

impl Module for Conv1D {
    /// Maps `[.., inputs]` to `[.., outputs]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}

/// A linear layer with either order of the weight's dimensions, so that other modules can use a [`Linear`] or a
/// [`Conv1D`].
#[derive(Clone, Debug)]
pub struct Projection {
    weight: Tensor,
    bias: Option<Tensor>,
    affine: Affine,
    lora: Option<Lora>,
}

impl From<Linear> for Projection {
    fn from(linear: Linear) -> Self {
        linear.0
    }
}

impl From<Conv1D> for Projection {
    fn from(conv: Conv1D) -> Self {
        conv.0
    }
}

impl Projection {
    /// Creates the layer without a bias.
    fn built(declared: Affine, sizes: [usize; 2], std: f64, vb: &VarBuilder, parallel: Parallel<'_>) -> Result<Self> {
        let (weight, affine) = weight(declared, sizes, std, vb, parallel)?;
        Ok(Self { weight, bias: None, affine, lora: Lora::of(declared, sizes, vb, parallel)? })
    }

    /// Separates the bias from the layer, for outputs that are partial sums, which ranks still have to add up.
    pub(crate) fn without_bias(self) -> (Self, Option<Tensor>) {
        let bias = self.bias.clone();
        (Self { bias: None, ..self }, bias)
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.lora {
            Some(lora) => lora.forward(x, self),
            None => self.apply(x, None),
        }
    }

    /// Returns whether the layer has an adapter.
    pub(crate) fn is_adapted(&self) -> bool {
        self.lora.is_some()
    }

    /// Applies the layer without its adapter. `of` is the input of GELU if x is GELU's result and only this layer reads
    /// x.
    fn apply(&self, x: &Tensor, of: Option<Arc<BeforeGelu>>) -> Result<Tensor> {
        let op = LinearOp { affine: self.affine, of };
        match &self.bias {
            Some(bias) => apply([x, &self.weight, bias], op),
            None => apply([x, &self.weight], op),
        }
    }

    /// Applies the layer and an activation, in one operation if a fused one exists.
    pub(crate) fn forward_activated(&self, x: &Tensor, activation: Activation) -> Result<Tensor> {
        match (&self.bias, activation) {
            (Some(bias), Activation::GeluNew) if self.lora.is_none() => linear_gelu(x, &self.weight, bias, self.affine),
            _ => activate(&self.forward(x)?, activation),
        }
    }

    /// Records the layer's operation in candle's graph, so that its backward can run. The output has no values.
    pub(crate) fn unmade(&self, x: &Tensor) -> Result<Tensor> {
        let shape = with_last(x.shape(), self.sizes()?[1]);
        let op = LinearOp { affine: self.affine, of: None };
        match &self.bias {
            Some(bias) => unmade([x, &self.weight, bias], op, &shape),
            None => unmade([x, &self.weight], op, &shape),
        }
    }

    /// Returns the numbers of inputs and outputs.
    pub(crate) fn sizes(&self) -> Result<[usize; 2]> {
        self.affine.sizes(OP, self.weight.shape()).map(|(inputs, outputs)| [inputs, outputs])
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.weight).chain(&self.bias)
    }
}

#[derive(Debug)]
struct LinearOp {
    affine: Affine,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "used only with a GPU, where the backward goes through GELU")
    )]
    of: Option<Arc<BeforeGelu>>,
}

const OP: &str = "linear";

impl Footprint for LinearOp {
    const READS: Reads = Reads::OF_LINEAR;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let costs = self.affine.footprint(OP, inputs)?;
        Ok(if inputs.len() > 2 { costs.with_epilogue() } else { costs })
    }
}

impl<const N: usize> Op<N> for LinearOp {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, inputs: Inputs<'_, CpuStorage, N>) -> Result<(CpuStorage, Shape)> {
        self.affine.forward(OP, inputs[0], inputs[1], inputs.get(2).copied())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Inputs<'_, CudaStorage, N>) -> Result<(CudaStorage, Shape)> {
        gpu::affine::forward(self.affine, OP, inputs[0], inputs[1], inputs.get(2).copied())
    }

    fn bwd(&self, inputs: [&Tensor; N], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; N]> {
        let (x, w, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
        #[cfg(feature = "cuda")]
        if gpu::holds(x) {
            return gpu::affine::backward(self.affine, OP, [x, w], bias, dy, self.of.as_deref()).map(leading);
        }
        let [dx, d_weight] = self.affine.backward(OP, x, w, dy)?;
        Ok(leading([dx, d_weight, bias_gradient(OP, bias, dy)?]))
    }
}

//! Elementwise activations, and the activations of gated MLPs.

#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{CACHED, Fresh, Reader, build_as, tensor};
use crate::kernel::{Isa, activation as kernel};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads, element_rooms};
use crate::parallel::split;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};
use zero_kernels::activation::Function;
use zero_model_options::Activation;

/// Applies an activation to each element.
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    let (name, function, forward, backward): (_, _, Forward, Backward) = match activation {
        Activation::GeluNew => ("gelu", Function::GeluTanh, kernel::gelu_tanh, kernel::gelu_tanh_backward),
        Activation::Gelu => ("gelu-erf", Function::GeluErf, kernel::gelu_erf, kernel::gelu_erf_backward),
        Activation::Silu => ("silu", Function::Silu, kernel::silu, kernel::silu_backward),
        Activation::Relu => ("relu", Function::Relu, kernel::relu, kernel::relu_backward),
    };
    apply([x], Elementwise { name, function, forward, backward })
}

/// Computes activation(gate)·up in one operation.
///
/// # Errors
/// Fails if the shapes differ, or for an activation other than SiLU and the tanh form of GELU.
pub fn gated(gate: &Tensor, activation: Activation, up: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Silu => swiglu(gate, up),
        Activation::GeluNew => geglu(gate, up),
        Activation::Gelu | Activation::Relu => {
            bail!("{activation:?} is not a valid gate; choose SiLU or the tanh approximation of GELU")
        }
    }
}

/// Computes the tanh form of GELU, Hugging Face's `gelu_new` and `gelu_pytorch_tanh`: ½·x·(1 + tanh(√(2/π)·(x +
/// 0.044715·x³))).
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::GeluNew)
}

/// Computes GELU with the normal distribution function: x·Φ(x).
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Gelu)
}

/// Computes x·σ(x), also known as swish.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Silu)
}

/// Computes max(x, 0). The gradient at 0 is 0, as in PyTorch; candle's `relu` has the gradient 1 there.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Relu)
}

/// Computes gate·σ(gate)·up, the gated activation of Llama's MLP. Both tensors have the same shape.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    apply([gate, up], Gated { name: SWIGLU, forward: kernel::swiglu, backward: kernel::swiglu_backward })
}

/// Computes gelu(gate)·up with the tanh form of [`gelu`], the gated activation of Gemma's MLP. Both tensors have the
/// same shape.
///
/// # Errors
/// Fails if the shapes differ, and on a GPU.
pub fn geglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    apply([gate, up], Gated { name: "geglu", forward: kernel::geglu, backward: kernel::geglu_backward })
}

type Forward = fn(Isa, x: &[f32], y: &mut [f32]);
type Backward = fn(Isa, x: &[f32], dy: &[f32], dx: &mut [f32]);

struct Elementwise {
    name: &'static str,
    /// Selects the function that the GPU kernel computes.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    function: Function,
    forward: Forward,
    backward: Backward,
}

impl Footprint for Elementwise {
    const READS: Reads = Reads::inputs([true, false, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (shape, dtype) = (inputs[0].shape(), inputs[0].dtype());
        let [forward, backward] = [1, 2].map(|operands| element_rooms(dtype, shape.elem_count(), operands));
        Ok(Costs { forward, backward, ..Costs::new(shape, dtype) })
    }
}

impl Op<1> for Elementwise {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(self.name);
        let x = View::new(self.name, xs, xl)?;
        let x = x.elements();
        let y = build_as(self.name, xs.dtype(), x.len(), 1, [x], |_, [x], y| (self.forward)(Isa::current(), x, y))?;
        Ok((y, xl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        Ok((gpu::activation::forward(self.name, self.function, xs, xl)?, xl.shape().clone()))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        #[cfg(feature = "cuda")]
        if gpu::holds(x) {
            return Ok([Some(gpu::activation::backward(self.name, self.function, x, dy)?)]);
        }
        let _timed = measure::backward(self.name);
        let held = (x.storage_and_layout(), dy.storage_and_layout());
        let (xs, dy) = (View::of(self.name, &held.0)?, View::of(self.name, &held.1)?);
        let (xs, dy) = (xs.elements(), dy.elements());
        let dx = build_as(self.name, x.dtype(), xs.len(), 1, [xs, dy], |_, [x, dy], dx| {
            (self.backward)(Isa::current(), x, dy, dx);
        })?;
        Ok([Some(tensor(dx, x.shape()))])
    }
}

/// activation(gate)·up.
struct Gated {
    name: &'static str,
    forward: fn(Isa, gate: &[f32], up: &[f32], y: &mut [f32]),
    #[expect(clippy::type_complexity, reason = "the signature of a kernel")]
    backward: fn(Isa, gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]),
}

const SWIGLU: &str = "swiglu";

fn same_shape(op: &str, gate: &Layout, up: &Layout) -> Result<()> {
    match gate.shape() == up.shape() {
        true => Ok(()),
        false => bail!("{op}: gate {:?} and up {:?} must have the same shape", gate.shape(), up.shape()),
    }
}

impl Footprint for Gated {
    const READS: Reads = Reads::inputs([true, true, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (shape, dtype) = (inputs[0].shape(), inputs[0].dtype());
        // The forward reads two operands. The backward reads three operands and writes a second result.
        let [forward, backward] = [2, 4].map(|operands| element_rooms(dtype, shape.elem_count(), operands));
        Ok(Costs { forward, backward, ..Costs::new(shape, dtype) })
    }
}

impl Op<2> for Gated {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, [(gs, gl), (us, ul)]: Inputs<'_, CpuStorage, 2>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(self.name);
        same_shape(self.name, gl, ul)?;
        let (gate, up) = (View::new(self.name, gs, gl)?, View::new(self.name, us, ul)?);
        let (gate, up) = (gate.elements(), up.elements());
        let y = build_as(self.name, gs.dtype(), gate.len(), 1, [gate, up], |_, [gate, up], y| {
            (self.forward)(Isa::current(), gate, up, y);
        })?;
        Ok((y, gl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(gs, gl), (us, ul)]: Inputs<'_, CudaStorage, 2>) -> Result<(CudaStorage, Shape)> {
        same_shape(self.name, gl, ul)?;
        if self.name != SWIGLU {
            bail!("{}: unsupported on a GPU", self.name);
        }
        Ok((gpu::activation::swiglu(self.name, (gs, gl), (us, ul))?, gl.shape().clone()))
    }

    fn bwd(&self, [gate, up]: [&Tensor; 2], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        #[cfg(feature = "cuda")]
        if gpu::holds(gate) {
            let [d_gate, d_up] = gpu::activation::backward_of_swiglu(self.name, gate, up, dy)?;
            return Ok([gate.track_op().then_some(d_gate), up.track_op().then_some(d_up)]);
        }
        let _timed = measure::backward(self.name);
        let held = (gate.storage_and_layout(), up.storage_and_layout(), dy.storage_and_layout());
        let (gs, us, dy) =
            (View::of(self.name, &held.0)?, View::of(self.name, &held.1)?, View::of(self.name, &held.2)?);
        let (gs, us, dy) = (gs.elements(), us.elements(), dy.elements());
        let fresh = |of: &Tensor| Fresh::new(self.name, of.dtype(), of.elem_count());
        let (mut d_gate, mut d_up) = (fresh(gate)?, fresh(up)?);
        let (to_gate, to_up) = (d_gate.shared(), d_up.shared());
        split::<f32, 0>(gs.len(), 1, [], |range, []| {
            let (isa, mut room_of_gate, mut room_of_up) = (Isa::current(), vec![], vec![]);
            let mut operands = [gs, us, dy].map(Reader::new);
            for start in range.clone().step_by(CACHED) {
                let part = start..range.end.min(start + CACHED);
                let len = part.len();
                let [gate, up, dy] = operands.each_mut().map(|operand| operand.floats(part.clone()));
                // SAFETY: each part belongs to one thread.
                unsafe {
                    to_gate.write(start, len, &mut room_of_gate, |d_gate| {
                        to_up.write(start, len, &mut room_of_up, |d_up| {
                            (self.backward)(isa, gate, up, dy, d_gate, d_up);
                        });
                    });
                }
            }
        });
        let gradient = |of: &Tensor, gradient: Fresh| {
            // SAFETY: the ranges of `split` cover all elements, so all are written.
            of.track_op().then(|| tensor(unsafe { gradient.filled(of.elem_count()) }, of.shape()))
        };
        Ok([gradient(gate, d_gate), gradient(up, d_up)])
    }
}

//! Elementwise activations.

use super::kernel::{Isa, activation as kernel};
use super::measure;
use super::operand::{f32s, f32s_of, stored, tensor};
use super::parallel::{Output, build, split};
use super::region::{apply1, apply2};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};

/// GELU's tanh form, Hugging Face's `gelu_new` and `gelu_pytorch_tanh`: ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    apply1(x, Elementwise { name: "gelu", forward: kernel::gelu_tanh, backward: kernel::gelu_tanh_backward })
}

/// GELU by the normal distribution function: x·Φ(x).
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    apply1(x, Elementwise { name: "gelu-erf", forward: kernel::gelu_erf, backward: kernel::gelu_erf_backward })
}

/// x·σ(x), also known as swish.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    apply1(x, Elementwise { name: "silu", forward: kernel::silu, backward: kernel::silu_backward })
}

/// gate·σ(gate)·up: the gated activation of Llama's MLP. Both of the same shape.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    apply2(gate, up, SwiGlu)
}

struct Elementwise {
    name: &'static str,
    forward: fn(Isa, x: &[f32], y: &mut [f32]),
    backward: fn(Isa, x: &[f32], dy: &[f32], dx: &mut [f32]),
}

impl CustomOp1 for Elementwise {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, xs: &CpuStorage, xl: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(self.name);
        let x = f32s(self.name, xs, xl)?;
        let y = build(x.len(), 1, |range, y| (self.forward)(Isa::best(), &x[range], y));
        Ok((stored(self.name, y, xs.dtype())?, xl.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let _timed = measure::backward(self.name);
        let held = (x.storage_and_layout(), dy.storage_and_layout());
        let (xs, dy) = (f32s_of(self.name, &held.0)?, f32s_of(self.name, &held.1)?);
        let dx = build(xs.len(), 1, |range, dx| (self.backward)(Isa::best(), &xs[range.clone()], &dy[range], dx));
        tensor(self.name, dx, x.shape().clone(), x.dtype())
    }
}

struct SwiGlu;

const SWIGLU: &str = "swiglu";

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        SWIGLU
    }

    fn cpu_fwd(&self, gs: &CpuStorage, gl: &Layout, us: &CpuStorage, ul: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(SWIGLU);
        if gl.shape() != ul.shape() {
            bail!("{SWIGLU}: gate {:?} and up {:?} differ in shape", gl.shape(), ul.shape());
        }
        let (gate, up) = (f32s(SWIGLU, gs, gl)?, f32s(SWIGLU, us, ul)?);
        let y = build(gate.len(), 1, |range, y| kernel::swiglu(Isa::best(), &gate[range.clone()], &up[range], y));
        Ok((stored(SWIGLU, y, gs.dtype())?, gl.shape().clone()))
    }

    fn bwd(&self, gate: &Tensor, up: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let _timed = measure::backward(SWIGLU);
        let held = (gate.storage_and_layout(), up.storage_and_layout(), dy.storage_and_layout());
        let (gs, us, dy) = (f32s_of(SWIGLU, &held.0)?, f32s_of(SWIGLU, &held.1)?, f32s_of(SWIGLU, &held.2)?);
        let (mut d_gate, mut d_up) = (vec![0.0; gs.len()], vec![0.0; gs.len()]);
        let outputs = [Output { data: &mut d_gate, floats: 1 }, Output { data: &mut d_up, floats: 1 }];
        split(gs.len(), 1, outputs, |r, [d_gate, d_up]| {
            kernel::swiglu_backward(Isa::best(), &gs[r.clone()], &us[r.clone()], &dy[r], d_gate, d_up);
        });
        Ok((
            if gate.track_op() { tensor(SWIGLU, d_gate, gate.shape().clone(), gate.dtype())? } else { None },
            if up.track_op() { tensor(SWIGLU, d_up, up.shape().clone(), up.dtype())? } else { None },
        ))
    }
}

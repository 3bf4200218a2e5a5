//! Layer norm and RMS norm over the last dimension.

use super::gradient::deliver;
use super::kernel::{Isa, norm as kernel};
use super::measure;
use super::operand::{f32s, f32s_of, rows, stored, tensor};
use super::parallel::{Output, build, split};
use super::region::{apply2, apply3};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};

/// y = (x − mean)/√(variance + ε)·weight + bias over the last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f32,
}

impl LayerNorm {
    /// From tensors of `[size]` each.
    pub fn from_tensors(weight: Tensor, bias: Tensor, eps: f32) -> Self {
        Self { weight, bias, eps }
    }

    /// Weight of ones and bias of zeros, named `weight` and `bias`.
    pub fn new(size: usize, eps: f32, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints(size, "weight", Init::Const(1.0))?;
        let bias = vb.get_with_hints(size, "bias", Init::Const(0.0))?;
        Ok(Self { weight, bias, eps })
    }
}

impl Module for LayerNorm {
    /// `[.., size]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply3(x, &self.weight, &self.bias, LayerNormOp { eps: self.eps })
    }
}

/// y = x/√(mean(x²) + ε)·weight over the last dimension.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    /// From a tensor of `[size]`.
    pub fn from_tensor(weight: Tensor, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// Weight of ones, named `weight`.
    pub fn new(size: usize, eps: f32, vb: VarBuilder) -> Result<Self> {
        Ok(Self { weight: vb.get_with_hints(size, "weight", Init::Const(1.0))?, eps })
    }
}

impl Module for RmsNorm {
    /// `[.., size]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply2(x, &self.weight, RmsNormOp { eps: self.eps })
    }
}

/// Rows whose contributions to the parameters' gradients are one partial sum.
const BLOCK: usize = 64;

#[derive(Clone, Copy, Debug)]
struct LayerNormOp {
    eps: f32,
}

const LAYER_NORM: &str = "layer-norm";

impl CustomOp3 for LayerNormOp {
    fn name(&self) -> &'static str {
        LAYER_NORM
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
        let _timed = measure::forward(LAYER_NORM);
        let (count, size) = rows(LAYER_NORM, xl.shape())?;
        for (name, layout) in [("weight", wl), ("bias", bl)] {
            if layout.dims() != [size] {
                bail!("{LAYER_NORM}: a {name} of {:?} does not fit an input of {:?}", layout.shape(), xl.shape());
            }
        }
        let (x, w, b) = (f32s(LAYER_NORM, xs, xl)?, f32s(LAYER_NORM, ws, wl)?, f32s(LAYER_NORM, bs, bl)?);
        let y = build(count, size, |range, y| {
            kernel::layer_norm(Isa::best(), &x[range.start * size..range.end * size], &w, &b, self.eps, y);
        });
        Ok((stored(LAYER_NORM, y, xs.dtype())?, xl.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let _timed = measure::backward(LAYER_NORM);
        let held = (x.storage_and_layout(), weight.storage_and_layout(), dy.storage_and_layout());
        let (xs, w, dy) = (f32s_of(LAYER_NORM, &held.0)?, f32s_of(LAYER_NORM, &held.1)?, f32s_of(LAYER_NORM, &held.2)?);
        let (isa, size) = (Isa::best(), w.len());
        let mut dx = vec![0.0; xs.len()];
        // Each block's Σ dy·x̂ and Σ dy, side by side.
        let blocks = (xs.len() / size).div_ceil(BLOCK);
        let mut partials = vec![0.0; blocks * 2 * size];
        let outputs =
            [Output { data: &mut dx, floats: BLOCK * size }, Output { data: &mut partials, floats: 2 * size }];
        split(blocks, BLOCK * size, outputs, |range, [dx, partials]| {
            let blocks = range.zip(dx.chunks_mut(BLOCK * size)).zip(partials.chunks_exact_mut(2 * size));
            for ((block, dx), partial) in blocks {
                let start = block * BLOCK * size;
                let (xs, dy) = (&xs[start..start + dx.len()], &dy[start..start + dx.len()]);
                let (d_weight, d_bias) = partial.split_at_mut(size);
                kernel::layer_norm_backward(isa, xs, &w, self.eps, dy, dx, d_weight, d_bias);
            }
        });
        let mut sums = vec![0.0; 2 * size];
        kernel::add_rows(isa, &partials, &mut sums);
        Ok((
            if x.track_op() { tensor(LAYER_NORM, dx, x.shape().clone(), x.dtype())? } else { None },
            deliver(LAYER_NORM, weight, |out| out.copy_from_slice(&sums[..size]))?,
            deliver(LAYER_NORM, bias, |out| out.copy_from_slice(&sums[size..]))?,
        ))
    }
}

#[derive(Clone, Copy, Debug)]
struct RmsNormOp {
    eps: f32,
}

const RMS_NORM: &str = "rms-norm";

impl CustomOp2 for RmsNormOp {
    fn name(&self) -> &'static str {
        RMS_NORM
    }

    fn cpu_fwd(&self, xs: &CpuStorage, xl: &Layout, ws: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(RMS_NORM);
        let (count, size) = rows(RMS_NORM, xl.shape())?;
        if wl.dims() != [size] {
            bail!("{RMS_NORM}: a weight of {:?} does not fit an input of {:?}", wl.shape(), xl.shape());
        }
        let (x, w) = (f32s(RMS_NORM, xs, xl)?, f32s(RMS_NORM, ws, wl)?);
        let y = build(count, size, |range, y| {
            kernel::rms_norm(Isa::best(), &x[range.start * size..range.end * size], &w, self.eps, y);
        });
        Ok((stored(RMS_NORM, y, xs.dtype())?, xl.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let _timed = measure::backward(RMS_NORM);
        let held = (x.storage_and_layout(), weight.storage_and_layout(), dy.storage_and_layout());
        let (xs, w, dy) = (f32s_of(RMS_NORM, &held.0)?, f32s_of(RMS_NORM, &held.1)?, f32s_of(RMS_NORM, &held.2)?);
        let (isa, size) = (Isa::best(), w.len());
        let mut dx = vec![0.0; xs.len()];
        let blocks = (xs.len() / size).div_ceil(BLOCK);
        let mut partials = vec![0.0; blocks * size];
        let outputs = [Output { data: &mut dx, floats: BLOCK * size }, Output { data: &mut partials, floats: size }];
        split(blocks, BLOCK * size, outputs, |range, [dx, partials]| {
            let blocks = range.zip(dx.chunks_mut(BLOCK * size)).zip(partials.chunks_exact_mut(size));
            for ((block, dx), d_weight) in blocks {
                let start = block * BLOCK * size;
                let (xs, dy) = (&xs[start..start + dx.len()], &dy[start..start + dx.len()]);
                kernel::rms_norm_backward(isa, xs, &w, self.eps, dy, dx, d_weight);
            }
        });
        Ok((
            if x.track_op() { tensor(RMS_NORM, dx, x.shape().clone(), x.dtype())? } else { None },
            deliver(RMS_NORM, weight, |out| {
                out.fill(0.0);
                kernel::add_rows(isa, &partials, out);
            })?,
        ))
    }
}

//! RMS norm.

use super::{backward, fits, footprint};
#[cfg(feature = "cuda")]
use crate::gpu;
#[cfg(feature = "cuda")]
use crate::graph::addend;
use crate::graph::apply::{applied, apply};
use crate::graph::gradient::deliver;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{View, f32s, f32s_of, rows};
use crate::graph::output::{build_as, tensor};
use crate::kernel::{Isa, norm as kernel};
use crate::measure;
use crate::meta;
use crate::meta::footprint::{Costs, DeferredCosts, Footprint, Reads, floats};
use crate::residual::residual_norm;
#[cfg(feature = "cuda")]
use crate::residual::residual_norm_on_gpu;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Shape, Tensor};
use candle_nn::{Init, Module, VarBuilder};
use std::borrow::Cow;

/// RMS norm over the last dimension: y = x/√(mean(x²) + ε)·weight.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    op: RmsNormOp,
}

impl RmsNorm {
    /// Creates the norm from a tensor of `[size]`.
    pub fn from_tensor(weight: Tensor, eps: f32) -> Self {
        Self { weight, op: RmsNormOp { eps, unit_offset: false } }
    }

    /// Creates the norm with a weight of ones, named `weight`.
    pub fn new(size: usize, eps: f32, vb: VarBuilder) -> Result<Self> {
        Ok(Self::from_tensor(vb.get_with_hints(size, "weight", Init::Const(1.0))?, eps))
    }

    /// Creates a norm that multiplies by 1 + weight ([`of_offsets`](Self::of_offsets)), with a weight of zeros named
    /// `weight`.
    pub fn with_unit_offset(size: usize, eps: f32, vb: VarBuilder) -> Result<Self> {
        Ok(Self::from_tensor(vb.get_with_hints(size, "weight", Init::Const(0.0))?, eps).of_offsets())
    }

    /// Makes the norm multiply by 1 + weight, as in Gemma: y = x/√(mean(x²) + ε)·(1 + weight). The factors are computed
    /// in f32. Such a norm is unsupported on a GPU.
    #[must_use]
    pub fn of_offsets(self) -> Self {
        Self { op: RmsNormOp { unit_offset: true, ..self.op }, ..self }
    }

    /// Computes (x + branch, norm(x + branch)), as [`LayerNorm::forward_residual`](super::LayerNorm::forward_residual)
    /// does.
    ///
    /// # Errors
    /// Fails if shapes or dtypes do not match.
    pub fn forward_residual(&self, x: &Tensor, branch: &Tensor) -> Result<(Tensor, Tensor)> {
        let (_, size) = rows(RMS_NORM, x.shape())?;
        fits(RMS_NORM, "weight", self.weight.layout(), size)?;
        let op = self.op;
        let record = |total: &Tensor, values| applied([total, &self.weight], op, (values, total.shape().clone()));
        #[cfg(feature = "cuda")]
        if gpu::holds(x) {
            op.check_on_gpu()?;
            let made = || gpu::norm::forward_residual(RMS_NORM, op.eps, [x, branch], &self.weight, None);
            return residual_norm_on_gpu(RMS_NORM, [x, branch], made, |total| self.forward(total), record);
        }
        let held = self.weight.storage_and_layout();
        let w = match meta::tracing() {
            true => Default::default(),
            false => op.factors(f32s_of(RMS_NORM, &held)?),
        };
        residual_norm(
            RMS_NORM,
            x,
            branch,
            |sums, normals| kernel::rms_norm(Isa::current(), sums, &w, op.eps, normals),
            |total| self.forward(total),
            record,
        )
    }
}

impl Module for RmsNorm {
    /// Normalizes `[.., size]`; the result has the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply([x, &self.weight], self.op)
    }
}

#[derive(Clone, Copy, Debug)]
struct RmsNormOp {
    eps: f32,
    /// Whether the factors are 1 + weight.
    unit_offset: bool,
}

impl RmsNormOp {
    /// Returns the factors that a weight represents: the weight, or 1 plus the weight with a unit offset.
    fn factors(self, weight: Cow<'_, [f32]>) -> Cow<'_, [f32]> {
        if !self.unit_offset {
            return weight;
        }
        let mut factors = weight.into_owned();
        factors.iter_mut().for_each(|factor| *factor += 1.0);
        Cow::Owned(factors)
    }

    #[cfg(feature = "cuda")]
    fn check_on_gpu(self) -> Result<()> {
        match self.unit_offset {
            true => candle_core::bail!("{RMS_NORM}: factors of 1 + weight are unsupported on a GPU"),
            false => Ok(()),
        }
    }
}

const RMS_NORM: &str = "rms-norm";

impl Footprint for RmsNormOp {
    const READS: Reads = Reads::inputs([true, true, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let costs = footprint(RMS_NORM, inputs[0], 1, 0)?;
        // The factors 1 + weight in f32. With 16-bit weights they overwrite the widened weight.
        let factors = match self.unit_offset && inputs[0].dtype() == DType::F32 {
            true => floats(inputs[1].elem_count()),
            false => 0,
        };
        let deferred =
            costs.deferred.map(|deferred| DeferredCosts { backward: deferred.backward + factors, ..deferred });
        Ok(Costs { forward: costs.forward + factors, backward: costs.backward + factors, deferred, ..costs })
    }
}

impl Op<2> for RmsNormOp {
    fn name(&self) -> &'static str {
        RMS_NORM
    }

    fn cpu_fwd(&self, [(xs, xl), (ws, wl)]: Inputs<'_, CpuStorage, 2>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(RMS_NORM);
        let (count, size) = rows(RMS_NORM, xl.shape())?;
        fits(RMS_NORM, "weight", wl, size)?;
        let (x, w) = (View::new(RMS_NORM, xs, xl)?, self.factors(f32s(RMS_NORM, ws, wl)?));
        let x = x.elements();
        let y = build_as(RMS_NORM, xs.dtype(), count, size, [x], |_, [x], y| {
            kernel::rms_norm(Isa::current(), x, &w, self.eps, y);
        })?;
        Ok((y, xl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl), (ws, wl)]: Inputs<'_, CudaStorage, 2>) -> Result<(CudaStorage, Shape)> {
        let (_, size) = rows(RMS_NORM, xl.shape())?;
        fits(RMS_NORM, "weight", wl, size)?;
        self.check_on_gpu()?;
        Ok((gpu::norm::forward(RMS_NORM, self.eps, (xs, xl), (ws, wl), None)?, xl.shape().clone()))
    }

    fn bwd(&self, [x, weight]: [&Tensor; 2], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        #[cfg(feature = "cuda")]
        if gpu::holds(x) {
            let [dx, d_weight, _] = gpu::norm::backward(RMS_NORM, self.eps, [x, dy], weight, None, addend::take(x))?;
            return Ok([dx, d_weight]);
        }
        let _timed = measure::backward(RMS_NORM);
        let held = (x.storage_and_layout(), weight.storage_and_layout(), dy.storage_and_layout());
        let (xs, dy) = (View::of(RMS_NORM, &held.0)?, View::of(RMS_NORM, &held.2)?);
        let w = self.factors(f32s_of(RMS_NORM, &held.1)?);
        let (isa, size) = (Isa::current(), w.len());
        let (dx, partials) =
            backward(RMS_NORM, [xs.elements(), dy.elements()], size, size, x.dtype(), |x, dy, dx, d_weight| {
                kernel::rms_norm_backward(isa, x, &w, self.eps, dy, dx, d_weight);
            })?;
        Ok([
            x.track_op().then(|| tensor(dx, x.shape())),
            deliver(RMS_NORM, weight, |out| {
                out.fill(0.0);
                kernel::add_rows(isa, &partials, out);
            })?,
        ])
    }
}

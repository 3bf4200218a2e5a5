//! Attention on GPT-2's packed projection. Its gradient is one packed tensor too.

use crate::attention::dropout::Mask;
use crate::attention::geometry::{Geometry, Layouts, Queries};
use crate::attention::heads::backward;
use crate::attention::span::Firsts;
#[cfg(feature = "cuda")]
use crate::attention::state::not_on_gpu;
use crate::attention::state::{OP, State, footprint};
#[cfg(feature = "cuda")]
use crate::device::{Gpu, Operand};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{Fresh, tensor};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;

/// Causal attention on a tensor of `[batch, time, 3·heads·size]`: q, then k, then v.
pub(super) struct Packed {
    heads: usize,
    state: State,
    #[cfg(feature = "cuda")]
    on_gpu: OnceLock<gpu::attention::SavedForward>,
}

impl Packed {
    pub(super) fn new(heads: usize, firsts: Arc<Firsts>, mask: Option<Mask>) -> Self {
        Self {
            heads,
            state: State::new(firsts, mask),
            #[cfg(feature = "cuda")]
            on_gpu: OnceLock::new(),
        }
    }

    fn geometry(&self, qkv: &Shape) -> Result<Geometry> {
        Self::geometry_of(self.heads, qkv)
    }

    pub(super) fn geometry_of(heads: usize, qkv: &Shape) -> Result<Geometry> {
        let (batch, time, width) = qkv.dims3()?;
        if heads == 0 || width == 0 || width % (3 * heads) != 0 {
            bail!("{OP}: the width {width} is not a multiple of three times {heads} heads");
        }
        let queries = Queries::all(time);
        Ok(Geometry { batch, time, queries, heads, kv_heads: heads, size: width / (3 * heads) })
    }
}

impl Footprint for Packed {
    const READS: Reads = Reads { output: true, ..Reads::inputs([true, false, false]) };

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let g = self.geometry(inputs[0].shape())?;
        Ok(footprint(g, Costs::new((g.batch, g.time, g.heads * g.size), inputs[0].dtype())))
    }
}

impl Op<1> for Packed {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let geometry = self.geometry(xl.shape())?;
        let x = View::new(OP, xs, xl)?;
        let shape = Shape::from((geometry.batch, geometry.time, geometry.heads * geometry.size));
        let len = shape.elem_count();
        let out = Fresh::new(OP, xs.dtype(), len)?;
        Ok((self.state.forward(geometry, Layouts::packed(geometry), [x.elements(); 3], out, len), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        not_on_gpu(self.state.mask.as_ref())?;
        let geometry = self.geometry(xl.shape())?;
        let (gpu, x) = (Gpu::new(&xs.device)?, [Operand::new(OP, xs, xl)?]);
        let (out, kept) = gpu::attention::forward(OP, &gpu, geometry, xs.dtype(), &x, &self.state.firsts)?;
        let _ = self.on_gpu.set(kept);
        Ok((out, Shape::from((geometry.batch, geometry.time, geometry.heads * geometry.size))))
    }

    fn bwd(&self, [x]: [&Tensor; 1], out: &Tensor, d_out: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let _timed = measure::backward(OP);
        let geometry = self.geometry(x.shape())?;
        #[cfg(feature = "cuda")]
        if let Some(kept) = self.on_gpu.get() {
            let operands = [Operand::of(OP, x)?];
            let outs = [&Operand::of(OP, out)?, &Operand::of(OP, d_out)?];
            let gpu = Gpu::of(OP, x)?;
            let [dx] = gpu::attention::backward(OP, &gpu, geometry, x.dtype(), &operands, outs, kept)?;
            return Ok([Some(gpu::tensor(dx, x.shape()))]);
        }
        let held = [x, out, d_out].map(Tensor::storage_and_layout);
        let [xs, os, ds] = held.each_ref().map(|held| View::of(OP, held));
        let (xs, os, ds) = (xs?, os?, ds?);
        let saved = self.state.saved([xs.elements(); 3], os.elements(), ds.elements())?;
        let mut dx = Fresh::new(OP, x.dtype(), x.elem_count())?;
        backward(geometry, Layouts::packed(geometry), &saved, [dx.shared(); 3]);
        // SAFETY: `backward` writes all elements.
        Ok([Some(tensor(unsafe { dx.filled(x.elem_count()) }, x.shape()))])
    }
}

//! A linear layer and GELU in one operation.
//!
//! The linear layer's output is the widest activation of a transformer. If the layer were a separate node of candle's
//! graph, candle would zero the gradient of this output, add to it and copy it once more. Here that gradient exists
//! only inside the backward.

#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{build_as, tensor};
use crate::kernel::{Isa, activation as kernel};
use crate::linear::affine::{Affine, bias_gradient};
use crate::measure;
use crate::meta::footprint::{Costs, DeferredCosts, Footprint, Reads, bytes, element_rooms};
use crate::product::Elements;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, Shape, Storage, Tensor, bail};
#[cfg(feature = "cuda")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
#[cfg(feature = "cuda")]
use zero_kernels::activation::Function;

/// Computes the tanh form of GELU of x·W + b. On the CPU the result is bit-identical to the two operations in
/// sequence.
pub(crate) fn linear_gelu(x: &Tensor, weight: &Tensor, bias: &Tensor, affine: Affine) -> Result<Tensor> {
    linear_gelu_for(x, weight, bias, affine, Arc::default())
}

/// Does the same as [`linear_gelu`], for a result that only one operation reads. That operation's backward may apply
/// GELU's derivative itself.
pub(crate) fn linear_gelu_for(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    affine: Affine,
    before: Arc<BeforeGelu>,
) -> Result<Tensor> {
    apply([x, weight, bias], LinearGelu { affine, before })
}

/// The input of GELU.
#[derive(Debug, Default)]
pub(crate) struct BeforeGelu {
    /// x·W + b, kept for the backward.
    sum: OnceLock<Storage>,
    /// Whether the upstream gradient already includes GELU's derivative, so that it is the gradient of the sum.
    #[cfg(feature = "cuda")]
    has_slope: AtomicBool,
}

#[cfg(feature = "cuda")]
impl BeforeGelu {
    /// Calls `take` with the sum, so that the operation that reads GELU's result can multiply the gradient that it
    /// computes by GELU's derivative. `take` returns whether it does, which this function records and returns.
    pub(crate) fn take_slope(&self, take: impl FnOnce(&CudaStorage) -> Result<bool>) -> Result<bool> {
        let has_slope = match self.sum.get() {
            Some(Storage::Cuda(sum)) => take(sum)?,
            _ => false,
        };
        self.has_slope.store(has_slope, Ordering::Relaxed);
        Ok(has_slope)
    }
}

struct LinearGelu {
    affine: Affine,
    before: Arc<BeforeGelu>,
}

const OP: &str = "linear-gelu";

impl Footprint for LinearGelu {
    const READS: Reads = Reads::OF_LINEAR;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (x, dtype) = (inputs[0], inputs[0].dtype());
        let linear = self.affine.footprint(OP, inputs)?;
        let results = linear.shape.elem_count();
        let sum = bytes(results, dtype);
        // The sum is computed before the output is allocated.
        let forward = element_rooms(dtype, results, 1).max(linear.forward.saturating_sub(sum));
        // The gradient of the sum. While it is computed, dx is not allocated yet.
        let dx = if x.track_op() { bytes(x.elem_count(), dtype) } else { 0 };
        let rooms = element_rooms(dtype, results, 2).saturating_sub(dx);
        let backward = |linear: u64| sum + rooms.max(linear);
        let deferred = linear.deferred.map(|deferred| DeferredCosts {
            keeps_gradient: false,
            operands: if deferred.keeps_input { sum } else { 0 },
            backward: backward(deferred.backward),
            ..deferred
        });
        Ok(Costs { saved: sum, forward, backward: backward(linear.backward), deferred, ..linear }.with_epilogue())
    }
}

impl Op<3> for LinearGelu {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl), (ws, wl), (bs, bl)]: Inputs<'_, CpuStorage, 3>) -> Result<(CpuStorage, Shape)> {
        let (sum, shape) = self.affine.forward(OP, (xs, xl), (ws, wl), Some((bs, bl)))?;
        let _timed = measure::forward("gelu");
        let y = {
            let sum = Elements::all(OP, &sum)?;
            build_as(OP, xs.dtype(), sum.len(), 1, [sum], |_, [sum], y| kernel::gelu_tanh(Isa::current(), sum, y))?
        };
        let _ = self.before.sum.set(Storage::Cpu(sum));
        Ok((y, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl), (ws, wl), (bs, bl)]: Inputs<'_, CudaStorage, 3>) -> Result<(CudaStorage, Shape)> {
        let ([sum, y], shape) = gpu::affine::forward_gelu(self.affine, OP, (xs, xl), (ws, wl), (bs, bl))?;
        let _ = self.before.sum.set(Storage::Cuda(sum));
        Ok((y, shape))
    }

    fn bwd(&self, [x, w, bias]: [&Tensor; 3], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let sum = match self.before.sum.get() {
            Some(Storage::Cpu(sum)) => sum,
            #[cfg(feature = "cuda")]
            Some(Storage::Cuda(sum)) => {
                let d_sum = match self.before.has_slope.load(Ordering::Relaxed) {
                    true => dy.clone(),
                    false => gpu::activation::backward_from(OP, Function::GeluTanh, sum, dy)?,
                };
                return gpu::affine::backward(self.affine, OP, [x, w], Some(bias), &d_sum, None);
            }
            _ => bail!("{OP}: the backward ran before the forward"),
        };
        let d_sum = {
            let _timed = measure::backward("gelu");
            let held = dy.storage_and_layout();
            let dy = View::of(OP, &held)?;
            let (sum, dy) = (Elements::all(OP, sum)?, dy.elements());
            build_as(OP, x.dtype(), sum.len(), 1, [sum, dy], |_, [sum, dy], d_sum| {
                kernel::gelu_tanh_backward(Isa::current(), sum, dy, d_sum);
            })?
        };
        let d_sum = tensor(d_sum, dy.shape());
        let [dx, d_weight] = self.affine.backward(OP, x, w, &d_sum)?;
        Ok([dx, d_weight, bias_gradient(OP, Some(bias), &d_sum)?])
    }
}

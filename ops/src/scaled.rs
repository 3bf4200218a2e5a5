//! Multiplication by a number.

use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{build_as, tensor};
use crate::meta::footprint::{Costs, Footprint, Reads, element_rooms};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};

/// Computes x·factor. Returns x itself if the factor is 1.
pub fn scaled(x: &Tensor, factor: f32) -> Result<Tensor> {
    if factor == 1.0 { Ok(x.clone()) } else { apply([x], Scaled(factor)) }
}

const OP: &str = "scaled";

/// x·s.
#[derive(Clone, Copy, Debug)]
struct Scaled(f32);

impl Scaled {
    fn apply(self, x: View<'_>, storage: &CpuStorage) -> Result<CpuStorage> {
        let elements = x.elements();
        build_as(OP, storage.dtype(), elements.len(), 1, [elements], |_, [x], y| {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = self.0 * x;
            }
        })
    }
}

impl Footprint for Scaled {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (shape, dtype) = (inputs[0].shape(), inputs[0].dtype());
        let rooms = element_rooms(dtype, shape.elem_count(), 1);
        Ok(Costs { forward: rooms, backward: rooms, ..Costs::new(shape, dtype) })
    }
}

impl Op<1> for Scaled {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        Ok((self.apply(View::new(OP, xs, xl)?, xs)?, xl.shape().clone()))
    }

    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        Ok((xs.affine(xl, f64::from(self.0), 0.0)?, xl.shape().clone()))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        if dy.device().is_cuda() {
            return Ok([Some(dy.detach().affine(f64::from(self.0), 0.0)?)]);
        }
        let held = dy.storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*held.0 else { bail!("{OP}: the gradient is not on the CPU") };
        Ok([Some(tensor(self.apply(View::of(OP, &held)?, storage)?, x.shape()))])
    }
}

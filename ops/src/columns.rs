//! Copies some columns of a matrix, so that a layer can use a part of a product.

#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{View, rows, with_last};
use crate::graph::output::{build_as, tensor};
#[cfg(feature = "cuda")]
use crate::graph::storage::take;
use crate::kernel::Isa;
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads, rooms};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, D};
use std::ops::Range;

/// Copies the elements `range` of the last dimension.
///
/// # Errors
/// Fails if `range` is empty or ends beyond the dimension.
pub fn columns(x: &Tensor, range: Range<usize>) -> Result<Tensor> {
    apply([x], Columns { start: range.start, count: range.len() })
}

#[derive(Clone, Copy, Debug)]
struct Columns {
    start: usize,
    count: usize,
}

const OP: &str = "columns";

impl Columns {
    /// Returns the number of rows, their width, and the shape of the result.
    fn fits(self, shape: &Shape) -> Result<(usize, usize, Shape)> {
        let (count, width) = rows(OP, shape)?;
        if self.count == 0 || self.start + self.count > width {
            bail!("{OP}: columns {}..{} are out of range for {width} columns", self.start, self.start + self.count);
        }
        Ok((count, width, with_last(shape, self.count)))
    }
}

impl Footprint for Columns {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (count, width, shape) = self.fits(inputs[0].shape())?;
        let dtype = inputs[0].dtype();
        let [forward, backward] = [self.count, width].map(|width| rooms(dtype, count, width, 0));
        Ok(Costs { forward, backward, ..Costs::new(shape, dtype) })
    }
}

impl Op<1> for Columns {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let (count, width, shape) = self.fits(xl.shape())?;
        let x = View::new(OP, xs, xl)?;
        let x = x.elements();
        let y = build_as(OP, xs.dtype(), count, self.count, [], |range, [], y| {
            for (row, y) in range.zip(y.chunks_exact_mut(self.count)) {
                x.read(Isa::current(), row * width + self.start, y);
            }
        })?;
        Ok((y, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        let (.., shape) = self.fits(xl.shape())?;
        let y = gpu::copied(OP, xs, &xl.narrow(shape.rank() - 1, self.start, self.count)?)?;
        Ok((gpu::storage(take(&y)?)?, shape))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let _timed = measure::backward(OP);
        let (count, width, _) = self.fits(x.shape())?;
        #[cfg(feature = "cuda")]
        if gpu::holds(dy) {
            let right = width - self.start - self.count;
            return Ok([Some(dy.detach().pad_with_zeros(D::Minus1, self.start, right)?.contiguous()?)]);
        }
        let held = dy.storage_and_layout();
        let dy = View::of(OP, &held)?;
        let dy = dy.elements();
        let dx = build_as(OP, x.dtype(), count, width, [], |range, [], dx| {
            for (row, dx) in range.zip(dx.chunks_exact_mut(width)) {
                dx.fill(0.0);
                dy.read(Isa::current(), row * self.count, &mut dx[self.start..self.start + self.count]);
            }
        })?;
        Ok([Some(tensor(dx, x.shape()))])
    }
}

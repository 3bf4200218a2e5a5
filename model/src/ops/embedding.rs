//! Rows of a table by index.

use super::gradient::deliver;
use super::kernel::Isa;
use super::measure;
use super::operand::{View, indices, indices_of};
use super::output::build_as;
use super::parallel::{Output, split};
use super::product::Elements;
use super::region::{apply2, region};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use candle_nn::{Init, Module, VarBuilder};

/// A table of `[entries, size]` whose rows are looked up by index.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// From a tensor of `[entries, size]`.
    pub fn from_tensor(weight: Tensor) -> Self {
        Self { weight }
    }

    /// A normal table of standard deviation `std`, named `weight`.
    pub fn new(entries: usize, size: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints((entries, size), "weight", Init::Randn { mean: 0.0, stdev: std })?;
        Ok(Self { weight })
    }

    pub(crate) fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    /// Indices `[..]` (u32, i64 or u8) to rows `[.., size]`. An index outside of the table is an error.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        region(&self.weight, |weight| apply2(weight, ids, Gather))
    }
}

#[derive(Clone, Copy, Debug)]
struct Gather;

const OP: &str = "embedding";

impl CustomOp2 for Gather {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, ws: &CpuStorage, wl: &Layout, is: &CpuStorage, il: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let (entries, size) = wl.shape().dims2()?;
        let ids = indices(OP, is, il, entries)?;
        let weight = View::new(OP, ws, wl)?;
        let weight = weight.elements();
        let y = build_as(OP, ws.dtype(), ids.len(), size, |range, y| {
            for (row, &id) in y.chunks_exact_mut(size.max(1)).zip(&ids[range]) {
                weight.read(Isa::best(), id * size, row);
            }
        })?;
        let mut dims = il.dims().to_vec();
        dims.push(size);
        Ok((y, Shape::from(dims)))
    }

    fn bwd(&self, weight: &Tensor, ids: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let _timed = measure::backward(OP);
        let (entries, size) = weight.dims2()?;
        let ids = indices_of(OP, ids, entries)?;
        let held = dy.storage_and_layout();
        let dy = View::of(OP, &held)?;
        Ok((deliver(OP, weight, |out| scatter(&ids, dy.elements(), size, out))?, None))
    }
}

/// Row `id` of `out` becomes the sum of the rows of `dy` at the positions of `id`, in the order of the positions.
fn scatter(ids: &[usize], dy: Elements<'_>, size: usize, out: &mut [f32]) {
    if size == 0 {
        return;
    }
    split(out.len() / size, size, [Output { data: out, floats: size }], |range, [out]| {
        out.fill(0.0);
        for (at, &id) in ids.iter().enumerate() {
            if range.contains(&id) {
                let start = (id - range.start) * size;
                let dy = dy.floats(at * size..(at + 1) * size);
                for (total, dy) in out[start..start + size].iter_mut().zip(&*dy) {
                    *total += dy;
                }
            }
        }
    });
}

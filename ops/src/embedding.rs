//! Embeddings: rows of a table looked up by index.

use crate::forward_only;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::fused_block;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{View, indices, indices_of};
use crate::graph::output::{Reader, build_as, stored, tensor};
use crate::kernel::Isa;
use crate::measure;
use crate::meta;
use crate::meta::footprint::{Costs, DeferredCosts, Footprint, Reads, bytes, floats, indices_room, rooms};
use crate::parallel::{Output, parts, split};
use crate::product::Elements;
use crate::scaled::scaled;
use crate::sink::{self, Slot};
use crate::tensor::{OwnEntries, get_cut, sum_to_slices};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Shape, Tensor};
use candle_nn::{Init, Module, VarBuilder};

/// A table of `[entries, size]` whose rows are looked up by index.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
    factor: f64,
    /// The entries of this rank, if ranks split the table.
    cut: Option<OwnEntries>,
}

impl Embedding {
    /// Creates the embedding from a tensor of `[entries, size]`.
    pub fn from_tensor(weight: Tensor) -> Self {
        Self { weight, factor: 1.0, cut: None }
    }

    /// Creates a table named `weight`, drawn from a normal distribution with standard deviation `std`.
    pub fn new(entries: usize, size: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let normal = Init::Randn { mean: 0.0, stdev: std };
        let weight = forward_only(|| vb.get_with_hints((entries, size), "weight", normal))?;
        Ok(Self::from_tensor(weight))
    }

    /// Creates a table as [`Embedding::new`] does, with its entries split among the ranks of a tensor group. The
    /// forward then maps the indices of whole sequences, `[batch, time]`, to this rank's slice of their rows,
    /// `[batch, slice, size]`.
    ///
    /// # Errors
    /// Returns errors of the builder.
    pub fn vocab_parallel(entries: usize, size: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        let normal = Init::Randn { mean: 0.0, stdev: std };
        let weight = forward_only(|| get_cut(&vb, &[entries, size], (0, &[entries]), "weight", normal))?;
        Ok(Self { cut: OwnEntries::of(entries), ..Self::from_tensor(weight) })
    }

    /// Multiplies rows by a factor, which is rounded to the table's dtype. Gemma multiplies by the square root of the
    /// row size.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// Returns the table.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    /// Maps indices `[..]` (u32, i64 or u8) to rows `[.., size]`. An index out of range is an error; on a GPU its row
    /// is NaN, and `device::check` reports the error later.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let factor = match self.weight.dtype() {
            DType::BF16 => half::bf16::from_f64(self.factor).to_f32(),
            DType::F16 => half::f16::from_f64(self.factor).to_f32(),
            _ => self.factor as f32,
        };
        fused_block(&self.weight, |weight| {
            let rows = apply([weight, ids], Gather { own: self.cut.clone() })?;
            let rows = if self.cut.is_some() { sum_to_slices(&rows)? } else { rows };
            scaled(&rows, factor)
        })
    }
}

#[derive(Clone, Debug)]
struct Gather {
    /// The entries of this rank, if ranks split the table. The rows of other ranks' entries are zero.
    own: Option<OwnEntries>,
}

/// Stands for the row of an entry that belongs to another rank.
const ELSEWHERE: usize = usize::MAX;

impl Gather {
    /// Returns the limit of the indices: the number of entries of the whole table. `entries` is the number of rows of
    /// this rank's table.
    fn entries(&self, entries: usize) -> usize {
        self.own.as_ref().map_or(entries, |own| own.all)
    }

    /// Maps each index to its row in this rank's table, or to `ELSEWHERE`.
    fn rows(&self, mut ids: Vec<usize>) -> Vec<usize> {
        if let Some(own) = &self.own {
            ids.iter_mut().for_each(|id| *id = own.place(*id).unwrap_or(ELSEWHERE));
        }
        ids
    }
}

const OP: &str = "embedding";

impl Footprint for Gather {
    const READS: Reads = Reads::inputs([false, true, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (weight, ids) = (inputs[0], inputs[1]);
        let ((entries, size), dtype) = (weight.dims2()?, weight.dtype());
        let count = ids.elem_count();
        let mut dims = ids.dims().to_vec();
        dims.push(size);
        let (copied, kept) = indices_room(ids);
        let output = bytes(count * size, dtype);
        let forward = copied.saturating_sub(output).max(kept + rooms(dtype, count, size, 0));
        // If dy is not f32, each thread holds a row of it in f32. If the result is added to an earlier contribution,
        // the order of the positions is also in memory, and each thread holds a row of sums.
        let parts = parts(entries, size) as u64;
        let row = if dtype == DType::F32 { 0 } else { floats(size) };
        let summing = match meta::is_written(weight) {
            true => (2 * size_of::<usize>() * count) as u64 + parts * floats(size),
            false => 0,
        };
        let backward = copied.max(kept + summing + parts * row);
        // Ids that the layer made itself, such as GPT-2's positions, live as long as this operation.
        let saved = meta::bytes_of_solid(ids);
        let table = floats(entries * size);
        let deferred =
            DeferredCosts { made: table, backward: copied.max(kept + table + parts * row), ..DeferredCosts::default() };
        Ok(Costs {
            saved,
            forward,
            backward,
            gradients: [false; 3],
            deferred: Some(deferred),
            ..Costs::new(dims, dtype)
        })
    }
}

impl Op<2> for Gather {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(ws, wl), (is, il)]: Inputs<'_, CpuStorage, 2>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let (entries, size) = wl.shape().dims2()?;
        let ids = self.rows(indices(OP, is, il, self.entries(entries))?);
        let weight = View::new(OP, ws, wl)?;
        let weight = weight.elements();
        let y = build_as(OP, ws.dtype(), ids.len(), size, [], |range, [], y| {
            for (row, &id) in y.chunks_exact_mut(size.max(1)).zip(&ids[range]) {
                match id {
                    ELSEWHERE => row.fill(0.0),
                    _ => weight.read(Isa::current(), id * size, row),
                }
            }
        })?;
        let mut dims = il.dims().to_vec();
        dims.push(size);
        Ok((y, Shape::from(dims)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(ws, wl), (is, il)]: Inputs<'_, CudaStorage, 2>) -> Result<(CudaStorage, Shape)> {
        let (entries, size) = wl.shape().dims2()?;
        let mut dims = il.dims().to_vec();
        dims.push(size);
        let rows = gpu::embedding::forward(OP, (ws, wl), (is, il), [entries, size], self.own.as_ref())?;
        Ok((rows, Shape::from(dims)))
    }

    fn bwd(&self, [weight, ids]: [&Tensor; 2], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        #[cfg(feature = "cuda")]
        if gpu::holds(dy) {
            return Ok([gpu::embedding::backward(OP, [weight, ids, dy], self.own.as_ref())?, None]);
        }
        let _timed = measure::backward(OP);
        let (entries, size) = weight.dims2()?;
        let ids = self.rows(indices_of(OP, ids, self.entries(entries))?);
        let held = dy.storage_and_layout();
        let dy = View::of(OP, &held)?;
        if !weight.track_op() {
            return Ok([None, None]);
        }
        let taken = sink::write(weight, |slot| match slot {
            Slot::First(out) => scatter(&ids, dy.elements(), size, out),
            Slot::Another(out) | Slot::Further(out) => add(&ids, dy.elements(), size, out),
        });
        if taken {
            return Ok([None, None]);
        }
        let mut gradient = vec![0.0; entries * size];
        scatter(&ids, dy.elements(), size, &mut gradient);
        Ok([Some(tensor(stored(OP, gradient, weight.dtype())?, weight.shape())), None])
    }
}

/// For each id, sums the rows of `dy` at the positions where `ids` holds it, in order, and adds the sum to row `id` of
/// `out`. Skips indices beyond `out`. This equals computing the table of [`scatter`] and adding it to `out`, except for
/// the sign of zeros in rows without a contribution, but allocates no table of mostly zeros.
fn add(ids: &[usize], dy: Elements<'_>, size: usize, out: &mut [f32]) {
    if size == 0 {
        return;
    }
    let mut order: Vec<(usize, usize)> = ids.iter().enumerate().map(|(at, &id)| (id, at)).collect();
    order.sort_unstable();
    split(out.len() / size, size, [Output { data: out, floats: size }], |range, [out]| {
        let up_to = |end: usize| order.partition_point(|&(id, _)| id < end);
        let (mut sum, mut dy) = (vec![0.0; size], Reader::new(dy));
        for positions in order[up_to(range.start)..up_to(range.end)].chunk_by(|a, b| a.0 == b.0) {
            sum.fill(0.0);
            for &(_, at) in positions {
                for (total, dy) in sum.iter_mut().zip(dy.floats(at * size..(at + 1) * size)) {
                    *total += dy;
                }
            }
            let start = (positions[0].0 - range.start) * size;
            for (total, sum) in out[start..start + size].iter_mut().zip(&sum) {
                *total += sum;
            }
        }
    });
}

/// For each id, sums the rows of `dy` at the positions where `ids` holds it, in order, and writes the sum to row `id`
/// of `out`.
fn scatter(ids: &[usize], dy: Elements<'_>, size: usize, out: &mut [f32]) {
    if size == 0 {
        return;
    }
    split(out.len() / size, size, [Output { data: out, floats: size }], |range, [out]| {
        out.fill(0.0);
        let mut dy = Reader::new(dy);
        for (at, &id) in ids.iter().enumerate() {
            if range.contains(&id) {
                let start = (id - range.start) * size;
                let dy = dy.floats(at * size..(at + 1) * size);
                for (total, dy) in out[start..start + size].iter_mut().zip(dy) {
                    *total += dy;
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn add_equals_scatter_then_add() {
        let (entries, size) = (300, 7);
        let ids: Vec<usize> = (0..500).map(|i| (i * i * 7 + i) % 211).collect();
        let dy: Vec<f32> = (0..ids.len() * size).map(|i| 1.0 / (i as f32 + 3.0)).collect();
        let before: Vec<f32> = (0..entries * size).map(|i| (i as f32).sin()).collect();
        for threads in [1, 3] {
            crate::set_threads(threads);
            let mut scattered = vec![f32::NAN; entries * size];
            scatter(&ids, Elements::F32(&dy), size, &mut scattered);
            let want: Vec<u32> = before.iter().zip(&scattered).map(|(a, b)| (a + b).to_bits()).collect();
            let mut found = before.clone();
            add(&ids, Elements::F32(&dy), size, &mut found);
            assert_eq!(found.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), want);
        }
        crate::set_threads(1);
    }
}

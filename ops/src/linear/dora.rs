//! DoRA: a LoRA adapter that also trains the norm of each row of the weight.
//!
//! y = c·(x·Wᵀ + s·(x·Aᵀ)·Bᵀ) + b with c = m / ‖W + s·B·A‖, where m is a trained vector with one magnitude per output,
//! and ‖·‖ is the norm of each row. The backward treats the norm as a constant. Liu et al., "DoRA: Weight-Decomposed
//! Low-Rank Adaptation", ICML 2024, equation 5 and section 4.3. As in the library PEFT, m starts as the norm. Dropout
//! applies to the input only in terms with the factor c − 1 or s, so the base output x·Wᵀ sees the whole input.

use std::borrow::Cow;
use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor, bail};

#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::gradient::{Tile, deliver_tile};
use crate::graph::op::{Inputs, Op, leading};
use crate::graph::operand::{View, f32s, f32s_of, rows};
use crate::graph::output::{Reader, build_as, tensor};
use crate::linear::affine::{Affine, BLOCK, bias_gradient};
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, bytes, floats, rooms};
use crate::product::{Elements, Matrix, product};
use crate::sequence::SequenceGroup;
use crate::threads;

const OP: &str = "dora";

/// A weight and the adapter's product that is added to it: W + s·B·A.
pub(crate) struct Direction<'a> {
    pub(crate) affine: Affine,
    pub(crate) weight: Elements<'a>,
    /// `[rank, inputs]`.
    pub(crate) a: Elements<'a>,
    /// `[outputs, rank]`.
    pub(crate) b: Elements<'a>,
    pub(crate) rank: usize,
    pub(crate) scale: f32,
}

/// Number of rows of the weight for which B·A is computed at a time.
const ROWS: usize = 64;

impl Direction<'_> {
    /// Returns (outputs, rows of the weight, columns of the weight).
    fn sizes(&self) -> (usize, usize, usize) {
        let (inputs, outputs) = (self.a.len() / self.rank, self.b.len() / self.rank);
        match self.affine {
            Affine::OutputsInputs | Affine::Quantized(_) => (outputs, outputs, inputs),
            Affine::InputsOutputs => (outputs, inputs, outputs),
        }
    }

    /// Returns, for each output, the sum of the squares of its weights in W + s·B·A.
    pub(crate) fn squares(&self) -> Vec<f64> {
        let (outputs, count, columns) = self.sizes();
        let (a, b) =
            (Matrix::new(self.a, self.rank, self.a.len() / self.rank), Matrix::new(self.b, outputs, self.rank));
        let mut sums = vec![0.0f64; outputs];
        let (mut delta, mut weight) = (vec![0.0; ROWS.min(count) * columns], Reader::new(self.weight));
        for first in (0..count).step_by(ROWS) {
            let block = first..count.min(first + ROWS);
            let delta = &mut delta[..block.len() * columns];
            match self.affine {
                Affine::OutputsInputs | Affine::Quantized(_) => {
                    let b = Matrix::new(self.b.skip(first * self.rank), block.len(), self.rank);
                    product(delta, b, a, threads());
                }
                Affine::InputsOutputs => {
                    let a = Matrix::strided(self.a.skip(first), self.rank, block.len(), count);
                    product(delta, a.t(), b.t(), threads());
                }
            }
            for (row, delta) in block.zip(delta.chunks_exact(columns)) {
                let weight = weight.floats(row * columns..(row + 1) * columns);
                let squares =
                    weight.iter().zip(delta).map(|(&w, &delta)| f64::from(delta.mul_add(self.scale, w)).powi(2));
                match self.affine {
                    Affine::OutputsInputs | Affine::Quantized(_) => sums[row] = squares.sum(),
                    Affine::InputsOutputs => sums.iter_mut().zip(squares).for_each(|(sum, square)| *sum += square),
                }
            }
        }
        sums
    }
}

fn roots(squares: &[f64]) -> Vec<f32> {
    squares.iter().map(|sum| sum.sqrt() as f32).collect()
}

/// Adds up the sums of squares that the ranks of a group computed.
fn over_ranks(group: &SequenceGroup, squares: &[f64]) -> Result<Vec<f64>> {
    let own: Vec<f32> = squares.iter().map(|&sum| sum as f32).collect();
    let mut sums = vec![0.0; squares.len()];
    for part in group.concatenated(own)?.chunks_exact(squares.len()) {
        sums.iter_mut().zip(part).for_each(|(sum, &part)| *sum += f64::from(part));
    }
    Ok(sums)
}

/// Returns the norm of each output's weights in W + s·B·A, which is the initial magnitude vector. W is
/// `[outputs, inputs]`, or `[inputs, outputs]` with `inputs_first`. A is `[rank, inputs]` and B is `[outputs, rank]`.
///
/// # Panics
/// Panics if the lengths do not match.
#[must_use]
pub fn weight_norms(weight: &[f32], [a, b]: [&[f32]; 2], rank: usize, scale: f32, inputs_first: bool) -> Vec<f32> {
    assert_eq!(weight.len() * rank * rank, a.len() * b.len(), "the weight does not match its adapter");
    let affine = if inputs_first { Affine::InputsOutputs } else { Affine::OutputsInputs };
    roots(&Direction { affine, weight: weight.into(), a: a.into(), b: b.into(), rank, scale }.squares())
}

/// c·p + b for p of `[.., outputs]`, with c = m / ‖W + s·B·A‖ and an optional bias b.
pub(crate) struct Magnified {
    pub(crate) affine: Affine,
    pub(crate) weight: Tensor,
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
    pub(crate) scale: f32,
    /// The ranks that split the inputs of the weight, if any do.
    pub(crate) group: Option<SequenceGroup>,
    /// The norms, which the forward computes and the backward reads: f32 on the host, the dtype of p on a GPU.
    pub(crate) norms: OnceLock<Tensor>,
}

impl Magnified {
    fn norms(&self) -> Result<&Tensor> {
        match self.norms.get() {
            Some(norms) => Ok(norms),
            None => bail!("{OP}: the backward ran before the forward"),
        }
    }

    fn apply(
        &self,
        (ps, pl): (&CpuStorage, &Layout),
        magnitudes: &[f32],
        bias: Option<&[f32]>,
    ) -> Result<(CpuStorage, Shape)> {
        let (count, outputs) = rows(OP, pl.shape())?;
        let squares = {
            let held = [&self.weight, &self.a, &self.b].map(Tensor::storage_and_layout);
            let [(weight, layout), a, b] = &held;
            let Storage::Cpu(weight) = &**weight else { bail!("{OP}: the weight is not on the CPU") };
            let (a, b) = (View::of(OP, a)?, View::of(OP, b)?);
            let (a, b, rank) = (a.elements(), b.elements(), self.a.dim(0)?);
            self.affine.with_elements(OP, (weight, layout), |weight| {
                Ok(Direction { affine: self.affine, weight, a, b, rank, scale: self.scale }.squares())
            })?
        };
        let norms = match &self.group {
            Some(group) => roots(&over_ranks(group, &squares)?),
            None => roots(&squares),
        };
        let factors: Vec<f32> = magnitudes.iter().zip(&norms).map(|(m, norm)| m / norm).collect();
        let _ = self.norms.set(Tensor::new(norms, &candle_core::Device::Cpu)?);
        let p = View::new(OP, ps, pl)?;
        let y = build_as(OP, ps.dtype(), count, outputs, [p.elements()], |_, [p], y| {
            for (p, y) in p.chunks_exact(outputs).zip(y.chunks_exact_mut(outputs)) {
                match bias {
                    Some(bias) => {
                        for (((y, &p), &c), &b) in y.iter_mut().zip(p).zip(&factors).zip(bias) {
                            *y = c.mul_add(p, b);
                        }
                    }
                    None => y.iter_mut().zip(p).zip(&factors).for_each(|((y, &p), &c)| *y = c * p),
                }
            }
        })?;
        Ok((y, pl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn apply_on_gpu(
        &self,
        (ps, pl): (&CudaStorage, &Layout),
        (ms, ml): (&CudaStorage, &Layout),
        bias: Option<(&CudaStorage, &Layout)>,
    ) -> Result<(CudaStorage, Shape)> {
        use candle_core::op::{Add, Div, Mul};
        let norms = self.norms_on_gpu()?;
        let shape = pl.shape().clone();
        let held = norms.storage_and_layout();
        let Storage::Cuda(of_norms) = &*held.0 else { bail!("{OP}: the weight is not on the GPU") };
        let factors = ms.binary_impl::<Div>(of_norms, ml, held.1)?;
        let wide = Layout::contiguous(ml.shape()).broadcast_as(&shape)?;
        let mut y = ps.binary_impl::<Mul>(&factors, pl, &wide)?;
        if let Some((bs, bl)) = bias {
            y = y.binary_impl::<Add>(bs, &Layout::contiguous(&shape), &bl.broadcast_as(&shape)?)?;
        }
        drop(held);
        let _ = self.norms.set(norms);
        Ok((y, shape))
    }

    #[cfg(feature = "cuda")]
    fn norms_on_gpu(&self) -> Result<Tensor> {
        let (weight, a, b) = (self.weight.detach(), self.a.detach(), self.b.detach());
        let delta = b.matmul(&a)?;
        let (delta, of_row) = match self.affine {
            Affine::OutputsInputs | Affine::Quantized(_) => (delta, 1),
            Affine::InputsOutputs => (delta.t()?.contiguous()?, 0),
        };
        let weight = (weight + delta.affine(f64::from(self.scale), 0.0)?)?.to_dtype(candle_core::DType::F32)?;
        let squares = weight.sqr()?.sum(of_row)?;
        let squares = match &self.group {
            Some(group) => group.gather_on_gpu(&squares)?()?.sum(0)?,
            None => squares,
        };
        squares.sqrt()?.to_dtype(self.a.dtype())
    }

    /// Returns the gradients of p and m.
    fn backward(&self, p: &Tensor, m: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let norms = self.norms()?;
        let (count, outputs) = rows(OP, p.shape())?;
        #[cfg(feature = "cuda")]
        if gpu::holds(p) {
            let (values, dy) = (p.detach(), dy.detach());
            let dp = dy.broadcast_mul(&m.detach().div(norms)?)?;
            let dm = bias_gradient(OP, Some(m), &dy.mul(&values)?.broadcast_div(norms)?)?;
            return Ok([Some(dp), dm]);
        }
        let held =
            (p.storage_and_layout(), m.storage_and_layout(), norms.storage_and_layout(), dy.storage_and_layout());
        let (p_view, dy_view) = (View::of(OP, &held.0)?, View::of(OP, &held.3)?);
        let (m_values, norms): (Cow<'_, [f32]>, Cow<'_, [f32]>) = (f32s_of(OP, &held.1)?, f32s_of(OP, &held.2)?);
        let factors: Vec<f32> = m_values.iter().zip(&*norms).map(|(m, norm)| m / norm).collect();
        let dp = build_as(OP, p.dtype(), count, outputs, [dy_view.elements()], |_, [dy], dp| {
            for (dy, dp) in dy.chunks_exact(outputs).zip(dp.chunks_exact_mut(outputs)) {
                dp.iter_mut().zip(dy).zip(&factors).for_each(|((dp, &dy), &c)| *dp = c * dy);
            }
        })?;
        let (of_p, of_dy) = (p_view.elements(), dy_view.elements());
        let dm = deliver_tile(OP, m, |out, tile| {
            let (mut p, mut dy) = (Reader::new(of_p), Reader::new(of_dy));
            if matches!(tile, Tile::First) {
                out.fill(0.0);
            }
            let mut sums = vec![0.0; outputs];
            for block in (0..count).step_by(BLOCK) {
                sums.fill(0.0);
                for row in block..count.min(block + BLOCK) {
                    let range = row * outputs..(row + 1) * outputs;
                    let (p, dy) = (p.floats(range.clone()), dy.floats(range));
                    sums.iter_mut().zip(p).zip(dy).for_each(|((sum, &p), &dy)| *sum = p.mul_add(dy, *sum));
                }
                out.iter_mut().zip(&sums).zip(&*norms).for_each(|((out, sum), norm)| *out += sum / norm);
            }
        })?;
        Ok([Some(tensor(dp, p.shape())), dm])
    }
}

impl Footprint for Magnified {
    const READS: Reads = Reads::inputs([true, true, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (p, bias) = (inputs[0], inputs.get(2));
        let (count, outputs) = rows(OP, p.shape())?;
        let dtype = p.dtype();
        let of_dtype = |floats: u64| if dtype == candle_core::DType::F32 { 0 } else { floats };
        // Rows and columns of the weight as it is stored, and the room for a row in f32.
        let (first, columns, row) = match self.affine {
            Affine::Quantized(is) => (is.sizes().1, is.sizes().0, floats(is.sizes().0)),
            _ => {
                let (first, columns) = self.weight.dims2()?;
                (first, columns, of_dtype(floats(columns)))
            }
        };
        let rooms = rooms(dtype, count, outputs, 1);
        let ranks = self.group.as_ref().map_or(1, SequenceGroup::size) as u64;
        // The f64 sums of this rank. If ranks split the inputs, also the f32 sums of all ranks and the f64 total.
        let summing = 2 * floats(outputs) + if ranks > 1 { (ranks + 2) * floats(outputs) } else { 0 };
        let delta = (floats(ROWS.min(first) * columns) + row + 2 * floats(outputs)).max(summing);
        let copies = of_dtype(floats(outputs) * if bias.is_some() { 2 } else { 1 });
        let forward = copies + floats(outputs) + delta.max(rooms);
        let partials = floats(outputs) + of_dtype(2 * floats(outputs));
        let backward = of_dtype(floats(outputs)) + floats(outputs) + rooms.max(bytes(p.elem_count(), dtype) + partials);
        let gradients = [true, false, false];
        let exchanged = [floats(outputs) * (ranks - 1), 0].map(Exchanged::to_tensor);
        Ok(Costs { saved: floats(outputs), forward, backward, gradients, exchanged, ..Costs::new(p.shape(), dtype) })
    }
}

impl<const N: usize> Op<N> for Magnified {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, inputs: Inputs<'_, CpuStorage, N>) -> Result<(CpuStorage, Shape)> {
        let bias = inputs.get(2).map(|(storage, layout)| f32s(OP, storage, layout)).transpose()?;
        self.apply(inputs[0], &f32s(OP, inputs[1].0, inputs[1].1)?, bias.as_deref())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Inputs<'_, CudaStorage, N>) -> Result<(CudaStorage, Shape)> {
        self.apply_on_gpu(inputs[0], inputs[1], inputs.get(2).copied())
    }
    fn bwd(&self, inputs: [&Tensor; N], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; N]> {
        let [dp, dm] = self.backward(inputs[0], inputs[1], dy)?;
        Ok(leading([dp, dm, bias_gradient(OP, inputs.get(2).copied(), dy)?]))
    }
}

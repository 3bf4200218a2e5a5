//! The two exchanges of a tensor group: gathering slices of sequences, and summing whole sequences into slices. Each is the
//! backward of the other.

use crate::graph::apply::{apply1, apply2};
use crate::graph::operand::View;
use crate::graph::output::{build_as, tensor};
use crate::kernel::Isa;
use crate::linear::affine::bias_gradient;
use crate::measure;
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, bytes, rooms};
use crate::sequence::{Element, SequenceGroup, dense};
use crate::tensor::Along;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, D, DType, Layout, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};

/// Gathers the slices of all ranks, `[batch, slice, …]`, to `[batch, time, …]`, or to `[ranks · batch, slice, …]`.
pub(super) fn gather(x: &Tensor, group: &SequenceGroup, along: Along) -> Result<Tensor> {
    apply1(x, Gather(Slices::new(x.shape(), group, along, 1)?))
}

/// Sums `[batch, time, width]`, or `[ranks · batch, slice, width]`, over the ranks, and returns this rank's slice of the sum, to
/// which it adds a bias of `[width]`.
pub(super) fn sum(y: &Tensor, bias: Option<&Tensor>, group: &SequenceGroup, along: Along) -> Result<Tensor> {
    let slices = Slices::new(y.shape(), group, along, group.size())?;
    match bias {
        None => apply1(y, Sum(slices)),
        Some(bias) => apply2(y, bias, Sum(slices)),
    }
}

const OP: &str = "tensor-exchange";

/// Slices of sequences, of which this rank has one of each sequence.
#[derive(Clone)]
struct Slices {
    group: SequenceGroup,
    /// The dimension along which slices are joined: 0 or 1.
    dimension: usize,
    /// Number of pieces that each rank's slices consist of: the samples if they are joined along positions.
    pieces: usize,
    /// Elements of a piece.
    piece: usize,
    /// Shape of this rank's slices.
    own: Vec<usize>,
}

impl Slices {
    /// `parts` is the number of slices that `shape` has along the dimension.
    fn new(shape: &Shape, group: &SequenceGroup, along: Along, parts: usize) -> Result<Self> {
        let (mut own, dimension) = (shape.dims().to_vec(), usize::from(along == Along::Positions));
        if own.len() < 2 || !own[dimension].is_multiple_of(parts) {
            bail!("{OP}: sequences of shape {shape:?} cannot be cut into {parts} slices of the same length");
        }
        own[dimension] /= parts;
        let pieces = own[..dimension].iter().product();
        Ok(Self { group: group.clone(), dimension, pieces, piece: own[dimension..].iter().product(), own })
    }

    fn whole(&self) -> Shape {
        let mut dims = self.own.clone();
        dims[self.dimension] *= self.group.size();
        dims.into()
    }

    /// Returns the slices of all ranks, in the order of the sequences.
    fn gathered(&self, storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
        Ok(match storage.dtype() {
            DType::F32 => CpuStorage::F32(self.gathered_as(&dense(storage, layout)?)?),
            DType::BF16 => CpuStorage::BF16(self.gathered_as::<bf16>(&dense(storage, layout)?)?),
            DType::F16 => CpuStorage::F16(self.gathered_as::<f16>(&dense(storage, layout)?)?),
            other => bail!("{OP}: expected f32, bf16 or f16, got {other:?}"),
        })
    }

    fn gathered_as<T: Element>(&self, own: &[T]) -> Result<Vec<T>> {
        let size = self.group.size();
        let room = vec![T::zero(); own.len() * size];
        let received = self.group.all_gather(T::buffer(own.to_vec()), T::buffer(room))?;
        let received = T::values(received).map_err(candle_core::Error::wrap)?;
        if self.pieces == 1 {
            return Ok(received);
        }
        let mut whole = Vec::with_capacity(received.len());
        for piece in 0..self.pieces {
            for rank in 0..size {
                let at = (rank * self.pieces + piece) * self.piece;
                whole.extend_from_slice(&received[at..at + self.piece]);
            }
        }
        Ok(whole)
    }

    /// Returns this rank's slices of the sum over the ranks, over a fixed tree; 16-bit floats are summed in f32.
    fn summed(&self, storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
        Ok(match storage.dtype() {
            DType::F32 => CpuStorage::F32(self.summed_as(&dense(storage, layout)?)?),
            DType::BF16 => CpuStorage::BF16(self.summed_as::<bf16>(&dense(storage, layout)?)?),
            DType::F16 => CpuStorage::F16(self.summed_as::<f16>(&dense(storage, layout)?)?),
            other => bail!("{OP}: expected f32, bf16 or f16, got {other:?}"),
        })
    }

    fn summed_as<T: Element>(&self, whole: &[T]) -> Result<Vec<T>> {
        let size = self.group.size();
        let mut packed = Vec::with_capacity(whole.len());
        for rank in 0..size {
            for piece in 0..self.pieces {
                let at = (piece * size + rank) * self.piece;
                packed.extend_from_slice(&whole[at..at + self.piece]);
            }
        }
        let room = vec![T::zero(); self.pieces * self.piece];
        let summed = self.group.reduce_scatter(T::buffer(packed), T::buffer(room))?;
        T::values(summed).map_err(candle_core::Error::wrap)
    }

    /// Returns the temporary bytes of gathering and of summing, beside their results, and the bytes that each sends.
    fn costs(&self, dtype: DType) -> [(u64, u64); 2] {
        let own = bytes(self.pieces * self.piece, dtype);
        let (whole, sent) = (own * self.group.size() as u64, own * (self.group.size() as u64 - 1));
        let received = if self.pieces == 1 { 0 } else { whole };
        [(own + received, sent), (whole, sent)]
    }
}

struct Gather(Slices);

impl Footprint for Gather {
    const READS: Reads = Reads::NOTHING;
    // Only slices are kept for the backward.
    const REMADE: bool = true;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let dtype = inputs[0].dtype();
        let [(forward, sent), (backward, back)] = self.0.costs(dtype);
        Ok(Costs {
            forward,
            backward,
            exchanged: [sent, back].map(Exchanged::to_tensor),
            ..Costs::new(self.0.whole(), dtype)
        })
    }
}

impl CustomOp1 for Gather {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, xs: &CpuStorage, xl: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        Ok((self.0.gathered(xs, xl)?, self.0.whole()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let _timed = measure::backward(OP);
        let (dys, layout) = dy.storage_and_layout();
        Ok(Some(tensor(self.0.summed(on_cpu(&dys)?, layout)?, x.shape())))
    }
}

struct Sum(Slices);

impl Sum {
    fn backward(&self, y: &Tensor, d_slice: &Tensor) -> Result<Tensor> {
        let _timed = measure::backward(OP);
        let (ds, layout) = d_slice.storage_and_layout();
        Ok(tensor(self.0.gathered(on_cpu(&ds)?, layout)?, y.shape()))
    }
}

impl Footprint for Sum {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let dtype = inputs[0].dtype();
        let [(backward, back), (forward, sent)] = self.0.costs(dtype);
        let shape = Shape::from(self.0.own.clone());
        let adding = match inputs.len() {
            1 => 0,
            _ => {
                let width = inputs[1].elem_count();
                bytes(shape.elem_count(), dtype) + rooms(dtype, shape.elem_count() / width, width, 1)
            }
        };
        let gradients = [true, false, false];
        Ok(Costs {
            forward: forward.max(adding),
            backward,
            exchanged: [sent, back].map(Exchanged::to_tensor),
            gradients,
            ..Costs::new(shape, dtype)
        })
    }
}

impl CustomOp1 for Sum {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, ys: &CpuStorage, yl: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        Ok((self.0.summed(ys, yl)?, self.0.own.clone().into()))
    }

    fn bwd(&self, y: &Tensor, _: &Tensor, d_slice: &Tensor) -> Result<Option<Tensor>> {
        self.backward(y, d_slice).map(Some)
    }
}

impl CustomOp2 for Sum {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, ys: &CpuStorage, yl: &Layout, bs: &CpuStorage, bl: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let shape = Shape::from(self.0.own.clone());
        let (slices, width) = (self.0.summed(ys, yl)?, bl.shape().elem_count());
        if shape.dim(D::Minus1)? != width {
            bail!("{OP}: a bias of {width} elements for outputs of shape {shape:?}");
        }
        let layout = Layout::contiguous(&shape);
        let (own, bias) = (View::new(OP, &slices, &layout)?, View::new(OP, bs, bl)?);
        let rows = shape.elem_count() / width;
        let added = build_as(OP, ys.dtype(), rows, width, [own.elements()], |range, [own], out| {
            let mut added = vec![0.0; width];
            bias.elements().read(Isa::current(), 0, &mut added);
            for (out, own) in out.chunks_exact_mut(width).zip(own.chunks_exact(width)).take(range.len()) {
                out.iter_mut().zip(own).zip(&added).for_each(|((out, own), bias)| *out = own + bias);
            }
        })?;
        Ok((added, shape))
    }

    fn bwd(&self, y: &Tensor, bias: &Tensor, _: &Tensor, d_slice: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dy = self.backward(y, d_slice)?;
        let held = d_slice.storage_and_layout();
        Ok((Some(dy), bias_gradient(OP, bias, View::of(OP, &held)?.elements())?))
    }
}

fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("{OP}: layers are cut among ranks on the CPU only"),
    }
}

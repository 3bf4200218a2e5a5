//! The two exchanges of a tensor group: gathering slices of sequences, and summing whole sequences into slices. Each is the
//! backward of the other.

use crate::graph::apply::{applied1, applied2, apply1, apply2, in_graph};
use crate::graph::operand::View;
use crate::graph::output::{build_as, tensor};
use crate::graph::storage::{swap, take};
use crate::kernel::Isa;
use crate::linear::affine::bias_gradient;
use crate::measure;
use crate::meta::footprint::{Costs, Exchange, Exchanged, Finish, Footprint, Reads, bytes, rooms};
use crate::meta::tracing;
use crate::sequence::{Element, SequenceGroup, dense, of_element};
use crate::tensor::Along;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, D, DType, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use zero_comm::{Gathered, Scattered};

/// Gathers the slices of all ranks, `[batch, slice, …]`, to `[batch, time, …]`, or to `[ranks · batch, slice, …]`.
pub(super) fn gather(x: &Tensor, group: &SequenceGroup, along: Along) -> Result<Tensor> {
    let gather = Gather(Slices::new(x.shape(), group, along, 1)?);
    if tracing() || in_graph() {
        return apply1(x, gather);
    }
    let whole = (Storage::Cpu(gather.0.gathered(x)?), gather.0.whole());
    Ok(applied1(x, gather, whole))
}

/// Sums `[batch, time, width]`, or `[ranks · batch, slice, width]`, over the ranks, and returns this rank's slice of the sum, to
/// which it adds a bias of `[width]`.
pub(super) fn sum(y: &Tensor, bias: Option<&Tensor>, group: &SequenceGroup, along: Along) -> Result<Tensor> {
    let sum = Sum(Slices::new(y.shape(), group, along, group.size())?);
    if tracing() || in_graph() {
        return match bias {
            None => apply1(y, sum),
            Some(bias) => apply2(y, bias, sum),
        };
    }
    let (slices, shape) = (sum.0.summed(y)?, sum.0.own.clone().into());
    match bias {
        None => Ok(applied1(y, sum, (Storage::Cpu(slices), shape))),
        Some(bias) => {
            let added = {
                let (bs, bl) = bias.storage_and_layout();
                sum.add(&slices, on_cpu(&bs)?, bl)?
            };
            Ok(applied2([y, bias], sum, (Storage::Cpu(added), shape)))
        }
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
            bail!(
                "{OP}: sequences of shape {shape:?} cannot be cut into {parts} slices of the same length; pass a multiple of \
                 {parts} positions"
            );
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
    fn gathered(&self, x: &Tensor) -> Result<CpuStorage> {
        of_element!(OP, x.dtype(), T => Ok(T::to_cpu_storage_owned(lend::<T, _>(x, |own| self.gathered_as(own))?)))
    }

    fn gathered_as<T: Element>(&self, own: Vec<T>) -> Result<(Vec<T>, Vec<T>)> {
        let Gathered { shard, output } = self.group.all_gather(own)?.wait()?;
        Ok((T::values(shard)?, self.in_order(T::values(output)?)))
    }

    /// Returns the pieces of all ranks in the order of the sequences.
    fn in_order<T: Element>(&self, received: Vec<T>) -> Vec<T> {
        let size = self.group.size();
        if self.pieces == 1 {
            return received;
        }
        let mut whole = Vec::with_capacity(received.len());
        for piece in 0..self.pieces {
            for rank in 0..size {
                let at = (rank * self.pieces + piece) * self.piece;
                whole.extend_from_slice(&received[at..at + self.piece]);
            }
        }
        whole
    }

    /// Returns this rank's slices of the sum over the ranks, over a fixed tree; 16-bit floats are summed in f32.
    fn summed(&self, whole: &Tensor) -> Result<CpuStorage> {
        self.summed_while(whole, &mut || Ok(()))
    }

    /// Runs `compute` during the exchange of [`Slices::summed`].
    fn summed_while(&self, whole: &Tensor, compute: &mut dyn FnMut() -> Result<()>) -> Result<CpuStorage> {
        of_element!(OP, whole.dtype(), T => {
            Ok(T::to_cpu_storage_owned(lend::<T, _>(whole, |whole| self.summed_as(whole, compute))?))
        })
    }

    fn summed_as<T: Element>(
        &self,
        whole: Vec<T>,
        compute: &mut dyn FnMut() -> Result<()>,
    ) -> Result<(Vec<T>, Vec<T>)> {
        let timed = measure::backward(OP);
        let (sent, whole) = match self.pieces {
            1 => (whole, None),
            _ => (self.packed(&whole), Some(whole)),
        };
        let exchange = self.group.reduce_scatter(sent)?;
        drop(timed);
        compute()?;
        let _timed = measure::backward(OP);
        let Scattered { input, shard } = exchange.wait()?;
        Ok((whole.map_or_else(|| T::values(input), Ok)?, T::values(shard)?))
    }

    /// Returns the pieces in the order of the ranks that get them.
    fn packed<T: Element>(&self, whole: &[T]) -> Vec<T> {
        let size = self.group.size();
        let mut packed = Vec::with_capacity(whole.len());
        for rank in 0..size {
            for piece in 0..self.pieces {
                let at = (piece * size + rank) * self.piece;
                packed.extend_from_slice(&whole[at..at + self.piece]);
            }
        }
        packed
    }

    /// Returns the temporary bytes of gathering or of summing, beside the result, and the bytes that either sends.
    fn costs(&self, dtype: DType) -> (u64, u64) {
        let own = bytes(self.pieces * self.piece, dtype);
        let (whole, sent) = (own * self.group.size() as u64, own * (self.group.size() as u64 - 1));
        // Pieces are copied into order.
        let copied = if self.pieces == 1 { 0 } else { whole };
        (copied, sent)
    }
}

struct Gather(Slices);

impl Footprint for Gather {
    const READS: Reads = Reads::NOTHING;
    // Only slices are kept for the backward.
    const REMADE: bool = true;

    fn make(&self, x: &Tensor) -> Result<CpuStorage> {
        self.0.gathered(x)
    }

    fn exchange(&self) -> Option<&dyn Exchange> {
        self.0.group.overlaps().then_some(self)
    }

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let dtype = inputs[0].dtype();
        let (copied, sent) = self.0.costs(dtype);
        Ok(Costs {
            forward: copied,
            backward: copied,
            exchanged: [sent; 2].map(Exchanged::to_tensor),
            ..Costs::new(self.0.whole(), dtype)
        })
    }
}

impl Exchange for Gather {
    fn start(&self, x: &Tensor, output: &Tensor) -> Result<Finish> {
        let (slices, output) = (self.0.clone(), output.clone());
        // The values of x stay where they are, since operations in between may read them.
        of_element!(OP, x.dtype(), T => {
            let exchange = slices.group.all_gather::<T>(copy_of(x)?)?;
            Ok(Box::new(move || {
                let _timed = measure::backward(OP);
                let Gathered { output: received, .. } = exchange.wait()?;
                let whole = slices.in_order(T::values(received)?);
                swap(&output, Storage::Cpu(T::to_cpu_storage_owned(whole))).map(drop)
            }))
        })
    }

    fn backward_while(&self, x: &Tensor, dy: &Tensor, compute: &mut dyn FnMut() -> Result<()>) -> Result<Tensor> {
        Ok(tensor(self.0.summed_while(dy, compute)?, x.shape()))
    }
}

impl CustomOp1 for Gather {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, xs: &CpuStorage, xl: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        Ok((self.0.gathered(&copied(xs, xl)?)?, self.0.whole()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(tensor(self.0.summed(dy)?, x.shape())))
    }
}

struct Sum(Slices);

impl Sum {
    fn backward(&self, y: &Tensor, d_slice: &Tensor) -> Result<Tensor> {
        let _timed = measure::backward(OP);
        Ok(tensor(self.0.gathered(d_slice)?, y.shape()))
    }

    /// Adds a bias to this rank's slices.
    fn add(&self, slices: &CpuStorage, bs: &CpuStorage, bl: &Layout) -> Result<CpuStorage> {
        let (shape, width) = (Shape::from(self.0.own.clone()), bl.shape().elem_count());
        if shape.dim(D::Minus1)? != width {
            bail!("{OP}: a bias of {width} elements for outputs of shape {shape:?}");
        }
        let layout = Layout::contiguous(&shape);
        let (own, bias) = (View::new(OP, slices, &layout)?, View::new(OP, bs, bl)?);
        let rows = shape.elem_count() / width;
        build_as(OP, slices.dtype(), rows, width, [own.elements()], |range, [own], out| {
            let mut added = vec![0.0; width];
            bias.elements().read(Isa::current(), 0, &mut added);
            for (out, own) in out.chunks_exact_mut(width).zip(own.chunks_exact(width)).take(range.len()) {
                out.iter_mut().zip(own).zip(&added).for_each(|((out, own), bias)| *out = own + bias);
            }
        })
    }
}

impl Footprint for Sum {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let dtype = inputs[0].dtype();
        let (copied, sent) = self.0.costs(dtype);
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
            forward: copied.max(adding),
            backward: copied,
            exchanged: [sent; 2].map(Exchanged::to_tensor),
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
        Ok((self.0.summed(&copied(ys, yl)?)?, self.0.own.clone().into()))
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
        let slices = self.0.summed(&copied(ys, yl)?)?;
        Ok((self.add(&slices, bs, bl)?, self.0.own.clone().into()))
    }

    fn bwd(&self, y: &Tensor, bias: &Tensor, _: &Tensor, d_slice: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dy = self.backward(y, d_slice)?;
        let held = d_slice.storage_and_layout();
        Ok((Some(dy), bias_gradient(OP, bias, View::of(OP, &held)?.elements())?))
    }
}

/// Passes the values of a tensor to `exchange` and returns its result. Dense values are moved out of the tensor without a copy and
/// put back afterwards; if `exchange` fails, they are lost. Other values are copied, and the tensor keeps its own.
fn lend<T: Element, R>(x: &Tensor, exchange: impl FnOnce(Vec<T>) -> Result<(Vec<T>, R)>) -> Result<R> {
    let is_dense = {
        let (storage, layout) = x.storage_and_layout();
        let len = T::cpu_storage_as_slice(on_cpu(&storage)?)?.len();
        layout.contiguous_offsets() == Some((0, len))
    };
    if !is_dense {
        return Ok(exchange(copy_of(x)?)?.1);
    }
    let Storage::Cpu(taken) = take(x)? else { bail!("{OP}: {ON_CPU}") };
    let Some(own) = T::of_storage(taken) else { bail!("{OP}: {x:?} has no values") };
    let (own, result) = exchange(own)?;
    swap(x, Storage::Cpu(T::to_cpu_storage_owned(own)))?;
    Ok(result)
}

fn copy_of<T: Element>(x: &Tensor) -> Result<Vec<T>> {
    let (storage, layout) = x.storage_and_layout();
    Ok(dense(on_cpu(&storage)?, layout)?.into_owned())
}

/// Returns a copy as a tensor, for an operation in candle's graph.
fn copied(storage: &CpuStorage, layout: &Layout) -> Result<Tensor> {
    let copy = View::new(OP, storage, layout)?.into_storage();
    Ok(tensor(copy, layout.shape()))
}

const ON_CPU: &str = "layers are cut among ranks on the CPU only";

fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("{OP}: {ON_CPU}"),
    }
}

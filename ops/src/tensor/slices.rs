//! The slices of a tensor group: their shapes, and the order in which gathered and summed pieces are stored.

#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::operand::View;
use crate::graph::output::tensor;
use crate::graph::storage::{swap, take};
use crate::measure;
use crate::meta::footprint::bytes;
use crate::sequence::{Element, SequenceGroup, dense, of_element, transposed};
use crate::tensor::Along;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, WithDType, bail};
use zero_comm::{Gathered, Scattered};

pub(super) const OP: &str = "tensor-exchange";

/// Describes how sequences are divided into slices: each rank of a group has one slice of each sequence.
#[derive(Clone)]
pub(super) struct Slices {
    pub(super) group: SequenceGroup,
    /// The dimension along which slices are joined: 0 or 1.
    dimension: usize,
    /// Number of contiguous pieces in each rank's slices: one per sample if slices are joined along positions.
    pieces: usize,
    /// Number of elements in a piece.
    piece: usize,
    /// Shape of this rank's slices.
    pub(super) own: Vec<usize>,
}

impl Slices {
    /// Describes the slices of a tensor of `shape`, which has `parts` slices along the dimension.
    pub(super) fn new(shape: &Shape, group: &SequenceGroup, along: Along, parts: usize) -> Result<Self> {
        let (mut own, dimension) = (shape.dims().to_vec(), usize::from(along == Along::Positions));
        if own.len() < 2 || !own[dimension].is_multiple_of(parts) {
            bail!(
                "{OP}: sequences of shape {shape:?} cannot be split into {parts} slices of the same length; pass a \
                 multiple of {parts} positions"
            );
        }
        own[dimension] /= parts;
        let pieces = own[..dimension].iter().product();
        Ok(Self { group: group.clone(), dimension, pieces, piece: own[dimension..].iter().product(), own })
    }

    pub(super) fn whole(&self) -> Shape {
        let mut dims = self.own.clone();
        dims[self.dimension] *= self.group.size();
        dims.into()
    }

    /// Returns the slices of all ranks, in the order of the sequences.
    pub(super) fn gathered(&self, x: &Tensor) -> Result<Storage> {
        #[cfg(feature = "cuda")]
        if gpu::holds(x) {
            return take(&self.in_order_on_gpu(&self.group.gather_on_gpu(x)?()?)?);
        }
        of_element!(OP, x.dtype(), T => {
            let whole = lend::<T, _>(x, |own| self.gathered_as(own))?;
            Ok(Storage::Cpu(T::to_cpu_storage_owned(whole)))
        })
    }

    fn gathered_as<T: Element>(&self, own: Vec<T>) -> Result<(Vec<T>, Vec<T>)> {
        let Gathered { shard, output } = self.group.all_gather(own)?.wait()?;
        Ok((T::values(shard)?, self.in_order(T::values(output)?)))
    }

    /// Returns the pieces of all ranks in the order of the sequences.
    pub(super) fn in_order<T: Element>(&self, received: Vec<T>) -> Vec<T> {
        if self.pieces == 1 {
            return received;
        }
        transposed(&received, [self.group.size(), self.pieces], self.piece)
    }

    /// Joins the slices of all ranks, `[ranks, …]`, in the order of the sequences.
    #[cfg(feature = "cuda")]
    pub(super) fn in_order_on_gpu(&self, received: &Tensor) -> Result<Tensor> {
        received.reshape((self.group.size(), self.pieces, self.piece))?.transpose(0, 1)?.contiguous()
    }

    /// Returns this rank's slices of the sum over the ranks. The sum follows a fixed tree of the ranks, and 16-bit
    /// floats are summed in f32. NCCL uses its own order and sums in the dtype of the values.
    pub(super) fn summed(&self, whole: &Tensor) -> Result<Storage> {
        self.summed_while(whole, &mut || Ok(()))
    }

    /// Runs `compute` during the exchange of [`Slices::summed`].
    pub(super) fn summed_while(&self, whole: &Tensor, compute: &mut dyn FnMut() -> Result<()>) -> Result<Storage> {
        #[cfg(feature = "cuda")]
        if gpu::holds(whole) {
            let packed = whole.detach().reshape((self.pieces, self.group.size(), self.piece))?.transpose(0, 1)?;
            let exchange = self.group.reduce_scatter_on_gpu(&packed.contiguous()?)?;
            compute()?;
            return take(&exchange()?);
        }
        of_element!(OP, whole.dtype(), T => {
            let slices = lend::<T, _>(whole, |whole| self.summed_as(whole, compute))?;
            Ok(Storage::Cpu(T::to_cpu_storage_owned(slices)))
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
            // The pieces in the order of the ranks that get them.
            _ => (transposed(&whole, [self.pieces, self.group.size()], self.piece), Some(whole)),
        };
        let exchange = self.group.reduce_scatter(sent)?;
        drop(timed);
        compute()?;
        let _timed = measure::backward(OP);
        let Scattered { input, shard } = exchange.wait()?;
        Ok((whole.map_or_else(|| T::values(input), Ok)?, T::values(shard)?))
    }

    /// Returns the temporary bytes that gathering or summing needs in addition to the result, and the bytes that it
    /// sends.
    pub(super) fn costs(&self, dtype: DType) -> (u64, u64) {
        let own = bytes(self.pieces * self.piece, dtype);
        let (whole, sent) = (own * self.group.size() as u64, own * (self.group.size() as u64 - 1));
        // If there are several pieces, they are copied into order.
        let copied = if self.pieces == 1 { 0 } else { whole };
        (copied, sent)
    }
}

/// Passes the values of a tensor to `exchange` and returns its result. If the values are dense, they are moved out of
/// the tensor without a copy and moved back afterwards. They are lost if `exchange` fails. Otherwise the values are
/// copied, and the tensor keeps them.
fn lend<T: Element, R>(x: &Tensor, exchange: impl FnOnce(Vec<T>) -> Result<(Vec<T>, R)>) -> Result<R> {
    let is_dense = {
        let (storage, layout) = x.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("{OP}: expected values on the host") };
        let len = T::cpu_storage_as_slice(storage)?.len();
        layout.contiguous_offsets() == Some((0, len))
    };
    if !is_dense {
        return Ok(exchange(copy_of(x)?)?.1);
    }
    let Some(own) = T::of_storage(host(take(x)?)?) else { bail!("{OP}: {x:?} has no values") };
    let (own, result) = exchange(own)?;
    swap(x, Storage::Cpu(T::to_cpu_storage_owned(own)))?;
    Ok(result)
}

pub(super) fn copy_of<T: Element>(x: &Tensor) -> Result<Vec<T>> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(dense(storage, layout)?.into_owned()),
        _ => bail!("{OP}: expected values on the host"),
    }
}

/// Copies a view to a new tensor, for an operation in candle's graph.
pub(super) fn copied(storage: &CpuStorage, layout: &Layout) -> Result<Tensor> {
    let copy = View::new(OP, storage, layout)?.into_storage();
    Ok(tensor(copy, layout.shape()))
}

pub(super) fn host(storage: Storage) -> Result<CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("{OP}: expected values on the host"),
    }
}

//! The all-to-all before and after attention. It converts between one slice of positions for all heads and all
//! positions for some heads.

use super::element::{Element, dense, of_element, transposed};
use super::{HeadShares, SequenceGroup};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::output::tensor;
#[cfg(feature = "cuda")]
use crate::graph::storage::take;
use crate::measure;
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, bytes};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor, WithDType, bail};

/// Exchanges a slice of positions for the whole sequences of this rank's heads. `x` is `[batch, slice, heads, size]` or
/// `[batch, slice, parts·heads·size]`; the result has the same number of dimensions. `parts` is the number of tensors
/// in a row: 3 for packed queries, keys and values.
pub(crate) fn to_heads(x: &Tensor, group: &SequenceGroup, shares: &HeadShares, parts: usize) -> Result<Tensor> {
    apply([x], Exchange::new(x, group, shares, parts, Direction::ToHeads)?)
}

/// Inverts [`to_heads`]. If several ranks computed the same head, their results are added in rank order.
pub(crate) fn to_positions(y: &Tensor, group: &SequenceGroup, shares: &HeadShares) -> Result<Tensor> {
    apply([y], Exchange::new(y, group, shares, 1, Direction::ToPositions)?)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToHeads,
    ToPositions,
}

#[derive(Clone)]
struct Exchange {
    group: SequenceGroup,
    shares: HeadShares,
    direction: Direction,
    batch: usize,
    /// Number of positions in a slice.
    slice: usize,
    parts: usize,
    /// Number of elements of a head.
    size: usize,
    /// Whether heads are a dimension of their own.
    has_heads: bool,
}

const OP: &str = "sequence-exchange";

impl Exchange {
    fn new(x: &Tensor, group: &SequenceGroup, shares: &HeadShares, parts: usize, direction: Direction) -> Result<Self> {
        group.may_exchange()?;
        let (has_heads, dims) = (x.dims().len() == 4, x.dims());
        let (&[batch, time, width] | &[batch, time, _, width]) = dims else {
            bail!("{OP}: expected three or four dimensions, got {dims:?}");
        };
        let (heads, slice) = match direction {
            Direction::ToHeads => (shares.heads, time),
            Direction::ToPositions => (shares.lists[group.index].len(), time / group.size),
        };
        let size = if has_heads { width } else { width / (parts * heads).max(1) };
        let whole = if has_heads { dims[2] * width } else { width };
        if size == 0 || whole != parts * heads * size {
            bail!("{OP}: the shape {dims:?} does not hold {parts} × {heads} heads");
        }
        let (group, shares) = (group.clone(), shares.clone());
        Ok(Self { group, shares, direction, batch, slice, parts, size, has_heads })
    }

    fn reversed(&self) -> Self {
        let direction = match self.direction {
            Direction::ToHeads => Direction::ToPositions,
            Direction::ToPositions => Direction::ToHeads,
        };
        Self { direction, ..self.clone() }
    }

    fn own(&self) -> &[usize] {
        &self.shares.lists[self.group.index]
    }

    /// Returns the shape of the output.
    fn shape(&self) -> Shape {
        let (time, heads) = match self.direction {
            Direction::ToHeads => (self.slice * self.group.size, self.own().len()),
            Direction::ToPositions => (self.slice, self.shares.heads),
        };
        match self.has_heads {
            true => (self.batch, time, heads, self.size).into(),
            false => (self.batch, time, self.parts * heads * self.size).into(),
        }
    }

    /// Returns two element counts for each rank r: how many elements of this rank's slices belong to the heads of r,
    /// and how many elements of the slices of r belong to this rank's heads.
    fn counts(&self) -> [Vec<usize>; 2] {
        let each = self.batch * self.slice * self.parts * self.size;
        let of_heads = self.shares.lists.iter().map(|list| each * list.len()).collect();
        [of_heads, vec![each * self.own().len(); self.group.size]]
    }

    /// Returns how many elements this rank sends, how many it receives (both including its own part), and how many it
    /// sends to other ranks.
    fn sizes(&self) -> [usize; 3] {
        let [of_heads, of_slices] = self.counts();
        let (heads, slices): (usize, usize) = (of_heads.iter().sum(), of_slices.iter().sum());
        match self.direction {
            Direction::ToHeads => [heads, slices, heads - of_heads[self.group.index]],
            Direction::ToPositions => [slices, heads, slices - of_slices[self.group.index]],
        }
    }

    /// Does the same as [`Exchange::run`], in GPU memory.
    #[cfg(feature = "cuda")]
    fn run_on_gpu(&self, x: &Tensor) -> Result<Tensor> {
        let (x, ranks, heads) = (x.detach(), self.group.size, self.shares.heads);
        let [of_heads, of_slices] = self.counts();
        let (sequences, positions) = ((self.batch, ranks, self.block()), (ranks, self.batch, self.block()));
        let rows = self.batch * self.slice * self.parts;
        let y = match self.direction {
            Direction::ToHeads => {
                let x = x.reshape((rows, heads, self.size))?;
                let of = |list: &Vec<usize>| x.index_select(&gpu::places(list, x.device())?, 1)?.flatten_all();
                let packed = Tensor::cat(&self.shares.lists.iter().map(of).collect::<Result<Vec<_>>>()?, 0)?;
                let received = self.group.all_to_all_on_gpu(&packed, [&of_heads, &of_slices])?;
                received.reshape(positions)?.transpose(0, 1)?.contiguous()?
            }
            Direction::ToPositions => {
                let packed = x.reshape(sequences)?.transpose(0, 1)?.contiguous()?;
                let received = self.group.all_to_all_on_gpu(&packed, [&of_slices, &of_heads])?;
                let mut first = 0;
                let parts = self.shares.lists.iter().zip(&of_heads).map(|(list, &count)| {
                    first += count;
                    received.narrow(0, first - count, count)?.reshape((rows, list.len(), self.size))
                });
                let parts = Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 1)?;
                let all = self.shares.lists.concat();
                match all.iter().copied().eq(0..heads) {
                    true => parts.contiguous()?,
                    // If several ranks computed the same head, their results are added in rank order.
                    false => Tensor::zeros((rows, heads, self.size), x.dtype(), x.device())?.index_add(
                        &gpu::places(&all, x.device())?,
                        &parts.contiguous()?,
                        1,
                    )?,
                }
            }
        };
        y.reshape(self.shape())
    }

    fn run_on(&self, storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
        of_element!(OP, storage.dtype(), T => Ok(T::to_cpu_storage_owned(self.run::<T>(&dense(storage, layout)?)?)))
    }

    fn run<T: Element>(&self, x: &[T]) -> Result<Vec<T>> {
        let [of_heads, of_slices] = self.counts();
        let [sent, received, _] = self.sizes();
        let (packed, counts) = match self.direction {
            Direction::ToHeads => (self.pack_heads(x, sent), [&*of_heads, &*of_slices]),
            Direction::ToPositions => {
                (transposed(x, [self.batch, self.group.size], self.block()), [&*of_slices, &*of_heads])
            }
        };
        let room = T::buffer(vec![T::zero(); received]);
        let received = self.group.all_to_all(T::buffer(packed), room, counts)?;
        let received = T::values(received)?;
        Ok(match self.direction {
            // With a single sequence, the received slices are already in order.
            Direction::ToHeads if self.batch == 1 => received,
            Direction::ToHeads => transposed(&received, [self.group.size, self.batch], self.block()),
            Direction::ToPositions => self.unpack_heads(&received),
        })
    }

    /// Returns the `sent` elements of the heads that each rank needs: for each rank `[batch, slice, parts, its heads,
    /// size]`.
    fn pack_heads<T: Element>(&self, x: &[T], sent: usize) -> Vec<T> {
        let mut packed = Vec::with_capacity(sent);
        let row = self.shares.heads * self.size;
        for list in &*self.shares.lists {
            for x in x.chunks_exact(row) {
                for head in list {
                    packed.extend_from_slice(&x[head * self.size..(head + 1) * self.size]);
                }
            }
        }
        packed
    }

    /// Adds up the results of each rank for its heads.
    fn unpack_heads<T: Element>(&self, received: &[T]) -> Vec<T> {
        let (rows, row) = (self.batch * self.slice * self.parts, self.shares.heads * self.size);
        let mut out = vec![T::zero(); rows * row];
        let (mut rest, mut is_written) = (received, vec![false; self.shares.heads]);
        for list in &*self.shares.lists {
            let (part, later) = rest.split_at(rows * list.len() * self.size);
            rest = later;
            let is_first: Vec<bool> =
                list.iter().map(|&head| !std::mem::replace(&mut is_written[head], true)).collect();
            for (out, part) in out.chunks_exact_mut(row).zip(part.chunks_exact(list.len() * self.size)) {
                for ((head, part), is_first) in list.iter().zip(part.chunks_exact(self.size)).zip(&is_first) {
                    let out = &mut out[head * self.size..(head + 1) * self.size];
                    match is_first {
                        true => out.copy_from_slice(part),
                        false => out.iter_mut().zip(part).for_each(|(out, &part)| *out += part),
                    }
                }
            }
        }
        out
    }

    /// Returns the number of elements of this rank's heads in the slice of one sequence.
    fn block(&self) -> usize {
        self.slice * self.parts * self.own().len() * self.size
    }
}

impl Footprint for Exchange {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let dtype = inputs[0].dtype();
        let sizes = |exchange: &Self| exchange.sizes().map(|elements| bytes(elements, dtype));
        let ([sent, received, leaving], [back_sent, back_received, back_leaving]) =
            (sizes(self), sizes(&self.reversed()));
        // The received values become the output without a copy if they are already in order.
        let room = |direction, sent, received| match direction {
            Direction::ToHeads if self.batch == 1 => sent,
            _ => sent + received,
        };
        Ok(Costs {
            forward: room(self.direction, sent, received),
            backward: room(self.reversed().direction, back_sent, back_received),
            exchanged: [leaving, back_leaving].map(Exchanged::to_heads),
            ..Costs::new(self.shape(), dtype)
        })
    }
}

impl Op<1> for Exchange {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        Ok((self.run_on(xs, xl)?, self.shape()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        let y = self.run_on_gpu(&gpu::copied(OP, xs, xl)?)?;
        Ok((gpu::storage(take(&y)?)?, self.shape()))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        #[cfg(feature = "cuda")]
        if gpu::holds(dy) {
            return Ok([Some(self.reversed().run_on_gpu(dy)?.reshape(x.shape())?)]);
        }
        let _timed = measure::backward(OP);
        let (dys, layout) = dy.storage_and_layout();
        let Storage::Cpu(dys) = &*dys else { bail!("{OP}: expected values on the host") };
        Ok([Some(tensor(self.reversed().run_on(dys, layout)?, x.shape()))])
    }
}

//! Runs ring attention on a GPU: launches one attention for each pair of a chunk of queries and a chunk of keys.
//! Kernels round the results and the gradients of each pair to the dtype of the tensors. The pairs are combined in f32.

use super::{OP, Ring};
use crate::attention::geometry::{Geometry, Queries};
use crate::attention::span::Firsts;
use crate::attention::state::{chunk_of, not_on_gpu};
use crate::device::{Gpu, Operand};
use crate::gpu::attention::{SavedForward, backward, forward};
use crate::gpu::{copied, storage, tensor};
use crate::graph::storage::take;
use crate::sequence::Arriving;
use candle_core::{CudaStorage, DType, Layout, Result, Tensor, bail};
use std::ops::Range;

/// The attention of one chunk of this rank's queries to one chunk of keys.
struct Pair {
    /// Index of the chunk of queries in the rank's slice, and of the chunk of keys in the block.
    chunks: [usize; 2],
    g: Geometry,
    firsts: Firsts,
}

impl Ring {
    fn pairs(&self, g: Geometry, owner: usize) -> impl Iterator<Item = Pair> {
        let own = &self.chunks[self.group.index()];
        let of_keys = move |(chunk, keys): (usize, &Range<usize>)| {
            let (keys, length) = (keys.clone(), keys.len());
            own.iter().enumerate().filter(move |(_, queries)| keys.start <= queries.start).map(
                move |(part, queries)| {
                    let queries_at = Queries::one(queries.start - keys.start, length);
                    let g = Geometry { time: length, queries: queries_at, ..g };
                    let firsts = self.firsts(g, &keys, std::slice::from_ref(queries));
                    Pair { chunks: [part, chunk], g, firsts: Firsts::new([g.batch, g.positions()], firsts) }
                },
            )
        };
        self.chunks[owner].iter().enumerate().flat_map(of_keys)
    }

    pub(super) fn forward_on_gpu(&self, [q, k, v]: [(&CudaStorage, &Layout); 3]) -> Result<CudaStorage> {
        not_on_gpu(self.state.mask.as_ref())?;
        let g = Geometry::separate(OP, q.1.shape(), k.1.shape(), v.1.shape())?;
        let (gpu, dtype) = (Gpu::new(&q.0.device)?, candle_core::backend::BackendStorage::dtype(q.0));
        let q = copied(OP, q.0, q.1)?;
        let queries = halves(&q)?;
        let mut block = Tensor::stack(&[copied(OP, k.0, k.1)?, copied(OP, v.0, v.1)?], 0)?;
        // For each chunk of queries: the result in f32, `[batch, length, heads, size]`, and ln Σ e^score, `[batch,
        // heads, length]`.
        let mut sums: [Option<(Tensor, Tensor)>; 2] = [None, None];
        for step in 0..self.group.size() {
            let next = self.pass_on_on_gpu(step, &block)?;
            let [keys, values] = [halves(&block.get(0)?)?, halves(&block.get(1)?)?];
            for Pair { chunks: [part, chunk], g, firsts } in self.pairs(g, self.owner(step)) {
                let (q, k, v) = (&queries[part], &keys[chunk], &values[chunk]);
                let operands = [Operand::of(OP, q)?, Operand::of(OP, k)?, Operand::of(OP, v)?];
                let (out, kept) = forward(OP, &gpu, g, dtype, &operands, &firsts)?;
                let out = tensor(out, q.shape()).to_dtype(DType::F32)?;
                let log_sums = kept
                    .log_sums
                    .narrow(0, 0, g.batch * g.heads * g.time)?
                    .reshape((g.batch, g.heads, g.time))?
                    .maximum(NOTHING)?;
                sums[part] = Some(match sums[part].take() {
                    None => (out, log_sums),
                    Some(sums) => combined(sums, (out, log_sums))?,
                });
            }
            if let Some(next) = next {
                block = next()?;
            }
        }
        let [Some(first), Some(second)] = sums else {
            bail!("{OP}: no keys arrived for one of the two chunks of queries")
        };
        let out = Tensor::cat(&[&first.0, &second.0], 1)?.to_dtype(dtype)?;
        let _ = self.on_gpu.set([first.1, second.1]);
        storage(take(&out)?)
    }

    pub(super) fn backward_on_gpu(
        &self,
        [q, k, v]: [&Tensor; 3],
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let g = Geometry::separate(OP, q.shape(), k.shape(), v.shape())?;
        let (Some(log_sums), gpu, dtype) = (self.on_gpu.get(), Gpu::of(OP, q)?, q.dtype()) else {
            bail!("{OP}: the backward ran before the forward");
        };
        let (queries, outs, d_outs) = (halves(q)?, halves(out)?, halves(d_out)?);
        let mut block = Tensor::stack(&[k.detach(), v.detach()], 0)?;
        let mut dq: [Option<Tensor>; 2] = [None, None];
        let (mut own, mut travelling) = (None, None::<Arriving>);
        for step in 0..self.group.size() {
            let next = self.pass_on_on_gpu(step, &block)?;
            let [keys, values] = [halves(&block.get(0)?)?, halves(&block.get(1)?)?];
            // Gradients of the block's two chunks of keys and values.
            let mut d_block: [Option<Tensor>; 2] = [None, None];
            for Pair { chunks: [part, chunk], g, firsts } in self.pairs(g, self.owner(step)) {
                let (q, k, v) = (&queries[part], &keys[chunk], &values[chunk]);
                let operands = [Operand::of(OP, q)?, Operand::of(OP, k)?, Operand::of(OP, v)?];
                let kept = SavedForward::new(OP, &gpu, g, log_sums[part].clone(), &firsts)?;
                let upstream = [&Operand::of(OP, &outs[part])?, &Operand::of(OP, &d_outs[part])?];
                let [own_dq, dk, dv] = backward(OP, &gpu, g, dtype, &operands, upstream, &kept)?;
                let wide = |of: CudaStorage, like: &Tensor| tensor(of, like.shape()).to_dtype(DType::F32);
                add(&mut dq[part], wide(own_dq, q)?)?;
                add(&mut d_block[chunk], Tensor::stack(&[wide(dk, k)?, wide(dv, v)?], 0)?)?;
            }
            let chunk = |d: &Option<Tensor>| match d {
                Some(d) => Ok(d.clone()),
                None => Tensor::zeros((2, g.batch, g.time / 2, g.kv_heads, g.size), DType::F32, q.device()),
            };
            let mut d_block = Tensor::cat(&[chunk(&d_block[0])?, chunk(&d_block[1])?], 2)?;
            if let Some(sums) = travelling.take() {
                d_block = (d_block + sums()?)?;
            }
            match step {
                0 => own = Some(d_block),
                _ => travelling = Some(self.group.pass_on_on_gpu(&d_block)?),
            }
            if let Some(next) = next {
                block = next()?;
            }
        }
        if let Some(sums) = travelling {
            add(&mut own, sums()?)?;
        }
        let ([Some(first), Some(second)], Some(own)) = (dq, own) else {
            bail!("{OP}: no keys arrived for one of the two chunks of queries");
        };
        let gradient = |of: &Tensor, own: Tensor| of.track_op().then(|| own.contiguous()?.to_dtype(dtype)).transpose();
        let dq = Tensor::cat(&[first, second], 1)?;
        Ok([gradient(q, dq)?, gradient(k, own.get(0)?)?, gradient(v, own.get(1)?)?])
    }

    /// Starts to pass a copy of the block on, unless this is the last step.
    fn pass_on_on_gpu(&self, step: usize, block: &Tensor) -> Result<Option<Arriving>> {
        let is_last = step + 1 == self.group.size();
        (!is_last).then(|| self.group.pass_on_on_gpu(block)).transpose()
    }
}

/// ln Σ e^score of no scores. Finite, so that differences are defined.
const NOTHING: f64 = -1e30;

/// Combines attention to different keys.
fn combined((a, of_a): (Tensor, Tensor), (b, of_b): (Tensor, Tensor)) -> Result<(Tensor, Tensor)> {
    let largest = of_a.maximum(&of_b)?;
    let both = (&largest + ((&of_a - &largest)?.exp()? + (&of_b - &largest)?.exp()?)?.log()?)?;
    // `[batch, heads, length]` to `[batch, length, heads, 1]`.
    let weight = |of: &Tensor| (of - &both)?.exp()?.transpose(1, 2)?.unsqueeze(3);
    let out = (a.broadcast_mul(&weight(&of_a)?)? + b.broadcast_mul(&weight(&of_b)?)?)?;
    Ok((out, both.contiguous()?))
}

fn add(sum: &mut Option<Tensor>, x: Tensor) -> Result<()> {
    *sum = Some(match sum.take() {
        None => x,
        Some(sum) => (sum + x)?,
    });
    Ok(())
}

/// Returns the two chunks of a slice.
fn halves(x: &Tensor) -> Result<[Tensor; 2]> {
    Ok([chunk_of(x, 0)?, chunk_of(x, 1)?])
}

//! Ring attention (Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023): the ranks
//! that share sequences pass keys and values from rank to rank, and each rank computes all heads for its own queries.
//!
//! A block consists of the keys and values of one rank's slice. In step s of n, rank r has the block of rank r − s, and
//! the block travels to rank r + 1 while rank r computes attention with it. The attention to each block is normalized
//! by itself, and [`Sums`] combines these results by ln Σ e^score. In the backward the blocks travel again. The
//! gradients of a block are summed in f32: the sums start at the rank after the block's owner, follow the block one
//! step later, and reach the owner at the end. The order of all sums depends on the number of ranks only.
//!
//! A slice has two chunks. Queries do not see the keys of a chunk that begins after their own chunk, so a rank skips
//! such pairs of chunks ([`ChunkAttention`]).

#[cfg(feature = "cuda")]
mod gpu;
mod sums;

use super::dropout::Mask;
use super::geometry::{Geometry, Layouts, Queries};
use super::heads::{Saved, backward, forward};
use super::span::AttentionSpan;
use super::state::{OP, State, of_chunks};
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{Shared, gradient, stored};
use crate::measure;
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, bytes, floats};
use crate::product::Elements;
use crate::sequence::{Element, Exchanging, SequenceGroup, dense, of_element};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, Shape, Storage, Tensor, bail};
use std::borrow::Cow;
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use sums::Sums;

/// Computes [`causal_attention_with_dropout`](super::causal_attention_with_dropout) on slices of q, k and v. `span`
/// refers to whole sequences.
pub(super) fn separate(
    group: &SequenceGroup,
    [q, k, v]: [&Tensor; 3],
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    let (chunks, state) = of_chunks(group, q, span, mask)?;
    let ring = Ring {
        group: group.clone(),
        chunks,
        time: q.dim(1)? * group.size(),
        state,
        #[cfg(feature = "cuda")]
        on_gpu: OnceLock::new(),
    };
    apply([q, k, v], ring)
}

struct Ring {
    group: SequenceGroup,
    /// The positions of each rank's slice: two chunks of the same length, which a slice stores one after the other.
    chunks: Vec<Vec<Range<usize>>>,
    /// Length of whole sequences.
    time: usize,
    state: State,
    /// The log-sums of both chunks of queries that a GPU's forward keeps for the backward.
    #[cfg(feature = "cuda")]
    on_gpu: OnceLock<[Tensor; 2]>,
}

/// The attention of some queries of a slice to one chunk of keys. Positions count from the first key.
struct ChunkAttention {
    g: Geometry,
    at: Layouts,
    firsts: Vec<usize>,
    mask: Option<Mask>,
    /// Indices of the queries in the slice.
    queries: Range<usize>,
}

/// The values of a slice's queries that the backward reads. `log_sums` is `[batch, heads, time]`.
struct Upstream<'a> {
    q: Elements<'a>,
    out: Elements<'a>,
    d_out: Elements<'a>,
    log_sums: &'a [f32],
}

impl Ring {
    /// Returns the parts of the attention to the block of rank `owner`. `g` is the geometry of a slice.
    fn parts(&self, g: Geometry, owner: usize) -> impl Iterator<Item = ChunkAttention> {
        let own = &self.chunks[self.group.index()];
        self.chunks[owner].iter().enumerate().filter_map(move |(chunk, keys)| {
            let skipped = own.iter().filter(|queries| queries.start < keys.start).count();
            let queries = match &own[skipped..] {
                [one] => Queries::one(one.start - keys.start, keys.len()),
                [one, two] => Queries::two([one.start - keys.start, two.start - keys.start], keys.len()),
                _ => return None,
            };
            let of_part = Geometry { time: keys.len(), queries, ..g };
            let first_query = skipped * keys.len();
            Some(ChunkAttention {
                g: of_part,
                at: Layouts::of_block(g, [first_query, chunk * keys.len()]),
                firsts: self.firsts(of_part, keys, &own[skipped..]),
                mask: self.state.mask.map(|mask| mask.at_position(keys.start)),
                queries: first_query..g.time,
            })
        })
    }

    /// Returns, for each position, the first key of the chunk `keys` that it sees.
    fn firsts(&self, g: Geometry, keys: &Range<usize>, queries: &[Range<usize>]) -> Vec<usize> {
        let mut firsts = vec![0; g.batch * g.positions()];
        let of_whole = self.state.firsts.chunks_exact(self.time.max(1));
        for (firsts, of_whole) in firsts.chunks_exact_mut(g.positions().max(1)).zip(of_whole) {
            for position in queries.iter().cloned().flatten() {
                firsts[position - keys.start] = of_whole[position].clamp(keys.start, keys.end) - keys.start;
            }
        }
        firsts
    }

    /// Returns the rank whose block this rank has in a step.
    fn owner(&self, step: usize) -> usize {
        (self.group.index() + self.group.size() - step) % self.group.size()
    }

    /// Starts to pass a copy of the block on, unless this is the last step.
    fn pass_on<T: Element>(&self, step: usize, block: &[T]) -> Result<Option<Exchanging<zero_comm::Exchanged>>> {
        let is_last = step + 1 == self.group.size();
        (!is_last).then(|| self.group.pass_on(block.to_vec())).transpose()
    }

    fn forward<T: Element>(&self, g: Geometry, q: Elements<'_>, mut block: Vec<T>) -> Result<Sums> {
        let mut sums = Sums::new(g);
        let mut of_part = vec![0.0; sums.out.len()];
        for step in 0..self.group.size() {
            let next = self.pass_on(step, &block)?;
            for part in self.parts(g, self.owner(step)) {
                let (block, out) = (T::elements(&block), Shared::from(&mut *of_part));
                let log_sums = forward(part.g, part.at, &part.firsts, part.mask.as_ref(), [q, block, block], out);
                sums.add(part.queries, &of_part, &log_sums);
            }
            if let Some(next) = next {
                block = T::values(next.wait()?.output)?;
            }
        }
        Ok(sums)
    }

    /// Returns the gradients of this rank's queries and of its block.
    fn backward<T: Element>(&self, g: Geometry, of: &Upstream<'_>, mut block: Vec<T>) -> Result<[Vec<f32>; 2]> {
        let mut dq = vec![0.0; g.batch * g.time * g.heads * g.size];
        let mut of_part = vec![0.0; dq.len()];
        let (mut own, mut travelling) = (vec![], None);
        for step in 0..self.group.size() {
            let next = self.pass_on(step, &block)?;
            let mut d_block = vec![0.0; block.len()];
            for part in self.parts(g, self.owner(step)) {
                part.write_gradients(g, of, T::elements(&block), [&mut of_part, &mut d_block]);
                part.add_queries(g, &of_part, &mut dq);
            }
            if let Some(sums) = travelling.take() {
                add(&mut d_block, sums)?;
            }
            match step {
                0 => own = d_block,
                _ => travelling = Some(self.group.pass_on(d_block)?),
            }
            if let Some(next) = next {
                block = T::values(next.wait()?.output)?;
            }
        }
        if let Some(sums) = travelling {
            add(&mut own, sums)?;
        }
        Ok([dq, own])
    }
}

/// Adds the sums of gradients that the previous rank sends.
fn add(gradients: &mut [f32], sums: Exchanging<zero_comm::Exchanged>) -> Result<()> {
    let sums = f32::values(sums.wait()?.output)?;
    gradients.iter_mut().zip(sums).for_each(|(gradient, sum)| *gradient += sum);
    Ok(())
}

impl ChunkAttention {
    /// Writes the gradients of the part's queries to `dq`, in the layout of a slice's queries, and those of its keys
    /// and values to `d_block`, in the layout of a block.
    fn write_gradients(&self, g: Geometry, of: &Upstream<'_>, block: Elements<'_>, [dq, d_block]: [&mut [f32]; 2]) {
        let log_sums: Cow<'_, [f32]> = match self.queries.len() == g.time {
            true => of.log_sums.into(),
            false => of.log_sums.chunks_exact(g.time).flat_map(|row| &row[self.queries.clone()]).copied().collect(),
        };
        let saved = Saved {
            qkv: [of.q, block, block],
            out: of.out,
            d_out: of.d_out,
            log_sums: &log_sums,
            firsts: &self.firsts,
            mask: self.mask.as_ref(),
        };
        let of_block = Shared::from(d_block);
        backward(self.g, self.at, &saved, [Shared::from(dq), of_block, of_block]);
    }

    /// Adds the gradients of the part's queries.
    fn add_queries(&self, g: Geometry, of_part: &[f32], dq: &mut [f32]) {
        let (row, of_slice) = (g.heads * g.size, g.time * g.heads * g.size);
        let own = self.queries.start * row..self.queries.end * row;
        for (dq, of_part) in dq.chunks_exact_mut(of_slice.max(1)).zip(of_part.chunks_exact(of_slice.max(1))) {
            dq[own.clone()].iter_mut().zip(&of_part[own.clone()]).for_each(|(sum, of_part)| *sum += of_part);
        }
    }
}

impl Footprint for Ring {
    const READS: Reads = Reads { output: true, ..Reads::inputs([true; 3]) };

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let [q, k, v] = [0, 1, 2].map(|input| inputs[input].shape());
        let (g, dtype, others) = (Geometry::separate(OP, q, k, v)?, inputs[1].dtype(), self.group.size() as u64 - 1);
        let (block, d_block) = (bytes(2 * k.elem_count(), dtype), floats(2 * k.elem_count()));
        let (out, result) = (floats(q.elem_count()), bytes(q.elem_count(), dtype));
        let rows = g.batch * g.heads * g.time;
        // All parts have the same number of keys. The parts of the rank's own block have the most queries.
        let of_part = |room: fn(Geometry) -> u64| {
            let firsts = g.batch * self.time * size_of::<usize>();
            self.parts(g, self.group.index()).map(|part| room(part.g)).max().unwrap_or(0) + firsts as u64
        };
        // Before the last step, memory also holds the copy of the block that is sent, and the next block, which is
        // received.
        let blocks = |step: u64| if step == others { block } else { 3 * block };
        // The gradients of the rank's own block and of the step's block, and the sums that are sent and received. In
        // step 1, the gradients of the step's block are themselves the sums that are sent.
        let gradients = |step: u64| d_block * [1, 3, 4][step.min(2) as usize];
        let travelling = (0..=others).map(|step| blocks(step) + gradients(step)).max().unwrap_or(0);
        let forward = 2 * out + blocks(0) + floats(3 * rows) + of_part(Geometry::forward_room);
        let backward = 2 * out + travelling + floats(rows) + of_part(Geometry::backward_room);
        Ok(Costs {
            saved: floats(rows) + (self.state.firsts.len() * size_of::<usize>()) as u64,
            // The caller counts the results, which are some of these f32 values or reuse the memory of some.
            forward: forward.saturating_sub(result),
            backward: backward.saturating_sub(result + block),
            exchanged: [others * block, others * (block + d_block)].map(Exchanged::to_queries),
            ..Costs::new(q, inputs[0].dtype())
        })
    }
}

impl Op<3> for Ring {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(qs, ql), (ks, kl), (vs, vl)]: Inputs<'_, CpuStorage, 3>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let g = Geometry::separate(OP, ql.shape(), kl.shape(), vl.shape())?;
        let q = View::new(OP, qs, ql)?;
        let Sums { out, log_sums, .. } = of_element!(OP, ks.dtype(), T => {
            let block = [dense::<T>(ks, kl)?, dense(vs, vl)?].concat();
            self.forward(g, q.elements(), block)?
        });
        let _ = self.state.log_sums.set(log_sums);
        Ok((stored(OP, out, qs.dtype())?, ql.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, qkv: Inputs<'_, CudaStorage, 3>) -> Result<(CudaStorage, Shape)> {
        Ok((self.forward_on_gpu(qkv)?, qkv[0].1.shape().clone()))
    }

    fn bwd(&self, [q, k, v]: [&Tensor; 3], out: &Tensor, d_out: &Tensor) -> Result<[Option<Tensor>; 3]> {
        #[cfg(feature = "cuda")]
        if crate::gpu::holds(q) {
            return self.backward_on_gpu([q, k, v], out, d_out);
        }
        let _timed = measure::backward(OP);
        let Some(log_sums) = self.state.log_sums.get() else { bail!("{OP}: the backward ran before the forward") };
        let g = Geometry::separate(OP, q.shape(), k.shape(), v.shape())?;
        let held = [q, out, d_out].map(Tensor::storage_and_layout);
        let [qs, os, ds] = held.each_ref().map(|held| View::of(OP, held));
        let (qs, os, ds) = (qs?, os?, ds?);
        let of = Upstream { q: qs.elements(), out: os.elements(), d_out: ds.elements(), log_sums };
        let ((ks, kl), (vs, vl)) = (k.storage_and_layout(), v.storage_and_layout());
        let (Storage::Cpu(ks), Storage::Cpu(vs)) = (&*ks, &*vs) else {
            bail!("{OP}: expected keys and values on the host");
        };
        let [dq, mut dk] = of_element!(OP, k.dtype(), T => {
            let block = [dense::<T>(ks, kl)?, dense(vs, vl)?].concat();
            self.backward(g, &of, block)?
        });
        let dv = dk.split_off(k.elem_count());
        Ok([gradient(OP, q, dq)?, gradient(OP, k, dk)?, gradient(OP, v, dv)?])
    }
}

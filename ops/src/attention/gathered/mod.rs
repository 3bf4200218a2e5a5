//! Attention of ranks that share sequences, where each rank computes all heads for its own queries. A rank gathers the
//! keys and values of all positions in the forward, and again in the backward. The backward sums the gradients of keys
//! and values over the ranks in f32, and each rank receives the sums of its own slice. On the CPU the sum follows a
//! fixed tree of the ranks; NCCL adds in its own order.

#[cfg(feature = "cuda")]
mod gpu;

use super::dropout::Mask;
use super::geometry::{Geometry, Layouts, Queries};
use super::heads::backward;
use super::span::AttentionSpan;
use super::state::{OP, State, footprint, of_chunks};
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{Fresh, gradient, tensor};
use crate::measure;
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, bytes, floats};
use crate::sequence::{Element, SequenceGroup, dense, of_element};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;

/// Computes [`causal_attention_with_dropout`](super::causal_attention_with_dropout) on slices of q, k and v. `span`
/// refers to whole sequences.
pub(super) fn separate(
    group: &SequenceGroup,
    [q, k, v]: [&Tensor; 3],
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    let (parts, state) = of_chunks(group, q, span, mask)?;
    let op = Gathered {
        group: group.clone(),
        parts,
        state,
        #[cfg(feature = "cuda")]
        kept: OnceLock::new(),
    };
    apply([q, k, v], op)
}

struct Gathered {
    group: SequenceGroup,
    /// The positions of each rank's slice. A slice stores its ranges contiguously.
    parts: Vec<Vec<Range<usize>>>,
    state: State,
    /// The values that a GPU's forward keeps for the backward, for the queries of each part.
    #[cfg(feature = "cuda")]
    kept: OnceLock<[crate::gpu::attention::SavedForward; 2]>,
}

impl Gathered {
    fn geometry(&self, q: &Shape, k: &Shape, v: &Shape) -> Result<Geometry> {
        let of_slice = Geometry::separate(OP, q, k, v)?;
        let [first, second] = &*self.parts[self.group.index()] else {
            bail!("{OP}: expected a slice of two ranges of positions");
        };
        let queries = Queries::two([first.start, second.start], first.len());
        Ok(Geometry { time: of_slice.time * self.group.size(), queries, ..of_slice })
    }

    /// Calls `copy` with a rank, a range of its elements in the rank's own slice, and the same elements' range in whole
    /// sequences.
    fn places(&self, g: Geometry, mut copy: impl FnMut(usize, Range<usize>, Range<usize>)) {
        let row = g.kv_heads * g.size;
        for (rank, parts) in self.parts.iter().enumerate() {
            let mut stored = 0;
            for sample in 0..g.batch {
                for part in parts {
                    let whole = (sample * g.time + part.start) * row..(sample * g.time + part.end) * row;
                    let inside = stored..stored + whole.len();
                    stored = inside.end;
                    copy(rank, inside, whole);
                }
            }
        }
    }

    /// Gathers the keys and the values of whole sequences.
    fn gather(&self, g: Geometry, own: [(&CpuStorage, &Layout); 2]) -> Result<[CpuStorage; 2]> {
        of_element!(OP, own[0].0.dtype(), T => self.gather_as::<T>(g, own))
    }

    fn gather_as<T: Element>(&self, g: Geometry, [k, v]: [(&CpuStorage, &Layout); 2]) -> Result<[CpuStorage; 2]> {
        let slice = [dense::<T>(k.0, k.1)?, dense(v.0, v.1)?].concat();
        let own = slice.len() / 2;
        let received = self.group.concatenated(slice)?;
        let mut whole = [(); 2].map(|()| vec![T::zero(); own * self.group.size()]);
        self.places(g, |rank, from, to| {
            for (which, whole) in whole.iter_mut().enumerate() {
                let start = (2 * rank + which) * own;
                whole[to.clone()].copy_from_slice(&received[start + from.start..start + from.end]);
            }
        });
        Ok(whole.map(T::to_cpu_storage_owned))
    }

    /// Sums the gradients of whole keys and values over the ranks, and returns the gradients of this rank's slice.
    fn give_back(&self, g: Geometry, [dk, dv]: [Vec<f32>; 2]) -> Result<[Vec<f32>; 2]> {
        let own = dk.len() / self.group.size();
        let mut packed = vec![0.0; 2 * dk.len()];
        self.places(g, |rank, to, from| {
            for (which, whole) in [&dk, &dv].into_iter().enumerate() {
                let start = (2 * rank + which) * own;
                packed[start + to.start..start + to.end].copy_from_slice(&whole[from.clone()]);
            }
        });
        drop([dk, dv]);
        let mut sums = f32::values(self.group.reduce_scatter(packed)?.wait()?.shard)?;
        let dv = sums.split_off(own);
        Ok([sums, dv])
    }
}

impl Footprint for Gathered {
    const READS: Reads = Reads { output: true, ..Reads::inputs([true; 3]) };

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let [q, k, v] = [0, 1, 2].map(|input| inputs[input].shape());
        let (g, dtype) = (self.geometry(q, k, v)?, inputs[1].dtype());
        let elements = 2 * whole_keys(g).elem_count();
        let (whole, in_f32) = (bytes(elements, dtype), floats(elements));
        let (own, own_f32) = (whole / self.group.size() as u64, in_f32 / self.group.size() as u64);
        let costs = footprint(g, Costs::new(q, inputs[0].dtype()));
        // The gathered values are in memory twice while their slices are joined.
        let gathering = 2 * whole;
        let others = self.group.size() as u64 - 1;
        Ok(Costs {
            forward: gathering.max(whole + costs.forward),
            backward: gathering.max(whole + in_f32 + costs.backward).max(2 * in_f32).max(in_f32 + own_f32),
            exchanged: [others * own, others * (own + own_f32)].map(Exchanged::to_queries),
            ..costs
        })
    }
}

impl Op<3> for Gathered {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(qs, ql), (ks, kl), (vs, vl)]: Inputs<'_, CpuStorage, 3>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let g = self.geometry(ql.shape(), kl.shape(), vl.shape())?;
        let q = View::new(OP, qs, ql)?;
        let len = ql.shape().elem_count();
        let out = Fresh::new(OP, qs.dtype(), len)?;
        let whole = self.gather(g, [(ks, kl), (vs, vl)])?;
        let layout = Layout::contiguous(whole_keys(g));
        let [k, v] = [View::new(OP, &whole[0], &layout)?, View::new(OP, &whole[1], &layout)?];
        let qkv = [q.elements(), k.elements(), v.elements()];
        Ok((self.state.forward(g, Layouts::separate(g), qkv, out, len), ql.shape().clone()))
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
        let g = self.geometry(q.shape(), k.shape(), v.shape())?;
        let held = [q, out, d_out].map(Tensor::storage_and_layout);
        let [qs, os, ds] = held.each_ref().map(|held| View::of(OP, held));
        let (qs, os, ds) = (qs?, os?, ds?);
        let ((ks, kl), (vs, vl)) = (k.storage_and_layout(), v.storage_and_layout());
        let (Storage::Cpu(ks), Storage::Cpu(vs)) = (&*ks, &*vs) else {
            bail!("{OP}: expected keys and values on the host");
        };
        let whole = self.gather(g, [(ks, kl), (vs, vl)])?;
        let layout = Layout::contiguous(whole_keys(g));
        let (of_keys, mut dq) = (layout.shape().elem_count(), Fresh::new(OP, q.dtype(), q.elem_count())?);
        let mut d_whole = [Fresh::new(OP, DType::F32, of_keys)?, Fresh::new(OP, DType::F32, of_keys)?];
        let [dk, dv] = d_whole.each_mut().map(Fresh::shared);
        let [k_whole, v_whole] = [View::new(OP, &whole[0], &layout)?, View::new(OP, &whole[1], &layout)?];
        let qkv = [qs.elements(), k_whole.elements(), v_whole.elements()];
        let saved = self.state.saved(qkv, os.elements(), ds.elements())?;
        backward(g, Layouts::separate(g), &saved, [dq.shared(), dk, dv]);
        drop((k_whole, v_whole));
        drop(whole);
        // SAFETY: `backward` writes all elements.
        let d_whole = d_whole.map(|d_whole| match unsafe { d_whole.filled(of_keys) } {
            CpuStorage::F32(values) => values,
            _ => vec![],
        });
        let [dk, dv] = self.give_back(g, d_whole)?;
        // SAFETY: `backward` writes all elements of `dq` too.
        let dq = q.track_op().then(|| tensor(unsafe { dq.filled(q.elem_count()) }, q.shape()));
        Ok([dq, gradient(OP, k, dk)?, gradient(OP, v, dv)?])
    }
}

/// Returns the shape of the keys, and of the values, of whole sequences.
fn whole_keys(g: Geometry) -> Shape {
    (g.batch, g.time, g.kv_heads, g.size).into()
}

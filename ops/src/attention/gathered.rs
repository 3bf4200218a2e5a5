//! Attention of ranks that share sequences, each of which computes all heads for its own queries. It gathers the keys and
//! values of all positions, in the forward and again in the backward, which returns the gradients of keys and values to
//! the ranks that they came from, summed in f32 over a fixed tree of the ranks.

use super::dropout::Mask;
use super::geometry::{Geometry, Layouts, Queries};
use super::heads::{Saved, backward, forward};
use super::span::{AttentionSpan, Firsts};
use super::{OP, footprint};
use crate::columns::columns;
use crate::graph::apply::{apply3, reshape};
use crate::graph::operand::View;
use crate::graph::output::{Fresh, stored, tensor};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads, bytes, floats};
use crate::sequence::{Element, SequenceGroup, dense};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use zero_comm::Buffer;

/// Computes [`causal_attention_with_dropout`](super::causal_attention_with_dropout) on slices of q, k and v. The span is that
/// of whole sequences.
pub(super) fn separate(
    group: &SequenceGroup,
    [q, k, v]: [&Tensor; 3],
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    group.may_exchange()?;
    let (batch, slice, ..) = q.dims4()?;
    let time = slice * group.size();
    let parts = (0..group.size()).map(|rank| group.positions_of(rank, time)).collect::<Result<_>>()?;
    let firsts = span.firsts(OP, batch, time)?;
    apply3(q, k, v, Gathered { group: group.clone(), parts, firsts, mask, log_sums: OnceLock::new() })
}

/// [`separate`] on slices of packed queries, keys and values of `heads` heads.
pub(super) fn packed(
    group: &SequenceGroup,
    qkv: &Tensor,
    heads: usize,
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    let (batch, slice, width) = qkv.dims3()?;
    let width = width / 3;
    if heads == 0 || !width.is_multiple_of(heads) {
        bail!("{OP}: the width {width} is not a multiple of {heads} heads");
    }
    let part = |part: usize| {
        let columns = columns(qkv, part * width..(part + 1) * width)?;
        reshape(&columns, (batch, slice, heads, width / heads))
    };
    let attended = separate(group, [&part(0)?, &part(1)?, &part(2)?], span, mask)?;
    reshape(&attended, (batch, slice, width))
}

struct Gathered {
    group: SequenceGroup,
    /// The positions of each rank's slice, which are stored one range after the other.
    parts: Vec<Vec<Range<usize>>>,
    /// The first position that each position sees.
    firsts: Arc<Firsts>,
    mask: Option<Mask>,
    log_sums: OnceLock<Vec<f32>>,
}

impl Gathered {
    fn geometry(&self, q: &Shape, k: &Shape, v: &Shape) -> Result<Geometry> {
        let of_slice = Geometry::separate(OP, q, k, v)?;
        let [first, second] = &*self.parts[self.group.index()] else {
            bail!("{OP}: a slice has two ranges of positions");
        };
        let queries = Queries::two([first.start, second.start], first.len());
        Ok(Geometry { time: of_slice.time * self.group.size(), queries, ..of_slice })
    }

    /// Calls `copy` with the places of each rank's elements among those of all ranks in rank order, and among those of whole
    /// sequences.
    fn places(&self, g: Geometry, mut copy: impl FnMut(usize, Range<usize>, Range<usize>)) {
        let row = g.kv_heads * g.size;
        let slice = g.queries.len();
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
            debug_assert_eq!(stored, g.batch * slice * row);
        }
    }

    /// Gathers the keys and the values of whole sequences.
    fn gather<T: Element>(&self, g: Geometry, [k, v]: [&[T]; 2]) -> Result<[Vec<T>; 2]> {
        let own = k.len();
        let slice = [k, v].concat();
        let room = vec![T::ZERO; slice.len() * self.group.size()];
        let received = self.group.all_gather(T::buffer(slice), T::buffer(room))?;
        let received = T::values(received).map_err(candle_core::Error::wrap)?;
        let mut whole = [(); 2].map(|()| vec![T::ZERO; own * self.group.size()]);
        self.places(g, |rank, from, to| {
            for (which, whole) in whole.iter_mut().enumerate() {
                let start = (2 * rank + which) * own;
                whole[to.clone()].copy_from_slice(&received[start + from.start..start + from.end]);
            }
        });
        Ok(whole)
    }

    /// Sums gradients of whole keys and values over the ranks, and returns those of this rank's slice.
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
        let sums = self.group.reduce_scatter(Buffer::F32(packed), Buffer::F32(vec![0.0; 2 * own]))?;
        let mut sums = sums.into_f32().map_err(candle_core::Error::wrap)?;
        let dv = sums.split_off(own);
        Ok([sums, dv])
    }

    fn forward<T: Element>(
        &self,
        g: Geometry,
        q: &View<'_>,
        k: (&CpuStorage, &Layout),
        v: (&CpuStorage, &Layout),
        dtype: DType,
    ) -> Result<CpuStorage> {
        let len = g.batch * g.queries.len() * g.heads * g.size;
        let mut out = Fresh::new(OP, dtype, len)?;
        let [k, v] = self.gather::<T>(g, [&dense(k.0, k.1)?, &dense(v.0, v.1)?])?;
        let qkv = [q.elements(), T::elements(&k), T::elements(&v)];
        let log_sums = forward(g, Layouts::separate(g), &self.firsts, self.mask.as_ref(), qkv, out.shared());
        let _ = self.log_sums.set(log_sums);
        // SAFETY: `forward` writes all elements.
        Ok(unsafe { out.filled(len) })
    }

    /// Returns the gradients of q, and in f32 those of this rank's keys and values.
    fn backward<T: Element>(
        &self,
        g: Geometry,
        [q, out, d_out]: [&View<'_>; 3],
        k: (&CpuStorage, &Layout),
        v: (&CpuStorage, &Layout),
        dtype: DType,
    ) -> Result<(CpuStorage, [Vec<f32>; 2])> {
        let Some(log_sums) = self.log_sums.get() else { bail!("{OP}: the backward ran before the forward") };
        let [k, v] = self.gather::<T>(g, [&dense(k.0, k.1)?, &dense(v.0, v.1)?])?;
        let saved = Saved {
            qkv: [q.elements(), T::elements(&k), T::elements(&v)],
            out: out.elements(),
            d_out: d_out.elements(),
            log_sums,
            firsts: &self.firsts,
            mask: self.mask.as_ref(),
        };
        let len = g.batch * g.queries.len() * g.heads * g.size;
        let mut dq = Fresh::new(OP, dtype, len)?;
        let mut whole = [Fresh::new(OP, DType::F32, k.len())?, Fresh::new(OP, DType::F32, v.len())?];
        let [dk, dv] = whole.each_mut().map(Fresh::shared);
        backward(g, Layouts::separate(g), &saved, [dq.shared(), dk, dv]);
        drop([k, v]);
        let values = |of: Fresh| match of {
            // SAFETY: `backward` writes all elements.
            of @ Fresh::F32(_) => match unsafe { of.filled(g.batch * g.time * g.kv_heads * g.size) } {
                CpuStorage::F32(values) => values,
                _ => vec![],
            },
            _ => vec![],
        };
        let own = self.give_back(g, whole.map(values))?;
        // SAFETY: as above.
        Ok((unsafe { dq.filled(len) }, own))
    }
}

impl Footprint for Gathered {
    const READS: Reads = Reads { inputs: [true; 3], output: true };

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let [q, k, v] = [0, 1, 2].map(|input| inputs[input].shape());
        let (g, dtype) = (self.geometry(q, k, v)?, inputs[1].dtype());
        let elements = 2 * g.batch * g.time * g.kv_heads * g.size;
        let (whole, in_f32) = (bytes(elements, dtype), floats(elements));
        let (own, own_f32) = (whole / self.group.size() as u64, in_f32 / self.group.size() as u64);
        let costs = footprint(g, Costs::new(q, inputs[0].dtype()));
        // What is gathered is there twice while its slices are joined.
        let gathering = 2 * whole;
        let others = self.group.size() as u64 - 1;
        Ok(Costs {
            forward: gathering.max(whole + costs.forward),
            backward: gathering.max(whole + in_f32 + costs.backward).max(2 * in_f32).max(in_f32 + own_f32),
            exchanged: [others * own, others * (own + own_f32)],
            ..costs
        })
    }
}

impl CustomOp3 for Gathered {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        qs: &CpuStorage,
        ql: &Layout,
        ks: &CpuStorage,
        kl: &Layout,
        vs: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let g = self.geometry(ql.shape(), kl.shape(), vl.shape())?;
        let (q, k, v) = (View::new(OP, qs, ql)?, (ks, kl), (vs, vl));
        let out = match ks.dtype() {
            DType::F32 => self.forward::<f32>(g, &q, k, v, qs.dtype())?,
            DType::BF16 => self.forward::<bf16>(g, &q, k, v, qs.dtype())?,
            DType::F16 => self.forward::<f16>(g, &q, k, v, qs.dtype())?,
            other => bail!("{OP}: expected f32, bf16 or f16, got {other:?}"),
        };
        Ok((out, ql.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let _timed = measure::backward(OP);
        let g = self.geometry(q.shape(), k.shape(), v.shape())?;
        let held = [q, out, d_out].map(Tensor::storage_and_layout);
        let [qs, os, ds] = held.each_ref().map(|held| View::of(OP, held));
        let views = [&qs?, &os?, &ds?];
        let ((ks, kl), (vs, vl)) = (k.storage_and_layout(), v.storage_and_layout());
        let (Storage::Cpu(ks), Storage::Cpu(vs)) = (&*ks, &*vs) else {
            bail!("{OP}: sequences are cut into slices on the CPU only");
        };
        let (k_own, v_own) = ((ks, kl), (vs, vl));
        let (dq, [dk, dv]) = match k.dtype() {
            DType::F32 => self.backward::<f32>(g, views, k_own, v_own, q.dtype())?,
            DType::BF16 => self.backward::<bf16>(g, views, k_own, v_own, q.dtype())?,
            DType::F16 => self.backward::<f16>(g, views, k_own, v_own, q.dtype())?,
            other => bail!("{OP}: expected f32, bf16 or f16, got {other:?}"),
        };
        let gradient = |of: &Tensor, values: Vec<f32>| -> Result<Option<Tensor>> {
            let wanted = of.track_op();
            wanted.then(|| Ok(tensor(stored(OP, values, of.dtype())?, of.shape()))).transpose()
        };
        Ok((q.track_op().then(|| tensor(dq, q.shape())), gradient(k, dk)?, gradient(v, dv)?))
    }
}

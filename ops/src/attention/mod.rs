//! Causal self-attention that stores no matrix of time × time.
//!
//! The forward saves one number per row, ln Σ e^score, from which the backward recomputes the probabilities tile by
//! tile (Dao et al., "FlashAttention", 2022). This file handles shapes and dtypes; `heads/mod.rs` contains the
//! arithmetic.

pub(crate) mod cached;
mod dropout;
mod gathered;
pub(crate) mod geometry;
pub(crate) mod heads;
mod packed;
mod ring;
mod slices;
pub(crate) mod span;
mod state;

use crate::attention::dropout::Mask;
use crate::attention::geometry::{Geometry, Layouts};
use crate::attention::heads::backward;
use crate::attention::packed::Packed;
use crate::attention::span::AttentionSpan;
#[cfg(feature = "cuda")]
use crate::attention::state::not_on_gpu;
use crate::attention::state::{OP, State, footprint};
use crate::columns::columns;
use crate::decode::is_decoding;
#[cfg(feature = "cuda")]
use crate::device::{Gpu, Operand};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::{apply, reshape};
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{Fresh, tensor};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads};
use crate::sequence::{SequenceGroup, Sharing, whole_length};
use crate::{Dropout, Pass};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
#[cfg(feature = "cuda")]
use std::sync::OnceLock;

/// Computes softmax(q·kᵀ/√size, causal)·v for q of `[batch, time, heads, size]` and k, v of `[batch, time, kv_heads,
/// size]`.
///
/// `heads` must be a multiple of `kv_heads`: query head h reads key and value head h / (heads / kv_heads), which is
/// grouped-query attention. The result has the shape of q.
///
/// If ranks share sequences ([`SequenceGroup`]), q, k, v and the result are this rank's slices of `time` / ranks
/// positions. Spans and dropout refer to whole sequences.
pub fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    causal_attention_within(q, k, v, &AttentionSpan::default())
}

/// Computes [`causal_attention`], but positions attend only to the earlier positions that `span` allows.
///
/// Positions outside the span cost no time, except at the edges of tiles, and do not affect the results: a document
/// gives bit-identical results whether it is packed with others or alone.
pub fn causal_attention_within(q: &Tensor, k: &Tensor, v: &Tensor, span: &AttentionSpan) -> Result<Tensor> {
    separate(q, k, v, span, None)
}

/// Computes [`causal_attention_within`] in which `dropout` drops attention probabilities in training. An element of
/// softmax(…) becomes 0 with the dropout's probability, and is divided by 1 − probability otherwise.
///
/// Whether a probability is dropped depends only on the run's seed, the layer, the dropout's name, the sample's index
/// in the run, the query head and the two positions in the row. The masks are therefore the same for any number of
/// ranks and any micro-batch size, but a document has different masks when packed and when alone. No mask is stored:
/// the backward computes it again.
///
/// # Errors
/// Fails on a GPU if anything is dropped, because there are no GPU kernels for this dropout.
pub fn causal_attention_with_dropout(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    span: &AttentionSpan,
    (dropout, pass): (&Dropout, &Pass),
) -> Result<Tensor> {
    separate(q, k, v, span, Mask::new(OP, dropout, pass)?)
}

fn separate(q: &Tensor, k: &Tensor, v: &Tensor, span: &AttentionSpan, mask: Option<Mask>) -> Result<Tensor> {
    let (_, time, heads, _) = q.dims4()?;
    if mask.is_some() {
        Mask::fits(OP, whole_length(time), heads)?;
    }
    if is_decoding() {
        decodes(mask.as_ref(), q)?;
        return cached::separate(q, k, v, span);
    }
    among(SequenceGroup::current().as_ref(), [q, k, v], span, of_own_heads(mask, heads))
}

/// Computes [`separate`] on the slices of a group's ranks, or on whole sequences if there is no group.
fn among(
    group: Option<&SequenceGroup>,
    [q, k, v]: [&Tensor; 3],
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    match group {
        None => whole(q, k, v, span, mask),
        Some(group) => match group.sharing() {
            Sharing::Heads => slices::separate(group, [q, k, v], span, mask),
            Sharing::Queries => gathered::separate(group, [q, k, v], span, mask),
            Sharing::Ring => ring::separate(group, [q, k, v], span, mask),
            Sharing::Layers => bail!("{OP}: {NOT_GATHERED}"),
        },
    }
}

fn whole(q: &Tensor, k: &Tensor, v: &Tensor, span: &AttentionSpan, mask: Option<Mask>) -> Result<Tensor> {
    let (batch, time, ..) = q.dims4()?;
    let separate = Separate {
        state: State::new(span.firsts(OP, batch, time)?, mask),
        #[cfg(feature = "cuda")]
        on_gpu: OnceLock::new(),
    };
    apply([q, k, v], separate)
}

/// Computes [`causal_attention`] on GPT-2's packed projection. Maps `[batch, time, 3·heads·size]`, which holds q, then
/// k, then v, to `[batch, time, heads·size]`.
pub fn causal_attention_packed(qkv: &Tensor, heads: usize) -> Result<Tensor> {
    causal_attention_packed_within(qkv, heads, &AttentionSpan::default())
}

/// Computes [`causal_attention_packed`] in which positions see only the earlier positions that `span` allows.
pub fn causal_attention_packed_within(qkv: &Tensor, heads: usize, span: &AttentionSpan) -> Result<Tensor> {
    packed(qkv, heads, span, None)
}

/// Computes [`causal_attention_packed_within`] with the dropout of [`causal_attention_with_dropout`].
///
/// # Errors
/// Fails in the same cases as [`causal_attention_with_dropout`].
pub fn causal_attention_packed_with_dropout(
    qkv: &Tensor,
    heads: usize,
    span: &AttentionSpan,
    (dropout, pass): (&Dropout, &Pass),
) -> Result<Tensor> {
    packed(qkv, heads, span, Mask::new(OP, dropout, pass)?)
}

fn packed(qkv: &Tensor, heads: usize, span: &AttentionSpan, mask: Option<Mask>) -> Result<Tensor> {
    let (_, time, _) = qkv.dims3()?;
    if mask.is_some() {
        Mask::fits(OP, whole_length(time), heads)?;
    }
    if is_decoding() {
        decodes(mask.as_ref(), qkv)?;
        return cached::packed(qkv, heads, span);
    }
    packed_among(SequenceGroup::current().as_ref(), qkv, heads, span, of_own_heads(mask, heads))
}

/// Computes [`packed`] on the slices of a group's ranks, or on whole sequences if there is no group.
fn packed_among(
    group: Option<&SequenceGroup>,
    qkv: &Tensor,
    heads: usize,
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    match group {
        None => whole_packed(qkv, heads, span, mask),
        Some(group) => match group.sharing() {
            Sharing::Heads => slices::packed(group, qkv, heads, span, mask),
            Sharing::Queries | Sharing::Ring => unpacked(group, qkv, heads, span, mask),
            Sharing::Layers => bail!("{OP}: {NOT_GATHERED}"),
        },
    }
}

/// Computes [`among`] on the queries, keys and values that `qkv` packs.
fn unpacked(
    group: &SequenceGroup,
    qkv: &Tensor,
    heads: usize,
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    let Geometry { batch, time, size, .. } = Packed::geometry_of(heads, qkv.shape())?;
    let width = heads * size;
    let part = |part: usize| reshape(&columns(qkv, part * width..(part + 1) * width)?, (batch, time, heads, size));
    let attended = among(Some(group), [&part(0)?, &part(1)?, &part(2)?], span, mask)?;
    reshape(&attended, (batch, time, width))
}

fn whole_packed(qkv: &Tensor, heads: usize, span: &AttentionSpan, mask: Option<Mask>) -> Result<Tensor> {
    let (batch, time, _) = qkv.dims3()?;
    apply([qkv], Packed::new(heads, span.firsts(OP, batch, time)?, mask))
}

/// Returns the mask for this rank's `heads` heads if the ranks of a tensor group split the heads of an attention, and
/// otherwise the mask unchanged.
fn of_own_heads(mask: Option<Mask>, heads: usize) -> Option<Mask> {
    match SequenceGroup::of_gathered() {
        Some((group, _)) => mask.map(|mask| mask.at_head(group.index() * heads)),
        None => mask,
    }
}

const NOT_GATHERED: &str =
    "the ranks of a tensor group have only slices of sequences here; run attention inside `whole_sequences`";

/// Fails if attention with a cache does not support the dropout or the device.
fn decodes(mask: Option<&Mask>, x: &Tensor) -> Result<()> {
    if mask.is_some() {
        bail!("{OP}: dropout is unsupported while decoding");
    }
    if !x.device().is_cpu() {
        bail!("{OP}: decoding with a cache is supported on the CPU only");
    }
    Ok(())
}

struct Separate {
    state: State,
    #[cfg(feature = "cuda")]
    on_gpu: OnceLock<gpu::attention::SavedForward>,
}

impl Footprint for Separate {
    const READS: Reads = Reads { output: true, ..Reads::inputs([true; 3]) };

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let [q, k, v] = [0, 1, 2].map(|i| inputs[i].shape());
        Ok(footprint(Geometry::separate(OP, q, k, v)?, Costs::new(q, inputs[0].dtype())))
    }
}

impl Op<3> for Separate {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(qs, ql), (ks, kl), (vs, vl)]: Inputs<'_, CpuStorage, 3>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let geometry = Geometry::separate(OP, ql.shape(), kl.shape(), vl.shape())?;
        let (at, qkv) =
            (Layouts::separate(geometry), [View::new(OP, qs, ql)?, View::new(OP, ks, kl)?, View::new(OP, vs, vl)?]);
        let len = ql.shape().elem_count();
        let out = Fresh::new(OP, qs.dtype(), len)?;
        Ok((self.state.forward(geometry, at, qkv.each_ref().map(View::elements), out, len), ql.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(qs, ql), (ks, kl), (vs, vl)]: Inputs<'_, CudaStorage, 3>) -> Result<(CudaStorage, Shape)> {
        not_on_gpu(self.state.mask.as_ref())?;
        let geometry = Geometry::separate(OP, ql.shape(), kl.shape(), vl.shape())?;
        let gpu = Gpu::new(&qs.device)?;
        let qkv = [Operand::new(OP, qs, ql)?, Operand::new(OP, ks, kl)?, Operand::new(OP, vs, vl)?];
        let (out, kept) = gpu::attention::forward(OP, &gpu, geometry, qs.dtype(), &qkv, &self.state.firsts)?;
        let _ = self.on_gpu.set(kept);
        Ok((out, ql.shape().clone()))
    }

    fn bwd(&self, [q, k, v]: [&Tensor; 3], out: &Tensor, d_out: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let _timed = measure::backward(OP);
        let geometry = Geometry::separate(OP, q.shape(), k.shape(), v.shape())?;
        #[cfg(feature = "cuda")]
        if let Some(kept) = self.on_gpu.get() {
            let qkv = [Operand::of(OP, q)?, Operand::of(OP, k)?, Operand::of(OP, v)?];
            let outs = [&Operand::of(OP, out)?, &Operand::of(OP, d_out)?];
            let gpu = Gpu::of(OP, q)?;
            let [dq, dk, dv] = gpu::attention::backward(OP, &gpu, geometry, q.dtype(), &qkv, outs, kept)?;
            let gradient = |of: &Tensor, gradient| of.track_op().then(|| gpu::tensor(gradient, of.shape()));
            return Ok([gradient(q, dq), gradient(k, dk), gradient(v, dv)]);
        }
        let held = [q, k, v, out, d_out].map(Tensor::storage_and_layout);
        let [qs, ks, vs, os, ds] = held.each_ref().map(|held| View::of(OP, held));
        let (qs, ks, vs, os, ds) = (qs?, ks?, vs?, os?, ds?);
        let qkv = [qs.elements(), ks.elements(), vs.elements()];
        let saved = self.state.saved(qkv, os.elements(), ds.elements())?;
        let fresh = |of: &Tensor| Fresh::new(OP, of.dtype(), of.elem_count());
        let (mut dq, mut dk, mut dv) = (fresh(q)?, fresh(k)?, fresh(v)?);
        backward(geometry, Layouts::separate(geometry), &saved, [dq.shared(), dk.shared(), dv.shared()]);
        let gradient = |of: &Tensor, gradient: Fresh| {
            // SAFETY: `backward` writes all elements.
            of.track_op().then(|| tensor(unsafe { gradient.filled(of.elem_count()) }, of.shape()))
        };
        Ok([gradient(q, dq), gradient(k, dk), gradient(v, dv)])
    }
}

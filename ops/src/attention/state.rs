//! The state that attention operations share: what the forward saves for the backward, and its memory.

use super::dropout::Mask;
use super::geometry::{Geometry, Layouts};
use super::heads::{Saved, forward};
use super::span::{AttentionSpan, Firsts};
use crate::graph::output::Fresh;
use crate::meta::footprint::{Costs, floats};
use crate::product::Elements;
use crate::sequence::SequenceGroup;
use candle_core::{CpuStorage, Result, Tensor, bail};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

pub(super) const OP: &str = "causal-attention";

/// The state of an attention operation.
pub(super) struct State {
    /// The first position that each position sees.
    pub(super) firsts: Arc<Firsts>,
    pub(super) mask: Option<Mask>,
    pub(super) log_sums: OnceLock<Vec<f32>>,
}

impl State {
    pub(super) fn new(firsts: Arc<Firsts>, mask: Option<Mask>) -> Self {
        Self { firsts, mask, log_sums: OnceLock::new() }
    }

    /// Runs the forward on the CPU. Writes the results to `out`, which has room for `len` elements, and returns them.
    pub(super) fn forward(
        &self,
        g: Geometry,
        at: Layouts,
        qkv: [Elements<'_>; 3],
        mut out: Fresh,
        len: usize,
    ) -> CpuStorage {
        let log_sums = forward(g, at, &self.firsts, self.mask.as_ref(), qkv, out.shared());
        let _ = self.log_sums.set(log_sums);
        // SAFETY: `forward` writes all elements.
        unsafe { out.filled(len) }
    }

    /// Returns the inputs of the backward on the CPU.
    pub(super) fn saved<'a>(
        &'a self,
        qkv: [Elements<'a>; 3],
        out: Elements<'a>,
        d_out: Elements<'a>,
    ) -> Result<Saved<'a>> {
        let Some(log_sums) = self.log_sums.get() else { bail!("{OP}: the backward ran before the forward") };
        Ok(Saved { qkv, out, d_out, log_sums, firsts: &self.firsts, mask: self.mask.as_ref() })
    }
}

/// Returns the positions of each rank's slice (two chunks of the same length) and the state of an attention to whole
/// sequences, for ranks that each compute the attention of their own queries. `q` is a slice.
pub(super) fn of_chunks(
    group: &SequenceGroup,
    q: &Tensor,
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<(Vec<Vec<Range<usize>>>, State)> {
    group.may_exchange()?;
    let (batch, slice, ..) = q.dims4()?;
    let time = slice * group.size();
    let chunks = (0..group.size()).map(|rank| group.positions_of(rank, time)).collect::<Result<_>>()?;
    Ok((chunks, State::new(span.firsts(OP, batch, time)?, mask)))
}

/// Adds the memory of `firsts` and of the threads' buffers to `costs`.
pub(super) fn footprint(geometry: Geometry, costs: Costs) -> Costs {
    let firsts = geometry.batch * geometry.time * size_of::<usize>();
    Costs {
        saved: floats(geometry.batch * geometry.heads * geometry.queries.len()) + firsts as u64,
        forward: geometry.forward_room(),
        backward: geometry.backward_room(),
        ..costs
    }
}

#[cfg(feature = "cuda")]
pub(super) fn not_on_gpu(mask: Option<&Mask>) -> Result<()> {
    match mask {
        None => Ok(()),
        Some(_) => bail!("{OP}: dropout of attention probabilities is unsupported on a GPU"),
    }
}

/// Returns the first or the second half of the positions of `[batch, time, …]`.
#[cfg(feature = "cuda")]
pub(super) fn chunk_of(x: &Tensor, chunk: usize) -> Result<Tensor> {
    let length = x.dim(1)? / 2;
    x.detach().narrow(1, chunk * length, length)?.contiguous()
}

//! Attention of ranks that share sequences, where each rank computes some of the heads over all positions. If the group
//! is part of an outer group, the exchange gives a rank its heads only over the positions that this group shares. The
//! ranks of the outer group then compute attention over whole sequences.

use super::{among, packed_among};
use crate::attention::dropout::Mask;
use crate::attention::geometry::Geometry;
use crate::attention::span::AttentionSpan;
use crate::attention::state::OP;
use crate::sequence::{HeadShares, SequenceGroup, to_heads, to_positions};
use candle_core::{Result, Tensor};

/// Computes [`separate`](super::separate) on slices of q, k and v. `span` refers to whole sequences.
pub(super) fn separate(
    group: &SequenceGroup,
    [q, k, v]: [&Tensor; 3],
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    let of_slice = Geometry::separate(OP, q.shape(), k.shape(), v.shape())?;
    let queries = HeadShares::of_queries(OP, of_slice.heads, group.size())?;
    let keys = queries.of_keys(of_slice.kv_heads);
    let q = to_heads(q, group, &queries, 1)?;
    let [k, v] = [to_heads(k, group, &keys, 1)?, to_heads(v, group, &keys, 1)?];
    let attended = among(group.outer(), [&q, &k, &v], span, of_first_head(mask, group, &queries))?;
    to_positions(&attended, group, &queries)
}

/// Computes [`packed`](super::packed) on slices of queries, keys and values of `heads` heads.
pub(super) fn packed(
    group: &SequenceGroup,
    qkv: &Tensor,
    heads: usize,
    span: &AttentionSpan,
    mask: Option<Mask>,
) -> Result<Tensor> {
    let shares = HeadShares::of_queries(OP, heads, group.size())?;
    let own = shares.lists[group.index()].len();
    let qkv = to_heads(qkv, group, &shares, 3)?;
    let attended = packed_among(group.outer(), &qkv, own, span, of_first_head(mask, group, &shares))?;
    to_positions(&attended, group, &shares)
}

fn of_first_head(mask: Option<Mask>, group: &SequenceGroup, queries: &HeadShares) -> Option<Mask> {
    mask.map(|mask| mask.at_head(queries.lists[group.index()][0]))
}

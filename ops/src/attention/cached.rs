//! Attention of new tokens to the cached keys and values of their whole sequences.
//!
//! Each sum adds the same terms in the same order as in `heads/mod.rs`, so the results are bit-identical to an attention
//! over the whole sequence. A new token reads every key and value of its sequence once, so memory bandwidth limits the
//! speed. Keys are therefore transposed within blocks of positions, so that the scores of a block are sums over
//! contiguous vectors.

use super::geometry::{Geometry, Layouts, heads_of};
use super::heads::forward;
use super::packed::Packed;
use super::span::AttentionSpan;
use super::state::OP;
use crate::decode::next_attention;
use crate::graph::operand::View;
use crate::graph::output::{Fresh, Shared, tensor};
use crate::kernel::decode::BLOCK;
use crate::kernel::{Isa, decode as kernel, softmax};
use crate::measure;
use crate::parallel::split;
use crate::product::Elements;
use candle_core::{Result, Shape, Tensor, bail};

/// The keys and values of one attention and one sequence.
#[derive(Debug, Default)]
pub(crate) struct KeysAndValues {
    tokens: usize,
    /// One entry for each key and value head.
    heads: Vec<Head>,
}

#[derive(Clone, Debug, Default)]
struct Head {
    /// Blocks of `[size, BLOCK]`. In the last block, positions without a token are 0.
    keys: Vec<f32>,
    /// `[tokens, size]`.
    values: Vec<f32>,
}

impl KeysAndValues {
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Appends the keys and values of the new tokens in one row of the batch.
    fn append(&mut self, isa: Isa, g: Geometry, at: Layouts, sample: usize, [k, v]: [Elements<'_>; 2]) {
        self.heads.resize(g.kv_heads, Head::default());
        let mut row = vec![0.0; g.size];
        for (index, head) in self.heads.iter_mut().enumerate() {
            head.keys.resize((self.tokens + g.time).div_ceil(BLOCK) * g.size * BLOCK, 0.0);
            for (new, position) in (self.tokens..self.tokens + g.time).enumerate() {
                at.k.read(isa, k, sample, new..new + 1, index, &mut row);
                let block = &mut head.keys[position / BLOCK * g.size * BLOCK..][..g.size * BLOCK];
                for (keys, &x) in block.chunks_exact_mut(BLOCK).zip(&row) {
                    keys[position % BLOCK] = x;
                }
            }
            let start = head.values.len();
            head.values.resize(start + g.time * g.size, 0.0);
            at.v.read(isa, v, sample, 0..g.time, index, &mut head.values[start..]);
        }
        self.tokens += g.time;
    }
}

/// Computes [`causal_attention_within`](super::causal_attention_within) inside [`decode`](crate::decode()).
pub(super) fn separate(q: &Tensor, k: &Tensor, v: &Tensor, span: &AttentionSpan) -> Result<Tensor> {
    let geometry = Geometry::separate(OP, q.shape(), k.shape(), v.shape())?;
    let held = [q, k, v].map(Tensor::storage_and_layout);
    let [qs, ks, vs] = held.each_ref().map(|held| View::of(OP, held));
    let (qs, ks, vs) = (qs?, ks?, vs?);
    let qkv = [qs.elements(), ks.elements(), vs.elements()];
    attend(geometry, Layouts::separate(geometry), span, qkv, q, q.shape().clone())
}

/// Computes [`causal_attention_packed_within`](super::causal_attention_packed_within) inside
/// [`decode`](crate::decode()).
pub(super) fn packed(qkv: &Tensor, heads: usize, span: &AttentionSpan) -> Result<Tensor> {
    let geometry = Packed::geometry_of(heads, qkv.shape())?;
    let held = qkv.storage_and_layout();
    let x = View::of(OP, &held)?;
    let shape = Shape::from((geometry.batch, geometry.time, geometry.heads * geometry.size));
    attend(geometry, Layouts::packed(geometry), span, [x.elements(); 3], qkv, shape)
}

fn attend(
    g: Geometry,
    at: Layouts,
    span: &AttentionSpan,
    [q, k, v]: [Elements<'_>; 3],
    like: &Tensor,
    shape: Shape,
) -> Result<Tensor> {
    let _timed = measure::forward(OP);
    let window = span.window_alone(OP)?;
    let len = shape.elem_count();
    let mut out = Fresh::new(OP, like.dtype(), len)?;
    next_attention(OP, (g.batch, g.time), |entries| {
        let isa = Isa::current();
        for (sample, (_, entry)) in entries.iter_mut().enumerate() {
            if entry.tokens > 0
                && (entry.heads.len(), entry.heads[0].values.len()) != (g.kv_heads, entry.tokens * g.size)
            {
                bail!("{OP}: the cache does not have {} heads of size {}", g.kv_heads, g.size);
            }
            entry.append(isa, g, at, sample, [k, v]);
        }
        if entries.iter().all(|(before, _)| *before == 0) {
            let firsts = span.firsts(OP, g.batch, g.time)?;
            forward(g, at, &firsts, None, [q, k, v], out.shared());
        } else {
            let entries: Vec<(usize, &KeysAndValues)> =
                entries.iter().map(|(before, entry)| (*before, &**entry)).collect();
            attend_to(g, at, &entries, window, q, out.shared());
        }
        Ok(())
    })?;
    // SAFETY: either branch writes all elements.
    Ok(tensor(unsafe { out.filled(len) }, shape))
}

/// Computes the attention of new tokens to all tokens of `entries`. Each entry comes with the number of tokens before
/// the new ones.
fn attend_to(
    g: Geometry,
    at: Layouts,
    entries: &[(usize, &KeysAndValues)],
    window: Option<usize>,
    q: Elements<'_>,
    out: Shared<'_>,
) {
    let isa = Isa::current();
    let longest = entries.iter().map(|(_, entry)| entry.tokens).max().unwrap_or(0);
    let cost = 2 * g.time * longest * g.size;
    split::<f32, 0>(g.batch * g.kv_heads, cost, [], |range, []| {
        let (mut query, mut result) = (vec![0.0; g.size], vec![0.0; g.size]);
        let mut scores = vec![0.0; longest.next_multiple_of(BLOCK) + softmax::SPARE];
        for (sample, kv_head) in range.map(|pair| (pair / g.kv_heads, pair % g.kv_heads)) {
            let (before, entry) = entries[sample];
            let Head { keys, values } = &entry.heads[kv_head];
            for (new, head) in (0..g.time).flat_map(|new| heads_of(g, kv_head).map(move |head| (new, head))) {
                at.q.read(isa, q, sample, new..new + 1, head, &mut query);
                let position = before + new;
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                let origin = first / BLOCK * BLOCK;
                let blocks = origin / BLOCK..position / BLOCK + 1;
                for (block, scores) in blocks.clone().zip(scores.chunks_exact_mut(BLOCK)) {
                    kernel::scores(isa, &query, &keys[block * g.size * BLOCK..][..g.size * BLOCK], scores);
                }
                let width = blocks.len() * BLOCK + softmax::SPARE;
                let tile = softmax::Tile { width, origin, position, end: position + 1, firsts: &[first] };
                let (mut sum, mut log_sum) = ([0.0], [0.0]);
                softmax::causal_exp(isa, tile, &mut scores[..width], g.scale(), &mut sum, &mut log_sum);
                let probabilities = &scores[first - origin..=position - origin];
                kernel::weighted_sum(isa, probabilities, &values[first * g.size..], &mut result);
                softmax::normalize(isa, &mut result, g.size, &sum);
                // SAFETY: this (sample, token, head) belongs to one pair of sample and key head, and each pair to one
                // thread.
                unsafe { out.store(at.out.at(sample, new, head), &result) };
            }
        }
    });
}

//! The backward: gradients of a block of queries, and their contributions to the gradients of keys and values.

use super::super::dropout::Mask;
use super::super::geometry::{BACKWARD_PRODUCTS, Geometry, Layouts, heads_of, pieces};
use super::{Few, KEYS, QUERIES, common, few_rows, panel_start, room_of_scores, rows_at_a_time};
use crate::graph::output::Shared;
use crate::kernel::Isa;
use crate::kernel::softmax::{self as kernel, MOST_ROWS};
use crate::measure;
use crate::parallel::split;
use crate::product::{Elements, FewRows, Matrix, Panels, Target};
use std::ops::Range;

/// The inputs of [`backward`].
pub(crate) struct Saved<'a> {
    pub(crate) qkv: [Elements<'a>; 3],
    pub(crate) out: Elements<'a>,
    pub(crate) d_out: Elements<'a>,
    pub(crate) log_sums: &'a [f32],
    /// The first key that each position sees, as for [`super::forward`].
    pub(crate) firsts: &'a [usize],
    /// The mask of the forward.
    pub(crate) mask: Option<&'a Mask>,
}

/// Writes the gradients of q, k and v. `at` gives their layouts; all three may be parts of one buffer.
pub(crate) fn backward(g: Geometry, at: Layouts, saved: &Saved<'_>, [dq, dk, dv]: [Shared<'_>; 3]) {
    if g.time == 0 {
        return;
    }
    measure::count_macs(BACKWARD_PRODUCTS * g.macs_of_a_product(saved.firsts));
    let isa = Isa::current();
    split::<f32, 0>(g.batch * g.kv_heads, g.cost(), [], |range, []| {
        let mut work = Backward::new(g, at, isa);
        for (sample, kv_head) in range.map(|pair| (pair / g.kv_heads, pair % g.kv_heads)) {
            work.begin(saved, sample, kv_head);
            for head in heads_of(g, kv_head) {
                for (block, own) in g.queries.pieces(QUERIES) {
                    work.block(saved, (sample, head), (block, own.clone()));
                    for (position, row) in own.zip(work.dq.chunks_exact(g.size)) {
                        // SAFETY: this (sample, position, head) belongs to one pair, and each pair to one thread.
                        unsafe { dq.store(at.q.at(sample, position, head), row) };
                    }
                }
            }
            let rows = work.dk.chunks_exact(g.size).zip(work.dv.chunks_exact(g.size));
            for (position, (dk_row, dv_row)) in rows.enumerate() {
                // SAFETY: this (sample, position, head) belongs to one pair, and each pair to one thread.
                unsafe { dk.store(at.k.at(sample, position, kv_head), dk_row) };
                // SAFETY: as above; in a packed buffer the columns of k and v are disjoint from those of q.
                unsafe { dv.store(at.v.at(sample, position, kv_head), dv_row) };
            }
        }
    });
}

/// The buffers of one thread.
struct Backward {
    g: Geometry,
    at: Layouts,
    isa: Isa,
    keys: Panels,
    keys_turned: Panels,
    values_turned: Panels,
    /// A block's q and the gradient of its results, both as rows and as packed operands of products.
    q: Vec<f32>,
    d_out: Vec<f32>,
    queries: Panels,
    upstream: Panels,
    /// A few rows of the results.
    out: Vec<f32>,
    /// Σ out · d_out of each row.
    deltas: Vec<f32>,
    /// The gradient of a block's queries.
    dq: Vec<f32>,
    /// A block's probabilities and the gradients of its scores, for a chunk of keys.
    probabilities: Vec<f32>,
    d_scores: Vec<f32>,
    /// The accumulated gradients of a pair's keys and values.
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Backward {
    fn new(g: Geometry, at: Layouts, isa: Isa) -> Self {
        let (rows, zeros) = (QUERIES.min(g.queries.len()), |len| vec![0.0; len]);
        Self {
            g,
            at,
            isa,
            keys: Panels::default(),
            keys_turned: Panels::default(),
            values_turned: Panels::default(),
            q: zeros(rows * g.size),
            d_out: zeros(rows * g.size),
            queries: Panels::default(),
            upstream: Panels::default(),
            out: zeros(MOST_ROWS * g.size),
            deltas: zeros(rows),
            dq: zeros(rows * g.size),
            probabilities: zeros(rows * room_of_scores(KEYS.min(g.time))),
            d_scores: zeros(rows * room_of_scores(KEYS.min(g.time))),
            dk: zeros(g.time * g.size),
            dv: zeros(g.time * g.size),
        }
    }

    fn begin(&mut self, saved: &Saved<'_>, sample: usize, kv_head: usize) {
        let ([_, k, v], all) = (saved.qkv, 0..self.g.time);
        let (k, v) = (self.at.k.matrix(k, sample, all.clone(), kv_head), self.at.v.matrix(v, sample, all, kv_head));
        self.keys.pack_for_all_columns(self.isa, k);
        self.keys_turned.pack(self.isa, k.t());
        self.values_turned.pack(self.isa, v.t());
        self.dk.fill(0.0);
        self.dv.fill(0.0);
    }

    /// Computes the gradient of a block of a head's queries, and adds the block's contributions to the gradients of the
    /// keys and values. `block` is the range of positions, and `own` is where its queries are stored.
    fn block(&mut self, saved: &Saved<'_>, (sample, head): (usize, usize), (block, own): (Range<usize>, Range<usize>)) {
        let (g, at, isa) = (self.g, self.at, self.isa);
        at.q.read(isa, saved.qkv[0], sample, own.clone(), head, &mut self.q);
        at.out.read(isa, saved.d_out, sample, own.clone(), head, &mut self.d_out);
        let rows = |data| Matrix::new(data, block.len(), g.size);
        self.queries.pack_for_all_columns(isa, rows(&self.q[..block.len() * g.size]));
        self.upstream.pack_for_all_columns(isa, rows(&self.d_out[..block.len() * g.size]));
        let mut d_out = self.d_out.chunks_exact(g.size).zip(&mut self.deltas);
        for own in pieces(own.clone(), MOST_ROWS) {
            at.out.read(isa, saved.out, sample, own.clone(), head, &mut self.out);
            for (out, (d_out, delta)) in self.out.chunks_exact(g.size).take(own.len()).zip(&mut d_out) {
                *delta = kernel::dot(isa, out, d_out);
            }
        }
        self.dq.fill(0.0);
        let firsts = &saved.firsts[sample * g.positions()..][..g.positions()];
        let seen = firsts[block.start]..block.end.min(g.time);
        for chunk in pieces(panel_start(seen.start)..seen.end, KEYS) {
            for few in few_rows(g, isa, block.clone(), firsts) {
                let rows = (block.start + few.first, own.start + few.first);
                self.scores(saved, (sample, head), rows, few, chunk.clone());
            }
            self.keys_and_values(&block, seen.start.max(chunk.start), chunk);
        }
    }

    /// Recomputes the probabilities of a few rows for a chunk of keys, computes the gradients of the scores, and adds
    /// to the gradients of the queries. The first row has the position `position` and is stored at `own`.
    fn scores(
        &mut self,
        saved: &Saved<'_>,
        (sample, head): (usize, usize),
        (position, own): (usize, usize),
        Few { first, count, seen }: Few,
        chunk: Range<usize>,
    ) {
        let (g, isa, width) = (self.g, self.isa, room_of_scores(chunk.len()));
        let scores = &mut self.probabilities[first * width..][..count * width];
        let d_scores = &mut self.d_scores[first * width..][..count * width];
        let seen = common(seen, &chunk);
        if seen.is_empty() {
            scores.fill(0.0);
            d_scores.fill(0.0);
            return;
        }
        let row = |data| FewRows { data, count, row: g.size, step: 1 };
        let (begin, end) = (panel_start(seen.start), seen.end);
        let to = Target { data: &mut scores[begin - chunk.start..], row: width, add: false };
        self.keys_turned.product(isa, row(&self.q[first * g.size..]), 0..g.size, begin..end, to);
        let to = Target { data: &mut d_scores[begin - chunk.start..], row: width, add: false };
        self.values_turned.product(isa, row(&self.d_out[first * g.size..]), 0..g.size, begin..end, to);
        let mut firsts = [chunk.end; MOST_ROWS];
        for (in_chunk, first) in firsts.iter_mut().zip(&saved.firsts[sample * g.positions() + position..][..count]) {
            *in_chunk = (*first).clamp(chunk.start, chunk.end);
        }
        let tile = kernel::Tile { width, origin: chunk.start, position, end: chunk.end, firsts: &firsts[..count] };
        // The forward multiplied the values by masked probabilities, so the mask applies to the gradients of the
        // probabilities here, and to the probabilities below. `deltas`, the sums Σ p·dp, already include the mask.
        if let Some(mask) = saved.mask {
            mask.apply(sample, head, tile, d_scores);
        }
        let log_sums = &saved.log_sums[(sample * g.heads + head) * g.queries.len() + own..][..count];
        let deltas = &self.deltas[first..][..count];
        kernel::causal_backward(isa, tile, scores, d_scores, g.scale(), log_sums, deltas);
        if let Some(mask) = saved.mask {
            mask.apply(sample, head, tile, scores);
        }
        let row = FewRows { data: &d_scores[seen.start - chunk.start..], count, row: width, step: 1 };
        let to = Target { data: &mut self.dq[first * g.size..], row: g.size, add: true };
        self.keys.product(isa, row, seen, 0..g.size, to);
    }

    /// Adds the contributions of a block's queries to the gradients of the keys and values of a chunk. The first row of
    /// the block sees the keys from `first` on.
    fn keys_and_values(&mut self, block: &Range<usize>, first: usize, chunk: Range<usize>) {
        let (g, isa, width) = (self.g, self.isa, room_of_scores(chunk.len()));
        let step = rows_at_a_time(isa);
        for keys in pieces(first / step * step..chunk.end, step) {
            // Queries before a key do not see it.
            let queries = keys.start.max(block.start) - block.start..block.len();
            let from = queries.start * width + keys.start - chunk.start;
            let turned = |data| FewRows { data, count: keys.len(), row: 1, step: width };
            let to = Target { data: &mut self.dk[keys.start * g.size..], row: g.size, add: true };
            self.queries.product(isa, turned(&self.d_scores[from..]), queries.clone(), 0..g.size, to);
            let to = Target { data: &mut self.dv[keys.start * g.size..], row: g.size, add: true };
            self.upstream.product(isa, turned(&self.probabilities[from..]), queries, 0..g.size, to);
        }
    }
}

//! The forward: probabilities of a block of queries, then their products with the values.

use super::super::dropout::Mask;
use super::super::geometry::{FORWARD_PRODUCTS, Geometry, Layouts, heads_of, pieces};
use super::{Few, KEYS, LONG, QUERIES_OF_LONG, common, few_rows, panel_start, room_of_scores, rows_at_a_time};
use crate::graph::output::Shared;
use crate::kernel::Isa;
use crate::kernel::softmax as kernel;
use crate::measure;
use crate::parallel::{Output, split};
use crate::product::{Elements, FewRows, Panels, Target};
use std::ops::Range;

/// Writes `out` (shape `[batch, queries, heads, size]`) and returns ln Σ e^score (shape `[batch, heads, queries]`). A
/// position sees the keys from its entry in `firsts` (shape `[batch, positions]`) up to itself; an entry of `g.time`
/// means that it sees none, which yields zeros and −∞. The entries of a sample never decrease. The mask drops
/// probabilities after their normalization.
pub(crate) fn forward(
    g: Geometry,
    at: Layouts,
    firsts: &[usize],
    mask: Option<&Mask>,
    [q, k, v]: [Elements<'_>; 3],
    out: Shared<'_>,
) -> Vec<f32> {
    let isa = Isa::current();
    let mut log_sums = vec![0.0; g.batch * g.heads * g.queries.len()];
    if g.time == 0 {
        return log_sums;
    }
    measure::count_macs(FORWARD_PRODUCTS * g.macs_of_a_product(firsts));
    let pairs = Output { data: &mut log_sums, floats: g.group() * g.queries.len() };
    split(g.batch * g.kv_heads, g.cost(), [pairs], |range, [log_sums]| {
        let mut work = Forward::new(g, at, isa);
        let mut log_sums = log_sums.chunks_exact_mut(g.queries.len());
        for (sample, kv_head) in range.map(|pair| (pair / g.kv_heads, pair % g.kv_heads)) {
            work.keys.pack(isa, at.k.matrix(k, sample, 0..g.time, kv_head).t());
            work.values.pack_for_all_columns(isa, at.v.matrix(v, sample, 0..g.time, kv_head));
            let firsts = &firsts[sample * g.positions()..][..g.positions()];
            for (head, log_sums) in heads_of(g, kv_head).zip(&mut log_sums) {
                for (block, own) in g.queries.pieces(work.queries_of_block) {
                    let log_sums = &mut log_sums[own.clone()];
                    work.block(q, firsts, mask, (sample, head), (block, own.clone()), log_sums);
                    for (position, result) in own.zip(work.results.chunks_exact(g.size)) {
                        // SAFETY: this (sample, position, head) belongs to one pair, and each pair to one thread.
                        unsafe { out.store(at.out.at(sample, position, head), result) };
                    }
                }
            }
        }
    });
    log_sums
}

/// The buffers of one thread.
struct Forward {
    g: Geometry,
    at: Layouts,
    isa: Isa,
    queries_of_block: usize,
    keys_of_chunk: usize,
    keys: Panels,
    values: Panels,
    queries: Vec<f32>,
    scores: Vec<f32>,
    /// Σ e^(score − largest score) of each row.
    sums: Vec<f32>,
    results: Vec<f32>,
}

impl Forward {
    fn new(g: Geometry, at: Layouts, isa: Isa) -> Self {
        let (rows, keys) = if g.time > LONG { (QUERIES_OF_LONG, KEYS) } else { (rows_at_a_time(isa), LONG) };
        let zeros = |len| vec![0.0; len];
        Self {
            g,
            at,
            isa,
            queries_of_block: rows,
            keys_of_chunk: keys,
            keys: Panels::default(),
            values: Panels::default(),
            queries: zeros(rows * g.size),
            scores: zeros(rows * room_of_scores(g.time)),
            sums: zeros(rows),
            results: zeros(rows * g.size),
        }
    }

    /// Computes the results of a block of a head's queries. `block` is the range of positions, and `own` is where its
    /// queries are stored.
    fn block(
        &mut self,
        q: Elements<'_>,
        firsts: &[usize],
        mask: Option<&Mask>,
        (sample, head): (usize, usize),
        (block, own): (Range<usize>, Range<usize>),
        log_sums: &mut [f32],
    ) {
        let Self { g, at, isa, keys_of_chunk, keys, values, queries, scores, sums, results, .. } = self;
        let (g, isa) = (*g, *isa);
        let q = at.q.few(isa, q, sample, own, head, queries);
        let few = || few_rows(g, isa, block.clone(), firsts);
        let (origin, end) = (panel_start(firsts[block.start]), block.end.min(g.time));
        let width = room_of_scores(end - origin);
        for chunk in pieces(origin..end, *keys_of_chunk) {
            for Few { first, count, seen } in few() {
                let seen = common(panel_start(seen.start)..seen.end, &chunk);
                if !seen.is_empty() {
                    let row = FewRows { data: &q.data[first * q.row..], count, ..q };
                    let to =
                        Target { data: &mut scores[first * width + seen.start - origin..], row: width, add: false };
                    keys.product(isa, row, 0..g.size, seen, to);
                }
            }
        }
        for Few { first, count, .. } in few() {
            let (scores, position) = (&mut scores[first * width..][..count * width], block.start + first);
            let tile = kernel::Tile { width, origin, position, end: g.time, firsts: &firsts[position..][..count] };
            let (sums, log_sums) = (&mut sums[first..][..count], &mut log_sums[first..][..count]);
            kernel::causal_exp(isa, tile, scores, g.scale(), sums, log_sums);
            if let Some(mask) = mask {
                mask.apply(sample, head, tile, scores);
            }
        }
        for chunk in pieces(origin..end, *keys_of_chunk) {
            for Few { first, count, seen } in few() {
                let add = chunk.start > seen.start;
                let seen = common(seen, &chunk);
                if !seen.is_empty() {
                    let row =
                        FewRows { data: &scores[first * width + seen.start - origin..], count, row: width, step: 1 };
                    let to = Target { data: &mut results[first * g.size..], row: g.size, add };
                    values.product(isa, row, seen, 0..g.size, to);
                }
            }
        }
        kernel::normalize(isa, results, g.size, sums);
    }
}

//! The arithmetic of causal attention, head by head over slices.
//!
//! The keys and values of a head are packed once. A few query rows at a time are multiplied with the keys and values
//! that they attend to, from the first position that the first row sees to the position of the last row. This takes two
//! products in the forward and five in the backward, on scores that stay in the first-level cache. The gradients of
//! keys and values are sums over queries, and are accumulated one tile of queries at a time. Heads are independent, so
//! the work is split among threads by pairs of a sample and a key and value head. Within a pair the order of the sums
//! is fixed. Positions that a row does not see add zeros to its sums, so its result depends only on the positions that
//! it sees.

use super::dropout::Mask;
use super::geometry::{BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Geometry, Layouts, heads_of, pieces};
use crate::graph::output::Shared;
use crate::kernel::Isa;
use crate::kernel::softmax::{self as kernel, MOST_ROWS};
use crate::measure;
use crate::meta::footprint::floats;
use crate::parallel::{Output, parts, split};
use crate::product::{COLUMNS, Elements, FewRows, Matrix, Panels, Target, tile_rows};
use std::ops::Range;

/// Query rows whose contributions to the gradients of keys and values are summed at a time.
const TILE: usize = 64;

/// Returns how many rows of scores are computed at a time: a multiple of the rows of a product's tile.
fn rows_at_a_time(isa: Isa) -> usize {
    MOST_ROWS / tile_rows(isa) * tile_rows(isa)
}

impl Geometry {
    /// Returns the bytes of temporary memory that all threads of a forward use together.
    pub(crate) fn forward_room(self) -> u64 {
        let (time, size) = (self.time, self.size);
        let panels = Panels::room(size, time) + Panels::room(time, size);
        self.parts() * (panels + floats(MOST_ROWS * Scores::room(time)) + 2 * floats(MOST_ROWS * size))
    }

    /// Returns the bytes of temporary memory that all threads of a backward use together.
    pub(crate) fn backward_room(self) -> u64 {
        let (time, size, rows) = (self.time, self.size, TILE.min(self.time));
        // Keys; transposed keys and values; a tile's queries and upstream gradient.
        let panels = Panels::room(time, size) + 2 * Panels::room(size, time) + 2 * Panels::room(rows, size);
        let tile = 2 * floats(rows * size) + 2 * floats(rows * Scores::room(time));
        self.parts() * (panels + tile + 2 * floats(MOST_ROWS * size) + 2 * floats(time * size))
    }

    fn parts(self) -> u64 {
        if self.time == 0 { 0 } else { parts(self.batch * self.kv_heads, self.cost()) as u64 }
    }
}

/// The layout of scores of query rows against the positions starting at `origin`. A panel of keys begins at `origin`.
#[derive(Clone, Copy)]
struct Scores {
    origin: usize,
    width: usize,
}

impl Scores {
    /// Returns the layout for rows that see the positions `seen`.
    fn new(seen: Range<usize>) -> Self {
        let origin = seen.start / COLUMNS * COLUMNS;
        Self { origin, width: Self::room(seen.end - origin) }
    }

    /// Returns the number of floats of a row of scores for `positions` positions.
    fn room(positions: usize) -> usize {
        positions.next_multiple_of(16) + kernel::SPARE
    }
}

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
        let (mut keys, mut values) = (Panels::default(), Panels::default());
        let mut scores = vec![0.0; MOST_ROWS * Scores::room(g.time)];
        let (mut queries, mut results) = (vec![0.0; MOST_ROWS * g.size], vec![0.0; MOST_ROWS * g.size]);
        let mut sums = [0.0; MOST_ROWS];
        let mut log_sums = log_sums.chunks_exact_mut(g.queries.len());
        for (sample, kv_head) in range.map(|pair| (pair / g.kv_heads, pair % g.kv_heads)) {
            keys.pack(isa, at.k.matrix(k, sample, 0..g.time, kv_head).t());
            values.pack_for_all_columns(isa, at.v.matrix(v, sample, 0..g.time, kv_head));
            for (head, log_sums) in heads_of(g, kv_head).zip(&mut log_sums) {
                for (rows, own) in g.queries.pieces(rows_at_a_time(isa)) {
                    let firsts = &firsts[sample * g.positions()..][rows.clone()];
                    let seen = firsts[0]..rows.end.min(g.time);
                    let (count, Scores { origin, width }) = (rows.len(), Scores::new(seen.clone()));
                    let row = at.q.few(isa, q, sample, own.clone(), head, &mut queries);
                    let to = Target { data: &mut scores, row: width, add: false };
                    keys.product(isa, row, 0..g.size, origin..seen.end, to);
                    let log_sums = &mut log_sums[own.clone()];
                    let tile = kernel::Tile { width, origin, position: rows.start, end: g.time, firsts };
                    kernel::causal_exp(isa, tile, &mut scores[..count * width], g.scale(), &mut sums, log_sums);
                    if let Some(mask) = mask {
                        mask.apply(sample, head, tile, &mut scores[..count * width]);
                    }
                    let row = FewRows { data: &scores[seen.start - origin..], count, row: width, step: 1 };
                    let to = Target { data: &mut results, row: g.size, add: false };
                    values.product(isa, row, seen, 0..g.size, to);
                    for ((position, result), sum) in own.zip(results.chunks_exact_mut(g.size)).zip(sums) {
                        // The sum is 0 only if the row sees no key.
                        match sum == 0.0 {
                            true => result.fill(0.0),
                            false => result.iter_mut().for_each(|x| *x /= sum),
                        }
                        // SAFETY: this (sample, position, head) belongs to one pair, and each pair to one thread.
                        unsafe { out.store(isa, at.out.at(sample, position, head), result) };
                    }
                }
            }
        }
    });
    log_sums
}

/// The inputs of [`backward`].
pub(crate) struct Saved<'a> {
    pub(crate) qkv: [Elements<'a>; 3],
    pub(crate) out: Elements<'a>,
    pub(crate) d_out: Elements<'a>,
    pub(crate) log_sums: &'a [f32],
    /// The first key that each position sees, as for [`forward`].
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
                for (tile, own) in g.queries.pieces(TILE) {
                    work.queries(saved, sample, head, (tile.clone(), own), dq);
                    work.keys_and_values(saved, sample, tile);
                }
            }
            let rows = work.dk.chunks_exact(g.size).zip(work.dv.chunks_exact(g.size));
            for (position, (dk_row, dv_row)) in rows.enumerate() {
                // SAFETY: this (sample, position, head) belongs to one pair, and each pair to one thread.
                unsafe { dk.store(isa, at.k.at(sample, position, kv_head), dk_row) };
                // SAFETY: as above; in a packed buffer the columns of k and v are disjoint from those of q.
                unsafe { dv.store(isa, at.v.at(sample, position, kv_head), dv_row) };
            }
        }
    });
}

/// The buffers of one thread for the backward.
struct Backward {
    g: Geometry,
    at: Layouts,
    isa: Isa,
    keys: Panels,
    keys_turned: Panels,
    values_turned: Panels,
    /// A tile's q and the gradient of its results, both as rows and as packed operands of products.
    q: Vec<f32>,
    d_out: Vec<f32>,
    queries: Panels,
    upstream: Panels,
    out: Vec<f32>,
    dq: Vec<f32>,
    /// A tile's probabilities and the gradients of its scores.
    probabilities: Vec<f32>,
    d_scores: Vec<f32>,
    /// The accumulated gradients of a pair's keys and values.
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Backward {
    fn new(g: Geometry, at: Layouts, isa: Isa) -> Self {
        let rows = TILE.min(g.time);
        let zeros = |len| vec![0.0; len];
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
            dq: zeros(MOST_ROWS * g.size),
            probabilities: zeros(rows * Scores::room(g.time)),
            d_scores: zeros(rows * Scores::room(g.time)),
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

    /// Recomputes the probabilities of a tile, computes the gradients of its scores, and writes the gradients of its
    /// queries. `tile` is the range of positions, and `own` is where its queries are stored.
    fn queries(
        &mut self,
        saved: &Saved<'_>,
        sample: usize,
        head: usize,
        (tile, own): (Range<usize>, Range<usize>),
        dq: Shared<'_>,
    ) {
        let (g, at, isa) = (self.g, self.at, self.isa);
        at.q.read(isa, saved.qkv[0], sample, own.clone(), head, &mut self.q);
        at.out.read(isa, saved.d_out, sample, own.clone(), head, &mut self.d_out);
        let firsts = &saved.firsts[sample * g.positions()..][..g.positions()];
        let count = g.queries.len();
        let log_sums = &saved.log_sums[(sample * g.heads + head) * count..][..count];
        let Scores { origin, width } = Scores::new(firsts[tile.start]..tile.end.min(g.time));
        for rows in pieces(tile.clone(), rows_at_a_time(isa)) {
            let (first, count) = (rows.start - tile.start, rows.len());
            let own = own.start + first..own.start + first + count;
            let d_out = &self.d_out[first * g.size..];
            at.out.read(isa, saved.out, sample, own.clone(), head, &mut self.out);
            let mut deltas = [0.0; MOST_ROWS];
            let pairs = self.out.chunks_exact(g.size).zip(d_out.chunks_exact(g.size)).take(count);
            for (delta, (out, d_out)) in deltas.iter_mut().zip(pairs) {
                *delta = kernel::dot(isa, out, d_out);
            }
            let scores = &mut self.probabilities[first * width..][..count * width];
            let d_scores = &mut self.d_scores[first * width..][..count * width];
            // The start of the panel that contains the first key that these rows see.
            let (begin, end) = (firsts[rows.start] / COLUMNS * COLUMNS, rows.end.min(g.time));
            let row = |data| FewRows { data, count, row: g.size, step: 1 };
            let to = Target { data: &mut scores[begin - origin..], row: width, add: false };
            self.keys_turned.product(isa, row(&self.q[first * g.size..]), 0..g.size, begin..end, to);
            let to = Target { data: &mut d_scores[begin - origin..], row: width, add: false };
            self.values_turned.product(isa, row(d_out), 0..g.size, begin..end, to);
            let (firsts, log_sums) = (&firsts[rows.clone()], &log_sums[own.clone()]);
            let tile = kernel::Tile { width, origin, position: rows.start, end: g.time, firsts };
            // The forward multiplied the values by masked probabilities, so the mask applies to the gradients of the
            // probabilities here, and to the probabilities below. `deltas`, the sums Σ p·dp, already include the mask.
            if let Some(mask) = saved.mask {
                mask.apply(sample, head, tile, d_scores);
            }
            kernel::causal_backward(isa, tile, scores, d_scores, g.scale(), log_sums, &deltas);
            if let Some(mask) = saved.mask {
                mask.apply(sample, head, tile, scores);
            }
            let seen = firsts[0]..end;
            let row = FewRows { data: &d_scores[seen.start - origin..], count, row: width, step: 1 };
            let to = Target { data: &mut self.dq, row: g.size, add: false };
            self.keys.product(isa, row, seen, 0..g.size, to);
            for (position, row) in own.zip(self.dq.chunks_exact(g.size)) {
                // SAFETY: this (sample, position, head) belongs to one pair, and each pair to one thread.
                unsafe { dq.store(isa, at.q.at(sample, position, head), row) };
            }
        }
    }

    /// Adds the contributions of a tile's queries to the gradients of the keys and values that they see.
    fn keys_and_values(&mut self, saved: &Saved<'_>, sample: usize, tile: Range<usize>) {
        let (g, isa) = (self.g, self.isa);
        let first = saved.firsts[sample * g.positions() + tile.start];
        let end = tile.end.min(g.time);
        let Scores { origin, width } = Scores::new(first..end);
        self.queries.pack_for_all_columns(isa, Matrix::new(&self.q[..tile.len() * g.size], tile.len(), g.size));
        self.upstream.pack_for_all_columns(isa, Matrix::new(&self.d_out[..tile.len() * g.size], tile.len(), g.size));
        let step = rows_at_a_time(isa);
        for keys in pieces(first / step * step..end, step) {
            // Queries before a key do not see it.
            let queries = keys.start.max(tile.start) - tile.start..tile.len();
            let from = queries.start * width + keys.start - origin;
            let turned = |data| FewRows { data, count: keys.len(), row: 1, step: width };
            let to = Target { data: &mut self.dk[keys.start * g.size..], row: g.size, add: true };
            self.queries.product(isa, turned(&self.d_scores[from..]), queries.clone(), 0..g.size, to);
            let to = Target { data: &mut self.dv[keys.start * g.size..], row: g.size, add: true };
            self.upstream.product(isa, turned(&self.probabilities[from..]), queries, 0..g.size, to);
        }
    }
}

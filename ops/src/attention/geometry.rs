//! Sizes of an attention, and where its rows are in memory.

use crate::kernel::Isa;
use crate::product::{Elements, FewRows, Matrix};
use candle_core::{Result, Shape, bail};
use std::ops::Range;

/// Sizes of an attention. `heads` is a multiple of `kv_heads`. Only `batch` and `time` may be 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) batch: usize,
    /// Number of positions of keys and values.
    pub(crate) time: usize,
    /// The positions of the queries, which may be after all keys.
    pub(crate) queries: Queries,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) size: usize,
}

/// Number of products of size queries × keys in the forward: queries with keys, and probabilities with values.
pub(crate) const FORWARD_PRODUCTS: u64 = 2;
/// Number of products of size queries × keys in the backward. A GPU computes two of them twice; the repetition is not
/// counted.
pub(crate) const BACKWARD_PRODUCTS: u64 = 5;

impl Geometry {
    /// Returns the sizes of an attention with q of `[batch, time, heads, size]` and k and v of
    /// `[batch, time, kv_heads, size]`.
    pub(crate) fn separate(op: &'static str, q: &Shape, k: &Shape, v: &Shape) -> Result<Self> {
        let (batch, time, heads, size) = q.dims4()?;
        let (k_batch, k_time, kv_heads, k_size) = k.dims4()?;
        if k != v || (k_batch, k_time, k_size) != (batch, time, size) {
            bail!("{op}: the shapes of q {q:?}, k {k:?} and v {v:?} do not match");
        }
        if heads == 0 || size == 0 || kv_heads == 0 || heads % kv_heads != 0 {
            bail!("{op}: {heads} heads of size {size} are not a multiple of {kv_heads} key and value heads");
        }
        Ok(Self { batch, time, queries: Queries::all(time), heads, kv_heads, size })
    }

    /// Returns the number of multiply-accumulates of one product of size queries × keys. Counts only the positions that
    /// queries see.
    pub(crate) fn macs_of_a_product(&self, firsts: &[usize]) -> u64 {
        let of_sample = |firsts: &[usize]| -> u64 {
            let positions = self.queries.parts().flat_map(|(positions, _)| positions);
            positions.map(|position| ((position + 1).min(self.time) - firsts[position]) as u64).sum()
        };
        firsts.chunks_exact(self.positions().max(1)).map(of_sample).sum::<u64>() * (self.heads * self.size) as u64
    }

    /// Returns the number of positions of a sample, including those of queries after all keys.
    pub(super) fn positions(self) -> usize {
        self.time.max(self.queries.end())
    }

    pub(super) fn scale(self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }

    pub(super) fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the number of floats that one (sample, key and value head) pair touches.
    pub(super) fn cost(self) -> usize {
        self.group() * self.queries.len() * (self.time + 4 * self.size)
    }
}

/// Equally long parts of a sequence. Their queries are stored contiguously.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queries {
    /// First position of each part, in ascending order.
    firsts: [usize; 2],
    parts: usize,
    /// Number of positions in a part.
    length: usize,
}

impl Queries {
    /// Selects all positions.
    pub(crate) fn all(time: usize) -> Self {
        Self { firsts: [0; 2], parts: 1, length: time }
    }

    /// Selects `length` positions, starting at `first`.
    pub(crate) fn one(first: usize, length: usize) -> Self {
        Self { firsts: [first, 0], parts: 1, length }
    }

    /// Selects two parts of `length` positions each.
    pub(crate) fn two(firsts: [usize; 2], length: usize) -> Self {
        Self { firsts, parts: 2, length }
    }

    /// Returns one of the parts alone.
    #[cfg(feature = "cuda")]
    pub(crate) fn part(self, part: usize) -> Self {
        Self { firsts: [self.firsts[part], 0], parts: 1, ..self }
    }

    /// Returns the positions of the only part.
    #[cfg(feature = "cuda")]
    pub(crate) fn only_part(self) -> Result<Range<usize>> {
        match self.parts {
            1 => Ok(self.firsts[0]..self.firsts[0] + self.length),
            parts => bail!("attention: a kernel computes one part of a sequence, got {parts}"),
        }
    }

    /// Returns the number of positions.
    pub(crate) fn len(self) -> usize {
        self.parts * self.length
    }

    /// Returns the position after the last one.
    fn end(self) -> usize {
        self.firsts[self.parts - 1] + self.length
    }

    /// Splits the parts into pieces of at most `most` positions. Returns each piece with its place among the stored
    /// queries.
    pub(super) fn pieces(self, most: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        self.parts().flat_map(move |(positions, before)| {
            let start = positions.start;
            let own = move |piece: &Range<usize>| before + piece.start - start..before + piece.end - start;
            pieces(positions, most).map(move |piece| (piece.clone(), own(&piece)))
        })
    }

    /// Returns, for each part, its positions and the number of queries that are stored before it.
    fn parts(self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let part = move |part: usize| (self.firsts[part]..self.firsts[part] + self.length, part * self.length);
        (0..self.parts).map(part)
    }
}

/// Splits positions into ranges of `size`.
pub(super) fn pieces(positions: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    positions.clone().step_by(size).map(move |start| start..positions.end.min(start + size))
}

/// The location of a head's rows in a buffer: element 0 of (sample b, position t, head h) is at `start + (b·time +
/// t)·row + h·size`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    start: usize,
    row: usize,
    time: usize,
    size: usize,
}

impl Rows {
    /// Skips some rows of the buffer.
    fn skip(self, positions: usize) -> Self {
        Self { start: self.start + positions * self.row, ..self }
    }

    pub(super) fn at(self, sample: usize, position: usize, head: usize) -> usize {
        self.start + (sample * self.time + position) * self.row + head * self.size
    }

    /// Views some positions of one head as a matrix of positions × size.
    pub(super) fn matrix(self, data: Elements<'_>, sample: usize, positions: Range<usize>, head: usize) -> Matrix<'_> {
        let start = self.at(sample, positions.start, head);
        Matrix::strided(data.skip(start), positions.len(), self.size, self.row)
    }

    /// Returns some positions of one head as the left operand of a product: in place if they are f32, otherwise
    /// converted to f32 in `room`.
    pub(super) fn few<'a>(
        self,
        isa: Isa,
        data: Elements<'a>,
        sample: usize,
        positions: Range<usize>,
        head: usize,
        room: &'a mut [f32],
    ) -> FewRows<'a> {
        let count = positions.len();
        if let Elements::F32(data) = data {
            return FewRows { data: &data[self.at(sample, positions.start, head)..], count, row: self.row, step: 1 };
        }
        self.read(isa, data, sample, positions, head, room);
        FewRows { data: room, count, row: self.size, step: 1 }
    }

    /// Copies some positions of one head as f32, one position after the other.
    pub(super) fn read(
        self,
        isa: Isa,
        data: Elements<'_>,
        sample: usize,
        positions: Range<usize>,
        head: usize,
        out: &mut [f32],
    ) {
        for (position, out) in positions.zip(out.chunks_exact_mut(self.size)) {
            data.read(isa, self.at(sample, position, head), out);
        }
    }
}

/// The layout of q, k and v in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layouts {
    pub(super) q: Rows,
    pub(super) k: Rows,
    pub(super) v: Rows,
    pub(super) out: Rows,
}

impl Layouts {
    /// Describes q, k and v in separate buffers of `[batch, time, heads, size]`, each with its own number of heads.
    pub(crate) fn separate(g: Geometry) -> Self {
        let rows = |heads, time| Rows { start: 0, row: heads * g.size, time, size: g.size };
        let [of_queries, of_keys] = [rows(g.heads, g.queries.len()), rows(g.kv_heads, g.time)];
        Self { q: of_queries, k: of_keys, v: of_keys, out: of_queries }
    }

    /// Describes q of `[batch, time, heads, size]`, and k and v in one buffer of `[2, batch, time, kv_heads, size]`.
    /// Position 0 of queries and keys is at `first_query` and `first_key`.
    pub(super) fn of_block(g: Geometry, [first_query, first_key]: [usize; 2]) -> Self {
        let Self { q, k, out, .. } = Self::separate(g);
        let [q, k, out] = [q.skip(first_query), k.skip(first_key), out.skip(first_query)];
        Self { q, k, v: k.skip(g.batch * g.time), out }
    }

    /// Describes q, k and v in one buffer of `[batch, time, 3·heads·size]`.
    pub(crate) fn packed(g: Geometry) -> Self {
        let width = g.heads * g.size;
        let rows = |part| Rows { start: part * width, row: 3 * width, time: g.time, size: g.size };
        Self { q: rows(0), k: rows(1), v: rows(2), out: Rows { start: 0, row: width, time: g.time, size: g.size } }
    }
}

/// Returns the query heads that share a key and value head.
pub(super) fn heads_of(g: Geometry, kv_head: usize) -> Range<usize> {
    kv_head * g.group()..(kv_head + 1) * g.group()
}

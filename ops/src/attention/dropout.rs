//! Dropout of attention probabilities. The mask is not stored, but computed again wherever it is needed.

use crate::dropout::numbers;
use crate::kernel::softmax::Tile;
use crate::random::Stream;
use crate::{Dropout, Pass};
use candle_core::{Result, bail};

/// Number of bits that the key's position, and also the query's position, has in the index of a random number.
const POSITION_BITS: u32 = 24;
const HEAD_BITS: u32 = 64 - 2 * POSITION_BITS;

/// The dropout of one attention in one pass.
///
/// The seed, the layer, the dropout's name, the sample's index in the run, the query head and the positions of query
/// and key decide whether a probability is kept. The sizes of a batch do not matter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mask {
    /// The random numbers of the first sample.
    stream: Stream,
    first_sample: u64,
    /// Index of the attention's first query head among the heads of the model.
    first_head: usize,
    /// The position in the row that is position 0 of the attention.
    first_position: usize,
    probability: f32,
}

impl Mask {
    /// Returns `None` if nothing is dropped: in evaluation, or with a probability of 0.
    pub(crate) fn new(op: &'static str, dropout: &Dropout, pass: &Pass) -> Result<Option<Self>> {
        let &Dropout { probability, name } = dropout;
        let stream = numbers(op, probability, name, pass)?;
        Ok(stream.map(|stream| Self {
            stream,
            first_sample: pass.sample,
            first_head: 0,
            first_position: 0,
            probability,
        }))
    }

    /// Returns the dropout for an attention that computes only a range of heads, starting at `first_head`.
    pub(crate) fn at_head(self, first_head: usize) -> Self {
        Self { first_head: self.first_head + first_head, ..self }
    }

    /// Returns the dropout for an attention that computes only positions from `first_position` on.
    pub(super) fn at_position(self, first_position: usize) -> Self {
        Self { first_position, ..self }
    }

    /// Checks that every probability has its own random number.
    pub(crate) fn fits(op: &'static str, time: usize, heads: usize) -> Result<()> {
        if time > 1 << POSITION_BITS || heads > 1 << HEAD_BITS {
            bail!("{op}: dropout supports 2^{POSITION_BITS} positions and 2^{HEAD_BITS} heads, got {time} and {heads}");
        }
        Ok(())
    }

    /// Drops elements of the rows of a tile and scales the others by 1/(1 − probability). The rows belong to one query
    /// head of one sample of the batch.
    pub(crate) fn apply(&self, sample: usize, head: usize, tile: Tile<'_>, rows: &mut [f32]) {
        let stream = self.stream.of(self.first_sample + sample as u64);
        let scale = 1.0 / (1.0 - self.probability);
        for (row, scores) in rows.chunks_exact_mut(tile.width).enumerate() {
            let (begin, end) = tile.columns(row);
            let at = |position: usize| (self.first_position + position) as u64;
            let of_row =
                ((self.first_head + head) as u64) << (2 * POSITION_BITS) | at(tile.position + row) << POSITION_BITS;
            let drop_out = |key: u64, scores: &mut [f32]| {
                stream.drop_out_in_place(of_row | key, self.probability, scale, scores);
            };
            // One counter yields four random numbers. The numbers of the first counter may begin before the tile.
            let first = at(tile.origin + begin);
            let before = (first % 4) as usize;
            match begin.checked_sub(before) {
                Some(begin) => drop_out(first / 4 * 4, &mut scores[begin..end]),
                None => {
                    let (begun, rest) = scores[begin..end].split_at_mut((4 - before).min(end - begin));
                    let mut whole = [0.0; 4];
                    whole[before..before + begun.len()].copy_from_slice(begun);
                    drop_out(first / 4 * 4, &mut whole);
                    begun.copy_from_slice(&whole[before..before + begun.len()]);
                    drop_out(first.next_multiple_of(4), rest);
                }
            }
        }
    }
}

//! The order of a collective's chunks in the stream from one rank to another.
//!
//! An all_reduce sends chunks of the receiver's range, to be reduced there, and chunks of the sender's own range once
//! they are reduced. The two kinds alternate, so that a reduced chunk is sent while it is still in the cache and both
//! directions stay busy. The chunks of several vectors form one sequence.
//!
//! This order cannot deadlock, however little room the streams have. The k-th reduced chunk of a rank depends on the
//! k-th contributions from all ranks. These contributions come earlier in every stream, and streams are consumed in
//! order.

use std::ops::Range;

/// The purpose of a chunk, with its index among the chunks of the same kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Item {
    /// A contribution to the receiver's range.
    Reduce(usize),
    /// A reduced chunk of the sender's range.
    Gather(usize),
}

/// A position in the stream.
#[derive(Debug, Clone)]
pub(super) struct Order {
    reduces: usize,
    gathers: usize,
    reduced: usize,
    gathered: usize,
}

/// Number of contributions sent ahead of the first reduced chunk, so that no rank waits for a round trip.
const LEAD: usize = 2;

impl Order {
    /// Creates the order of a stream with the given number of chunks of each kind.
    pub(super) fn new(reduces: usize, gathers: usize) -> Order {
        Order { reduces, gathers, reduced: 0, gathered: 0 }
    }

    /// Returns the current chunk; `None` at the end.
    pub(super) fn item(&self) -> Option<Item> {
        let reduce_first = self.reduced < self.gathered + LEAD || self.gathered == self.gathers;
        if self.reduced < self.reduces && reduce_first {
            Some(Item::Reduce(self.reduced))
        } else if self.gathered < self.gathers {
            Some(Item::Gather(self.gathered))
        } else {
            None
        }
    }

    pub(super) fn advance(&mut self) {
        match self.item() {
            Some(Item::Reduce(_)) => self.reduced += 1,
            Some(Item::Gather(_)) => self.gathered += 1,
            None => {}
        }
    }
}

/// A chunk of one vector.
pub(super) struct Chunk {
    /// Index of the vector.
    pub(super) vector: usize,
    /// The chunk's byte range in the vector.
    pub(super) range: Range<usize>,
}

/// Cuts ranges of several vectors into chunks.
pub(super) fn chunks_of<'a>(ranges: impl Iterator<Item = (usize, &'a Range<usize>)>, chunk: usize) -> Vec<Chunk> {
    let of_range = |(vector, range): (usize, &Range<usize>)| {
        let range = range.clone();
        (0..range.len().div_ceil(chunk)).map(move |index| Chunk { vector, range: chunk_of(&range, index, chunk) })
    };
    ranges.flat_map(of_range).collect()
}

/// Returns the `index`-th chunk of a range of bytes.
pub(super) fn chunk_of(range: &Range<usize>, index: usize, chunk: usize) -> Range<usize> {
    let start = range.start + index * chunk;
    start..range.end.min(start + chunk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_sent_once_and_reduced_chunks_follow_their_contributions() {
        for reduces in 0..7 {
            for gathers in 0..7 {
                let mut order = Order::new(reduces, gathers);
                let mut seen = Vec::new();
                while let Some(item) = order.item() {
                    seen.push(item);
                    order.advance();
                }
                assert_eq!(seen.len(), reduces + gathers);
                for (place, item) in seen.iter().enumerate() {
                    if let Item::Gather(index) = item
                        && *index < reduces
                    {
                        assert!(seen[..place].contains(&Item::Reduce(*index)), "{seen:?}");
                    }
                }
            }
        }
    }
}

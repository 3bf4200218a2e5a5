//! An all_to_all in the form that every transport executes: the data that this rank exchanges with each other rank.
//!
//! No rank knows what the others exchange among themselves. Every two ranks therefore compare their counts before they
//! use any data: a header states how many elements its sender sends to the receiver and expects from it. A rank
//! therefore sends one header to each other rank. If every rank collected the counts of all ranks instead, its traffic
//! would grow with the square of the number of ranks.

use std::ops::Range;

use crate::buffers::buffer::Buffer;
use crate::buffers::copy::copy;
use crate::buffers::ranges::consecutive;
use crate::collective::deadline::Deadline;
use crate::collective::signature::Signature;

/// An all_to_all to execute, or a part of one.
pub(crate) struct Parts<'a> {
    /// The operation that the caller requested. [`Pair::signature`] returns the signature of the part between two
    /// ranks.
    pub(crate) signature: Signature,
    /// The parts for all ranks.
    pub(crate) input: &'a [u8],
    /// The parts from all ranks.
    pub(crate) output: &'a mut [u8],
    /// The data that this rank exchanges with each rank, itself included; `None` if the two ranks exchange nothing over
    /// this endpoint, not even headers.
    pub(crate) pairs: Vec<Option<Pair>>,
    pub(crate) deadline: Deadline,
}

/// The data that this rank exchanges with one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    /// Number of elements that this rank sends.
    pub(crate) sent: usize,
    /// Number of elements that this rank expects.
    pub(crate) expected: usize,
    /// The byte range of the input that holds the part for the other rank; empty if another transport carries the data.
    pub(crate) from: Range<usize>,
    /// The byte range of the output for the part from the other rank; empty if another transport carries the data.
    pub(crate) to: Range<usize>,
}

impl Pair {
    /// Returns the signature of the part between this rank and the other.
    pub(crate) fn signature(&self, whole: &Signature) -> Signature {
        whole.between(self.sent, self.expected)
    }
}

impl Parts<'_> {
    /// Copies the part that this rank sends to itself.
    pub(crate) fn keep(&mut self, rank: usize) {
        if let Some(Pair { from, to, .. }) = &self.pairs[rank] {
            let whole = self.output.len();
            copy(&self.input[from.clone()], &mut self.output[to.clone()], whole);
        }
    }
}

/// The caller's counts of elements, by rank.
#[derive(Debug, Clone)]
pub(crate) struct Counts {
    pub(crate) send: Vec<usize>,
    pub(crate) receive: Vec<usize>,
}

impl Counts {
    /// Checks the counts of rank `rank` of a group of `size`.
    pub(crate) fn check(&self, rank: usize, size: usize, input: &Buffer, output: &Buffer) -> Result<(), String> {
        for (counts, buffer, name) in [(&self.send, input, "input"), (&self.receive, output, "output")] {
            if counts.len() != size {
                return Err(format!("expected one count per rank, {size}, for the {name}, but got {}", counts.len()));
            }
            let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
            if total != Some(buffer.len()) {
                return Err(format!("the counts {counts:?} do not sum to the {} elements of the {name}", buffer.len()));
            }
        }
        if self.send[rank] != self.receive[rank] {
            let (sent, expected) = (self.send[rank], self.receive[rank]);
            return Err(format!("the rank sends {sent} elements to itself, but expects {expected}"));
        }
        if input.dtype() != output.dtype() {
            return Err(format!("the input holds {}, but the output holds {}", input.dtype(), output.dtype()));
        }
        Ok(())
    }

    /// Returns the data that this rank exchanges with each rank, with elements of `unit` bytes. With 0 bytes, the ranks
    /// compare their counts and transfer nothing.
    pub(crate) fn pairs(&self, unit: usize) -> Vec<Option<Pair>> {
        let ranges = |counts: &[usize]| consecutive(counts.iter().copied(), unit);
        let places = ranges(&self.send).into_iter().zip(ranges(&self.receive));
        let counts = self.send.iter().zip(&self.receive);
        let pair = |((&sent, &expected), (from, to))| Some(Pair { sent, expected, from, to });
        counts.zip(places).map(pair).collect()
    }

    /// Returns the number of elements that leave this rank.
    pub(crate) fn leaving(&self, rank: usize) -> usize {
        self.send.iter().sum::<usize>() - self.send[rank]
    }
}

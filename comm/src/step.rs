//! One collective in the form that every transport carries out, and the pieces a transport consists of.
//!
//! All collectives are the same two moves over a vector that is cut into one range per rank: *reduce* (the owner of a range
//! combines everybody's contribution to it) and *gather* (everybody copies each range from its owner). An all_reduce is
//! both, a reduce_scatter the first, an all_gather the second, a broadcast a gather in which the root owns everything, a
//! barrier neither.

use std::ops::{AddAssign, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::Dtype;
use crate::communicator::ReduceOp;
use crate::copy::copy;
use crate::error::CommError;
use crate::health::Failure;
use crate::inquiry::Waiters;
use crate::signature::Signature;

/// A collective to be carried out, or a part of one.
pub(crate) struct Step<'a> {
    /// What the caller asked for.
    pub(crate) signature: Signature,
    pub(crate) reduce: Option<Reduction>,
    /// The whole vector: the ranges of all ranks one after another.
    pub(crate) buffer: &'a mut [u8],
    /// The own range of a gather, where it is not yet in `buffer`.
    pub(crate) source: Option<&'a [u8]>,
    /// Where the own range of the reduction goes, so that `buffer` stays as it is; `None`: in place.
    pub(crate) shard: Option<&'a mut [u8]>,
    /// Each rank's range of `buffer`, in bytes.
    pub(crate) ranges: Vec<Range<usize>>,
    pub(crate) gather: bool,
    pub(crate) deadline: Deadline,
}

impl Step<'_> {
    /// Copies the source to its place in the buffer, for those who look for it there.
    pub(crate) fn place_source(&mut self, rank: usize) {
        if let Some(source) = self.source.take() {
            let whole = self.buffer.len();
            copy(source, &mut self.buffer[self.ranges[rank].clone()], whole);
        }
    }
}

/// When an operation has failed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    pub(crate) started: Instant,
    /// How long a thread may wait for the operation.
    pub(crate) timeout: Duration,
}

impl Deadline {
    pub(crate) fn after(timeout: Duration) -> Deadline {
        Deadline { started: Instant::now(), timeout }
    }
}

/// How contributions become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    pub(crate) dtype: Dtype,
}

/// Carries out collectives, one after another.
pub(crate) trait Collective: Send {
    fn run(&mut self, step: Step<'_>) -> Result<Carried, Failure>;
}

/// The collectives of a group of one: what it asks for is what it has.
pub(crate) struct Alone;

impl Collective for Alone {
    fn run(&mut self, mut step: Step<'_>) -> Result<Carried, Failure> {
        step.place_source(0);
        if let Some(shard) = step.shard {
            copy(step.buffer, shard, step.buffer.len());
        }
        Ok(Carried::IN_PLACE)
    }
}

/// How the payload of an operation went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Carried {
    /// Ranks read, or wrote, each other's buffers; otherwise it was copied into and out of rings or sockets.
    pub(crate) in_place: bool,
    /// Bytes that this rank put into sockets.
    pub(crate) network_bytes: usize,
}

impl Carried {
    pub(crate) const IN_PLACE: Carried = Carried { in_place: true, network_bytes: 0 };

    pub(crate) fn streamed(network_bytes: usize) -> Carried {
        Carried { in_place: false, network_bytes }
    }
}

impl AddAssign for Carried {
    fn add_assign(&mut self, part: Carried) {
        self.in_place &= part.in_place;
        self.network_bytes += part.network_bytes;
    }
}

/// Sends messages to one peer.
pub(crate) trait Outbox: Send {
    /// Returns when `bytes` may be reused.
    fn send(&mut self, signature: &Signature, bytes: &[u8], deadline: Deadline) -> Result<Carried, Failure>;
}

/// Receives messages from one peer.
pub(crate) trait Inbox: Send {
    fn recv(&mut self, signature: &Signature, bytes: &mut [u8], deadline: Deadline) -> Result<(), Failure>;
}

/// How the ranks of a group are connected.
pub(crate) trait Fabric: Send + Sync {
    fn transport(&self) -> &'static str;
    /// The one object that carries out the collectives of this rank; asked for once.
    fn collective(&self, waiters: &Arc<Waiters>) -> Result<Box<dyn Collective>, CommError>;
    /// The sending end towards rank `peer` of the group; asked for at most once per peer.
    fn outbox(&self, peer: usize, waiters: &Arc<Waiters>) -> Result<Box<dyn Outbox>, CommError>;
    /// The receiving end from rank `peer` of the group; asked for at most once per peer.
    fn inbox(&self, peer: usize, waiters: &Arc<Waiters>) -> Result<Box<dyn Inbox>, CommError>;
    /// Connects a new group. Called by all its members at the same time.
    fn connect(&self, membership: Membership) -> Result<Box<dyn Fabric>, CommError>;
}

/// Who belongs to a group.
#[derive(Debug, Clone)]
pub(crate) struct Membership {
    /// The same on all members and on nobody else's groups.
    pub(crate) group: u64,
    /// This rank in the group.
    pub(crate) rank: usize,
    /// Ranks of the world, by rank in the group.
    pub(crate) members: Vec<usize>,
    /// How many neighbouring ranks the contribution of each member is the sum of, a node of the tree.
    pub(crate) weights: Vec<usize>,
}

impl Membership {
    /// A group whose members contribute for themselves.
    pub(crate) fn new(group: u64, rank: usize, members: Vec<usize>) -> Membership {
        Membership { group, rank, weights: vec![1; members.len()], members }
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// The ranks of the group but this one, from the next one on: so that not everybody begins with rank 0.
    pub(crate) fn peers(&self) -> Vec<usize> {
        (1..self.size()).map(|i| (self.rank + i) % self.size()).collect()
    }
}

/// Consecutive ranges of `counts[r] * scale` bytes.
pub(crate) fn consecutive(counts: impl IntoIterator<Item = usize>, scale: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let next = |count: usize| {
        let range = start..start + count * scale;
        start = range.end;
        range
    };
    counts.into_iter().map(next).collect()
}

/// `length` elements in `parts` parts that differ by at most one element.
pub(crate) fn even_counts(length: usize, parts: usize) -> impl Iterator<Item = usize> {
    (0..parts).map(move |part| length / parts + usize::from(part < length % parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_is_cut_evenly_and_completely() {
        for length in [0, 1, 7, 8, 9, 1000] {
            for parts in 1..9 {
                let ranges = consecutive(even_counts(length, parts), 4);
                assert_eq!(ranges.len(), parts);
                assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, 4 * length));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            }
        }
    }
}

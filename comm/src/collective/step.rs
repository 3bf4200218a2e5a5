//! A collective in the form that every transport executes, and the traits that make up a transport.
//!
//! All collectives consist of two phases over vectors, each of which is divided into one range per rank. In *reduce*,
//! the owner of a range combines the values that all ranks contribute to this range. In *gather*, every rank copies
//! each range from its owner. An all_reduce has both phases, a reduce_scatter only the first, an all_gather only the
//! second. A broadcast is a gather in which the root owns the whole vector. A barrier has neither phase. An all_to_all
//! does not have this form, because no two ranks have the same vector; [`Parts`] describes it.

use std::ops::Range;
use std::sync::Arc;

use crate::buffers::copy::copy;
use crate::buffers::dtype::Dtype;
use crate::collective::carried::Carried;
use crate::collective::deadline::Deadline;
use crate::collective::parts::Parts;
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::Signature;
use crate::error::CommError;
use crate::health::Failure;
use crate::inquiry::Waiters;

/// A collective to execute, or a part of one.
pub(crate) struct Step<'a> {
    /// The operation that the caller requested.
    pub(crate) signature: Signature,
    pub(crate) reduce: Option<ReduceOp>,
    /// The vectors of a coalesced operation, or one; none in a barrier.
    pub(crate) vectors: Vec<Vector<'a>>,
    pub(crate) gather: bool,
    pub(crate) deadline: Deadline,
}

/// A vector that a collective reduces or gathers.
pub(crate) struct Vector<'a> {
    /// Element type. A gather copies bytes, so its ranges need not start and end at element boundaries.
    pub(crate) dtype: Dtype,
    /// The whole vector, which contains the ranges of all ranks.
    pub(crate) buffer: &'a mut [u8],
    /// This rank's range of a gather, if it is not in `buffer` yet.
    pub(crate) source: Option<&'a [u8]>,
    /// Destination of this rank's range of the reduction, so that `buffer` stays unchanged; `None` means in place.
    pub(crate) shard: Option<&'a mut [u8]>,
    /// Each rank's range of `buffer`, in bytes.
    pub(crate) ranges: Vec<Range<usize>>,
}

impl<'a> Vector<'a> {
    /// Creates a vector that is changed in place.
    pub(crate) fn new(dtype: Dtype, buffer: &'a mut [u8], ranges: Vec<Range<usize>>) -> Vector<'a> {
        Vector { dtype, buffer, source: None, shard: None, ranges }
    }

    /// Returns the payload bytes that rank `rank` sends in a reduction: the other ranks' ranges to their owners, and,
    /// if the result is then gathered, its own reduced range to everyone.
    pub(crate) fn leaving(&self, rank: usize, gather: bool) -> usize {
        let own = self.ranges[rank].len();
        self.buffer.len() - own + if gather { own * (self.ranges.len() - 1) } else { 0 }
    }

    /// Copies the source to its range in the buffer, where peers read it.
    pub(crate) fn place_source(&mut self, rank: usize) {
        if let Some(source) = self.source.take() {
            let whole = self.buffer.len();
            copy(source, &mut self.buffer[self.ranges[rank].clone()], whole);
        }
    }
}

/// Executes collectives, one after another.
pub(crate) trait Collective: Send {
    fn run(&mut self, step: Step<'_>) -> Result<Carried, Failure>;

    /// Executes an all_to_all.
    fn exchange(&mut self, parts: Parts<'_>) -> Result<Carried, Failure>;
}

/// The collectives of a group of one rank, which only copy.
pub(crate) struct Alone;

impl Collective for Alone {
    fn run(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        for mut vector in step.vectors {
            vector.place_source(0);
            if let Some(shard) = vector.shard {
                copy(vector.buffer, shard, vector.buffer.len());
            }
        }
        Ok(Carried::IN_PLACE)
    }

    fn exchange(&mut self, mut parts: Parts<'_>) -> Result<Carried, Failure> {
        parts.keep(0);
        Ok(Carried::IN_PLACE)
    }
}

/// Sends messages to one peer.
pub(crate) trait Outbox: Send {
    /// Sends a message. Returns when the memory of `bytes` may be reused.
    fn send(&mut self, signature: &Signature, bytes: &[u8], deadline: Deadline) -> Result<Carried, Failure>;
}

/// Receives messages from one peer.
pub(crate) trait Inbox: Send {
    fn recv(&mut self, signature: &Signature, bytes: &mut [u8], deadline: Deadline) -> Result<(), Failure>;
}

/// The connections between the ranks of a group.
pub(crate) trait Fabric: Send + Sync {
    fn transport(&self) -> &'static str;
    /// Creates the endpoint that executes this rank's collectives; called once.
    fn collective(&self, waiters: &Arc<Waiters>) -> Result<Box<dyn Collective>, CommError>;
    /// Creates the sending end to rank `peer` of the group; called at most once per peer.
    fn outbox(&self, peer: usize, waiters: &Arc<Waiters>) -> Result<Box<dyn Outbox>, CommError>;
    /// Creates the receiving end from rank `peer` of the group; called at most once per peer.
    fn inbox(&self, peer: usize, waiters: &Arc<Waiters>) -> Result<Box<dyn Inbox>, CommError>;
    /// Connects a new group. All its members call this at the same time.
    fn connect(&self, membership: Membership) -> Result<Box<dyn Fabric>, CommError>;
}

/// The members of a group.
#[derive(Debug, Clone)]
pub(crate) struct Membership {
    /// Identifier of the group: equal on all members and different from every other group's.
    pub(crate) group: u64,
    /// This rank in the group.
    pub(crate) rank: usize,
    /// Global ranks of the members, by rank in the group.
    pub(crate) members: Vec<usize>,
    /// For each member, the number of consecutive ranks whose sum it contributes. These ranks form a node of the
    /// reduction tree.
    pub(crate) weights: Vec<usize>,
}

impl Membership {
    /// Creates a group whose members contribute only their own values.
    pub(crate) fn new(group: u64, rank: usize, members: Vec<usize>) -> Membership {
        Membership { group, rank, weights: vec![1; members.len()], members }
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns the other ranks of the group, starting with the rank after this one. Each rank therefore starts with a
    /// different peer.
    pub(crate) fn peers(&self) -> Vec<usize> {
        (1..self.size()).map(|i| (self.rank + i) % self.size()).collect()
    }
}

//! Runs a collective directly on the ranks' buffers, each rank on its own range, in one pass over memory. Also copies a
//! message directly from its sender's buffer.
//!
//! The owner of a range reads it in all buffers, combines it, and writes the result back to all buffers while they are
//! still in the cache. Meanwhile, no other rank accesses that range of any buffer, so ranks synchronize only twice: no
//! rank starts before the exchange of headers, and no rank returns its buffer before the exchange of done bytes. A
//! gather without a reduction also has these two exchanges, but each range is only copied.
//!
//! For an all_reduce of S bytes on two ranks, each rank reads S and writes S. Through rings, it would read 2.5 S and
//! write 2 S, and most of these accesses would be to cache lines that the other rank's core has just written.

use std::ops::Range;
use std::sync::Arc;

use super::arena::PeerArena;
use crate::buffers::copy::copy;
use crate::collective::reduction::{ReduceOp, Reduction};
use crate::collective::step::{Membership, Step, Vector};
use crate::health::{Cause, Failure, Health};
use crate::tree;

/// Number of bytes combined at a time: the blocks of all ranks should fit into the L2 cache.
const BLOCK: usize = 64 * 1024;

/// The arenas of a group's ranks, by rank in the group; `None` for this rank itself.
#[derive(Clone)]
pub(crate) struct Neighbours(pub(crate) Vec<Option<Arc<PeerArena>>>);

/// A rank's buffer that is lent to its peers.
struct Lease {
    rank: usize,
    bytes: *mut u8,
    length: usize,
}

impl Lease {
    fn at(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.length);
        // SAFETY: the assertion keeps the range inside the buffer.
        unsafe { self.bytes.add(range.start) }
    }

    /// Returns a shared slice of the range.
    ///
    /// # Safety
    /// No rank may write to the range while the slice lives.
    unsafe fn read(&self, range: &Range<usize>) -> &[u8] {
        // SAFETY: the range is inside a buffer that is lent; the caller guarantees the absence of writes.
        unsafe { std::slice::from_raw_parts(self.at(range), range.len()) }
    }

    /// Returns a mutable slice of the range.
    ///
    /// # Safety
    /// No other code may use the range while the slice lives, and two such slices must not overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn write(&self, range: &Range<usize>) -> &mut [u8] {
        // SAFETY: the range is inside a buffer that is lent; the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.at(range), range.len()) }
    }
}

impl Neighbours {
    /// Runs this rank's part of a collective on the vector with index `index`. The headers have been exchanged already:
    /// all ranks have lent their buffers and published the offsets. `places` lists (rank, offset) of all peers.
    pub(crate) fn carry_out(
        &self,
        step: &mut Step<'_>,
        index: usize,
        membership: &Membership,
        places: &[(usize, u64)],
        health: &Health,
    ) -> Result<(), Failure> {
        let (op, gathers, vector) = (step.reduce, step.gather, &mut step.vectors[index]);
        let length = vector.buffer.len();
        let own = Lease { rank: membership.rank, bytes: vector.buffer.as_mut_ptr(), length };
        let lease = |&(peer, place): &(usize, u64)| self.lease(peer, place, length, membership);
        let peers: Vec<Lease> = places.iter().map(lease).collect::<Result<_, _>>()?;
        match op {
            Some(op) => reduce(vector, op, gathers, &membership.weights, &own, peers, health),
            None if gathers => match vector.source.take() {
                Some(source) => hand_out(vector, source, &own, &peers, health),
                None => gather(vector, &own, &peers, health),
            },
            None => Ok(()),
        }
    }
}

impl Neighbours {
    /// Copies a message, or a part of an all_to_all, from offset `place` of the arena of group rank `peer` to `into`,
    /// which is part of a vector of `whole` bytes. The peer waits until the copy is done.
    pub(crate) fn fetch(
        &self,
        peer: usize,
        place: u64,
        into: &mut [u8],
        whole: usize,
        membership: &Membership,
        health: &Health,
    ) -> Result<(), Failure> {
        let length = into.len();
        let bytes = self.0[peer].as_ref().and_then(|arena| arena.bytes(place, length));
        let theirs = lease(peer, bytes, place, length, membership)?;
        for block in blocks(&(0..length)) {
            health.check()?;
            // SAFETY: the sender does not touch its buffer until it has the receipt, which this rank sends after the
            // copy.
            copy(unsafe { theirs.read(&block) }, &mut into[block.clone()], whole);
        }
        Ok(())
    }

    /// Returns the buffer that a peer lends at offset `place` of its arena.
    fn lease(&self, peer: usize, place: u64, length: usize, membership: &Membership) -> Result<Lease, Failure> {
        let bytes = self.0[peer].as_ref().and_then(|arena| arena.buffer(place, length));
        lease(peer, bytes, place, length, membership)
    }
}

fn lease(
    rank: usize,
    bytes: Option<*mut u8>,
    place: u64,
    length: usize,
    membership: &Membership,
) -> Result<Lease, Failure> {
    bytes.map(|bytes| Lease { rank, bytes, length }).ok_or_else(|| {
        let detail = format!("it offered {length} bytes at {place:#x}, outside its shared memory");
        Cause::Lost { peer: membership.members[rank], detail }.into()
    })
}

/// Combines this rank's range of all buffers and, for an all_reduce, writes the result to all of them.
fn reduce(
    vector: &mut Vector<'_>,
    op: ReduceOp,
    gathers: bool,
    weights: &[usize],
    own: &Lease,
    mut peers: Vec<Lease>,
    health: &Health,
) -> Result<(), Failure> {
    let reduction = Reduction { op, dtype: vector.dtype };
    // The tree combines contributions in rank order.
    peers.sort_unstable_by_key(|peer| peer.rank);
    let range = vector.ranges[own.rank].clone();
    for block in blocks(&range) {
        health.check()?;
        // SAFETY: for all accesses below, only this rank reads or writes its range, in any buffer, during this
        // collective, and each slice is in a different buffer.
        match &mut vector.shard {
            None if gathers => {
                // SAFETY: as above.
                let mut peers: Vec<&mut [u8]> = peers.iter().map(|peer| unsafe { peer.write(&block) }).collect();
                // SAFETY: as above.
                tree::reduce_everywhere(reduction, weights, own.rank, unsafe { own.write(&block) }, &mut peers);
            }
            shard => {
                // SAFETY: as above.
                let peers: Vec<&[u8]> = peers.iter().map(|peer| unsafe { peer.read(&block) }).collect();
                match shard {
                    // SAFETY: as above.
                    None => tree::reduce(reduction, weights, own.rank, unsafe { own.write(&block) }, &peers),
                    Some(shard) => {
                        let target = &mut shard[block.start - range.start..block.end - range.start];
                        // SAFETY: as above.
                        let own_part = unsafe { own.read(&block) };
                        tree::reduce_into(reduction, weights, own.rank, own_part, &peers, target, range.len());
                    }
                }
            }
        }
    }
    Ok(())
}

/// Copies the peers' ranges from their buffers into this rank's. In a broadcast, the rank that owns all data would have
/// nothing to copy. It therefore writes the last part of its range to every other buffer, so that all ranks copy about
/// the same amount.
fn gather(vector: &Vector<'_>, own: &Lease, peers: &[Lease], health: &Health) -> Result<(), Failure> {
    let (whole, ranges) = (vector.buffer.len(), &vector.ranges);
    let alone = ranges.iter().filter(|range| !range.is_empty()).count() == 1;
    let parts = |owner: usize| {
        let Range { start, end } = ranges[owner];
        let middle =
            if alone { end - ((end - start) / ranges.len()).next_multiple_of(64).min(end - start) } else { end };
        (start..middle, middle..end)
    };
    for peer in peers {
        for block in blocks(&parts(peer.rank).0) {
            health.check()?;
            // SAFETY: in this collective no rank writes to its own range in its own buffer. In each rank's buffer, only
            // that rank writes the first part of an owner's range.
            unsafe { copy(peer.read(&block), own.write(&block), whole) };
        }
        for block in blocks(&parts(own.rank).1) {
            health.check()?;
            // SAFETY: no rank writes to its own range in its own buffer, and only the owner writes the last part of a
            // range.
            unsafe { copy(own.read(&block), peer.write(&block), whole) };
        }
    }
    Ok(())
}

/// Writes this rank's range from a separate source to all buffers, its own and the peers', so that the source is read
/// only once.
fn hand_out(vector: &Vector<'_>, source: &[u8], own: &Lease, peers: &[Lease], health: &Health) -> Result<(), Failure> {
    let range = &vector.ranges[own.rank];
    for block in blocks(range) {
        health.check()?;
        let source = &source[block.start - range.start..block.end - range.start];
        for lease in peers.iter().chain([own]) {
            // SAFETY: in this collective only this rank accesses its range, in any buffer.
            copy(source, unsafe { lease.write(&block) }, vector.buffer.len());
        }
    }
    Ok(())
}

fn blocks(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *range;
    (start..end).step_by(BLOCK).map(move |start| start..end.min(start + BLOCK))
}

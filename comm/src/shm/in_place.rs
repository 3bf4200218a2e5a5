//! Carries out a collective where the ranks' buffers lie, each rank on its own range, in one pass over memory; and takes a
//! message out of the buffer of its sender.
//!
//! The owner of a range reads it in all buffers, combines it, and writes the result back into all buffers while the cache still
//! holds them. No other rank touches that range of any buffer meanwhile, so ranks need not wait for each other between the
//! exchange of headers, before which nobody may begin, and the exchange of farewells, before which nobody may give its
//! buffer back. A gather alone is the same without the combining.
//!
//! In numbers, for an all_reduce of S bytes by two ranks: each reads S and writes S. Through a ring it would read 2.5 S and
//! write 2 S, much of that in lines that the other core has just written.

use std::ops::Range;
use std::sync::Arc;

use super::arena::PeerArena;
use crate::copy::copy;
use crate::health::{Cause, Failure, Health};
use crate::step::{Membership, Reduction, Step};
use crate::tree;

/// Bytes that are combined at a time: those of all ranks should fit into the second-level cache.
const BLOCK: usize = 64 * 1024;

/// The arenas of a group's ranks, by rank in the group; `None` for this rank itself.
#[derive(Clone)]
pub(crate) struct Neighbours(pub(crate) Vec<Option<Arc<PeerArena>>>);

/// A rank's buffer, as long as it is lent.
struct Lease {
    rank: usize,
    bytes: *mut u8,
    length: usize,
}

impl Lease {
    fn at(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.length);
        // SAFETY: inside the buffer.
        unsafe { self.bytes.add(range.start) }
    }

    /// # Safety
    /// Nobody may write to the range meanwhile.
    unsafe fn read(&self, range: &Range<usize>) -> &[u8] {
        // SAFETY: inside a buffer that is lent; the caller answers for the rest.
        unsafe { std::slice::from_raw_parts(self.at(range), range.len()) }
    }

    /// # Safety
    /// Nobody else may use the range meanwhile, nor may two of these overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn write(&self, range: &Range<usize>) -> &mut [u8] {
        // SAFETY: as for `read`.
        unsafe { std::slice::from_raw_parts_mut(self.at(range), range.len()) }
    }
}

impl Neighbours {
    /// Does this rank's part. The headers have been exchanged: all ranks have lent their buffers and say where they are.
    /// `places` has all peers.
    pub(crate) fn carry_out(
        &self,
        step: &mut Step<'_>,
        membership: &Membership,
        places: &[(usize, u64)],
        health: &Health,
    ) -> Result<(), Failure> {
        let length = step.buffer.len();
        let own = Lease { rank: membership.rank, bytes: step.buffer.as_mut_ptr(), length };
        let lease = |&(peer, place): &(usize, u64)| self.lease(peer, place, length, membership);
        let peers: Vec<Lease> = places.iter().map(lease).collect::<Result<_, _>>()?;
        match step.reduce {
            Some(reduction) => reduce(step, reduction, &membership.weights, &own, peers, health),
            None if step.gather => match step.source.take() {
                Some(source) => hand_out(step, source, &own, &peers, health),
                None => gather(step, &own, &peers, health),
            },
            None => Ok(()),
        }
    }
}

impl Neighbours {
    /// Copies the message that a peer, of the group, says to have at `place`, while it waits for that.
    pub(crate) fn fetch(
        &self,
        peer: usize,
        place: u64,
        into: &mut [u8],
        membership: &Membership,
        health: &Health,
    ) -> Result<(), Failure> {
        let theirs = self.lease(peer, place, into.len(), membership)?;
        let whole = into.len();
        for block in blocks(&(0..whole)) {
            health.check()?;
            // SAFETY: the sender leaves its buffer alone until it has the receipt, which comes after this.
            copy(unsafe { theirs.read(&block) }, &mut into[block.clone()], whole);
        }
        Ok(())
    }

    /// The buffer that a peer says to have at `place`.
    fn lease(&self, peer: usize, place: u64, length: usize, membership: &Membership) -> Result<Lease, Failure> {
        let bytes = self.0[peer].as_ref().and_then(|arena| arena.buffer(place, length));
        bytes.map(|bytes| Lease { rank: peer, bytes, length }).ok_or_else(|| {
            let detail = format!("it offers {length} bytes at {place:#x}, where its arena has none");
            Cause::Lost { peer: membership.members[peer], detail }.into()
        })
    }
}

/// Combines the own range of all buffers and, for an all_reduce, leaves the result in all of them.
fn reduce(
    step: &mut Step<'_>,
    reduction: Reduction,
    weights: &[usize],
    own: &Lease,
    mut peers: Vec<Lease>,
    health: &Health,
) -> Result<(), Failure> {
    // The tree wants them in this order.
    peers.sort_unstable_by_key(|peer| peer.rank);
    let range = step.ranges[own.rank].clone();
    for block in blocks(&range) {
        health.check()?;
        // SAFETY, of all below: in this collective this rank alone reads or writes its range, of any buffer, and each of these is
        // another buffer.
        match &mut step.shard {
            None if step.gather => {
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

/// Copies the others' ranges from their buffers into this rank's. Where one rank alone has something, as in a broadcast, it
/// would have nothing to do; it writes the last part of everybody's buffer then, so that all copy the same amount.
fn gather(step: &Step<'_>, own: &Lease, peers: &[Lease], health: &Health) -> Result<(), Failure> {
    let whole = step.buffer.len();
    let alone = step.ranges.iter().filter(|range| !range.is_empty()).count() == 1;
    let parts = |owner: usize| {
        let Range { start, end } = step.ranges[owner];
        let middle =
            if alone { end - ((end - start) / step.ranges.len()).next_multiple_of(64).min(end - start) } else { end };
        (start..middle, middle..end)
    };
    for peer in peers {
        for block in blocks(&parts(peer.rank).0) {
            health.check()?;
            // SAFETY: in this collective nobody writes to a rank's range of its own buffer. The first part of an owner's range
            // is written in a rank's buffer by that rank alone.
            unsafe { copy(peer.read(&block), own.write(&block), whole) };
        }
        for block in blocks(&parts(own.rank).1) {
            health.check()?;
            // SAFETY: as above, and the last part by its owner alone.
            unsafe { copy(own.read(&block), peer.write(&block), whole) };
        }
    }
    Ok(())
}

/// Writes a rank's range, which lies elsewhere, into all buffers, its own and the others': read from memory once.
fn hand_out(step: &Step<'_>, source: &[u8], own: &Lease, peers: &[Lease], health: &Health) -> Result<(), Failure> {
    let range = &step.ranges[own.rank];
    for block in blocks(range) {
        health.check()?;
        let source = &source[block.start - range.start..block.end - range.start];
        for lease in peers.iter().chain([own]) {
            // SAFETY: in this collective this rank alone uses its range, of any buffer.
            copy(source, unsafe { lease.write(&block) }, step.buffer.len());
        }
    }
    Ok(())
}

fn blocks(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *range;
    (start..end).step_by(BLOCK).map(move |start| start..end.min(start + BLOCK))
}

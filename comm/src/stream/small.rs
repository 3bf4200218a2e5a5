//! Runs small collectives of many ranks over a network. Messages go along a tree of the ranks, not between every two
//! ranks.
//!
//! The ranks form a binomial tree. The parent of rank r is r without its lowest set bit. Rank 0 is the root, and every
//! subtree consists of consecutive ranks. The contributions of the ranks travel to the root, which reduces all of them
//! at once. The order of the additions is that of `tree/mod.rs`, so the result is bit-identical to a collective of
//! `exchange.rs`. The result travels back to all ranks. Headers and payloads use the N − 1 connections of the tree
//! instead of all N(N − 1)/2, and at most 2⌈log₂ N⌉ payloads are sent one after another.
//!
//! Every rank first sends its header to its parent and its children. If a rank's operation differs so much that it does
//! not use the tree, this rank sends its header to all ranks. The tree connects all ranks, so in any case at least two
//! ranks with different headers compare them. Their failure ends the operation on all ranks.

use std::ops::Range;

use super::done::DONE;
use super::exchange::compare;
use super::{Wait, Watch, Wires};
use crate::collective::carried::Carried;
use crate::collective::reduction::Reduction;
use crate::collective::signature::{HEADER_BYTES, Header};
use crate::collective::step::{Membership, Step, Vector};
use crate::health::Failure;
use crate::tree;

/// Minimum number of ranks in the group, or of hosts if the group is on several hosts. With fewer, it is faster if all
/// ranks send to each other at the same time.
const RANKS: usize = 16;

/// Returns whether a collective goes over the tree. Ranks with equal headers get the same result. Small means that the
/// contributions of all ranks fit in one chunk.
pub(super) fn is_small(step: &Step<'_>, membership: &Membership, wires: &dyn Wires) -> bool {
    let size = membership.size();
    let whole: usize = step.vectors.iter().map(length).sum();
    let all = if step.reduce.is_some() { whole.saturating_mul(size) } else { whole };
    wires.is_network() && size >= RANKS && all < wires.chunk()
}

/// Executes a small collective.
pub(super) fn run(
    mut step: Step<'_>,
    header: &Header,
    membership: &Membership,
    wires: &mut dyn Wires,
    watch: &mut Watch<'_>,
) -> Result<Carried, Failure> {
    let (rank, size) = (membership.rank, membership.size());
    step.vectors.iter_mut().for_each(|vector| vector.place_source(rank));
    let parent = parent(rank);
    let mut neighbours: Vec<Neighbour> = below(rank, size)
        .map(|child| {
            let bytes = (child..end(child, size)).map(|rank| contribution(&step, rank)).sum::<usize>();
            Neighbour::new(child, header, bytes)
        })
        .collect();
    let result: usize = step.vectors.iter().map(length).sum();
    neighbours.extend(parent.map(|parent| Neighbour::new(parent, header, result)));
    let children = neighbours.len() - usize::from(parent.is_some());

    deliver(header, &mut neighbours, wires, watch, |index| index < children)?;
    // The contributions in rank order: first this rank's, then those of the other ranks in its subtree.
    let mut all = own(&step, rank);
    for child in &neighbours[..children] {
        all.extend(child.payload());
    }
    let mut sent = 0;
    let whole = match parent {
        Some(_) => {
            sent += all.len();
            neighbours[children].send(all);
            deliver(header, &mut neighbours, wires, watch, |index| index == children)?;
            neighbours[children].payload().to_vec()
        }
        None => reduced(&step, membership, &all),
    };
    for child in &mut neighbours[..children] {
        sent += whole.len();
        child.send(whole.clone());
    }
    deliver(header, &mut neighbours, wires, watch, |_| false)?;
    store(&mut step, rank, &whole);
    Ok(Carried::streamed(sent))
}

/// The parent or a child of this rank, with the data that is sent to it and received from it.
struct Neighbour {
    rank: usize,
    /// Chunks to send; the first is the header.
    sending: Vec<Vec<u8>>,
    /// Number of chunks sent completely, and number of bytes sent of the next chunk.
    sent: (usize, usize),
    header: [u8; HEADER_BYTES],
    /// The payload, followed by [`DONE`], which is sent even if the payload is empty.
    received: Vec<u8>,
    /// Number of bytes received of the header, and of the payload with [`DONE`].
    arrived: (usize, usize),
}

impl Neighbour {
    fn new(rank: usize, header: &Header, payload: usize) -> Neighbour {
        let sending = vec![header.encode().to_vec()];
        Neighbour {
            rank,
            sending,
            sent: (0, 0),
            header: [0; HEADER_BYTES],
            received: vec![0; payload + 1],
            arrived: (0, 0),
        }
    }

    fn send(&mut self, mut payload: Vec<u8>) {
        payload.push(DONE);
        self.sending.push(payload);
    }

    fn payload(&self) -> &[u8] {
        &self.received[..self.received.len() - 1]
    }

    fn has_room_to_wait_for(&self) -> bool {
        self.sent.0 < self.sending.len()
    }

    fn is_awaited(&self) -> bool {
        self.arrived.1 < self.received.len()
    }

    /// Sends as many bytes to the neighbour as possible. Returns whether it sent any.
    fn push(&mut self, wires: &mut dyn Wires, watch: &Watch<'_>) -> Result<bool, Failure> {
        let Some(chunk) = self.sending.get(self.sent.0) else { return Ok(false) };
        let pushed = wires.push(self.rank, &chunk[self.sent.1..]).map_err(watch.broken(self.rank))?;
        self.sent.1 += pushed;
        if self.sent.1 == chunk.len() {
            self.sent = (self.sent.0 + 1, 0);
        }
        Ok(pushed > 0)
    }

    /// Receives the bytes that have arrived. Compares the header before it receives the payload. Returns whether any
    /// bytes have arrived.
    fn pull(&mut self, ours: &Header, wires: &mut dyn Wires, watch: &Watch<'_>) -> Result<bool, Failure> {
        let broken = watch.broken(self.rank);
        if self.arrived.0 < HEADER_BYTES {
            let pulled = wires.pull(self.rank, &mut self.header[self.arrived.0..]).map_err(broken)?;
            self.arrived.0 += pulled;
            if self.arrived.0 == HEADER_BYTES {
                compare(ours, &self.header, watch.members[self.rank], watch.health)?;
            }
            return Ok(pulled > 0);
        }
        let pulled = wires.pull(self.rank, &mut self.received[self.arrived.1..]).map_err(broken)?;
        self.arrived.1 += pulled;
        Ok(pulled > 0)
    }
}

/// Sends all pending chunks, and receives the payloads of the neighbours that `is_needed` selects by their index.
fn deliver(
    header: &Header,
    neighbours: &mut [Neighbour],
    wires: &mut dyn Wires,
    watch: &mut Watch<'_>,
    is_needed: impl Fn(usize) -> bool,
) -> Result<(), Failure> {
    loop {
        let mark = wires.mark();
        let mut moved = false;
        for (index, neighbour) in neighbours.iter_mut().enumerate() {
            moved |= neighbour.push(wires, watch)?;
            if is_needed(index) && neighbour.is_awaited() {
                moved |= neighbour.pull(header, wires, watch)?;
            }
        }
        if moved {
            watch.moved = true;
            continue;
        }
        let needed = neighbours.iter().enumerate().filter(|(index, of)| is_needed(*index) && of.is_awaited());
        let data = needed.map(|(_, of)| Wait::Data(of.rank));
        let room = neighbours.iter().filter(|of| of.has_room_to_wait_for()).map(|of| Wait::Room(of.rank));
        let waits: Vec<Wait> = data.chain(room).collect();
        if waits.is_empty() {
            return Ok(());
        }
        watch.idle(wires, mark, &waits)?;
    }
}

fn parent(rank: usize) -> Option<usize> {
    (rank > 0).then(|| rank & (rank - 1))
}

/// Returns the end of the range of ranks in the subtree of `rank`.
fn end(rank: usize, size: usize) -> usize {
    if rank == 0 { size } else { size.min(rank + (1 << rank.trailing_zeros())) }
}

/// Returns the children of a rank in the tree, in rank order.
fn below(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    let end = end(rank, size);
    (0..usize::BITS).map(move |bit| rank + (1 << bit)).take_while(move |child| *child < end)
}

/// Returns the total length in bytes of the ranges of all ranks. They need not cover the whole buffer.
fn length(vector: &Vector<'_>) -> usize {
    vector.ranges.iter().map(Range::len).sum()
}

/// Returns the ranges of a vector that a rank contributes: all of them to a reduction, and its own to a gather.
fn contributed<'a>(step: &Step<'_>, vector: &'a Vector<'_>, rank: usize) -> &'a [Range<usize>] {
    if step.reduce.is_some() { &vector.ranges } else { &vector.ranges[rank..=rank] }
}

/// Returns the number of bytes that a rank contributes.
fn contribution(step: &Step<'_>, rank: usize) -> usize {
    step.vectors.iter().flat_map(|vector| contributed(step, vector, rank)).map(Range::len).sum()
}

/// Returns this rank's contribution: vector by vector, range by range.
fn own(step: &Step<'_>, rank: usize) -> Vec<u8> {
    let mut own = vec![];
    for vector in &step.vectors {
        contributed(step, vector, rank).iter().for_each(|range| own.extend_from_slice(&vector.buffer[range.clone()]));
    }
    own
}

/// Computes the result from the contributions of all ranks: vector by vector, range by range.
fn reduced(step: &Step<'_>, membership: &Membership, all: &[u8]) -> Vec<u8> {
    let Some(op) = step.reduce else {
        let mut parts = vec![vec![]; step.vectors.len()];
        let mut rest = all;
        for rank in 0..membership.size() {
            for (vector, part) in step.vectors.iter().zip(&mut parts) {
                let (own, others) = rest.split_at(vector.ranges[rank].len());
                part.extend_from_slice(own);
                rest = others;
            }
        }
        return parts.concat();
    };
    let whole = all.len() / membership.size();
    let mut result = vec![];
    for vector in step.vectors.iter().filter(|vector| length(vector) > 0) {
        let place = result.len()..result.len() + length(vector);
        // Copy the elements into words, because elements in a buffer of bytes may not be aligned.
        let stride = place.len().next_multiple_of(size_of::<u64>());
        let mut words = vec![0u64; stride / size_of::<u64>() * membership.size()];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for (to, from) in bytes.chunks_mut(stride).zip(all.chunks(whole)) {
            to[..place.len()].copy_from_slice(&from[place.clone()]);
        }
        let mut of_ranks = bytes.chunks_mut(stride).map(|of| &mut of[..place.len()]);
        let Some(sum) = of_ranks.next() else { continue };
        let peers: Vec<&[u8]> = of_ranks.map(|of| &*of).collect();
        tree::reduce(Reduction { op, dtype: vector.dtype }, &membership.weights, 0, sum, &peers);
        result.extend_from_slice(sum);
    }
    result
}

/// Stores the result in the vectors: the ranges of all ranks, or only this rank's ranges after a reduction without a
/// gather.
fn store(step: &mut Step<'_>, rank: usize, mut result: &[u8]) {
    for vector in &mut step.vectors {
        for (owner, range) in vector.ranges.iter().enumerate() {
            let (of, rest) = result.split_at(range.len());
            result = rest;
            match (&mut vector.shard, step.gather, owner == rank) {
                (Some(shard), false, true) => shard.copy_from_slice(of),
                (_, true, _) | (None, false, true) => vector.buffer[range.clone()].copy_from_slice(of),
                (_, false, false) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_one_parent_and_subtrees_are_consecutive() {
        for size in 1..140 {
            let mut parents = vec![None; size];
            for rank in 0..size {
                let mut next = rank + 1;
                for child in below(rank, size) {
                    assert_eq!((child, parent(child)), (next, Some(rank)), "{size} ranks");
                    assert_eq!(parents[child].replace(rank), None);
                    next = end(child, size);
                }
                assert_eq!(next, end(rank, size));
            }
            assert_eq!(parents.iter().filter(|parent| parent.is_none()).count(), 1);
        }
    }
}

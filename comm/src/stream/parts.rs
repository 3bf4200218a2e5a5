//! Runs an all_to_all over the streams between the ranks of a group.
//!
//! The stream to each peer carries a header, then the part for that peer in chunks. The streams are independent of each
//! other. Each iteration offers every peer its next chunk and takes the data that has arrived, and no chunk waits for a
//! chunk of another stream. Therefore, ranks cannot block each other, however little room the streams have. A part goes
//! from the input of one rank to the output of the other and needs no further memory.
//!
//! If the peers can access this rank's input, the stream carries no chunks. The header then contains the offset of the
//! part, and the peer copies the part from there and sends a receipt, for which this rank waits. Each rank decides for
//! its own input whether it sends chunks.

use super::done::DONE;
use super::exchange::{Exchange, compare};
use super::order::chunk_of;
use super::{Wait, Watch, Wires};
use crate::collective::carried::Carried;
use crate::collective::parts::{Pair, Parts};
use crate::collective::signature::{HEADER_BYTES, Header};
use crate::collective::step::Membership;
use crate::health::Failure;
use crate::shm::{Lent, Neighbours, lend};

/// The streams to and from one peer.
struct Streams {
    peer: usize,
    pair: Pair,
    ours: Header,
    header_sent: usize,
    /// Number of bytes of the part that were sent.
    sent: usize,
    theirs: [u8; HEADER_BYTES],
    header_received: usize,
    /// Number of bytes of the part that have arrived.
    received: usize,
    /// Whether this rank owes the receipt for a part that it has copied from the peer's input.
    owes_receipt: bool,
    /// Whether the peer owes the receipt for its part of this rank's input.
    awaits_receipt: bool,
}

/// An all_to_all in progress.
struct Run<'a, 'b> {
    parts: Parts<'a>,
    streams: Vec<Streams>,
    neighbours: Option<&'b Neighbours>,
    membership: &'b Membership,
    /// Whether the peers copy from the input instead of receiving chunks.
    lent: bool,
    /// Number of bytes of parts sent in chunks, without headers.
    payload: usize,
}

/// Exchanges the parts of this rank with all peers.
pub(super) fn exchange(endpoint: &mut Exchange, parts: Parts<'_>) -> Result<Carried, Failure> {
    let Exchange { wires, neighbours, membership, health, topic, job: (job, attempt) } = endpoint;
    let mut watch = Watch::new(health, membership, topic, parts.deadline);
    // From here until their receipts, peers may read the input.
    let lent = neighbours.as_ref().and_then(|_| lend(parts.input));
    let stream = |peer: usize| {
        let pair = parts.pairs[peer].clone()?;
        let signature = pair.signature(&parts.signature);
        let place = lent.as_ref().map(|lent| lent.place() + pair.from.start as u64);
        let ours = Header { job: *job, attempt: *attempt, group: membership.group, signature, place };
        let awaits_receipt = place.is_some() && !pair.from.is_empty();
        Some(Streams {
            peer,
            pair,
            ours,
            header_sent: 0,
            sent: 0,
            theirs: [0; HEADER_BYTES],
            header_received: 0,
            received: 0,
            owes_receipt: false,
            awaits_receipt,
        })
    };
    let streams = membership.peers().into_iter().filter_map(stream).collect();
    let (neighbours, is_lent) = (neighbours.as_ref(), lent.is_some());
    let mut run = Run { parts, streams, neighbours, membership, lent: is_lent, payload: 0 };
    let mut kept = false;
    loop {
        let mark = wires.mark();
        let mut moved = false;
        for index in 0..run.streams.len() {
            moved |= run.send(index, &mut **wires, &watch)?;
        }
        // The peers can start while this rank copies its own part.
        if !std::mem::replace(&mut kept, true) {
            run.parts.keep(membership.rank);
        }
        for index in 0..run.streams.len() {
            moved |= run.receive(index, &mut **wires, &watch)?;
        }
        if moved {
            watch.moved = true;
            continue;
        }
        let waits = run.waits();
        if waits.is_empty() {
            break;
        }
        watch.idle(&mut **wires, mark, &waits)?;
    }
    let network_bytes = if wires.is_network() { run.payload } else { 0 };
    lent.into_iter().for_each(Lent::returned);
    Ok(Carried { in_place: is_lent, network_bytes, ..Carried::IN_PLACE })
}

impl Streams {
    /// Returns whether something from the peer is missing: its header, some of its data, or its receipt.
    fn awaits_data(&self) -> bool {
        let has_part = self.received == self.pair.to.len();
        self.header_received < HEADER_BYTES || !has_part || self.awaits_receipt
    }
}

impl Run<'_, '_> {
    /// Returns how many bytes this rank sends to a peer in chunks: none if the peer reads them from a lent buffer.
    fn streamed(&self, streams: &Streams) -> usize {
        if self.lent { 0 } else { streams.pair.from.len() }
    }

    /// Returns the events that could allow progress; empty when the all_to_all is complete. Peers that have not started
    /// come first.
    fn waits(&self) -> Vec<Wait> {
        let absent = self.streams.iter().filter(|streams| streams.header_received < HEADER_BYTES);
        let slow = self.streams.iter().filter(|s| s.header_received == HEADER_BYTES && s.awaits_data());
        let full = |s: &&Streams| s.header_sent < HEADER_BYTES || s.sent < self.streamed(s) || s.owes_receipt;
        let full = self.streams.iter().filter(full);
        let data = absent.chain(slow).map(|streams| Wait::Data(streams.peer));
        data.chain(full.map(|streams| Wait::Room(streams.peer))).collect()
    }

    /// Offers the header, the next chunk or the receipt to a peer.
    fn send(&mut self, index: usize, wires: &mut dyn Wires, watch: &Watch) -> Result<bool, Failure> {
        let whole = self.streamed(&self.streams[index]);
        let streams = &mut self.streams[index];
        let peer = streams.peer;
        let pushed = if streams.header_sent < HEADER_BYTES {
            let header = streams.ours.encode();
            let pushed = wires.push(peer, &header[streams.header_sent..]).map_err(watch.broken(peer))?;
            streams.header_sent += pushed;
            pushed
        } else if streams.sent < whole {
            let chunk = chunk_of(&streams.pair.from, streams.sent / wires.chunk(), wires.chunk());
            let rest = streams.pair.from.start + streams.sent..chunk.end;
            let pushed = wires.push(peer, &self.parts.input[rest]).map_err(watch.broken(peer))?;
            streams.sent += pushed;
            self.payload += pushed;
            pushed
        } else if streams.owes_receipt {
            let pushed = wires.push(peer, &[DONE]).map_err(watch.broken(peer))?;
            streams.owes_receipt = pushed == 0;
            pushed
        } else {
            0
        };
        Ok(pushed > 0)
    }

    /// Reads from a peer what is due next: its header, data of its part, or its receipt. Returns whether anything
    /// arrived.
    fn receive(&mut self, index: usize, wires: &mut dyn Wires, watch: &Watch) -> Result<bool, Failure> {
        let streams = &mut self.streams[index];
        let peer = streams.peer;
        let pulled = if streams.header_received < HEADER_BYTES {
            let rest = &mut streams.theirs[streams.header_received..];
            let pulled = wires.pull(peer, rest).map_err(watch.broken(peer))?;
            streams.header_received += pulled;
            if streams.header_received == HEADER_BYTES {
                compare(&streams.ours, &streams.theirs, watch.members[peer], watch.health)?;
            }
            pulled
        } else if streams.received < streams.pair.to.len() {
            let place = Header::decode(&streams.theirs).and_then(|header| header.place);
            let whole = self.parts.output.len();
            if let Some((neighbours, place)) = self.neighbours.zip(place) {
                let part = &mut self.parts.output[streams.pair.to.clone()];
                streams.received = part.len();
                streams.owes_receipt = true;
                neighbours.fetch(peer, place, part, whole, self.membership, watch.health)?;
                return Ok(true);
            }
            let chunk = chunk_of(&streams.pair.to, streams.received / wires.chunk(), wires.chunk());
            let rest = streams.pair.to.start + streams.received..chunk.end;
            let pulled = wires.pull(peer, &mut self.parts.output[rest]).map_err(watch.broken(peer))?;
            streams.received += pulled;
            pulled
        } else if streams.awaits_receipt {
            let pulled = wires.pull(peer, &mut [0]).map_err(watch.broken(peer))?;
            streams.awaits_receipt = pulled == 0;
            pulled
        } else {
            0
        };
        Ok(pulled > 0)
    }
}

//! Runs a collective over the streams between the ranks of a group, with one loop for all collectives.
//!
//! Each iteration offers every peer the data that may be sent and takes the data that has arrived. A chunk of this
//! rank's range is reduced as soon as the contributions of all peers have arrived. Every stream starts with the header,
//! and no payload of a peer is used before its header has been compared.
//!
//! If all ranks can access each other's buffers, only the headers pass through the streams and the collective runs in
//! place.

use std::sync::Arc;
use std::time::Instant;

use super::order::{Item, Order, chunk_of};
use super::{Wait, Watch, Wires};
use crate::buffer::Dtype;
use crate::health::{Cause, Failure, Health};
use crate::inquiry::Topic;
use crate::parts::Parts;
use crate::shm::{Lent, Neighbours, lend};
use crate::signature::{HEADER_BYTES, Header, Operation, Signature};
use crate::step::{Carried, Collective, Deadline, Membership, Step, consecutive};
use crate::tree;

/// One rank's end of a group's collectives.
pub(crate) struct Exchange {
    pub(crate) wires: Box<dyn Wires>,
    /// The arenas of the peers, if all are accessible.
    pub(crate) neighbours: Option<Neighbours>,
    pub(crate) membership: Membership,
    pub(crate) health: Arc<Health>,
    pub(crate) topic: Topic,
    /// Digest of the job's run id, and the attempt.
    pub(crate) job: (u64, u32),
}

/// The streams to and from one peer during one collective.
struct Streams {
    peer: usize,
    header_sent: usize,
    sending: Order,
    /// Bytes of the current chunk that were sent.
    sent: usize,
    header: [u8; HEADER_BYTES],
    header_received: usize,
    receiving: Order,
    /// Bytes of the current chunk that have arrived.
    received: usize,
    /// Whether the current chunk has arrived completely and waits for those of the other peers.
    ready: bool,
}

/// A collective in progress.
struct Run<'a> {
    step: Step<'a>,
    header: Header,
    streams: Vec<Streams>,
    rank: usize,
    weights: &'a [usize],
    chunk: usize,
    /// Payload bytes sent, without headers.
    payload: usize,
    /// Number of reduced chunks of this rank's range.
    reduced: usize,
    /// Whether payload is streamed. Becomes true once some buffer is known to be inaccessible.
    streaming: bool,
}

impl Collective for Exchange {
    fn run(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let mut watch = Watch::new(&self.health, &self.membership, &self.topic, step.deadline);
        let wires = &mut *self.wires;
        let (job, attempt) = self.job;
        // From here until their farewell, peers may read and write the buffer.
        let mut lent = self.neighbours.as_ref().and_then(|_| lend(step.buffer));
        let place = lent.as_ref().map(Lent::place);
        let header = Header { job, attempt, group: self.membership.group, signature: step.signature, place };
        let mut run = Run::new(step, header, &self.membership, wires.chunk());
        if lent.is_none() {
            run.step.place_source(run.rank);
        }
        loop {
            if let Some(offer) = lent.take_if(|_| run.headers_exchanged()) {
                let (neighbours, theirs) = (self.neighbours.as_ref(), run.places());
                if let Some((neighbours, theirs)) = neighbours.zip(theirs) {
                    neighbours.carry_out(&mut run.step, &self.membership, &theirs, watch.health)?;
                    farewell(wires, &self.membership, &mut watch)?;
                    offer.returned();
                    return Ok(Carried::IN_PLACE);
                }
                // Every rank has seen that some rank offers no buffer, so none accesses this one.
                offer.returned();
                run.step.place_source(run.rank);
                run.streaming = true;
            }
            let mark = wires.mark();
            let mut moved = false;
            for index in 0..run.streams.len() {
                moved |= run.send(index, wires, &watch)?;
            }
            for index in 0..run.streams.len() {
                moved |= run.receive(index, wires, &watch)?;
            }
            moved |= run.reduce(wires, &watch)?;
            if moved {
                continue;
            }
            let waits = run.waits();
            if waits.is_empty() {
                return Ok(Carried::streamed(if wires.is_network() { run.payload } else { 0 }));
            }
            watch.idle(wires, mark, &waits)?;
        }
    }

    fn exchange(&mut self, parts: Parts<'_>) -> Result<Carried, Failure> {
        super::parts::exchange(self, parts)
    }
}

impl<'a> Run<'a> {
    fn new(step: Step<'a>, header: Header, membership: &'a Membership, chunk: usize) -> Run<'a> {
        let rank = membership.rank;
        let chunks = |rank: usize| step.ranges[rank].len().div_ceil(chunk);
        let (reduces, gathers) = (step.reduce.is_some(), step.gather);
        let order = |to: usize, from: usize| {
            Order::new(if reduces { chunks(to) } else { 0 }, if gathers { chunks(from) } else { 0 })
        };
        let streams = membership.peers().into_iter().map(|peer| Streams {
            peer,
            header_sent: 0,
            sending: order(peer, rank),
            sent: 0,
            header: [0; HEADER_BYTES],
            header_received: 0,
            receiving: order(rank, peer),
            received: 0,
            ready: false,
        });
        let streaming = header.place.is_none();
        let (streams, weights) = (streams.collect(), &membership.weights[..]);
        Run { header, streams, rank, weights, chunk, payload: 0, reduced: 0, streaming, step }
    }

    fn headers_exchanged(&self) -> bool {
        let exchanged = |s: &Streams| s.header_sent == HEADER_BYTES && s.header_received == HEADER_BYTES;
        self.streams.iter().all(exchanged)
    }

    /// Returns (rank, offset) of each peer's buffer, if all peers have offered theirs.
    fn places(&self) -> Option<Vec<(usize, u64)>> {
        let place = |streams: &Streams| Some((streams.peer, Header::decode(&streams.header)?.place?));
        self.streams.iter().map(place).collect()
    }

    /// Returns the events that could allow progress; empty when the collective is complete. Peers that have not started
    /// come first, then peers that owe their own contribution, then peers that may themselves be waiting for
    /// contributions.
    fn waits(&self) -> Vec<Wait> {
        let mut absent = Vec::new();
        let mut owing = Vec::new();
        let mut slow = Vec::new();
        let mut full = Vec::new();
        for streams in &self.streams {
            if streams.header_received < HEADER_BYTES {
                absent.push(Wait::Data(streams.peer));
            } else if !streams.ready {
                match streams.receiving.item() {
                    Some(Item::Reduce(_)) => owing.push(Wait::Data(streams.peer)),
                    Some(Item::Gather(_)) => slow.push(Wait::Data(streams.peer)),
                    None => {}
                }
            }
            if streams.header_sent < HEADER_BYTES || streams.sending.item().is_some_and(|item| self.may_send(item)) {
                full.push(Wait::Room(streams.peer));
            }
        }
        [absent, owing, slow, full].concat()
    }

    /// Returns whether a chunk may be sent: a chunk of this rank's range only once it is reduced.
    fn may_send(&self, item: Item) -> bool {
        match item {
            _ if !self.streaming => false,
            Item::Reduce(_) => true,
            Item::Gather(index) => self.step.reduce.is_none() || index < self.reduced,
        }
    }

    /// Offers one chunk to a peer.
    fn send(&mut self, index: usize, wires: &mut dyn Wires, watch: &Watch) -> Result<bool, Failure> {
        let streams = &self.streams[index];
        let peer = streams.peer;
        if streams.header_sent < HEADER_BYTES {
            let header = self.header.encode();
            let pushed = wires.push(peer, &header[streams.header_sent..]).map_err(watch.broken(peer))?;
            self.streams[index].header_sent += pushed;
            return Ok(pushed > 0);
        }
        let Some(item) = streams.sending.item().filter(|item| self.may_send(*item)) else { return Ok(false) };
        let range = match item {
            Item::Reduce(index) => chunk_of(&self.step.ranges[peer], index, self.chunk),
            Item::Gather(index) => chunk_of(&self.step.ranges[self.rank], index, self.chunk),
        };
        let rest = range.start + streams.sent..range.end;
        let pushed = wires.push(peer, &self.step.buffer[rest.clone()]).map_err(watch.broken(peer))?;
        self.payload += pushed;
        let streams = &mut self.streams[index];
        streams.sent += pushed;
        if pushed == rest.len() {
            streams.sending.advance();
            streams.sent = 0;
        }
        Ok(pushed > 0)
    }

    /// Receives a header, or a finished chunk of the peer's range directly into the buffer.
    fn receive(&mut self, index: usize, wires: &mut dyn Wires, watch: &Watch) -> Result<bool, Failure> {
        let streams = &mut self.streams[index];
        let peer = streams.peer;
        if streams.header_received < HEADER_BYTES {
            let rest = &mut streams.header[streams.header_received..];
            let pulled = wires.pull(peer, rest).map_err(watch.broken(peer))?;
            streams.header_received += pulled;
            if streams.header_received == HEADER_BYTES {
                compare(&self.header, &streams.header, watch.members[peer], watch.health)?;
            }
            return Ok(pulled > 0);
        }
        let Some(Item::Gather(index)) = streams.receiving.item().filter(|_| self.streaming) else { return Ok(false) };
        let range = chunk_of(&self.step.ranges[peer], index, self.chunk);
        let rest = range.start + streams.received..range.end;
        let pulled = wires.pull(peer, &mut self.step.buffer[rest.clone()]).map_err(watch.broken(peer))?;
        streams.received += pulled;
        if pulled == rest.len() {
            streams.receiving.advance();
            streams.received = 0;
        }
        Ok(pulled > 0)
    }

    /// Reduces the next chunk of this rank's range if all contributions have arrived.
    fn reduce(&mut self, wires: &mut dyn Wires, watch: &Watch) -> Result<bool, Failure> {
        let Some(reduction) = self.step.reduce.filter(|_| self.streaming) else { return Ok(false) };
        let own = &self.step.ranges[self.rank];
        let range = chunk_of(own, self.reduced, self.chunk);
        if range.start >= own.end {
            return Ok(false);
        }
        for streams in &mut self.streams {
            let next = streams.receiving.item() == Some(Item::Reduce(self.reduced));
            if next && streams.header_received == HEADER_BYTES && !streams.ready {
                streams.ready = wires.arrived(streams.peer, range.len()).map_err(watch.broken(streams.peer))?;
            }
        }
        if !self.streams.iter().all(|streams| streams.ready) {
            return Ok(false);
        }
        let others = (0..watch.members.len()).filter(|peer| *peer != self.rank);
        let peers: Vec<&[u8]> = others.map(|peer| wires.view(peer, range.len())).collect();
        match &mut self.step.shard {
            None => tree::reduce(reduction, self.weights, self.rank, &mut self.step.buffer[range], &peers),
            Some(shard) => {
                let target = &mut shard[range.start - own.start..range.end - own.start];
                target.copy_from_slice(&self.step.buffer[range]);
                tree::reduce(reduction, self.weights, self.rank, target, &peers);
            }
        }
        for streams in &mut self.streams {
            wires.consume(streams.peer);
            streams.receiving.advance();
            streams.ready = false;
        }
        self.reduced += 1;
        Ok(true)
    }
}

/// Tells the peers that this rank no longer uses their buffers, and waits until they no longer use this rank's.
fn farewell(wires: &mut dyn Wires, membership: &Membership, watch: &mut Watch) -> Result<(), Failure> {
    let mut peers: Vec<(usize, bool, bool)> = membership.peers().into_iter().map(|peer| (peer, false, false)).collect();
    loop {
        let mark = wires.mark();
        let mut moved = false;
        for (peer, told, heard) in &mut peers {
            if !*told {
                *told = wires.push(*peer, &[DONE]).map_err(watch.broken(*peer))? == 1;
                moved |= *told;
            }
            if !*heard {
                *heard = wires.pull(*peer, &mut [0]).map_err(watch.broken(*peer))? == 1;
                moved |= *heard;
            }
        }
        let slow = peers.iter().filter(|(_, _, heard)| !heard).map(|(peer, ..)| Wait::Data(*peer));
        let full = peers.iter().filter(|(_, told, _)| !told).map(|(peer, ..)| Wait::Room(*peer));
        let waits: Vec<Wait> = slow.chain(full).collect();
        if waits.is_empty() {
            return Ok(());
        }
        if !moved {
            watch.idle(wires, mark, &waits)?;
        }
    }
}

/// The byte that a rank sends when it no longer uses the receiver's buffer.
pub(super) const DONE: u8 = 1;

/// Compares a peer's header with this rank's.
pub(super) fn compare(ours: &Header, theirs: &[u8; HEADER_BYTES], peer: usize, health: &Health) -> Result<(), Failure> {
    let difference = match Header::decode(theirs) {
        Some(theirs) => ours.difference(&theirs),
        None => Some((ours.signature.to_string(), "an invalid header".into())),
    };
    match difference {
        None => Ok(()),
        Some((here, there)) => Err(Cause::Mismatch { rank: health.rank, here, peer, there }.into()),
    }
}

/// Gathers `mine` of all ranks of the group, in rank order. Used while connecting, before the communicator exists.
pub(crate) fn gather_all(
    endpoint: &mut dyn Collective,
    membership: &Membership,
    mine: &[u8],
    round: u64,
    deadline: Instant,
) -> Result<Vec<Vec<u8>>, (Failure, Signature)> {
    let size = membership.size();
    let mut buffer = vec![0; size * mine.len()];
    let ranges = consecutive(vec![mine.len(); size], 1);
    buffer[ranges[membership.rank].clone()].copy_from_slice(mine);
    let signature = Signature {
        operation: Operation::Split,
        sequence: round,
        dtype: Some(Dtype::U8),
        length: buffer.len() as u64,
        reduce: None,
        layout: 0,
        on_device: false,
    };
    let whole = &mut buffer[..];
    let deadline = Deadline::after(deadline.saturating_duration_since(Instant::now()));
    let (reduce, shard, gather) = (None, None, true);
    let step = Step { signature, reduce, buffer: whole, source: None, shard, ranges: ranges.clone(), gather, deadline };
    endpoint.run(step).map_err(|failure| (failure, signature))?;
    Ok(ranges.into_iter().map(|range| buffer[range].to_vec()).collect())
}

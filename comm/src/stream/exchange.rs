//! Runs a collective over the streams between the ranks of a group, with one loop for all collectives.
//!
//! Each iteration offers every peer the data that may be sent and takes the data that has arrived. A chunk of this
//! rank's range is reduced as soon as the contributions of all peers have arrived. Every stream starts with a header.
//! No payload of a peer is used before the header of this peer has been compared.
//!
//! If every rank can access every other rank's buffer of a vector, the vector is reduced or gathered in place: only the
//! headers and the places of the buffers pass through the streams. The other vectors of a coalesced operation are
//! streamed one after another, as one sequence of chunks.

use std::ops::Range;
use std::sync::Arc;

use super::among::{Among, Subgroup};
use super::done::exchange_done;
use super::order::{Chunk, Item, Order, chunk_of, chunks_of};
use super::{Wait, Watch, Wires, small};
use crate::collective::carried::Carried;
use crate::collective::parts::Parts;
use crate::collective::reduction::Reduction;
use crate::collective::signature::{HEADER_BYTES, Header};
use crate::collective::step::{Collective, Membership, Step, Vector};
use crate::health::{Cause, Failure, Health};
use crate::inquiry::Topic;
use crate::shm::{Lent, Neighbours, lend};
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
    /// Number of bytes of the current chunk that were sent.
    sent: usize,
    header: [u8; HEADER_BYTES],
    header_received: usize,
    places_sent: usize,
    /// The places of the peer's buffers, in the format of [`Run::places`].
    places: Vec<u8>,
    places_received: usize,
    receiving: Order,
    /// Number of bytes of the current chunk that have arrived.
    received: usize,
    /// Whether the current chunk has arrived completely and waits for the chunks of the other peers.
    ready: bool,
}

/// A collective in progress.
struct Run<'a> {
    step: Step<'a>,
    header: Header,
    /// The offset of each of this rank's buffers, as words; [`NOWHERE`] for a buffer that peers cannot access. Empty
    /// unless the header is followed by several offsets.
    places: Vec<u8>,
    streams: Vec<Streams>,
    rank: usize,
    weights: &'a [usize],
    chunk: usize,
    /// Payload bytes sent, without headers.
    payload: usize,
    /// For each rank, the chunks of its ranges in all streamed vectors. Empty until these vectors are known.
    chunks: Vec<Vec<Chunk>>,
    /// Number of reduced chunks of this rank's ranges.
    reduced: usize,
}

/// The place of a buffer that peers cannot access.
const NOWHERE: u64 = u64::MAX;

impl Exchange {
    /// Runs a collective among the ranks of a subgroup. They have no access to each other's buffers.
    pub(crate) fn run_among(&mut self, subgroup: &Subgroup, step: Step<'_>) -> Result<Carried, Failure> {
        let Subgroup { membership, ranks } = subgroup;
        let wires = &mut Among { wires: &mut *self.wires, ranks };
        let ends =
            Ends { wires, neighbours: None, membership, health: &self.health, topic: &self.topic, job: self.job };
        ends.run(step)
    }
}

impl Collective for Exchange {
    fn run(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let Exchange { wires, neighbours, membership, health, topic, job } = self;
        let (wires, neighbours) = (&mut **wires, neighbours.as_ref());
        Ends { wires, neighbours, membership, health, topic, job: *job }.run(step)
    }

    fn exchange(&mut self, parts: Parts<'_>) -> Result<Carried, Failure> {
        super::parts::exchange(self, parts)
    }
}

/// An [`Exchange`], or its part for a subgroup.
struct Ends<'a> {
    wires: &'a mut dyn Wires,
    neighbours: Option<&'a Neighbours>,
    membership: &'a Membership,
    health: &'a Arc<Health>,
    topic: &'a Topic,
    job: (u64, u32),
}

impl Ends<'_> {
    fn run(self, step: Step<'_>) -> Result<Carried, Failure> {
        let Ends { wires, neighbours, membership, health, topic, job: (job, attempt) } = self;
        let mut watch = Watch::new(health, membership, topic, step.deadline);
        if small::is_small(&step, membership, wires) {
            let header = Header { job, attempt, group: membership.group, signature: step.signature, place: None };
            return small::run(step, &header, membership, wires, &mut watch);
        }
        // From here on, peers may read and write these buffers, until they send their done byte.
        let offer = |vector: &Vector<'_>| neighbours.and_then(|_| lend(vector.buffer));
        let mut lent: Vec<Option<Lent>> = step.vectors.iter().map(offer).collect();
        let places: Vec<Option<u64>> = lent.iter().map(|lent| lent.as_ref().map(Lent::place)).collect();
        // All ranks have the same number of vectors, and all have arenas or none has. They therefore agree on whether
        // places follow the header.
        let place = if let [place] = places[..] { place } else { None };
        let follow = neighbours.is_some() && places.len() > 1;
        let header = Header { job, attempt, group: membership.group, signature: step.signature, place };
        let words = places.iter().filter(|_| follow).flat_map(|place| place.unwrap_or(NOWHERE).to_le_bytes());
        let mut run = Run::new(step, header, words.collect(), membership, wires.chunk());
        let mut is_open = places.iter().any(Option::is_some);
        if !is_open {
            run.stream(|_| true);
        }
        loop {
            if is_open && run.is_introduced() {
                is_open = false;
                for (index, lent) in lent.iter_mut().enumerate() {
                    let theirs = if lent.is_some() { run.places(index) } else { None };
                    match neighbours.zip(theirs) {
                        Some((neighbours, theirs)) => {
                            neighbours.carry_out(&mut run.step, index, membership, &theirs, watch.health)?;
                        }
                        // Some rank offers no buffer for this vector. All ranks know this, so no peer accesses this
                        // buffer.
                        None => lent.take().into_iter().for_each(Lent::returned),
                    }
                }
                run.stream(|index| lent[index].is_none());
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
                watch.moved = true;
                continue;
            }
            let waits = run.waits();
            if waits.is_empty() {
                break;
            }
            watch.idle(wires, mark, &waits)?;
        }
        let in_place = lent.iter().any(Option::is_some);
        if in_place {
            exchange_done(wires, membership, &mut watch)?;
            lent.into_iter().flatten().for_each(Lent::returned);
        }
        Ok(Carried { in_place, network_bytes: if wires.is_network() { run.payload } else { 0 }, ..Carried::IN_PLACE })
    }
}

impl<'a> Run<'a> {
    fn new(step: Step<'a>, header: Header, places: Vec<u8>, membership: &'a Membership, chunk: usize) -> Run<'a> {
        let streams = membership.peers().into_iter().map(|peer| Streams {
            peer,
            header_sent: 0,
            sending: Order::new(0, 0),
            sent: 0,
            header: [0; HEADER_BYTES],
            header_received: 0,
            places_sent: 0,
            places: vec![0; places.len()],
            places_received: 0,
            receiving: Order::new(0, 0),
            received: 0,
            ready: false,
        });
        let (rank, weights, streams) = (membership.rank, &membership.weights[..], streams.collect());
        Run { header, places, streams, rank, weights, chunk, payload: 0, chunks: vec![], reduced: 0, step }
    }

    /// Streams the vectors that `is_streamed` selects by their index.
    fn stream(&mut self, is_streamed: impl Fn(usize) -> bool) {
        let streamed = self.step.vectors.iter_mut().enumerate().filter(|(index, _)| is_streamed(*index));
        let mut ranges = vec![];
        for (index, vector) in streamed {
            vector.place_source(self.rank);
            ranges.push((index, &vector.ranges[..]));
        }
        let of_rank = |rank: usize| chunks_of(ranges.iter().map(|(index, ranges)| (*index, &ranges[rank])), self.chunk);
        self.chunks = (0..self.weights.len()).map(of_rank).collect();
        let (reduces, gathers) = (self.step.reduce.is_some(), self.step.gather);
        let count = |is_sent: bool, rank: usize| if is_sent { self.chunks[rank].len() } else { 0 };
        let order = |to: usize, from: usize| Order::new(count(reduces, to), count(gathers, from));
        for streams in &mut self.streams {
            streams.sending = order(streams.peer, self.rank);
            streams.receiving = order(self.rank, streams.peer);
        }
    }

    /// Returns whether all headers and places are exchanged.
    fn is_introduced(&self) -> bool {
        let is_told = |s: &Streams| s.header_sent == HEADER_BYTES && s.places_sent == self.places.len();
        self.streams.iter().all(|streams| is_told(streams) && streams.is_known())
    }

    /// Returns (rank, offset) of each peer's buffer of a vector, if all peers have offered theirs.
    fn places(&self, vector: usize) -> Option<Vec<(usize, u64)>> {
        let place = |streams: &Streams| match streams.places.as_chunks().0.get(vector) {
            Some(word) => Some(u64::from_le_bytes(*word)).filter(|place| *place != NOWHERE),
            None => Header::decode(&streams.header)?.place,
        };
        self.streams.iter().map(|streams| Some((streams.peer, place(streams)?))).collect()
    }

    /// Returns the events that could allow progress; empty when the collective is complete. The order is: peers that
    /// have not started, peers whose own contribution is missing, and peers that may themselves be waiting for
    /// contributions.
    fn waits(&self) -> Vec<Wait> {
        let mut absent = Vec::new();
        let mut owing = Vec::new();
        let mut slow = Vec::new();
        let mut full = Vec::new();
        for streams in &self.streams {
            if !streams.is_known() {
                absent.push(Wait::Data(streams.peer));
            } else if !streams.ready {
                match streams.receiving.item() {
                    Some(Item::Reduce(_)) => owing.push(Wait::Data(streams.peer)),
                    Some(Item::Gather(_)) => slow.push(Wait::Data(streams.peer)),
                    None => {}
                }
            }
            let is_told = streams.header_sent == HEADER_BYTES && streams.places_sent == self.places.len();
            if !is_told || streams.sending.item().is_some_and(|item| self.may_send(item)) {
                full.push(Wait::Room(streams.peer));
            }
        }
        [absent, owing, slow, full].concat()
    }

    /// Returns whether a chunk may be sent. A chunk of this rank's range may be sent only once it is reduced.
    fn may_send(&self, item: Item) -> bool {
        match item {
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
        if streams.places_sent < self.places.len() {
            let rest = rest_of_chunk(self.places.len(), streams.places_sent, self.chunk);
            let pushed = wires.push(peer, &self.places[rest]).map_err(watch.broken(peer))?;
            self.streams[index].places_sent += pushed;
            return Ok(pushed > 0);
        }
        let Some(item) = streams.sending.item().filter(|item| self.may_send(*item)) else { return Ok(false) };
        let Chunk { vector, range } = match item {
            Item::Reduce(index) => &self.chunks[peer][index],
            Item::Gather(index) => &self.chunks[self.rank][index],
        };
        let rest = range.start + streams.sent..range.end;
        let buffer = &self.step.vectors[*vector].buffer;
        let pushed = wires.push(peer, &buffer[rest.clone()]).map_err(watch.broken(peer))?;
        self.payload += pushed;
        let streams = &mut self.streams[index];
        streams.sent += pushed;
        if pushed == rest.len() {
            streams.sending.advance();
            streams.sent = 0;
        }
        Ok(pushed > 0)
    }

    /// Receives a header, places, or a finished chunk of the peer's ranges directly into its buffer.
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
        if !streams.is_known() {
            let rest = rest_of_chunk(streams.places.len(), streams.places_received, self.chunk);
            let pulled = wires.pull(peer, &mut streams.places[rest]).map_err(watch.broken(peer))?;
            streams.places_received += pulled;
            return Ok(pulled > 0);
        }
        let Some(Item::Gather(index)) = streams.receiving.item() else { return Ok(false) };
        let Chunk { vector, range } = &self.chunks[peer][index];
        let rest = range.start + streams.received..range.end;
        let buffer = &mut self.step.vectors[*vector].buffer;
        let pulled = wires.pull(peer, &mut buffer[rest.clone()]).map_err(watch.broken(peer))?;
        streams.received += pulled;
        if pulled == rest.len() {
            streams.receiving.advance();
            streams.received = 0;
        }
        Ok(pulled > 0)
    }

    /// Reduces the next chunk of this rank's ranges if all contributions have arrived.
    fn reduce(&mut self, wires: &mut dyn Wires, watch: &Watch) -> Result<bool, Failure> {
        let Some(op) = self.step.reduce else { return Ok(false) };
        let next = self.chunks.get(self.rank).and_then(|own| own.get(self.reduced));
        let Some(Chunk { vector, range }) = next else { return Ok(false) };
        for streams in &mut self.streams {
            let next = streams.receiving.item() == Some(Item::Reduce(self.reduced));
            if next && streams.is_known() && !streams.ready {
                streams.ready = wires.arrived(streams.peer, range.len()).map_err(watch.broken(streams.peer))?;
            }
        }
        if !self.streams.iter().all(|streams| streams.ready) {
            return Ok(false);
        }
        let others = (0..watch.members.len()).filter(|peer| *peer != self.rank);
        let peers: Vec<&[u8]> = others.map(|peer| wires.view(peer, range.len())).collect();
        let Vector { dtype, buffer, shard, ranges, .. } = &mut self.step.vectors[*vector];
        let (reduction, start) = (Reduction { op, dtype: *dtype }, ranges[self.rank].start);
        match shard {
            None => tree::reduce(reduction, self.weights, self.rank, &mut buffer[range.clone()], &peers),
            Some(shard) => {
                let target = &mut shard[range.start - start..range.end - start];
                target.copy_from_slice(&buffer[range.clone()]);
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

impl Streams {
    /// Returns whether the header and the places of the peer have arrived.
    fn is_known(&self) -> bool {
        self.header_received == HEADER_BYTES && self.places_received == self.places.len()
    }
}

/// Returns the rest of the current chunk, given that `done` of `length` bytes were transferred.
fn rest_of_chunk(length: usize, done: usize, chunk: usize) -> Range<usize> {
    done..chunk_of(&(0..length), done / chunk, chunk).end
}

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

//! Streams over the rings of a segment.

use std::sync::Arc;
use std::time::Duration;

use super::segment::{RingUse, Segment};
use crate::bell::Bell;
use crate::stream::{Broken, Wait, Wires};

/// One rank's rings of one lane.
pub(crate) struct ShmWires {
    segment: Arc<Segment>,
    rank: usize,
    scope: Scope,
    spin: Duration,
}

/// The rings of the lane, and the bell it waits on.
enum Scope {
    /// The rings to and from all peers. The rank waits for all their events on a single bell.
    Collectives,
    /// The ring with messages to this peer.
    To(usize),
    /// The ring with messages from this peer.
    From(usize),
}

impl ShmWires {
    pub(crate) fn collectives(segment: &Arc<Segment>, rank: usize, spin: Duration) -> ShmWires {
        ShmWires { segment: Arc::clone(segment), rank, scope: Scope::Collectives, spin }
    }

    pub(crate) fn outgoing(segment: &Arc<Segment>, rank: usize, to: usize, spin: Duration) -> ShmWires {
        ShmWires { segment: Arc::clone(segment), rank, scope: Scope::To(to), spin }
    }

    pub(crate) fn incoming(segment: &Arc<Segment>, rank: usize, from: usize, spin: Duration) -> ShmWires {
        ShmWires { segment: Arc::clone(segment), rank, scope: Scope::From(from), spin }
    }

    fn lane(&self) -> RingUse {
        match self.scope {
            Scope::Collectives => RingUse::Collectives,
            Scope::To(_) | Scope::From(_) => RingUse::Messages,
        }
    }

    fn own_bell(&self) -> &Bell {
        match self.scope {
            Scope::Collectives => self.segment.bell(self.rank),
            Scope::To(peer) => &self.segment.control(RingUse::Messages, self.rank, peer).writer,
            Scope::From(peer) => &self.segment.control(RingUse::Messages, peer, self.rank).reader,
        }
    }

    fn bell_of(&self, peer: usize) -> &Bell {
        match self.scope {
            Scope::Collectives => self.segment.bell(peer),
            Scope::To(peer) => &self.segment.control(RingUse::Messages, self.rank, peer).reader,
            Scope::From(peer) => &self.segment.control(RingUse::Messages, peer, self.rank).writer,
        }
    }

    /// Returns the slot of the current chunk from `peer`, if the chunk has arrived.
    fn present(&self, peer: usize, length: usize) -> Result<Option<usize>, Broken> {
        match self.segment.control(self.lane(), peer, self.rank).full_slot() {
            None => Ok(None),
            Some((slot, found)) if found == length => Ok(Some(slot)),
            Some((_, found)) => Err(Broken { detail: format!("received a chunk of {found} bytes, expected {length}") }),
        }
    }
}

impl Wires for ShmWires {
    fn chunk(&self) -> usize {
        self.segment.chunk()
    }

    fn push(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, Broken> {
        let control = self.segment.control(self.lane(), self.rank, peer);
        let Some(slot) = control.free_slot() else { return Ok(0) };
        assert!(bytes.len() <= self.segment.chunk());
        let target = self.segment.slot(self.lane(), self.rank, peer, slot);
        // SAFETY: a free slot belongs to the writer, which is this rank, and it has `chunk` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        control.publish(slot, bytes.len());
        self.bell_of(peer).ring();
        Ok(bytes.len())
    }

    fn pull(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Broken> {
        if self.present(peer, into.len())?.is_none() {
            return Ok(0);
        }
        into.copy_from_slice(self.view(peer, into.len()));
        self.consume(peer);
        Ok(into.len())
    }

    fn arrived(&mut self, peer: usize, length: usize) -> Result<bool, Broken> {
        Ok(self.present(peer, length)?.is_some())
    }

    fn view(&self, peer: usize, length: usize) -> &[u8] {
        let (slot, found) = self.segment.control(self.lane(), peer, self.rank).full_slot().unwrap_or((0, 0));
        let length = length.min(found).min(self.segment.chunk());
        let source = self.segment.slot(self.lane(), peer, self.rank, slot);
        // SAFETY: a full slot belongs to the reader, which is this rank, until `consume` releases it, which needs
        // `&mut self`. The slot has `chunk` bytes.
        unsafe { std::slice::from_raw_parts(source, length) }
    }

    fn consume(&mut self, peer: usize) {
        self.segment.control(self.lane(), peer, self.rank).release();
        self.bell_of(peer).ring();
    }

    fn is_taken(&self, peer: usize) -> bool {
        self.segment.control(self.lane(), self.rank, peer).is_empty()
    }

    fn is_network(&self) -> bool {
        false
    }

    fn mark(&self) -> u32 {
        self.own_bell().mark()
    }

    fn wait(&mut self, mark: u32, _waits: &[Wait], limit: Duration) {
        self.own_bell().wait(mark, self.spin, limit);
    }
}

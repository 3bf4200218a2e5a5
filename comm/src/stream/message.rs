//! Messages from one rank to another over a stream: a header, then the payload in chunks.
//!
//! If the receiver can access the sender's buffer, the header contains the buffer's offset and the receiver copies the
//! payload from there. After the copy, the receiver consumes the header from the stream. For the waiting sender, this
//! is the receipt.

use std::sync::Arc;

use super::exchange::compare;
use super::{Wait, Watch, Wires};
use crate::collective::carried::Carried;
use crate::collective::deadline::Deadline;
use crate::collective::signature::{HEADER_BYTES, Header, Signature};
use crate::collective::step::{Inbox, Membership, Outbox};
use crate::health::{Failure, Health};
use crate::inquiry::Topic;
use crate::shm::{Lent, Neighbours, lend};

/// The state that the sending and the receiving end have in common.
pub(crate) struct End {
    pub(crate) wires: Box<dyn Wires>,
    /// The arenas of the peers, if all are accessible.
    pub(crate) neighbours: Option<Neighbours>,
    pub(crate) membership: Membership,
    pub(crate) health: Arc<Health>,
    pub(crate) topic: Topic,
    /// Digest of the job's run id, and the attempt.
    pub(crate) job: (u64, u32),
    /// Group rank of the other end.
    pub(crate) peer: usize,
}

impl End {
    fn header(&self, signature: &Signature, place: Option<u64>) -> Header {
        let (job, attempt) = self.job;
        Header { job, attempt, group: self.membership.group, signature: *signature, place }
    }

    fn push(&mut self, bytes: &[u8], deadline: Deadline) -> Result<(), Failure> {
        let mut watch = Watch::new(&self.health, &self.membership, &self.topic, deadline);
        for chunk in bytes.chunks(self.wires.chunk()) {
            let mut sent = 0;
            while sent < chunk.len() {
                let mark = self.wires.mark();
                let pushed = self.wires.push(self.peer, &chunk[sent..]).map_err(watch.broken(self.peer))?;
                sent += pushed;
                watch.moved |= pushed > 0;
                if pushed == 0 {
                    watch.idle(&mut *self.wires, mark, &[Wait::Room(self.peer)])?;
                }
            }
        }
        Ok(())
    }

    fn pull(&mut self, into: &mut [u8], deadline: Deadline) -> Result<(), Failure> {
        let mut watch = Watch::new(&self.health, &self.membership, &self.topic, deadline);
        for chunk in into.chunks_mut(self.wires.chunk()) {
            let mut received = 0;
            while received < chunk.len() {
                let mark = self.wires.mark();
                let pulled = self.wires.pull(self.peer, &mut chunk[received..]).map_err(watch.broken(self.peer))?;
                received += pulled;
                watch.moved |= pulled > 0;
                if pulled == 0 {
                    watch.idle(&mut *self.wires, mark, &[Wait::Data(self.peer)])?;
                }
            }
        }
        Ok(())
    }

    /// Waits until the peer has consumed everything that was pushed.
    fn await_receipt(&mut self, deadline: Deadline) -> Result<(), Failure> {
        let mut watch = Watch::new(&self.health, &self.membership, &self.topic, deadline);
        loop {
            let mark = self.wires.mark();
            if self.wires.is_taken(self.peer) {
                return Ok(());
            }
            watch.idle(&mut *self.wires, mark, &[Wait::Room(self.peer)])?;
        }
    }

    /// Waits for the header of a message and leaves it in the stream.
    fn await_header(&mut self, deadline: Deadline) -> Result<[u8; HEADER_BYTES], Failure> {
        let mut watch = Watch::new(&self.health, &self.membership, &self.topic, deadline);
        loop {
            let mark = self.wires.mark();
            if self.wires.arrived(self.peer, HEADER_BYTES).map_err(watch.broken(self.peer))? {
                let mut header = [0; HEADER_BYTES];
                header.copy_from_slice(self.wires.view(self.peer, HEADER_BYTES));
                return Ok(header);
            }
            watch.idle(&mut *self.wires, mark, &[Wait::Data(self.peer)])?;
        }
    }
}

/// The sending end.
pub(crate) struct StreamOutbox(pub(crate) End);

impl Outbox for StreamOutbox {
    fn send(&mut self, signature: &Signature, bytes: &[u8], deadline: Deadline) -> Result<Carried, Failure> {
        let lent = self.0.neighbours.as_ref().and_then(|_| lend(bytes));
        let header = self.0.header(signature, lent.as_ref().map(Lent::place));
        self.0.push(&header.encode(), deadline)?;
        if let Some(lent) = lent {
            self.0.await_receipt(deadline.renewed())?;
            lent.returned();
            return Ok(Carried::IN_PLACE);
        }
        self.0.push(bytes, deadline.renewed())?;
        Ok(Carried::streamed(if self.0.wires.is_network() { bytes.len() } else { 0 }))
    }
}

/// The receiving end.
pub(crate) struct StreamInbox(pub(crate) End);

impl Inbox for StreamInbox {
    fn recv(&mut self, signature: &Signature, bytes: &mut [u8], deadline: Deadline) -> Result<(), Failure> {
        let header = self.0.await_header(deadline)?;
        let End { neighbours, membership, health, peer, .. } = &self.0;
        compare(&self.0.header(signature, None), &header, membership.members[*peer], health)?;
        let place = Header::decode(&header).and_then(|header| header.place);
        if let Some((neighbours, place)) = neighbours.as_ref().zip(place) {
            neighbours.fetch(*peer, place, bytes, bytes.len(), membership, health)?;
            self.0.wires.consume(self.0.peer);
            return Ok(());
        }
        self.0.wires.consume(self.0.peer);
        self.0.pull(bytes, deadline.renewed())
    }
}

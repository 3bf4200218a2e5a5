//! Messages from one rank to another over a stream: a header, then the payload in chunks.

use std::sync::Arc;
use std::time::Instant;

use super::exchange::compare;
use super::{Wait, Watch, Wires};
use crate::health::{Failure, Health};
use crate::signature::{HEADER_BYTES, Header, Signature};
use crate::step::{Carried, Inbox, Membership, Outbox};

/// What both ends need to know.
pub(crate) struct End {
    pub(crate) wires: Box<dyn Wires>,
    pub(crate) membership: Membership,
    pub(crate) health: Arc<Health>,
    /// Digest of the job's name, and its attempt.
    pub(crate) job: (u64, u32),
    /// Rank in the group of the other end.
    pub(crate) peer: usize,
}

impl End {
    fn header(&self, signature: &Signature) -> Header {
        let (job, attempt) = self.job;
        Header { job, attempt, group: self.membership.group, signature: *signature, place: None }
    }

    fn push(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), Failure> {
        let mut watch = Watch::of_message(&self.health, &self.membership, deadline);
        for chunk in bytes.chunks(self.wires.chunk()) {
            let mut sent = 0;
            while sent < chunk.len() {
                let mark = self.wires.mark();
                let pushed = self.wires.push(self.peer, &chunk[sent..]).map_err(watch.broken(self.peer))?;
                sent += pushed;
                if pushed == 0 {
                    watch.idle(&mut *self.wires, mark, &[Wait::Room(self.peer)])?;
                }
            }
        }
        Ok(())
    }

    fn pull(&mut self, into: &mut [u8], deadline: Instant) -> Result<(), Failure> {
        let mut watch = Watch::of_message(&self.health, &self.membership, deadline);
        for chunk in into.chunks_mut(self.wires.chunk()) {
            let mut received = 0;
            while received < chunk.len() {
                let mark = self.wires.mark();
                let pulled = self.wires.pull(self.peer, &mut chunk[received..]).map_err(watch.broken(self.peer))?;
                received += pulled;
                if pulled == 0 {
                    watch.idle(&mut *self.wires, mark, &[Wait::Data(self.peer)])?;
                }
            }
        }
        Ok(())
    }
}

/// The sending end.
pub(crate) struct StreamOutbox(pub(crate) End);

impl Outbox for StreamOutbox {
    fn send(&mut self, signature: &Signature, bytes: &[u8], deadline: Instant) -> Result<Carried, Failure> {
        let header = self.0.header(signature).encode();
        self.0.push(&header, deadline)?;
        self.0.push(bytes, deadline)?;
        Ok(Carried::streamed(if self.0.wires.is_network() { bytes.len() } else { 0 }))
    }
}

/// The receiving end.
pub(crate) struct StreamInbox(pub(crate) End);

impl Inbox for StreamInbox {
    fn recv(&mut self, signature: &Signature, bytes: &mut [u8], deadline: Instant) -> Result<(), Failure> {
        let mut theirs = [0; HEADER_BYTES];
        self.0.pull(&mut theirs, deadline)?;
        let End { membership, health, peer, .. } = &self.0;
        compare(&self.0.header(signature), &theirs, membership.members[*peer], health)?;
        self.0.pull(bytes, deadline)
    }
}

//! Collectives and messages over streams of chunks, whatever carries the chunks.
//!
//! Between every two processes of a group there is a stream in each direction. What is sent is cut into chunks at places
//! that both sides compute from the header, so a stream carries no lengths of its own. Everything here is non-blocking; when
//! nothing moves, the lane waits in slices and looks at the health of the job in between.

mod exchange;
mod message;
mod order;
#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::health::{Cause, Failure, Health, SLICE};
use crate::inquiry::{Inquest, Topic};
use crate::step::{Deadline, Membership};

pub(crate) use exchange::{Exchange, gather_all};
pub(crate) use message::{End, StreamInbox, StreamOutbox};

/// The streams of one lane. Peers are ranks of the group.
pub(crate) trait Wires: Send {
    /// Bytes of a full chunk: a multiple of every element's size.
    fn chunk(&self) -> usize;

    /// Takes bytes of the present chunk to `peer`: all, some or none. The rest of the chunk is offered again.
    fn push(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, Broken>;

    /// Copies out what has arrived of the rest of the present chunk from `peer`: all, some or none.
    fn pull(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Broken>;

    /// Whether the present chunk from `peer`, of `length` bytes, is here as a whole, to be read where it lies.
    fn arrived(&mut self, peer: usize, length: usize) -> Result<bool, Broken>;

    /// The chunk that has `arrived`.
    fn view(&self, peer: usize, length: usize) -> &[u8];

    /// Makes room for the next chunk.
    fn consume(&mut self, peer: usize);

    /// Whether `peer` has consumed all that was pushed. Of sockets that is never known.
    fn is_taken(&self, peer: usize) -> bool;

    /// Whether what is pushed leaves the memory that the ranks share.
    fn is_network(&self) -> bool;

    /// To be taken before trying to push and pull, so that `wait` misses nothing that happens after.
    fn mark(&self) -> u32;

    /// Returns when one of `waits` may have come true since `mark`, or after about `limit`.
    fn wait(&mut self, mark: u32, waits: &[Wait], limit: Duration);
}

/// What a lane waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Room for a chunk to this peer.
    Room(usize),
    /// A chunk from this peer.
    Data(usize),
}

impl Wait {
    fn peer(self) -> usize {
        match self {
            Wait::Room(peer) | Wait::Data(peer) => peer,
        }
    }
}

/// A stream that is no more.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) detail: String,
}

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Broken {
        Broken { detail: error.to_string() }
    }
}

/// Decides how long a lane goes on waiting.
struct Watch<'a> {
    health: &'a Health,
    /// Ranks of the world by rank in the group.
    members: &'a [usize],
    /// Knows when the time is up, and finds out who is to blame, which may be somebody else than who is waited for.
    inquest: Inquest<'a>,
    /// Why the lane would have given up, had it not looked once more: what a rank sent before it left, or before it was lost,
    /// may have come after the last look at its stream.
    last_look: Option<Failure>,
}

impl<'a> Watch<'a> {
    fn new(health: &'a Health, membership: &'a Membership, topic: &'a Topic, deadline: Deadline) -> Watch<'a> {
        let inquest = Inquest::new(health, topic, deadline);
        Watch { health, members: &membership.members, inquest, last_look: None }
    }

    /// Sleeps until something may have moved. `waits` begin with who is most likely to blame.
    fn idle(&mut self, wires: &mut dyn Wires, mark: u32, waits: &[Wait]) -> Result<(), Failure> {
        if let Some(failure) = self.last_look.take() {
            return Err(failure);
        }
        let peers: Vec<usize> = waits.iter().map(|wait| self.members[wait.peer()]).collect();
        self.inquest.pursue(&peers);
        self.last_look = self.hopeless(&peers);
        if self.last_look.is_none() {
            let left = self.inquest.left().unwrap_or(SLICE);
            wires.wait(mark, waits, left.clamp(Duration::from_millis(1), SLICE));
        }
        Ok(())
    }

    /// Why nothing can still come from these ranks, if so.
    fn hopeless(&mut self, peers: &[usize]) -> Option<Failure> {
        if let Err(failure) = self.health.check() {
            return Some(failure);
        }
        if let Some(peer) = peers.iter().copied().find(|peer| self.health.board.has_left(*peer)) {
            return Some(Cause::Lost { peer, detail: "it dropped its communicator".into() }.into());
        }
        if self.inquest.left().is_none_or(|left| !left.is_zero()) {
            return None;
        }
        self.inquest.verdict(peers).map(|peer| Failure::Deadline { peer })
    }

    fn broken(&self, peer: usize) -> impl Fn(Broken) -> Failure {
        move |broken| self.health.broken(self.members[peer], &broken.detail)
    }
}

//! Collectives and messages over streams of chunks, independent of the transport.
//!
//! Every two processes of a group have one stream in each direction. Data is divided into chunks at boundaries that
//! both sides compute from the header, so a stream carries no lengths. All code here is non-blocking. When no data
//! moves, the lane waits in slices and checks the health of the job in between.

mod among;
mod done;
mod exchange;
mod gather;
mod message;
mod order;
mod parts;
#[cfg(test)]
mod rounds;
mod small;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use crate::collective::deadline::Deadline;
use crate::collective::step::Membership;
use crate::health::{Cause, Failure, Health, SLICE};
use crate::inquiry::{Inquest, Topic};

pub(crate) use among::Subgroup;
pub(crate) use exchange::Exchange;
pub(crate) use gather::gather_all;
pub(crate) use message::{End, StreamInbox, StreamOutbox};

/// The streams of one lane. Peers are group ranks.
pub(crate) trait Wires: Send {
    /// Returns the size of a full chunk in bytes, a multiple of every element size.
    fn chunk(&self) -> usize;

    /// Sends all, some or none of `bytes`, the rest of the current chunk, to `peer`. Returns the number of bytes sent;
    /// the caller passes the remaining bytes again.
    fn push(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, Broken>;

    /// Receives the rest of the current chunk from `peer`: all, some or none. Returns the number of bytes.
    fn pull(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Broken>;

    /// Returns whether the current chunk from `peer`, of `length` bytes, has arrived completely, so that `view` can
    /// read it.
    fn arrived(&mut self, peer: usize, length: usize) -> Result<bool, Broken>;

    /// Returns the chunk that has `arrived`.
    fn view(&self, peer: usize, length: usize) -> &[u8];

    /// Releases the chunk, which makes room for the next.
    fn consume(&mut self, peer: usize);

    /// Returns whether `peer` has consumed everything that was pushed. Always false for sockets, which cannot tell.
    fn is_taken(&self, peer: usize) -> bool;

    /// Returns whether pushed data is sent over a network instead of through memory that the ranks share.
    fn is_network(&self) -> bool;

    /// Returns a mark for `wait`. Take it before trying to push and pull, so that `wait` misses no later event.
    fn mark(&self) -> u32;

    /// Blocks until one of the events in `waits` may have happened since `mark`, but for at most about `limit`.
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

/// The error of a stream that has broken.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) detail: String,
}

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Broken {
        Broken { detail: error.to_string() }
    }
}

/// Decides how long a lane keeps waiting.
struct Watch<'a> {
    health: &'a Health,
    /// Global ranks, by rank in the group.
    members: &'a [usize],
    /// Tracks the deadline and determines which rank to blame. This is not always the rank that this rank waits for.
    inquest: Inquest<'a>,
    /// The failure that will end the operation. Before that, the lane checks its streams once more: a rank that has
    /// left or was lost may have sent data that arrived after the previous check.
    last_look: Option<Failure>,
    /// Whether data has moved since the lane last waited: a sign of life, after which the peers have the full time
    /// again.
    moved: bool,
}

impl<'a> Watch<'a> {
    fn new(health: &'a Health, membership: &'a Membership, topic: &'a Topic, deadline: Deadline) -> Watch<'a> {
        let inquest = Inquest::new(health, topic, deadline);
        Watch { health, members: &membership.members, inquest, last_look: None, moved: false }
    }

    /// Sleeps until progress may be possible. `waits` must start with the peers that are most likely to blame.
    fn idle(&mut self, wires: &mut dyn Wires, mark: u32, waits: &[Wait]) -> Result<(), Failure> {
        if let Some(failure) = self.last_look.take() {
            return Err(failure);
        }
        if std::mem::take(&mut self.moved) {
            self.inquest.data_moved(Instant::now());
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

    /// Returns a failure if no more data can come from these ranks.
    fn hopeless(&mut self, peers: &[usize]) -> Option<Failure> {
        if let Err(failure) = self.health.check() {
            return Some(failure);
        }
        if let Some(peer) = peers.iter().copied().find(|peer| self.health.board.has_left(*peer)) {
            return Some(Cause::Lost { peer, detail: "it dropped its communicator".into() }.into());
        }
        self.inquest.verdict(peers).map(|peer| Failure::Deadline { peer })
    }

    fn broken(&self, peer: usize) -> impl Fn(Broken) -> Failure {
        move |broken| self.health.broken(self.members[peer], &broken.detail)
    }
}

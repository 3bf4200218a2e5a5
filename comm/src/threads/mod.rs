//! Ranks as threads of one process. Ranks read each other's buffers directly, in one pass over the data, and nothing is
//! copied through a channel.
//!
//! A buffer may be read from the moment its owner posts it until the owner withdraws the post. Readers hold a read lock
//! on the post while they read, and the owner withdraws it under the write lock, even when an operation fails. A buffer
//! is therefore never freed while it is being read.
#![allow(unsafe_code)]

mod mailbox;
mod meeting;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::collective::step::{Collective, Fabric, Inbox, Membership, Outbox};
use crate::communicator::{Communicator, Options};
use crate::error::CommError;
use crate::group::Group;
use crate::health::{Announce, Board, Cause, Health};
use crate::inquiry::{Topic, WaitRegistry, Waiters};
use crate::lock::lock;

use mailbox::{Mailbox, Receiver, Sender};
use meeting::{Meeting, Participant};

/// Creates `size` ranks in this process. Returns the communicators in rank order. Pass each to the thread that runs
/// this rank.
///
/// # Panics
/// Panics if the operating system refuses to start the `size` worker threads.
pub fn threads(size: usize, options: &Options) -> Vec<Arc<dyn Communicator>> {
    let board = Board::new(size);
    let rooms = Arc::new(Rooms::default());
    let registries: Arc<[Arc<WaitRegistry>]> = (0..size).map(|_| Arc::default()).collect();
    let rank = |rank| -> Result<Arc<dyn Communicator>, CommError> {
        let announcer = Box::new(SharedRegistries { rank, registries: Arc::clone(&registries) });
        let health = Health::new(rank, Arc::clone(&board), Arc::clone(&registries[rank]), Some(announcer));
        let membership = Membership::new(0, rank, (0..size).collect());
        let fabric = Threads::enter(&rooms, &health, membership.clone(), options.timeout);
        Ok(Group::new(membership, Box::new(fabric), None, health, options.timeout)?)
    };
    (0..size).map(rank).collect::<Result<_, _>>().expect("the operating system starts a thread for each rank")
}

/// Asks the other ranks by reading their registries.
struct SharedRegistries {
    rank: usize,
    /// By rank.
    registries: Arc<[Arc<WaitRegistry>]>,
}

impl Announce for SharedRegistries {
    /// Does nothing, because all ranks share one board.
    fn announce(&self, _cause: &Cause) {}

    fn ask(&self, peer: usize, topic: u64) {
        self.registries[self.rank].answered(topic, peer, self.registries[peer].wait_state(topic));
    }
}

/// The rooms that not all members have entered yet, by group.
#[derive(Default)]
struct Rooms {
    open: Mutex<HashMap<u64, (Arc<Room>, usize)>>,
}

/// The shared state of one group.
struct Room {
    meeting: Meeting,
    /// `mailboxes[i * size + j]` holds the messages from rank `i` to rank `j`.
    mailboxes: Vec<Mailbox>,
}

struct Threads {
    rooms: Arc<Rooms>,
    room: Arc<Room>,
    membership: Membership,
    health: Arc<Health>,
    timeout: Duration,
}

impl Threads {
    fn enter(rooms: &Arc<Rooms>, health: &Arc<Health>, membership: Membership, timeout: Duration) -> Threads {
        let size = membership.size();
        let mut open = lock(&rooms.open);
        let (room, inside) = open.entry(membership.group).or_insert_with(|| {
            let mailboxes = (0..size * size).map(|_| Mailbox::default()).collect();
            (Arc::new(Room { meeting: Meeting::new(size), mailboxes }), 0)
        });
        *inside += 1;
        let (room, complete) = (Arc::clone(room), *inside == size);
        if complete {
            open.remove(&membership.group);
        }
        Threads { rooms: Arc::clone(rooms), room, membership, health: Arc::clone(health), timeout }
    }

    /// Creates one end of the channel for messages between two ranks of the group.
    fn end(&self, from: usize, to: usize, peer: usize, waiters: &Arc<Waiters>) -> mailbox::End {
        let Membership { group, ref members, .. } = self.membership;
        mailbox::End {
            room: Arc::clone(&self.room),
            index: from * members.len() + to,
            peer: members[peer],
            health: Arc::clone(&self.health),
            topic: Topic::messages(group, from, to, waiters),
        }
    }
}

impl Fabric for Threads {
    fn transport(&self) -> &'static str {
        "threads"
    }

    fn collective(&self, waiters: &Arc<Waiters>) -> Result<Box<dyn Collective>, CommError> {
        let (room, health) = (Arc::clone(&self.room), Arc::clone(&self.health));
        let topic = Topic::collectives(self.membership.group, waiters);
        Ok(Box::new(Participant::new(room, self.membership.clone(), health, topic, self.timeout)))
    }

    fn outbox(&self, peer: usize, waiters: &Arc<Waiters>) -> Result<Box<dyn Outbox>, CommError> {
        Ok(Box::new(Sender(self.end(self.membership.rank, peer, peer, waiters))))
    }

    fn inbox(&self, peer: usize, waiters: &Arc<Waiters>) -> Result<Box<dyn Inbox>, CommError> {
        Ok(Box::new(Receiver(self.end(peer, self.membership.rank, peer, waiters))))
    }

    fn connect(&self, membership: Membership) -> Result<Box<dyn Fabric>, CommError> {
        Ok(Box::new(Threads::enter(&self.rooms, &self.health, membership, self.timeout)))
    }
}

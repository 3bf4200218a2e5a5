//! Ranks as threads of one process. Peers read each other's buffers directly: one pass over the data, no copy through a
//! channel.
//!
//! A buffer may be read from the moment its owner posts it until the owner withdraws the post. Readers hold a read lock on
//! the post while they read and the owner withdraws under the write lock, also when it fails: so no buffer is freed while
//! it is being read.
#![allow(unsafe_code)]

mod mailbox;
mod meeting;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::communicator::{Communicator, Options};
use crate::error::CommError;
use crate::group::Group;
use crate::health::{Board, Health};
use crate::step::{Collective, Fabric, Inbox, Membership, Outbox};

use mailbox::{Mailbox, Receiver, Sender};
use meeting::{Meeting, Participant};

/// A world of `size` ranks in this process: the communicators in rank order, one to be given to each thread.
///
/// # Panics
/// If the operating system refuses to start the `size` worker threads.
pub fn threads(size: usize, options: &Options) -> Vec<Arc<dyn Communicator>> {
    let board = Board::new(size);
    let rooms = Arc::new(Rooms::default());
    let rank = |rank| -> Result<Arc<dyn Communicator>, CommError> {
        let health = Health::new(rank, Arc::clone(&board), Arc::default(), None);
        let membership = Membership::new(0, rank, (0..size).collect());
        let fabric = Threads::enter(&rooms, &health, membership.clone(), options.timeout);
        Ok(Group::new(membership, Box::new(fabric), health, options.timeout)?)
    };
    (0..size).map(rank).collect::<Result<_, _>>().expect("the operating system starts a thread for each rank")
}

/// The rooms that not all members have entered yet, by group.
#[derive(Default)]
struct Rooms {
    open: Mutex<HashMap<u64, (Arc<Room>, usize)>>,
}

/// Where the ranks of one group meet.
struct Room {
    meeting: Meeting,
    /// From rank `i` to rank `j`: `mailboxes[i * size + j]`.
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
        let mut open = rooms.open.lock().unwrap_or_else(PoisonError::into_inner);
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

    fn mailbox(&self, from: usize, to: usize) -> mailbox::Address {
        mailbox::Address { room: Arc::clone(&self.room), index: from * self.membership.size() + to }
    }

    fn world_rank(&self, peer: usize) -> usize {
        self.membership.members[peer]
    }
}

impl Fabric for Threads {
    fn transport(&self) -> &'static str {
        "threads"
    }

    fn collective(&self) -> Result<Box<dyn Collective>, CommError> {
        let (room, health) = (Arc::clone(&self.room), Arc::clone(&self.health));
        Ok(Box::new(Participant::new(room, self.membership.clone(), health, self.timeout)))
    }

    fn outbox(&self, peer: usize) -> Result<Box<dyn Outbox>, CommError> {
        let address = self.mailbox(self.membership.rank, peer);
        Ok(Box::new(Sender { address, peer: self.world_rank(peer), health: Arc::clone(&self.health) }))
    }

    fn inbox(&self, peer: usize) -> Result<Box<dyn Inbox>, CommError> {
        let address = self.mailbox(peer, self.membership.rank);
        Ok(Box::new(Receiver { address, peer: self.world_rank(peer), health: Arc::clone(&self.health) }))
    }

    fn connect(&self, membership: Membership) -> Result<Box<dyn Fabric>, CommError> {
        Ok(Box::new(Threads::enter(&self.rooms, &self.health, membership, self.timeout)))
    }
}

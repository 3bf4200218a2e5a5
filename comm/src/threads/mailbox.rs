//! A message from one thread to another: the sender offers its buffer, the receiver copies it out and says so.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Room;
use crate::health::{Cause, Failure, Health, SLICE};
use crate::signature::Signature;
use crate::step::{Carried, Inbox, Outbox};

/// The way from one rank to another.
#[derive(Default)]
pub(super) struct Mailbox {
    offer: Mutex<Option<Offer>>,
    changed: Condvar,
}

struct Offer {
    signature: Signature,
    bytes: *const u8,
    length: usize,
}

// SAFETY: the pointer is read only by the receiver, under the lock, while the sender waits for the offer to go.
unsafe impl Send for Offer {}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Option<Offer>> {
        self.offer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is an offer (`full`) or none.
    fn wait_until(
        &self,
        full: bool,
        health: &Health,
        peer: usize,
        deadline: Instant,
    ) -> Result<MutexGuard<'_, Option<Offer>>, Failure> {
        let mut offer = self.lock();
        loop {
            if offer.is_some() == full {
                return Ok(offer);
            }
            health.check()?;
            if health.board.has_left(peer) {
                let detail = "it dropped its communicator".to_string();
                return Err(Cause::Lost { peer, detail }.into());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Err(Failure::Deadline { peer });
            }
            offer = self.changed.wait_timeout(offer, left.min(SLICE)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// One mailbox of a room.
pub(super) struct Address {
    pub(super) room: Arc<Room>,
    pub(super) index: usize,
}

impl Address {
    fn mailbox(&self) -> &Mailbox {
        &self.room.mailboxes[self.index]
    }
}

pub(super) struct Sender {
    pub(super) address: Address,
    /// Rank of the world.
    pub(super) peer: usize,
    pub(super) health: Arc<Health>,
}

impl Outbox for Sender {
    fn send(&mut self, signature: &Signature, bytes: &[u8], deadline: Instant) -> Result<Carried, Failure> {
        let mailbox = self.address.mailbox();
        *mailbox.lock() = Some(Offer { signature: *signature, bytes: bytes.as_ptr(), length: bytes.len() });
        mailbox.changed.notify_all();
        match mailbox.wait_until(false, &self.health, self.peer, deadline) {
            Ok(_) => Ok(Carried::streamed(0)),
            Err(failure) => {
                // Under the lock nobody is copying, and nobody finds the offer afterwards.
                *mailbox.lock() = None;
                Err(failure)
            }
        }
    }
}

pub(super) struct Receiver {
    pub(super) address: Address,
    /// Rank of the world.
    pub(super) peer: usize,
    pub(super) health: Arc<Health>,
}

impl Inbox for Receiver {
    fn recv(&mut self, signature: &Signature, bytes: &mut [u8], deadline: Instant) -> Result<(), Failure> {
        let mailbox = self.address.mailbox();
        let mut slot = mailbox.wait_until(true, &self.health, self.peer, deadline)?;
        if let Some(offer) = slot.as_ref() {
            if !signature.agrees_with(&offer.signature) || offer.length != bytes.len() {
                let (here, there) = (signature.to_string(), offer.signature.to_string());
                return Err(Cause::Mismatch { rank: self.health.rank, here, peer: self.peer, there }.into());
            }
            // SAFETY: the sender keeps its buffer alive and unchanged until the offer is gone, which needs the lock held
            // here; the lengths were compared.
            bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(offer.bytes, offer.length) });
        }
        *slot = None;
        drop(slot);
        mailbox.changed.notify_all();
        Ok(())
    }
}

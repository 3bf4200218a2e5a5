//! Messages between threads: the sender offers its buffer, and the receiver copies it and withdraws the offer.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Room;
use crate::collective::carried::Carried;
use crate::collective::deadline::Deadline;
use crate::collective::signature::Signature;
use crate::collective::step::{Inbox, Outbox};
use crate::health::{Cause, Failure, Health, SLICE};
use crate::inquiry::{Inquest, Topic};
use crate::lock::lock;

/// The channel from one rank to another.
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

// SAFETY: only the receiver reads the pointer, under the lock, while the sender waits until the offer is withdrawn.
unsafe impl Send for Offer {}

/// One end of a mailbox.
pub(super) struct End {
    pub(super) room: Arc<Room>,
    /// Index among the room's mailboxes.
    pub(super) index: usize,
    /// Global rank of the other end.
    pub(super) peer: usize,
    pub(super) health: Arc<Health>,
    pub(super) topic: Topic,
}

impl End {
    fn mailbox(&self) -> &Mailbox {
        &self.room.mailboxes[self.index]
    }

    /// Waits until an offer exists (`full`) or no offer exists.
    fn wait_until(&self, full: bool, deadline: Deadline) -> Result<MutexGuard<'_, Option<Offer>>, Failure> {
        let (mailbox, peer) = (self.mailbox(), self.peer);
        let mut inquest = Inquest::new(&self.health, &self.topic, deadline);
        let mut offer = lock(&mailbox.offer);
        loop {
            if offer.is_some() == full {
                return Ok(offer);
            }
            self.health.check()?;
            if self.health.board.has_left(peer) {
                let detail = "it dropped its communicator".to_string();
                return Err(Cause::Lost { peer, detail }.into());
            }
            inquest.pursue(&[peer]);
            if let Some(peer) = inquest.verdict(&[peer]) {
                return Err(Failure::Deadline { peer });
            }
            let slice = inquest.left().unwrap_or(SLICE).clamp(Duration::from_millis(1), SLICE);
            offer = mailbox.changed.wait_timeout(offer, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

pub(super) struct Sender(pub(super) End);

impl Outbox for Sender {
    fn send(&mut self, signature: &Signature, bytes: &[u8], deadline: Deadline) -> Result<Carried, Failure> {
        let mailbox = self.0.mailbox();
        *lock(&mailbox.offer) = Some(Offer { signature: *signature, bytes: bytes.as_ptr(), length: bytes.len() });
        mailbox.changed.notify_all();
        match self.0.wait_until(false, deadline) {
            Ok(_) => Ok(Carried::IN_PLACE),
            Err(failure) => {
                // While this thread holds the lock, the receiver does not copy. Afterwards the receiver finds no offer.
                *lock(&mailbox.offer) = None;
                Err(failure)
            }
        }
    }
}

pub(super) struct Receiver(pub(super) End);

impl Inbox for Receiver {
    fn recv(&mut self, signature: &Signature, bytes: &mut [u8], deadline: Deadline) -> Result<(), Failure> {
        let End { health, peer, .. } = &self.0;
        let mut slot = self.0.wait_until(true, deadline)?;
        if let Some(offer) = slot.as_ref() {
            if !signature.agrees_with(&offer.signature) || offer.length != bytes.len() {
                let (here, there) = (signature.to_string(), offer.signature.to_string());
                return Err(Cause::Mismatch { rank: health.rank, here, peer: *peer, there }.into());
            }
            // SAFETY: the sender keeps its buffer alive and unchanged until the offer is withdrawn, which needs the
            // lock held here. The lengths were compared above.
            bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(offer.bytes, offer.length) });
        }
        *slot = None;
        drop(slot);
        self.0.mailbox().changed.notify_all();
        Ok(())
    }
}

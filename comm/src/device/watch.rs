//! Watches operations that run ahead: enforces their deadlines, finds the rank to blame, and aborts them if the job
//! fails.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::end::{LOOK, of_device};
use super::{DeviceEvent, DeviceLane};
use crate::collective::deadline::Deadline;
use crate::collective::signature::Signature;
use crate::health::{Failure, Health};
use crate::inquiry::{Inquest, Topic};
use crate::lock::lock;

/// A connection and its operations in flight.
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The connection of a watch.
pub(super) struct Watched {
    pub(super) lane: Arc<Mutex<Box<dyn DeviceLane>>>,
    pub(super) transport: &'static str,
    pub(super) health: Arc<Health>,
    pub(super) topic: Topic,
    /// The other ranks of the connection.
    pub(super) peers: Vec<usize>,
}

/// An operation in the queue of a device.
struct InFlight {
    signature: Signature,
    timeout: Duration,
    event: Arc<dyn DeviceEvent>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    in_flight: VecDeque<InFlight>,
    closed: bool,
}

/// How long the watch sleeps at first. It sleeps longer while an operation stays in flight.
const NAP: Duration = Duration::from_micros(100);

impl Watch {
    pub(super) fn start(of: Watched) -> std::io::Result<Watch> {
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let name = format!("zero-comm {} watch", of.health.rank);
        let thread = std::thread::Builder::new().name(name).spawn(move || own.run(&of))?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    /// Adds an operation that the device has in its queue.
    pub(super) fn add(&self, signature: &Signature, timeout: Duration, event: Arc<dyn DeviceEvent>) {
        lock(&self.shared.queue).in_flight.push_back(InFlight { signature: *signature, timeout, event });
        self.shared.changed.notify_all();
    }

    /// Waits until no operation is in flight. Each of them has a deadline, so this always returns.
    pub(super) fn drain(&self) {
        let mut queue = lock(&self.shared.queue);
        while !queue.in_flight.is_empty() {
            queue = self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn run(&self, of: &Watched) {
        let mut queue = lock(&self.queue);
        loop {
            let Some(first) = queue.in_flight.front() else {
                if queue.closed {
                    return;
                }
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (signature, timeout, event) = (first.signature, first.timeout, Arc::clone(&first.event));
            drop(queue);
            let outcome = of.until(&*event, timeout);
            if let Err(failure) = &outcome {
                // Report the failure to the other ranks before aborting, as for other operations.
                of.health.end_because(failure, &signature, timeout);
                lock(&of.lane).abort();
            }
            queue = lock(&self.queue);
            match outcome {
                Ok(()) => drop(queue.in_flight.pop_front()),
                Err(_) => queue.in_flight.clear(),
            }
            self.changed.notify_all();
        }
    }
}

impl Watched {
    /// Waits for the event of the oldest operation in flight.
    fn until(&self, event: &dyn DeviceEvent, timeout: Duration) -> Result<(), Failure> {
        let failed = |error: String| of_device(&self.health, self.transport, &error);
        let _seat = self.topic.enter();
        let mut inquest = Inquest::new(&self.health, &self.topic, Deadline::after(timeout));
        let mut nap = NAP;
        while !event.has_happened().map_err(failed)? {
            // An asynchronous error of the connection.
            lock(&self.lane).poll().map_err(failed)?;
            self.health.check()?;
            inquest.pursue(&self.peers);
            if let Some(peer) = inquest.verdict(&self.peers) {
                return Err(Failure::Deadline { peer });
            }
            std::thread::sleep(nap);
            nap = (2 * nap).min(LOOK);
        }
        // An error may arrive together with the end of the operation.
        lock(&self.lane).poll().map_err(failed).map(drop)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

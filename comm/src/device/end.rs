//! Runs a group's operations on a device: connects on first use, starts the operation, and waits for it until the
//! deadline, or leaves it to a watch if the group runs ahead.

use std::mem::forget;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use super::watch::{Watch, Watched};
use super::{DeviceFabric, DeviceLane, DeviceWork, INVITATION};
use crate::collective::deadline::Deadline;
use crate::collective::signature::Signature;
use crate::health::{Cause, Failure, Health};
use crate::inquiry::{Inquest, Topic};
use crate::lock::lock;

/// A rank's end of a device connection. The connection is between all ranks of a group, or between two of them.
pub(crate) struct DeviceEnd {
    fabric: Arc<dyn DeviceFabric>,
    health: Arc<Health>,
    topic: Topic,
    /// This end's rank within the connection.
    rank: usize,
    /// The global ranks of all ends, by rank within the connection.
    members: Vec<usize>,
    /// Whether operations run ahead of the host.
    runs_ahead: Arc<AtomicBool>,
    /// `None` until connected.
    open: Option<Open>,
}

/// An open connection.
struct Open {
    /// Watches the operations that run ahead; `None` before the first of them. Dropped before the lane.
    watch: Option<Watch>,
    lane: Arc<Mutex<Box<dyn DeviceLane>>>,
}

/// How long a wait polls before it sleeps. A small operation takes less time than it takes to wake a sleeping thread.
const SPIN: Duration = Duration::from_micros(100);
const NAP: Duration = Duration::from_micros(50);
/// Interval at which a wait checks whether the job has failed.
pub(super) const LOOK: Duration = Duration::from_millis(5);

impl DeviceEnd {
    /// Describes an end that is not connected yet: the end of rank `rank` of a connection between the global ranks
    /// `members`.
    pub(crate) fn new(
        fabric: Arc<dyn DeviceFabric>,
        health: Arc<Health>,
        topic: Topic,
        (rank, members): (usize, Vec<usize>),
        runs_ahead: Arc<AtomicBool>,
    ) -> DeviceEnd {
        DeviceEnd { fabric, health, topic, rank, members, runs_ahead, open: None }
    }

    /// Returns whether the next operation runs ahead, so that the ranks need not synchronize on the host.
    pub(crate) fn is_ahead(&self) -> bool {
        self.open.is_some() && self.runs_ahead.load(Ordering::Relaxed)
    }

    /// Runs an operation that all ranks have reached or, if the group runs ahead, will reach. `tell` sends the first
    /// rank's invitation to the others. It is called only if the connection does not exist yet. Returns the buffers,
    /// unless the device may still be using them. In that case they are leaked, because the device could otherwise
    /// write to memory that has been reused.
    pub(crate) fn carry_out<B>(
        &mut self,
        buffers: B,
        work: impl FnOnce(&B) -> DeviceWork<'_>,
        tell: impl FnOnce(&mut [u8; INVITATION]) -> Result<(), Failure>,
        signature: &Signature,
        deadline: Deadline,
    ) -> Result<B, Failure> {
        let is_ahead = self.is_ahead();
        self.connect(tell, signature, deadline)?;
        let Some(mut open) = self.open.take() else { return Err(self.failure("not connected")) };
        let work = work(&buffers);
        let started = lock(&open.lane).start(&work).map_err(|error| self.failure(&error));
        let outcome = started.and_then(|()| match is_ahead {
            false => self.wait(deadline, || lock(&open.lane).poll()),
            true => self.run_ahead(&mut open, &work, signature, deadline),
        });
        match outcome {
            Ok(()) => {
                self.open = Some(open);
                Ok(buffers)
            }
            Err(failure) => {
                // Report the failure to the other ranks before aborting. Otherwise they would wait during the abort, or
                // blame this rank for leaving.
                self.health.end_because(&failure, signature, deadline.timeout);
                if !lock(&open.lane).abort() {
                    forget(buffers);
                }
                Err(failure)
            }
        }
    }

    /// Waits until the device has an operation in its queue, and leaves it to the watch.
    fn run_ahead(
        &self,
        open: &mut Open,
        work: &DeviceWork<'_>,
        signature: &Signature,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let mut event = None;
        self.wait(deadline, || {
            event = lock(&open.lane).enqueued()?;
            Ok(event.is_some())
        })?;
        let Some(event) = event else { return Err(self.failure("an operation has no event")) };
        work.buffers().into_iter().for_each(|buffer| buffer.used_until(Arc::clone(&event)));
        if open.watch.is_none() {
            let watched = Watched {
                lane: Arc::clone(&open.lane),
                transport: self.fabric.transport(),
                health: Arc::clone(&self.health),
                topic: self.topic.clone(),
                peers: self.peers(),
            };
            open.watch = Some(Watch::start(watched).map_err(|error| self.failure(&error.to_string()))?);
        }
        if let Some(watch) = &open.watch {
            watch.add(signature, deadline.timeout, event);
        }
        Ok(())
    }

    /// Leaves the connection. No operation runs afterwards.
    pub(crate) fn leave(&mut self) {
        let Some(Open { watch, lane }) = &self.open else { return };
        if let Some(watch) = watch {
            watch.drain();
        }
        match self.health.check() {
            Ok(()) => lock(lane).leave(),
            // The job has failed, so there is no peer to wait for.
            Err(_) => {
                lock(lane).abort();
                self.open = None;
            }
        }
    }

    fn connect(
        &mut self,
        tell: impl FnOnce(&mut [u8; INVITATION]) -> Result<(), Failure>,
        signature: &Signature,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        if self.open.is_some() {
            return Ok(());
        }
        let mut lane = self.fabric.lane().map_err(|error| self.failure(&error))?;
        let mut invitation = [0; INVITATION];
        if self.rank == 0 {
            invitation = lane.invitation().map_err(|error| self.failure(&error))?;
        }
        tell(&mut invitation)?;
        let begun = lane.connect(&invitation, self.rank, self.members.len()).map_err(|error| self.failure(&error));
        if let Err(failure) = begun.and_then(|()| self.wait(deadline, || lane.poll())) {
            self.health.end_because(&failure, signature, deadline.timeout);
            lane.abort();
            return Err(failure);
        }
        self.open = Some(Open { watch: None, lane: Arc::new(Mutex::new(lane)) });
        Ok(())
    }

    fn peers(&self) -> Vec<usize> {
        let own = self.members[self.rank];
        self.members.iter().copied().filter(|member| *member != own).collect()
    }

    /// Waits for the device until `poll` returns true. Any other rank may have stopped, so this rank counts as waiting
    /// for all of its peers.
    fn wait(&self, deadline: Deadline, mut poll: impl FnMut() -> Result<bool, String>) -> Result<(), Failure> {
        let peers = self.peers();
        let mut inquest = Inquest::new(&self.health, &self.topic, deadline);
        let begun = Instant::now();
        let mut looked = begun;
        loop {
            if poll().map_err(|error| self.failure(&error))? {
                return Ok(());
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                self.health.check()?;
                inquest.pursue(&peers);
                if let Some(peer) = inquest.verdict(&peers) {
                    return Err(Failure::Deadline { peer });
                }
            }
            if begun.elapsed() < SPIN { yield_now() } else { sleep(NAP) }
        }
    }

    fn failure(&self, error: &str) -> Failure {
        of_device(&self.health, self.fabric.transport(), error)
    }
}

/// Turns an error of the device or its library into the failure that ends the job. If the device failed only because
/// the job has ended, returns the cause of that end instead, which is more informative. The message with the cause may
/// still be in flight, so this waits up to [`GRACE`] for it.
pub(super) fn of_device(health: &Health, transport: &str, error: &str) -> Failure {
    let until = Instant::now() + GRACE;
    while Instant::now() < until {
        if let Err(failure) = health.check() {
            return failure;
        }
        sleep(Duration::from_millis(2));
    }
    Cause::Aborted { by: health.rank, reason: format!("{transport}: {error}") }.into()
}

/// How long the cause of the job's end may take to arrive.
const GRACE: Duration = Duration::from_millis(500);

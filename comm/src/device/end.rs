//! Runs a group's operations on a device: connects on first use, starts the operation, and waits for it until the
//! deadline.

use std::mem::forget;
use std::sync::Arc;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use super::{DeviceFabric, DeviceLane, DeviceWork, INVITATION};
use crate::health::{Cause, Failure, Health};
use crate::inquiry::{Inquest, Topic};
use crate::signature::Signature;
use crate::step::Deadline;

/// A rank's end of a device connection. The connection is between all ranks of a group, or between two of them.
pub(crate) struct DeviceEnd {
    pub(crate) fabric: Arc<dyn DeviceFabric>,
    pub(crate) health: Arc<Health>,
    pub(crate) topic: Topic,
    /// This end's rank within the connection.
    pub(crate) rank: usize,
    /// The global ranks of all ends, by rank within the connection.
    pub(crate) members: Vec<usize>,
    /// `None` until connected.
    pub(crate) lane: Option<Box<dyn DeviceLane>>,
}

/// How long a wait polls before it sleeps. A small operation takes less time than it takes to wake a sleeping thread.
const SPIN: Duration = Duration::from_micros(100);
const NAP: Duration = Duration::from_micros(50);
/// Interval at which a wait checks whether the job has failed.
const LOOK: Duration = Duration::from_millis(5);

impl DeviceEnd {
    /// Runs an operation that all ranks have reached. `tell` sends the first rank's invitation to the others. It is
    /// called only if the connection does not exist yet. Returns the buffers, unless the device may still be using
    /// them. In that case they are leaked, because the device could otherwise write to memory that has been reused.
    pub(crate) fn carry_out<B>(
        &mut self,
        buffers: B,
        work: impl FnOnce(&B) -> DeviceWork<'_>,
        tell: impl FnOnce(&mut [u8; INVITATION]) -> Result<(), Failure>,
        signature: &Signature,
        deadline: Deadline,
    ) -> Result<B, Failure> {
        self.connect(tell, signature, deadline)?;
        let Some(mut lane) = self.lane.take() else { return Err(self.failure("not connected")) };
        let work = work(&buffers);
        let outcome = lane.start(&work).map_err(|error| self.failure(&error));
        match outcome.and_then(|()| self.wait(&mut *lane, deadline)) {
            Ok(()) => {
                self.lane = Some(lane);
                Ok(buffers)
            }
            Err(failure) => {
                // Report the failure to the other ranks before aborting. Otherwise they would wait during the abort, or
                // blame this rank for leaving.
                self.health.end_because(&failure, signature, deadline.timeout);
                if !lane.abort() {
                    forget(buffers);
                }
                Err(failure)
            }
        }
    }

    /// Leaves the connection. No operation runs afterwards.
    pub(crate) fn leave(&mut self) {
        match (&mut self.lane, self.health.check()) {
            (None, _) => {}
            (Some(lane), Ok(())) => lane.leave(),
            // The job has failed, so there is no peer to wait for.
            (Some(lane), Err(_)) => {
                lane.abort();
                self.lane = None;
            }
        }
    }

    fn connect(
        &mut self,
        tell: impl FnOnce(&mut [u8; INVITATION]) -> Result<(), Failure>,
        signature: &Signature,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        if self.lane.is_some() {
            return Ok(());
        }
        let mut lane = self.fabric.lane().map_err(|error| self.failure(&error))?;
        let mut invitation = [0; INVITATION];
        if self.rank == 0 {
            invitation = lane.invitation().map_err(|error| self.failure(&error))?;
        }
        tell(&mut invitation)?;
        let begun = lane.connect(&invitation, self.rank, self.members.len()).map_err(|error| self.failure(&error));
        if let Err(failure) = begun.and_then(|()| self.wait(&mut *lane, deadline)) {
            self.health.end_because(&failure, signature, deadline.timeout);
            lane.abort();
            return Err(failure);
        }
        self.lane = Some(lane);
        Ok(())
    }

    /// Waits for the device. All ranks have reached the operation, and any of them may have stopped since. This rank
    /// therefore counts as waiting for all of its peers.
    fn wait(&self, lane: &mut dyn DeviceLane, deadline: Deadline) -> Result<(), Failure> {
        let own = self.members[self.rank];
        let peers: Vec<usize> = self.members.iter().copied().filter(|member| *member != own).collect();
        let mut inquest = Inquest::new(&self.health, &self.topic, deadline);
        let begun = Instant::now();
        let mut looked = begun;
        loop {
            if lane.poll().map_err(|error| self.failure(&error))? {
                return Ok(());
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                self.health.check()?;
                inquest.pursue(&peers);
                if inquest.left().is_some_and(|left| left.is_zero())
                    && let Some(peer) = inquest.verdict(&peers)
                {
                    return Err(Failure::Deadline { peer });
                }
            }
            if begun.elapsed() < SPIN { yield_now() } else { sleep(NAP) }
        }
    }

    /// Turns an error of the device or its library into the failure that ends the job. If the device failed only
    /// because the job has ended, returns the cause of that end instead, which is more informative. The message with
    /// the cause may still be in flight, so this waits up to [`GRACE`] for it.
    fn failure(&self, error: &str) -> Failure {
        let until = Instant::now() + GRACE;
        while Instant::now() < until {
            if let Err(failure) = self.health.check() {
                return failure;
            }
            sleep(Duration::from_millis(2));
        }
        let reason = format!("{}: {error}", self.fabric.transport());
        Cause::Aborted { by: self.health.rank, reason }.into()
    }
}

/// How long the cause of the job's end may take to arrive.
const GRACE: Duration = Duration::from_millis(500);

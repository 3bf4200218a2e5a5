//! Carries out what a group wants of a device: connects when it is first needed, starts, and waits with the deadline of the operation.

use std::mem::forget;
use std::sync::Arc;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use super::{DeviceFabric, DeviceLane, DeviceWork, INVITATION};
use crate::health::{Cause, Failure, Health};
use crate::inquiry::{Inquest, Topic};
use crate::signature::Signature;
use crate::step::Deadline;

/// A rank's end of a connection between the devices of a group, or of two of its ranks.
pub(crate) struct DeviceEnd {
    pub(crate) fabric: Arc<dyn DeviceFabric>,
    pub(crate) health: Arc<Health>,
    pub(crate) topic: Topic,
    /// Rank here, and all ranks of the world that are connected, by rank here.
    pub(crate) rank: usize,
    pub(crate) members: Vec<usize>,
    /// Once it is connected.
    pub(crate) lane: Option<Box<dyn DeviceLane>>,
}

/// How long a wait looks again and again before it sleeps between looks: a small operation is done sooner than a thread wakes.
const SPIN: Duration = Duration::from_micros(100);
const NAP: Duration = Duration::from_micros(50);
/// How often a wait looks whether the job is whole.
const LOOK: Duration = Duration::from_millis(5);

impl DeviceEnd {
    /// Carries out an operation to which all ranks have come. `tell` hands the invitation of the first rank to the others; it is needed once.
    /// The buffers come back, unless the device may still be using them: then they are lost for good, which is better than to have them
    /// written to when they are something else.
    pub(crate) fn carry_out<B>(
        &mut self,
        buffers: B,
        work: impl FnOnce(&B) -> DeviceWork<'_>,
        tell: impl FnOnce(&mut [u8; INVITATION]) -> Result<(), Failure>,
        signature: &Signature,
        deadline: Deadline,
    ) -> Result<B, Failure> {
        self.connect(tell, signature, deadline)?;
        let Some(mut lane) = self.lane.take() else { return Err(self.failure("there is no connection")) };
        let work = work(&buffers);
        let outcome = lane.start(&work).map_err(|error| self.failure(&error));
        match outcome.and_then(|()| self.wait(&mut *lane, deadline)) {
            Ok(()) => {
                self.lane = Some(lane);
                Ok(buffers)
            }
            Err(failure) => {
                // First the others, so that they do not take our leaving for the cause, nor wait while this rank aborts.
                self.health.end_because(&failure, signature, deadline.timeout);
                if !lane.abort() {
                    forget(buffers);
                }
                Err(failure)
            }
        }
    }

    /// Nothing is carried out afterwards.
    pub(crate) fn leave(&mut self) {
        match (&mut self.lane, self.health.check()) {
            (None, _) => {}
            (Some(lane), Ok(())) => lane.leave(),
            // Nobody is waited for any more.
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

    /// Waits for the device. All ranks have come, so any of them may be the one who does not go on.
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

    /// What a device or its library says ends the job. If that happened because the job has ended, the reason of that says more; it may still
    /// be on its way.
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

/// How long the reason of an end may take to come.
const GRACE: Duration = Duration::from_millis(500);

//! Orders the operations of a group on its lanes, counts them, and maps their failures to errors.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::Group;
use crate::collective::deadline::Deadline;
use crate::collective::signature::Signature;
use crate::collective::stats::{Log, Sent};
use crate::collective::step::{Alone, Collective, Membership};
use crate::communicator::Communicator;
use crate::device::DeviceEnd;
use crate::error::CommError;
use crate::health::{Failure, Health};
use crate::inquiry::Waiters;
use crate::lane::Lane;
use crate::lock::lock;
use crate::pending::Pending;

/// The data that an operation needs besides its endpoint.
pub(super) struct Context {
    pub(super) membership: Membership,
    pub(super) timeout: Duration,
    pub(super) log: Mutex<Log>,
    pub(super) health: Arc<Health>,
}

/// A lane and the sequence number of its next job. Numbers must be taken in the order of submission.
pub(super) struct Ordered<E: ?Sized> {
    pub(super) next: Mutex<u64>,
    pub(super) lane: Lane<E>,
    /// Used only by the jobs of this lane.
    pub(super) device: Option<Arc<Mutex<DeviceEnd>>>,
}

impl<E: ?Sized + Send + 'static> Ordered<E> {
    pub(super) fn start(
        rank: usize,
        purpose: &str,
        endpoint: impl FnOnce(&Arc<Waiters>) -> Result<Box<E>, CommError>,
        device: impl FnOnce(&Arc<Waiters>) -> Option<DeviceEnd>,
    ) -> Result<Ordered<E>, CommError> {
        let waiters = Arc::default();
        let endpoint = endpoint(&waiters)?;
        let device = device(&waiters).map(|end| Arc::new(Mutex::new(end)));
        let lane = Lane::start(format!("zero-comm {rank} {purpose}"), endpoint, waiters)
            .map_err(|error| CommError::Io { rank, detail: format!("cannot start a worker thread: {error}") })?;
        Ok(Ordered { next: Mutex::new(0), lane, device })
    }

    /// Submits a job that makes the device end leave its connection, so that it leaves after all earlier jobs.
    pub(super) fn leave_device(&self) {
        if let Some(device) = self.device.clone() {
            self.lane.submit(move |_| lock(&device).leave());
        }
    }
}

impl Group {
    /// Submits a job to a lane and assigns the sequence number of `signature`. `work` returns its result and the data
    /// that this rank sent.
    pub(super) fn submit<E: ?Sized + Send + 'static, T: Send + 'static>(
        &self,
        ordered: &Ordered<E>,
        mut signature: Signature,
        work: impl FnOnce(&mut E, &Signature, Deadline) -> Result<(T, Sent), Failure> + Send + 'static,
    ) -> Pending<T> {
        let context = Arc::clone(&self.context);
        let mut next = lock(&ordered.next);
        signature.sequence = *next;
        *next += 1;
        let rank = context.health.rank;
        let detail = format!("the worker ended before {} #{}", signature.operation, signature.sequence);
        let (completion, pending) = Pending::new(CommError::Io { rank, detail }, ordered.lane.help());
        ordered.lane.submit(move |endpoint| completion.complete(context.carry_out(endpoint, &signature, work)));
        pending
    }

    /// Submits a collective of the group.
    pub(super) fn collective<T: Send + 'static>(
        &self,
        mut signature: Signature,
        work: impl FnOnce(&mut (dyn Collective + 'static), &Signature, Deadline) -> Result<(T, Sent), Failure>
        + Send
        + 'static,
    ) -> Pending<T> {
        if self.size() > 1 {
            return self.submit(&self.collectives, signature, work);
        }
        // A group of one rank runs the operation on this thread, which takes less time than waking a worker thread.
        let mut next = lock(&self.collectives.next);
        signature.sequence = *next;
        *next += 1;
        drop(next);
        Pending::ready(self.context.carry_out(&mut Alone as &mut (dyn Collective + 'static), &signature, work))
    }
}

impl Context {
    fn carry_out<E: ?Sized, T>(
        &self,
        endpoint: &mut E,
        signature: &Signature,
        work: impl FnOnce(&mut E, &Signature, Deadline) -> Result<(T, Sent), Failure>,
    ) -> Result<T, CommError> {
        let deadline = Deadline::after(self.timeout);
        let outcome = self.health.check().and_then(|()| work(endpoint, signature, deadline));
        match outcome {
            Ok((result, sent)) => {
                let seconds = deadline.started.elapsed().as_secs_f64();
                lock(&self.log).count(signature.operation, signature.bytes(), sent, seconds);
                Ok(result)
            }
            Err(failure) => {
                self.health.end_because(&failure, signature, self.timeout);
                Err(self.health.error(failure, signature, self.timeout))
            }
        }
    }
}

pub(super) fn lane_to<E: ?Sized>(
    lanes: &mut BTreeMap<usize, Ordered<E>>,
    peer: usize,
    start: impl FnOnce() -> Result<Ordered<E>, CommError>,
) -> Result<&Ordered<E>, CommError> {
    use std::collections::btree_map::Entry;
    match lanes.entry(peer) {
        Entry::Occupied(lane) => Ok(lane.into_mut()),
        Entry::Vacant(place) => Ok(place.insert(start()?)),
    }
}

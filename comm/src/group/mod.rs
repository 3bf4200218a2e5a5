//! The communicator that users hold. It checks the arguments of an operation and submits the operation to a lane. A
//! `Fabric` transfers the data of host buffers, and a `DeviceFabric` the data of device buffers.

mod arguments;
mod on_device;
mod submission;
mod vectors;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::buffers::buffer::Buffer;
use crate::buffers::ranges::consecutive;
use crate::collective::carried::Carried;
use crate::collective::parts::{Counts, Parts};
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::{Operation, Signature, digest};
use crate::collective::stats::{Sent, SizeCounter, Stats};
use crate::collective::step::{Collective, Fabric, Inbox, Membership, Outbox, Step, Vector};
use crate::communicator::{Communicator, Exchanged, Gathered, Scattered, ToGather, ToScatter};
use crate::device::{DeviceEnd, DeviceFabric};
use crate::error::CommError;
use crate::health::{Cause, Health};
use crate::inquiry::Topic;
use crate::lock::lock;
use crate::pending::Pending;

use arguments::BufferKind;
use submission::{Context, Ordered, lane_to};
use vectors::{coalesced, describe, divided};

pub(crate) struct Group {
    // Fields drop in this order: the lanes finish their jobs before the fabric and the rank's `Health` are dropped.
    collectives: Ordered<dyn Collective>,
    outboxes: Mutex<BTreeMap<usize, Ordered<dyn Outbox>>>,
    inboxes: Mutex<BTreeMap<usize, Ordered<dyn Inbox>>>,
    fabric: Box<dyn Fabric>,
    /// For buffers in device memory; `None` in a group without devices.
    devices: Option<Arc<dyn DeviceFabric>>,
    /// Whether operations on devices run ahead of the host. Splits share it.
    runs_ahead: Arc<AtomicBool>,
    splits: AtomicU64,
    context: Arc<Context>,
}

impl Group {
    pub(crate) fn new(
        membership: Membership,
        fabric: Box<dyn Fabric>,
        devices: Option<(Arc<dyn DeviceFabric>, Arc<AtomicBool>)>,
        health: Arc<Health>,
        timeout: Duration,
    ) -> Result<Arc<Group>, CommError> {
        let (devices, runs_ahead) = devices.map_or_else(Default::default, |(devices, ahead)| (Some(devices), ahead));
        let Membership { group, rank: place, ref members, .. } = membership;
        let rank = members[place];
        let end = |waiters: &_| {
            let (fabric, health) = (devices.clone()?, Arc::clone(&health));
            let topic = Topic::collectives(group, waiters);
            Some(DeviceEnd::new(fabric, health, topic, (place, members.clone()), Arc::clone(&runs_ahead)))
        };
        let collectives = Ordered::start(rank, "all", |waiters| fabric.collective(waiters), end)?;
        let context = Context { membership, timeout, log: Mutex::default(), health };
        Ok(Arc::new(Group {
            collectives,
            outboxes: Mutex::default(),
            inboxes: Mutex::default(),
            fabric,
            devices,
            runs_ahead,
            splits: AtomicU64::new(0),
            context: Arc::new(context),
        }))
    }

    fn membership(&self) -> &Membership {
        &self.context.membership
    }

    fn split_with(
        &self,
        color: usize,
        key: usize,
        devices: Option<(Arc<dyn DeviceFabric>, Arc<AtomicBool>)>,
    ) -> Result<Arc<dyn Communicator>, CommError> {
        let Membership { group, rank, members, .. } = self.membership();
        let nth = self.splits.fetch_add(1, Ordering::SeqCst);
        let wish = Buffer::I64(vec![color as i64, key as i64]);
        let wishes = Buffer::I64(vec![0; 2 * members.len()]);
        let wishes = self.all_gather(wish, wishes, &vec![2; members.len()]).wait()?.output.into_i64()?;
        let mut chosen: Vec<(i64, usize)> = (0..members.len())
            .filter(|other| wishes[2 * other] == color as i64)
            .map(|other| (wishes[2 * other + 1], other))
            .collect();
        chosen.sort_unstable();
        let place = chosen.iter().position(|(_, other)| other == rank).unwrap_or_default();
        let child = digest("split", &[*group as usize, nth as usize, color]);
        let child = Membership::new(child, place, chosen.iter().map(|(_, other)| members[*other]).collect());
        let fabric = self.fabric.connect(child.clone()).inspect_err(|error| self.abort(&error.to_string()))?;
        let health = Arc::clone(&self.context.health);
        let group = Group::new(child, fabric, devices, health, self.context.timeout)?;
        Ok(group)
    }
}

impl Communicator for Group {
    fn rank(&self) -> usize {
        self.membership().rank
    }

    fn size(&self) -> usize {
        self.membership().size()
    }

    fn all_reduce_coalesced(&self, mut buffers: Vec<Buffer>, op: ReduceOp) -> Pending<Vec<Buffer>> {
        let (rank, size) = (self.rank(), self.size());
        let counts: Vec<[usize; 1]> = buffers.iter().map(|buffer| [buffer.len()]).collect();
        let wholes = buffers.iter().zip(&counts).map(|(buffer, counts)| (buffer, &counts[..]));
        let signature = Signature { reduce: Some(op), ..coalesced(Operation::AllReduce, wholes) };
        match self.place_all(buffers.iter()) {
            Err(detail) => return self.invalid(Operation::AllReduce, detail),
            Ok(BufferKind::Host) => {}
            Ok(BufferKind::Device) => return self.all_reduce_on_device(signature, buffers, op),
        }
        self.collective(signature, move |endpoint, signature, deadline| {
            let vectors: Vec<Vector<'_>> = buffers.iter_mut().map(|buffer| divided(buffer, size)).collect();
            let sent = vectors.iter().map(|vector| vector.leaving(rank, true)).sum();
            let step = Step { signature: *signature, reduce: Some(op), vectors, gather: true, deadline };
            let carried = endpoint.run(step)?;
            Ok((buffers, Sent { bytes: sent, carried }))
        })
    }

    fn all_gather_coalesced(&self, mut vectors: Vec<ToGather>) -> Pending<Vec<Gathered>> {
        let check = |ToGather { shard, output, counts }: &ToGather| self.check_counts(output, shard, counts);
        let buffers = vectors.iter().flat_map(|ToGather { shard, output, .. }| [shard, output]);
        let place = vectors.iter().try_for_each(check).and_then(|()| self.place_all(buffers));
        let wholes = vectors.iter().map(|ToGather { output, counts, .. }| (output, &counts[..]));
        let (size, signature) = (self.size(), coalesced(Operation::AllGather, wholes));
        match place {
            Err(detail) => return self.invalid(Operation::AllGather, detail),
            Ok(BufferKind::Host) => {}
            Ok(BufferKind::Device) => return self.all_gather_on_device(signature, vectors),
        }
        self.collective(signature, move |endpoint, signature, deadline| {
            let whole = vectors.iter_mut().map(ToGather::vector).collect();
            let step = Step { signature: *signature, reduce: None, vectors: whole, gather: true, deadline };
            let carried = endpoint.run(step)?;
            let sent =
                Sent { bytes: vectors.iter().map(|vector| vector.shard.size_bytes() * (size - 1)).sum(), carried };
            let gathered = |ToGather { shard, output, .. }| Gathered { shard, output };
            Ok((vectors.into_iter().map(gathered).collect(), sent))
        })
    }

    fn reduce_scatter_coalesced(&self, mut vectors: Vec<ToScatter>, op: ReduceOp) -> Pending<Vec<Scattered>> {
        let check = |ToScatter { input, shard, counts }: &ToScatter| self.check_counts(input, shard, counts);
        let buffers = vectors.iter().flat_map(|ToScatter { input, shard, .. }| [input, shard]);
        let place = vectors.iter().try_for_each(check).and_then(|()| self.place_all(buffers));
        let wholes = vectors.iter().map(|ToScatter { input, counts, .. }| (input, &counts[..]));
        let signature = Signature { reduce: Some(op), ..coalesced(Operation::ReduceScatter, wholes) };
        match place {
            Err(detail) => return self.invalid(Operation::ReduceScatter, detail),
            Ok(BufferKind::Host) => {}
            Ok(BufferKind::Device) => return self.reduce_scatter_on_device(signature, vectors, op),
        }
        self.collective(signature, move |endpoint, signature, deadline| {
            let whole = vectors.iter_mut().map(ToScatter::vector).collect();
            let step = Step { signature: *signature, reduce: Some(op), vectors: whole, gather: false, deadline };
            let carried = endpoint.run(step)?;
            let sent = |vector: &ToScatter| vector.input.size_bytes() - vector.shard.size_bytes();
            let sent = Sent { bytes: vectors.iter().map(sent).sum(), carried };
            let scattered = |ToScatter { input, shard, .. }| Scattered { input, shard };
            Ok((vectors.into_iter().map(scattered).collect(), sent))
        })
    }

    fn broadcast(&self, mut buffer: Buffer, root: usize) -> Pending<Buffer> {
        let (rank, size) = (self.rank(), self.size());
        if root >= size {
            return self.invalid(Operation::Broadcast, format!("root {root} does not exist in a group of {size}"));
        }
        let signature = Signature { layout: root as u64, ..describe(Operation::Broadcast, &buffer) };
        match self.place(&[&buffer]) {
            Err(detail) => return self.invalid(Operation::Broadcast, detail),
            Ok(BufferKind::Host) => {}
            Ok(BufferKind::Device) => return self.broadcast_on_device(signature, buffer, root),
        }
        self.collective(signature, move |endpoint, signature, deadline| {
            let all = buffer.size_bytes();
            let ranges = consecutive((0..size).map(|rank| if rank == root { all } else { 0 }), 1);
            let vectors = vec![Vector::new(buffer.dtype(), buffer.as_bytes_mut(), ranges)];
            let step = Step { signature: *signature, reduce: None, vectors, gather: true, deadline };
            let carried = endpoint.run(step)?;
            let sent = if rank == root { all * (size - 1) } else { 0 };
            Ok((buffer, Sent { bytes: sent, carried }))
        })
    }

    fn all_to_all(
        &self,
        input: Buffer,
        mut output: Buffer,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Pending<Exchanged> {
        let rank = self.rank();
        let counts = Counts { send: send_counts.to_vec(), receive: receive_counts.to_vec() };
        if let Err(detail) = counts.check(rank, self.size(), &input, &output) {
            return self.invalid(Operation::AllToAll, detail);
        }
        let signature = describe(Operation::AllToAll, &input);
        match self.place(&[&input, &output]) {
            Err(detail) => return self.invalid(Operation::AllToAll, detail),
            Ok(BufferKind::Host) => {}
            Ok(BufferKind::Device) => return self.all_to_all_on_device(signature, input, output, counts),
        }
        self.collective(signature, move |endpoint, signature, deadline| {
            let unit = input.dtype().size();
            let (signature, pairs) = (*signature, counts.pairs(unit));
            let (from, to) = (input.as_bytes(), output.as_bytes_mut());
            let carried = endpoint.exchange(Parts { signature, input: from, output: to, pairs, deadline })?;
            let sent = counts.leaving(rank) * unit;
            Ok((Exchanged { input, output }, Sent { bytes: sent, carried }))
        })
    }

    fn send(&self, buffer: Buffer, to: usize) -> Pending<Buffer> {
        let place = match self.check_peer(to).and_then(|()| self.place(&[&buffer])) {
            Err(detail) => return self.invalid(Operation::Send, detail),
            Ok(place) => place,
        };
        let endpoint = |waiters: &_| self.fabric.outbox(to, waiters);
        let end = |waiters: &_| self.device_end(Operation::Send, to, waiters);
        let start = || Ordered::start(self.context.health.rank, &format!("to {to}"), endpoint, end);
        let signature = describe(Operation::Send, &buffer);
        match (lane_to(&mut lock(&self.outboxes), to, start), place) {
            (Err(error), _) => Pending::ready(Err(error)),
            (Ok(lane), BufferKind::Device) => self.send_on_device(lane, signature, buffer),
            (Ok(lane), BufferKind::Host) => self.submit(lane, signature, move |outbox, signature, deadline| {
                let carried = outbox.send(signature, buffer.as_bytes(), deadline)?;
                let sent = Sent { bytes: buffer.size_bytes(), carried };
                Ok((buffer, sent))
            }),
        }
    }

    fn recv(&self, mut buffer: Buffer, from: usize) -> Pending<Buffer> {
        let place = match self.check_peer(from).and_then(|()| self.place(&[&buffer])) {
            Err(detail) => return self.invalid(Operation::Recv, detail),
            Ok(place) => place,
        };
        let endpoint = |waiters: &_| self.fabric.inbox(from, waiters);
        let end = |waiters: &_| self.device_end(Operation::Recv, from, waiters);
        let start = || Ordered::start(self.context.health.rank, &format!("of {from}"), endpoint, end);
        let signature = describe(Operation::Recv, &buffer);
        match (lane_to(&mut lock(&self.inboxes), from, start), place) {
            (Err(error), _) => Pending::ready(Err(error)),
            (Ok(lane), BufferKind::Device) => self.recv_on_device(lane, signature, buffer),
            (Ok(lane), BufferKind::Host) => self.submit(lane, signature, move |inbox, signature, deadline| {
                inbox.recv(signature, buffer.as_bytes_mut(), deadline)?;
                Ok((buffer, Sent { bytes: 0, carried: Carried::streamed(0) }))
            }),
        }
    }

    fn barrier(&self) -> Pending<()> {
        let signature = coalesced(Operation::Barrier, std::iter::empty());
        self.collective(signature, move |endpoint, signature, deadline| {
            let step = Step { signature: *signature, reduce: None, vectors: vec![], gather: false, deadline };
            let carried = endpoint.run(step)?;
            Ok(((), Sent { bytes: 0, carried }))
        })
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, CommError> {
        let devices = self.devices.clone().map(|devices| (devices, Arc::clone(&self.runs_ahead)));
        self.split_with(color, key, devices)
    }

    fn with_devices(&self, devices: Arc<dyn DeviceFabric>) -> Result<Arc<dyn Communicator>, CommError> {
        self.split_with(0, self.rank(), Some((devices, Arc::default())))
    }

    fn run_ahead(&self) {
        self.runs_ahead.store(true, Ordering::Relaxed);
    }

    fn abort(&self, reason: &str) {
        let health = &self.context.health;
        health.end(Cause::Aborted { by: health.rank, reason: reason.to_string() });
    }

    fn stats(&self) -> Stats {
        lock(&self.context.log).stats
    }

    fn sizes(&self) -> Vec<SizeCounter> {
        lock(&self.context.log).sizes(self.size())
    }

    fn transport(&self) -> &'static str {
        self.devices.as_ref().map_or_else(|| self.fabric.transport(), |devices| devices.transport())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The lanes finish their jobs when the fields are dropped. If this rank panics, it cannot finish them together
        // with the other ranks, so it aborts the job.
        if std::thread::panicking() {
            self.abort("the rank panicked");
        }
        self.collectives.leave_device();
        lock(&self.outboxes).values().for_each(Ordered::leave_device);
        lock(&self.inboxes).values().for_each(Ordered::leave_device);
    }
}

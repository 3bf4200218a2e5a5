//! The communicator that users hold: checks the arguments of an operation and submits it to a lane.
//! A `Fabric` carries the bytes of host buffers, a `DeviceFabric` those of device buffers.

mod arguments;
mod on_device;
mod submission;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::buffer::Buffer;
use crate::communicator::{Communicator, Exchanged, Gathered, ReduceOp, Scattered};
use crate::device::{DeviceEnd, DeviceFabric};
use crate::error::CommError;
use crate::health::{Cause, Health};
use crate::inquiry::Topic;
use crate::parts::{Counts, Parts};
use crate::pending::Pending;
use crate::signature::{Operation, Signature, digest};
use crate::stats::{Sent, SizeCounter, Stats};
use crate::step::{Carried, Collective, Fabric, Inbox, Membership, Outbox, Reduction, Step, consecutive, even_counts};

use arguments::BufferKind;
use submission::{Context, Ordered, lane_to, lock};

pub(crate) struct Group {
    // Fields drop in this order: the lanes finish their jobs before the fabric and the rank's `Health` are dropped.
    collectives: Ordered<dyn Collective>,
    outboxes: Mutex<BTreeMap<usize, Ordered<dyn Outbox>>>,
    inboxes: Mutex<BTreeMap<usize, Ordered<dyn Inbox>>>,
    fabric: Box<dyn Fabric>,
    /// For buffers in device memory; `None` in a group without devices.
    devices: Option<Arc<dyn DeviceFabric>>,
    splits: AtomicU64,
    context: Arc<Context>,
}

impl Group {
    pub(crate) fn new(
        membership: Membership,
        fabric: Box<dyn Fabric>,
        health: Arc<Health>,
        timeout: Duration,
    ) -> Result<Arc<Group>, CommError> {
        Group::with(membership, fabric, None, health, timeout)
    }

    fn with(
        membership: Membership,
        fabric: Box<dyn Fabric>,
        devices: Option<Arc<dyn DeviceFabric>>,
        health: Arc<Health>,
        timeout: Duration,
    ) -> Result<Arc<Group>, CommError> {
        let Membership { group, rank: place, ref members, .. } = membership;
        let rank = members[place];
        let end = |waiters: &_| {
            let (fabric, health) = (devices.clone()?, Arc::clone(&health));
            let topic = Topic::collectives(group, waiters);
            Some(DeviceEnd { fabric, health, topic, rank: place, members: members.clone(), lane: None })
        };
        let collectives = Ordered::start(rank, "all", |waiters| fabric.collective(waiters), end)?;
        let context = Context { membership, timeout, log: Mutex::default(), health };
        Ok(Arc::new(Group {
            collectives,
            outboxes: Mutex::default(),
            inboxes: Mutex::default(),
            fabric,
            devices,
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
        devices: Option<Arc<dyn DeviceFabric>>,
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
        let group = Group::with(child, fabric, devices, health, self.context.timeout)?;
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

    fn all_reduce(&self, mut buffer: Buffer, op: ReduceOp) -> Pending<Buffer> {
        let (rank, size) = (self.rank(), self.size());
        let signature = Signature { reduce: Some(op), ..describe(Operation::AllReduce, &buffer) };
        match self.place(&[&buffer]) {
            Err(detail) => return self.invalid(Operation::AllReduce, detail),
            Ok(BufferKind::Host) => {}
            Ok(BufferKind::Device) => return self.all_reduce_on_device(signature, buffer, op),
        }
        self.collective(signature, move |endpoint, signature, deadline| {
            let ranges = consecutive(even_counts(buffer.len(), size), buffer.dtype().size());
            let own = ranges[rank].len();
            // Each rank sends the other ranks' ranges to their owners, then its own reduced range to everyone.
            let sent = buffer.size_bytes() - own + own * (size - 1);
            let reduce = Some(Reduction { op, dtype: buffer.dtype() });
            let (signature, bytes) = (*signature, buffer.as_bytes_mut());
            let step =
                Step { signature, reduce, buffer: bytes, source: None, shard: None, ranges, gather: true, deadline };
            let carried = endpoint.run(step)?;
            Ok((buffer, Sent { bytes: sent, carried }))
        })
    }

    fn all_gather(&self, shard: Buffer, mut output: Buffer, counts: &[usize]) -> Pending<Gathered> {
        if let Err(detail) = self.check_counts(&output, &shard, counts) {
            return self.invalid(Operation::AllGather, detail);
        }
        let (size, counts) = (self.size(), counts.to_vec());
        let signature = Signature { layout: digest("counts", &counts), ..describe(Operation::AllGather, &output) };
        match self.place(&[&shard, &output]) {
            Err(detail) => return self.invalid(Operation::AllGather, detail),
            Ok(BufferKind::Host) => {}
            Ok(BufferKind::Device) => return self.all_gather_on_device(signature, shard, output, counts),
        }
        self.collective(signature, move |endpoint, signature, deadline| {
            let ranges = consecutive(counts, output.dtype().size());
            let (signature, bytes) = (*signature, output.as_bytes_mut());
            let source = Some(shard.as_bytes());
            let (reduce, shard_to, gather) = (None, None, true);
            let step = Step { signature, reduce, buffer: bytes, source, shard: shard_to, ranges, gather, deadline };
            let carried = endpoint.run(step)?;
            let sent = shard.size_bytes() * (size - 1);
            Ok((Gathered { shard, output }, Sent { bytes: sent, carried }))
        })
    }

    fn reduce_scatter(
        &self,
        mut input: Buffer,
        mut shard: Buffer,
        counts: &[usize],
        op: ReduceOp,
    ) -> Pending<Scattered> {
        if let Err(detail) = self.check_counts(&input, &shard, counts) {
            return self.invalid(Operation::ReduceScatter, detail);
        }
        let counts = counts.to_vec();
        let layout = digest("counts", &counts);
        let signature = Signature { layout, reduce: Some(op), ..describe(Operation::ReduceScatter, &input) };
        match self.place(&[&input, &shard]) {
            Err(detail) => return self.invalid(Operation::ReduceScatter, detail),
            Ok(BufferKind::Host) => {}
            Ok(BufferKind::Device) => return self.reduce_scatter_on_device(signature, input, shard, counts, op),
        }
        self.collective(signature, move |endpoint, signature, deadline| {
            let ranges = consecutive(counts, input.dtype().size());
            let reduce = Some(Reduction { op, dtype: input.dtype() });
            let (signature, buffer, target) = (*signature, input.as_bytes_mut(), Some(shard.as_bytes_mut()));
            let step = Step { signature, reduce, buffer, source: None, shard: target, ranges, gather: false, deadline };
            let carried = endpoint.run(step)?;
            let sent = input.size_bytes() - shard.size_bytes();
            Ok((Scattered { input, shard }, Sent { bytes: sent, carried }))
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
            let (signature, bytes) = (*signature, buffer.as_bytes_mut());
            let step = Step {
                signature,
                reduce: None,
                buffer: bytes,
                source: None,
                shard: None,
                ranges,
                gather: true,
                deadline,
            };
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
        let size = self.size();
        let operation = Operation::Barrier;
        let signature =
            Signature { operation, sequence: 0, dtype: None, length: 0, reduce: None, layout: 0, on_device: false };
        self.collective(signature, move |endpoint, signature, deadline| {
            let (signature, ranges) = (*signature, vec![0..0; size]);
            let step = Step {
                signature,
                reduce: None,
                buffer: &mut [],
                source: None,
                shard: None,
                ranges,
                gather: false,
                deadline,
            };
            let carried = endpoint.run(step)?;
            Ok(((), Sent { bytes: 0, carried }))
        })
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, CommError> {
        self.split_with(color, key, self.devices.clone())
    }

    fn with_devices(&self, devices: Arc<dyn DeviceFabric>) -> Result<Arc<dyn Communicator>, CommError> {
        self.split_with(0, self.rank(), Some(devices))
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
        // The lanes finish their jobs below. A panicking rank will not finish them together with the other ranks, so it
        // tells them.
        if std::thread::panicking() {
            self.abort("the rank panicked");
        }
        self.collectives.leave_device();
        lock(&self.outboxes).values().for_each(Ordered::leave_device);
        lock(&self.inboxes).values().for_each(Ordered::leave_device);
    }
}

fn describe(operation: Operation, buffer: &Buffer) -> Signature {
    let (dtype, on_device) = (Some(buffer.dtype()), buffer.is_on_device());
    Signature { operation, sequence: 0, dtype, length: buffer.len() as u64, reduce: None, layout: 0, on_device }
}

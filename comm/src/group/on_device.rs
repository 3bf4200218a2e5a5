//! Operations on device buffers: the ranks synchronize over the host fabric, then their devices run the operation.

use std::sync::Arc;

use super::Group;
use super::submission::Ordered;
use super::vectors::memory;
use crate::buffers::buffer::Buffer;
use crate::buffers::dtype::Dtype;
use crate::buffers::ranges::even_counts;
use crate::collective::carried::Carried;
use crate::collective::deadline::Deadline;
use crate::collective::parts::{Counts, Parts};
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::{Operation, Signature};
use crate::collective::stats::Sent;
use crate::collective::step::{Collective, Inbox, Membership, Outbox, Step, Vector};
use crate::communicator::{Communicator, Exchanged, Gathered, Scattered, ToGather, ToScatter};
use crate::device::{DeviceEnd, DeviceWork};
use crate::health::Failure;
use crate::inquiry::{Topic, Waiters};
use crate::lock::lock;
use crate::pending::Pending;

impl Group {
    /// Returns this rank's end of the device connection for messages with a peer, in the direction of `operation`. In
    /// this connection, the sender is rank 0 and the receiver is rank 1.
    pub(super) fn device_end(&self, operation: Operation, peer: usize, waiters: &Arc<Waiters>) -> Option<DeviceEnd> {
        let Membership { group, rank: own, ref members, .. } = *self.membership();
        let (from, to, rank) = if operation == Operation::Send { (own, peer, 0) } else { (peer, own, 1) };
        let topic = Topic::messages(group, from, to, waiters);
        let (health, place) = (Arc::clone(&self.context.health), (rank, vec![members[from], members[to]]));
        Some(DeviceEnd::new(self.devices.clone()?, health, topic, place, Arc::clone(&self.runs_ahead)))
    }

    pub(super) fn all_reduce_on_device(
        &self,
        signature: Signature,
        buffers: Vec<Buffer>,
        op: ReduceOp,
    ) -> Pending<Vec<Buffer>> {
        let (rank, size) = (self.rank(), self.size());
        let sent = |buffer: &Buffer| {
            let own = even_counts(buffer.len(), size).nth(rank).unwrap_or(0) * buffer.dtype().size();
            buffer.size_bytes() - own + own * (size - 1)
        };
        self.collective_on_device(
            signature,
            buffers.iter().map(sent).sum(),
            buffers,
            move |buffers| DeviceWork::AllReduce { buffers: buffers.iter().map(memory).collect(), op },
            |buffers| buffers,
        )
    }

    pub(super) fn all_gather_on_device(&self, signature: Signature, vectors: Vec<ToGather>) -> Pending<Vec<Gathered>> {
        let sent = vectors.iter().map(|vector| vector.shard.size_bytes() * (self.size() - 1)).sum();
        self.collective_on_device(
            signature,
            sent,
            vectors,
            move |vectors| DeviceWork::AllGather { vectors: vectors.iter().map(ToGather::on_device).collect() },
            |vectors| vectors.into_iter().map(|ToGather { shard, output, .. }| Gathered { shard, output }).collect(),
        )
    }

    pub(super) fn reduce_scatter_on_device(
        &self,
        signature: Signature,
        vectors: Vec<ToScatter>,
        op: ReduceOp,
    ) -> Pending<Vec<Scattered>> {
        let sent = vectors.iter().map(|vector| vector.input.size_bytes() - vector.shard.size_bytes()).sum();
        self.collective_on_device(
            signature,
            sent,
            vectors,
            move |vectors| DeviceWork::ReduceScatter {
                vectors: vectors.iter().map(ToScatter::on_device).collect(),
                op,
            },
            |vectors| vectors.into_iter().map(|ToScatter { input, shard, .. }| Scattered { input, shard }).collect(),
        )
    }

    pub(super) fn broadcast_on_device(&self, signature: Signature, buffer: Buffer, root: usize) -> Pending<Buffer> {
        let sent = if self.rank() == root { buffer.size_bytes() * (self.size() - 1) } else { 0 };
        self.collective_on_device(
            signature,
            sent,
            buffer,
            move |buffer| DeviceWork::Broadcast { buffer: memory(buffer), root },
            |buffer| buffer,
        )
    }

    pub(super) fn all_to_all_on_device(
        &self,
        signature: Signature,
        input: Buffer,
        output: Buffer,
        counts: Counts,
    ) -> Pending<Exchanged> {
        let sent = counts.leaving(self.rank()) * input.dtype().size();
        let pairs = counts.pairs(0);
        let meet = move |endpoint: &mut dyn Collective, signature: &Signature, deadline| {
            endpoint.exchange(Parts { signature: *signature, input: &[], output: &mut [], pairs, deadline })
        };
        self.collective_on_device_after(
            meet,
            signature,
            sent,
            (input, output, counts),
            |(input, output, counts)| DeviceWork::AllToAll {
                input: memory(input),
                output: memory(output),
                send_counts: &counts.send,
                receive_counts: &counts.receive,
            },
            |(input, output, _)| Exchanged { input, output },
        )
    }

    /// Runs a collective whose signature must be equal on all ranks.
    fn collective_on_device<B: Send + 'static, T: Send + 'static>(
        &self,
        signature: Signature,
        sent: usize,
        buffers: B,
        work: impl FnOnce(&B) -> DeviceWork<'_> + Send + 'static,
        result: impl FnOnce(B) -> T + Send + 'static,
    ) -> Pending<T> {
        let meet = move |endpoint: &mut dyn Collective, signature: &Signature, deadline| {
            endpoint.run(step(signature, vec![], false, deadline))
        };
        self.collective_on_device_after(meet, signature, sent, buffers, work, result)
    }

    /// Runs a collective on the device after `meet`, in which the ranks synchronize on the host unless the group runs
    /// ahead.
    fn collective_on_device_after<B: Send + 'static, T: Send + 'static>(
        &self,
        meet: impl FnOnce(&mut dyn Collective, &Signature, Deadline) -> Result<Carried, Failure> + Send + 'static,
        signature: Signature,
        sent: usize,
        buffers: B,
        work: impl FnOnce(&B) -> DeviceWork<'_> + Send + 'static,
        result: impl FnOnce(B) -> T + Send + 'static,
    ) -> Pending<T> {
        let Some(end) = self.collectives.device.clone() else {
            return self.invalid(signature.operation, "the group has no devices".into());
        };
        let size = self.size();
        self.submit(&self.collectives, signature, move |endpoint, signature, deadline| {
            let ahead = lock(&end).is_ahead();
            if !ahead {
                meet(endpoint, signature, deadline)?;
            }
            let tell = |invitation: &mut [u8; _]| {
                let mut ranges = vec![invitation.len()..invitation.len(); size];
                ranges[0] = 0..invitation.len();
                let vectors = vec![Vector::new(Dtype::U8, invitation, ranges)];
                endpoint.run(step(signature, vectors, true, deadline)).map(|_| ())
            };
            let buffers = lock(&end).carry_out(buffers, work, tell, signature, deadline)?;
            Ok((result(buffers), Sent { bytes: sent, carried: Carried { ahead, ..Carried::IN_PLACE } }))
        })
    }

    pub(super) fn send_on_device(
        &self,
        lane: &Ordered<dyn Outbox>,
        signature: Signature,
        buffer: Buffer,
    ) -> Pending<Buffer> {
        let Some(end) = lane.device.clone() else {
            return self.invalid(signature.operation, "the group has no devices".into());
        };
        self.submit(lane, signature, move |outbox, signature, deadline| {
            let ahead = lock(&end).is_ahead();
            outbox.send(signature, &[], deadline)?;
            let tell = |invitation: &mut [u8; _]| outbox.send(signature, invitation, deadline).map(|_| ());
            let bytes = buffer.size_bytes();
            let buffer = lock(&end).carry_out(
                buffer,
                |buffer| DeviceWork::Send { buffer: memory(buffer), to: 1 },
                tell,
                signature,
                deadline,
            )?;
            Ok((buffer, Sent { bytes, carried: Carried { ahead, ..Carried::IN_PLACE } }))
        })
    }

    pub(super) fn recv_on_device(
        &self,
        lane: &Ordered<dyn Inbox>,
        signature: Signature,
        buffer: Buffer,
    ) -> Pending<Buffer> {
        let Some(end) = lane.device.clone() else {
            return self.invalid(signature.operation, "the group has no devices".into());
        };
        self.submit(lane, signature, move |inbox, signature, deadline| {
            let ahead = lock(&end).is_ahead();
            // Both ranks meet even if they run ahead: a receive that is posted early would keep the device waiting
            // until the sender has computed the values.
            inbox.recv(signature, &mut [], deadline)?;
            let tell = |invitation: &mut [u8; _]| inbox.recv(signature, invitation, deadline);
            let buffer = lock(&end).carry_out(
                buffer,
                |buffer| DeviceWork::Recv { buffer: memory(buffer), from: 0 },
                tell,
                signature,
                deadline,
            )?;
            Ok((buffer, Sent { bytes: 0, carried: Carried { ahead, ..Carried::streamed(0) } }))
        })
    }
}

/// Builds a host step that carries the signature of a device operation.
fn step<'a>(signature: &Signature, vectors: Vec<Vector<'a>>, gather: bool, deadline: Deadline) -> Step<'a> {
    Step { signature: signature.of_all(), reduce: None, vectors, gather, deadline }
}

//! A communicator that copies every host buffer to the device and the result back, so that the suite's tests with host
//! buffers exercise the device.

use std::sync::Arc;

use zero_comm::{
    Buffer, CommError, Communicator, Exchanged, Gathered, Pending, ReduceOp, Scattered, ToGather, ToScatter,
};
use zero_cuda::Device;
use zero_nccl::DeviceVector;

use crate::delegate::delegate;
use crate::mock::device_of;

pub(crate) struct Staged {
    inner: Arc<dyn Communicator>,
    device: Arc<Device>,
}

/// Creates a group over NCCL from the ranks of `host`. It accepts host buffers.
pub(crate) fn staged(host: &dyn Communicator) -> Arc<dyn Communicator> {
    let device = device_of(host.rank());
    let inner = zero_nccl::attach(host, &device).expect("a group with devices");
    Arc::new(Staged { inner, device })
}

impl Staged {
    fn up(&self, buffer: &Buffer) -> Buffer {
        DeviceVector::upload(buffer, &self.device).expect("room on the device").into()
    }
}

fn down(buffer: Buffer) -> Result<Buffer, CommError> {
    let Buffer::Device(device) = buffer else { panic!("{buffer:?} does not come from a device") };
    let vector: DeviceVector = device.downcast().expect("the vector that was passed in");
    Ok(vector.download().expect("the device answers"))
}

impl Communicator for Staged {
    delegate!(rank, size, barrier, with_devices, run_ahead, abort, stats, sizes, transport);

    fn all_reduce_coalesced(&self, buffers: Vec<Buffer>, op: ReduceOp) -> Pending<Vec<Buffer>> {
        let buffers = buffers.iter().map(|buffer| self.up(buffer)).collect();
        self.inner.all_reduce_coalesced(buffers, op).map(|buffers| buffers.into_iter().map(down).collect())
    }

    fn all_gather_coalesced(&self, vectors: Vec<ToGather>) -> Pending<Vec<Gathered>> {
        let up =
            |ToGather { shard, output, counts }| ToGather { shard: self.up(&shard), output: self.up(&output), counts };
        let gathered = self.inner.all_gather_coalesced(vectors.into_iter().map(up).collect());
        let down = |Gathered { shard, output }| Ok(Gathered { shard: down(shard)?, output: down(output)? });
        gathered.map(move |gathered| gathered.into_iter().map(down).collect())
    }

    fn reduce_scatter_coalesced(&self, vectors: Vec<ToScatter>, op: ReduceOp) -> Pending<Vec<Scattered>> {
        let up =
            |ToScatter { input, shard, counts }| ToScatter { input: self.up(&input), shard: self.up(&shard), counts };
        let scattered = self.inner.reduce_scatter_coalesced(vectors.into_iter().map(up).collect(), op);
        let down = |Scattered { input, shard }| Ok(Scattered { input: down(input)?, shard: down(shard)? });
        scattered.map(move |scattered| scattered.into_iter().map(down).collect())
    }

    fn all_to_all(
        &self,
        input: Buffer,
        output: Buffer,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Pending<Exchanged> {
        let exchanged = self.inner.all_to_all(self.up(&input), self.up(&output), send_counts, receive_counts);
        exchanged.map(|Exchanged { input, output }| Ok(Exchanged { input: down(input)?, output: down(output)? }))
    }

    fn broadcast(&self, buffer: Buffer, root: usize) -> Pending<Buffer> {
        self.inner.broadcast(self.up(&buffer), root).map(down)
    }

    fn send(&self, buffer: Buffer, to: usize) -> Pending<Buffer> {
        self.inner.send(self.up(&buffer), to).map(down)
    }

    fn recv(&self, buffer: Buffer, from: usize) -> Pending<Buffer> {
        self.inner.recv(self.up(&buffer), from).map(down)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, CommError> {
        let inner = self.inner.split(color, key)?;
        Ok(Arc::new(Staged { inner, device: Arc::clone(&self.device) }))
    }
}

//! A communicator that copies every host buffer to the device and the result back, so that the suite's tests with host
//! buffers exercise the device.

use std::sync::Arc;

use zero_comm::{
    Buffer, CommError, Communicator, DeviceFabric, Exchanged, Gathered, Pending, ReduceOp, Scattered, SizeCounter,
    Stats,
};
use zero_cuda::Device;
use zero_nccl::DeviceVector;

use crate::mock::device_of;

pub(crate) struct Staged {
    inner: Arc<dyn Communicator>,
    device: Arc<Device>,
}

/// Creates a group over NCCL of the ranks of `host` that takes host buffers.
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
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn all_reduce(&self, buffer: Buffer, op: ReduceOp) -> Pending<Buffer> {
        self.inner.all_reduce(self.up(&buffer), op).map(down)
    }

    fn all_gather(&self, shard: Buffer, output: Buffer, counts: &[usize]) -> Pending<Gathered> {
        let gathered = self.inner.all_gather(self.up(&shard), self.up(&output), counts);
        gathered.map(|Gathered { shard, output }| Ok(Gathered { shard: down(shard)?, output: down(output)? }))
    }

    fn reduce_scatter(&self, input: Buffer, shard: Buffer, counts: &[usize], op: ReduceOp) -> Pending<Scattered> {
        let scattered = self.inner.reduce_scatter(self.up(&input), self.up(&shard), counts, op);
        scattered.map(|Scattered { input, shard }| Ok(Scattered { input: down(input)?, shard: down(shard)? }))
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

    fn barrier(&self) -> Pending<()> {
        self.inner.barrier()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, CommError> {
        let inner = self.inner.split(color, key)?;
        Ok(Arc::new(Staged { inner, device: Arc::clone(&self.device) }))
    }

    fn with_devices(&self, devices: Arc<dyn DeviceFabric>) -> Result<Arc<dyn Communicator>, CommError> {
        self.inner.with_devices(devices)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn sizes(&self) -> Vec<SizeCounter> {
        self.inner.sizes()
    }

    fn transport(&self) -> &'static str {
        self.inner.transport()
    }
}

//! The methods of a communicator that wraps another one, for tests that change or record only some calls.

/// Implements the named methods of `Communicator` by calls of the same methods of `self.inner`.
macro_rules! delegate {
    ($($method:ident),+ $(,)?) => { $(crate::delegate::delegate!(@$method);)+ };
    (@rank) => {
        fn rank(&self) -> usize {
            self.inner.rank()
        }
    };
    (@size) => {
        fn size(&self) -> usize {
            self.inner.size()
        }
    };
    (@all_reduce_coalesced) => {
        fn all_reduce_coalesced(
            &self,
            buffers: Vec<zero_comm::Buffer>,
            op: zero_comm::ReduceOp,
        ) -> zero_comm::Pending<Vec<zero_comm::Buffer>> {
            self.inner.all_reduce_coalesced(buffers, op)
        }
    };
    (@broadcast) => {
        fn broadcast(&self, buffer: zero_comm::Buffer, root: usize) -> zero_comm::Pending<zero_comm::Buffer> {
            self.inner.broadcast(buffer, root)
        }
    };
    (@send) => {
        fn send(&self, buffer: zero_comm::Buffer, to: usize) -> zero_comm::Pending<zero_comm::Buffer> {
            self.inner.send(buffer, to)
        }
    };
    (@recv) => {
        fn recv(&self, buffer: zero_comm::Buffer, from: usize) -> zero_comm::Pending<zero_comm::Buffer> {
            self.inner.recv(buffer, from)
        }
    };
    (@barrier) => {
        fn barrier(&self) -> zero_comm::Pending<()> {
            self.inner.barrier()
        }
    };
    (@split) => {
        fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, zero_comm::CommError> {
            self.inner.split(color, key)
        }
    };
    (@with_devices) => {
        fn with_devices(
            &self,
            devices: Arc<dyn zero_comm::DeviceFabric>,
        ) -> Result<Arc<dyn Communicator>, zero_comm::CommError> {
            self.inner.with_devices(devices)
        }
    };
    (@run_ahead) => {
        fn run_ahead(&self) {
            self.inner.run_ahead();
        }
    };
    (@abort) => {
        fn abort(&self, reason: &str) {
            self.inner.abort(reason);
        }
    };
    (@stats) => {
        fn stats(&self) -> zero_comm::Stats {
            self.inner.stats()
        }
    };
    (@sizes) => {
        fn sizes(&self) -> Vec<zero_comm::SizeCounter> {
            self.inner.sizes()
        }
    };
    (@transport) => {
        fn transport(&self) -> &'static str {
            self.inner.transport()
        }
    };
}
pub(crate) use delegate;

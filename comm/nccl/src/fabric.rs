//! NCCL as the way between the devices of a group.

use std::sync::Arc;

use zero_comm::{CommError, Communicator, DeviceFabric, DeviceLane};
use zero_cuda::{Device, Library};

use crate::lane::Lane;

/// A group of the same ranks as `host` that carries out operations on buffers of `device` over NCCL, and all others as `host` does.
/// Collective over `host`, which stays as it is. Each rank needs a device of its own (or NCCL 2.30 and `NCCL_MULTI_RANK_GPU_ENABLE=1`).
/// NCCL is asked at the first operation on a device.
///
/// # Errors
/// NCCL is not on this machine: this rank gets [`CommError::Io`], and the others that it has aborted. Or what `host` says.
pub fn attach(host: &dyn Communicator, device: &Arc<Device>) -> Result<Arc<dyn Communicator>, CommError> {
    if let Err(reason) = Library::Nccl.available() {
        let detail = format!("there is no NCCL: {reason}");
        host.abort(&detail);
        return Err(CommError::Io { rank: host.rank(), detail });
    }
    host.with_devices(Arc::new(Nccl(Arc::clone(device))))
}

struct Nccl(Arc<Device>);

impl DeviceFabric for Nccl {
    fn transport(&self) -> &'static str {
        "nccl"
    }

    fn device(&self) -> usize {
        self.0.ordinal()
    }

    fn lane(&self) -> Result<Box<dyn DeviceLane>, String> {
        Ok(Box::new(Lane::new(&self.0).map_err(|error| error.to_string())?))
    }
}

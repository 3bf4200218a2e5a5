//! NCCL as the way between the devices of a group.

use std::sync::Arc;

use zero_comm::{CommError, Communicator, DeviceFabric, DeviceLane};
use zero_cuda::{Device, Library, Recorder};

use crate::lane::Lane;

/// A group of the same ranks as `host` that carries out operations on buffers of `device` over NCCL, and all others as `host` does.
/// Collective over `host`, which stays as it is. Each rank needs a device of its own (or NCCL 2.30 and `NCCL_MULTI_RANK_GPU_ENABLE=1`).
/// NCCL is asked at the first operation on a device.
///
/// # Errors
/// NCCL is not on this machine: this rank gets [`CommError::Io`], and the others that it has aborted. Or what `host` says.
pub fn attach(host: &dyn Communicator, device: &Arc<Device>) -> Result<Arc<dyn Communicator>, CommError> {
    attach_recorded(host, device, None)
}

/// [`attach`], with somebody who is told when operations begin and end on the device.
///
/// # Errors
/// As there.
pub fn attach_recorded(
    host: &dyn Communicator,
    device: &Arc<Device>,
    recorder: Option<Arc<Recorder>>,
) -> Result<Arc<dyn Communicator>, CommError> {
    if let Err(reason) = Library::Nccl.available() {
        let detail = format!("there is no NCCL: {reason}");
        host.abort(&detail);
        return Err(CommError::Io { rank: host.rank(), detail });
    }
    host.with_devices(Arc::new(Nccl { device: Arc::clone(device), recorder }))
}

struct Nccl {
    device: Arc<Device>,
    recorder: Option<Arc<Recorder>>,
}

impl DeviceFabric for Nccl {
    fn transport(&self) -> &'static str {
        "nccl"
    }

    fn device(&self) -> usize {
        self.device.ordinal()
    }

    fn lane(&self) -> Result<Box<dyn DeviceLane>, String> {
        let lane = Lane::new(&self.device, self.recorder.clone());
        Ok(Box::new(lane.map_err(|error| error.to_string())?))
    }
}

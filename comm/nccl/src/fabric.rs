//! NCCL as the transport between the devices of a group.

use std::sync::Arc;

use zero_comm::{CommError, Communicator, DeviceFabric, DeviceLane};
use zero_cuda::{Device, Library, Recorder};

use crate::lane::Lane;

/// Creates a group of the same ranks as `host`. The new group runs operations on buffers of `device` over NCCL, and all
/// other operations over the transport of `host`.
///
/// All ranks of `host` must call this function; `host` remains usable. Each rank needs a device of its own (or NCCL
/// 2.30 and `NCCL_MULTI_RANK_GPU_ENABLE=1`). The NCCL connection is created at the first operation on a device.
///
/// # Errors
/// If this machine has no NCCL, this rank gets [`CommError::Io`]. The others get an error that says that this rank has
/// aborted. Otherwise returns the errors of `host`.
pub fn attach(host: &dyn Communicator, device: &Arc<Device>) -> Result<Arc<dyn Communicator>, CommError> {
    attach_recorded(host, device, None)
}

/// Does the same as [`attach`], and also records when operations start and end on the device.
///
/// # Errors
/// Returns the errors of [`attach`].
pub fn attach_recorded(
    host: &dyn Communicator,
    device: &Arc<Device>,
    recorder: Option<Arc<Recorder>>,
) -> Result<Arc<dyn Communicator>, CommError> {
    if let Err(reason) = Library::Nccl.available() {
        let detail = format!("NCCL is unavailable: {reason}");
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
        // Flat buffers come from the device's memory pool, so peers need access to the pool.
        if !self.device.share_pool_with_peers().map_err(|error| error.to_string())? {
            return Err("the GPU has no memory pools; set `launcher.gpu_transport: host`".into());
        }
        let lane = Lane::new(&self.device, self.recorder.clone());
        Ok(Box::new(lane.map_err(|error| error.to_string())?))
    }
}

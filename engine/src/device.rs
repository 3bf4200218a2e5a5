//! What layers run on.

use candle_core::backend::BackendDevice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, Shape, Storage, Tensor};
use zero_comm::Communicator;
use zero_config::{Compute, Config, OffloadDevice, PartitionMethod, ZeroStage};
use zero_model::Activations;

use crate::error::Error;

const KEY: &str = "training.device";

/// # Errors
/// With a GPU: what is not there for one, and where this program was built without.
pub(crate) fn check(config: &Config) -> Result<(), Error> {
    if config.training.device == Compute::Cpu {
        return Ok(());
    }
    if cfg!(not(feature = "cuda")) {
        let help = "build it with `--features cuda`, as docs/gpu.md says, or write `device: cpu`";
        return Err(Error::setting(KEY, "this program was built without support for GPUs", help));
    }
    let zero = &config.zero;
    let not_there = |key: &str, message: &str, help: &str| Err(Error::setting(key, message, help));
    if zero.offload_optimizer.device == OffloadDevice::None {
        let message = "with `training.device: cuda` optimizer state and master weights are in the memory of the host: they cannot be on the GPU yet";
        let help = "write `offload_optimizer: {device: cpu}` and `stage: 1` or more";
        return not_there("zero_optimization.offload_optimizer.device", message, help);
    }
    if zero.stage == ZeroStage::Three && zero.offload_param.device == OffloadDevice::None {
        let message = "with `training.device: cuda` shards of parameters are in the memory of the host: they cannot be on the GPU yet";
        return not_there("zero_optimization.offload_param.device", message, "write `offload_param: {device: cpu}`");
    }
    if config.pipeline.stages > 1 && config.pipeline.partition_method == PartitionMethod::Time {
        let message = "layers are timed on the processor, and not on a GPU";
        return not_there("pipeline.partition_method", message, "write `parameters` or `uniform`");
    }
    if config.training.cost_table.is_some() {
        let message = "a cost table says what things take on the processor, and not on a GPU";
        return not_there("training.cost_table", message, "leave it out");
    }
    if config.model.as_ref().is_some_and(|model| model.tiled_mlp_rows().is_some()) {
        return not_there("model.tiled_mlp_rows", "tiles of rows are not there on a GPU", "leave it out");
    }
    if config.activation_checkpointing.as_ref().is_some_and(|kept| kept.device == OffloadDevice::Cpu) {
        let message = "inputs that are kept for layers to be run again stay on the GPU, or go to a disk";
        return not_there("activation_checkpointing.cpu_checkpointing", message, "leave it out");
    }
    Ok(())
}

/// # Errors
/// A GPU, for `what` knows none.
pub(crate) fn only_the_processor(config: &Config, what: &str) -> Result<(), Error> {
    match config.training.device {
        Compute::Cpu => Ok(()),
        Compute::Cuda => {
            Err(Error::setting(KEY, format!("{what} measures the processor, and not a GPU"), "write `device: cpu`"))
        }
    }
}

/// The device that the configuration names: of several GPUs that of this rank's number on its machine.
///
/// # Errors
/// There is no GPU, or no library that it takes.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(crate) fn open(config: &Config, comm: &dyn Communicator) -> Result<Device, Error> {
    check(config)?;
    #[cfg(feature = "cuda")]
    if config.training.device == Compute::Cuda {
        let unusable =
            |why: String| Error::setting(KEY, why, "`zero-train doctor` says what is there and what is missing");
        let count = zero_cuda::Device::count().map_err(|error| unusable(format!("there is no GPU: {error}")))?;
        if count == 0 {
            return Err(unusable("there is no GPU, or none that CUDA_VISIBLE_DEVICES lets through".into()));
        }
        let ordinal = local_rank(comm) % count;
        return zero_model::device::open(ordinal).map_err(|error| unusable(format!("GPU {ordinal}: {error}")));
    }
    Ok(Device::Cpu)
}

/// This rank's number among those of its machine.
#[cfg(feature = "cuda")]
fn local_rank(comm: &dyn Communicator) -> usize {
    // Threads of one process have no place of their own.
    if comm.transport() == "threads" {
        return comm.rank();
    }
    zero_comm::place::Place::from_environment(|name| std::env::var(name).ok()).map_or(0, |place| place.local_rank)
}

/// Tensors on a device.
pub(crate) fn onto(device: &Device, tensors: &Activations) -> candle_core::Result<Activations> {
    Ok(Activations::new(tensors.tensors().iter().map(|x| x.to_device(device)).collect::<candle_core::Result<_>>()?))
}

/// Values that came to the host, as a tensor on a device: a leaf of a graph or not.
pub(crate) fn tensor(
    device: &Device,
    values: CpuStorage,
    shape: impl Into<Shape>,
    is_leaf: bool,
) -> candle_core::Result<Tensor> {
    let storage = match device {
        Device::Cuda(device) => Storage::Cuda(device.storage_from_cpu_storage_owned(values)?),
        _ => Storage::Cpu(values),
    };
    Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), is_leaf))
}

//! What layers run on.

use std::sync::Arc;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, Shape, Storage, Tensor};
#[cfg(feature = "cuda")]
use zero_comm::Buffer;
use zero_comm::Communicator;
#[cfg(feature = "cuda")]
use zero_config::GpuTransport;
use zero_config::{Compute, Config, OffloadDevice, PartitionMethod, ZeroStage};
use zero_model::Activations;
use zero_partition::OnGpu;

use crate::error::Error;
use crate::timing::gpu_timeline::GpuTimeline;
#[cfg(feature = "cuda")]
use crate::timing::is_traced;

const KEY: &str = "training.device";

/// # Errors
/// With a GPU: what is not there for one, and where this program was built without.
pub(crate) fn check(config: &Config) -> Result<(), Error> {
    const RATIO: &str = "zero_optimization.offload_optimizer.ratio";
    let offloaded = &config.zero.offload_optimizer;
    let is_split = offloaded.device != OffloadDevice::None && offloaded.ratio < 1.0;
    if config.training.device == Compute::Cpu {
        let message = "it deals state out between a GPU and the host, and layers run on the processor";
        return if is_split { Err(Error::setting(RATIO, message, "leave it out")) } else { Ok(()) };
    }
    if cfg!(not(feature = "cuda")) {
        let help = "build it with `--features cuda`, as docs/gpu.md says, or write `device: cpu`";
        return Err(Error::setting(KEY, "this program was built without support for GPUs", help));
    }
    let zero = &config.zero;
    let not_there = |key: &str, message: &str, help: &str| Err(Error::setting(key, message, help));
    if zero.offload_optimizer.device == OffloadDevice::None && zero.offload_param.device != OffloadDevice::None {
        let message = "parameters that are on the host are updated there, and optimizer state would be on the GPU";
        let help = "write `offload_optimizer: {device: cpu}` as well, or leave `offload_param` out";
        return not_there("zero_optimization.offload_param.device", message, help);
    }
    if zero.offload_optimizer.device == OffloadDevice::Nvme
        && zero.offload_param.device == OffloadDevice::None
        && zero.stage == ZeroStage::Three
    {
        let message = "with optimizer state on a disk, shards of parameters are on the host or on a disk too";
        return not_there("zero_optimization.offload_param.device", message, "write `offload_param: {device: cpu}`");
    }
    if is_split {
        if offloaded.device == OffloadDevice::Nvme {
            return not_there(RATIO, "what is on a disk is there as a whole", "leave it out");
        }
        if zero.offload_param.device != OffloadDevice::None {
            let message = "parameters that are on the host are updated there, all of them";
            return not_there(RATIO, message, "leave it out");
        }
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

/// What of a rank's work is in the memory of its GPU. How ranks reach each other's shows when they meet.
pub(crate) fn on_gpu(config: &Config) -> OnGpu {
    let layers = config.training.device == Compute::Cuda;
    let stays = |device| layers && device == OffloadDevice::None;
    let offloaded = &config.zero.offload_optimizer;
    let states = match offloaded.device {
        _ if !layers => 0.0,
        OffloadDevice::None => 1.0,
        OffloadDevice::Cpu => 1.0 - offloaded.ratio,
        OffloadDevice::Nvme => 0.0,
    };
    OnGpu { layers, states, parameters: stays(config.zero.offload_param.device), gathers: false, sums: false }
}

/// # Errors
/// A GPU, for `what` knows none.
pub fn only_the_processor(config: &Config, what: &str) -> Result<(), Error> {
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
        let opened = zero_model::device::open(ordinal).and_then(|device| {
            // Before the first collective, which a rank that loads one then would hold up.
            zero_model::device::load_kernels(&device)?;
            Ok(device)
        });
        return opened.map_err(|error| unusable(format!("GPU {ordinal}: {error}")));
    }
    Ok(Device::Cpu)
}

/// How many GPUs of NVIDIA's this program can use here: those that `CUDA_VISIBLE_DEVICES` lets through, and none if it was built without
/// support for them.
#[must_use]
pub fn gpus() -> usize {
    #[cfg(feature = "cuda")]
    return zero_cuda::Device::count().unwrap_or(0);
    #[cfg(not(feature = "cuda"))]
    0
}

/// The clock of a GPU, where something reads it.
///
/// # Errors
/// What the driver says.
#[cfg_attr(not(feature = "cuda"), expect(clippy::unnecessary_wraps, unused_variables))]
pub(crate) fn timeline(config: &Config, device: &Device) -> Result<Option<GpuTimeline>, Error> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device
        && (is_traced(config) || config.flops_profiler.enabled)
    {
        return Ok(Some(GpuTimeline::new(device)?));
    }
    Ok(None)
}

/// The same ranks, over NCCL for what is on their GPUs where the configuration and the machines have it; a collective.
///
/// `on_gpu` is told what goes over it, and a line for the user comes with the ranks. Where it was asked for and is not there, that is an error on every rank.
///
/// # Errors
/// NCCL was asked for, and one rank has none, or shares its GPU with another; or a lost rank.
#[cfg_attr(not(feature = "cuda"), expect(clippy::unnecessary_wraps, unused_variables))]
pub(crate) fn connect(
    config: &Config,
    device: &Device,
    comm: Arc<dyn Communicator>,
    on_gpu: &mut OnGpu,
    timeline: Option<&GpuTimeline>,
) -> Result<(Arc<dyn Communicator>, Option<String>), Error> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device
        && config.launcher.gpu_transport != GpuTransport::Host
        && comm.size() > 1
    {
        let device = zero_cuda::Device::open(device.cuda_stream().context().ordinal());
        let device = device.map_err(|error| Error::setting(KEY, error.to_string(), "see `zero-train doctor`"))?;
        let own = nccl::facts(&device);
        let all = Buffer::U8(vec![0; own.len() * comm.size()]);
        let all = comm.all_gather(Buffer::U8(own.to_vec()), all, &vec![own.len(); comm.size()]).wait()?;
        match (nccl::obstacle(&all.output.into_u8()?), config.launcher.gpu_transport) {
            (None, _) => {
                // Parameters are the same however they travel; sums have NCCL's order.
                on_gpu.gathers = true;
                on_gpu.sums = on_gpu.states > 0.0 && !config.training.reproducible;
                let what = match (on_gpu.sums, on_gpu.states < 1.0) {
                    (true, false) => "everything",
                    (true, true) => "parameters, and gradients that stay there",
                    (false, _) => "parameters; gradients are added up on the host",
                };
                let recorder = timeline.map(GpuTimeline::recorder);
                let attached = zero_nccl::attach_recorded(&*comm, &device, recorder)?;
                return Ok((attached, Some(format!("between GPUs: NCCL, {what}"))));
            }
            (Some(why), GpuTransport::Nccl) => {
                let help = "with `auto`, values go by way of the host";
                return Err(Error::setting("launcher.gpu_transport", why, help));
            }
            (Some(why), _) => return Ok((comm, Some(format!("between GPUs: by way of the host, since {why}")))),
        }
    }
    Ok((comm, None))
}

#[cfg(feature = "cuda")]
mod nccl {
    //! Whether the ranks of a job can use NCCL: what each knows of itself, and what follows from all of it.

    use std::collections::HashMap;
    use std::sync::Arc;

    use zero_cuda::{Device, Library};

    /// Whether the library is there, and the device's name.
    pub(super) fn facts(device: &Arc<Device>) -> [u8; 17] {
        let mut facts = [0; 17];
        // A device without a name is taken for one that is shared.
        let uuid = device.uuid().unwrap_or_default();
        facts[0] = u8::from(Library::Nccl.available().is_ok());
        facts[1..].copy_from_slice(&uuid);
        facts
    }

    /// Why NCCL cannot be used, given the facts of all ranks.
    pub(super) fn obstacle(all: &[u8]) -> Option<String> {
        let mut seen = HashMap::new();
        for (rank, facts) in all.chunks(17).enumerate() {
            if facts[0] == 0 {
                return Some(format!("rank {rank} finds no {}", Library::Nccl.file()));
            }
            if let Some(other) = seen.insert(&facts[1..], rank) {
                return Some(format!("ranks {other} and {rank} share a GPU"));
            }
        }
        None
    }

    #[cfg(test)]
    mod tests {
        use super::obstacle;

        #[test]
        fn every_rank_needs_a_gpu_and_a_library() {
            let facts = |there: u8, gpu: u8| {
                let mut facts = [0; 17];
                (facts[0], facts[16]) = (there, gpu);
                facts
            };
            assert_eq!(obstacle(&[facts(1, 0), facts(1, 1)].concat()), None);
            let why = obstacle(&[facts(1, 0), facts(0, 1)].concat());
            assert_eq!(why.as_deref(), Some("rank 1 finds no libnccl.so.2"));
            let why = obstacle(&[facts(1, 0), facts(1, 1), facts(1, 0)].concat());
            assert_eq!(why.as_deref(), Some("ranks 0 and 2 share a GPU"));
        }
    }
}

/// This rank's number among those of its machine.
#[cfg(feature = "cuda")]
fn local_rank(comm: &dyn Communicator) -> usize {
    // Threads of one process have no place of their own.
    if comm.transport() == "threads" {
        return comm.rank();
    }
    zero_comm::launcher_environment::LauncherEnvironment::from_environment(|name| std::env::var(name).ok())
        .map_or(0, |place| place.local_rank)
}

/// The most bytes of a GPU's memory that this process has used at a time, as its driver counts them; `None` on the processor.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(crate) fn peak(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    return zero_model::device::peak(device).ok().flatten();
    #[cfg(not(feature = "cuda"))]
    None
}

/// The most bytes that the pool of that memory has taken from the GPU; `None` on the processor.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(crate) fn reserved(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    return zero_model::device::reserved(device).ok().flatten();
    #[cfg(not(feature = "cuda"))]
    None
}

/// An error of a step, in words where it is that the memory of a GPU does not suffice.
pub(crate) fn explained(error: Error) -> Error {
    let said = error.to_string();
    if !said.contains("CUDA_ERROR_OUT_OF_MEMORY") {
        return error;
    }
    let said = said.lines().next().unwrap_or_default();
    let help = "less is needed with a smaller `train_micro_batch_size_per_gpu`, with `activation_checkpointing`, with `stage: 3`, or in bf16";
    Error::Memory(format!("the memory of the GPU does not suffice: {said}\n  in: {KEY}\n  help: {help}"))
}

/// Tensors on a device.
pub(crate) fn onto(device: &Device, tensors: &Activations) -> candle_core::Result<Activations> {
    Ok(Activations::new(tensors.tensors().iter().map(|x| onto_one(device, x)).collect::<candle_core::Result<_>>()?))
}

/// A tensor on a device. The host waits for nothing that is on a GPU's stream.
pub(crate) fn onto_one(device: &Device, x: &Tensor) -> candle_core::Result<Tensor> {
    #[cfg(feature = "cuda")]
    return zero_model::device::onto(device, x);
    #[cfg(not(feature = "cuda"))]
    x.to_device(device)
}

/// Values that came to the host, as a tensor on a device: a leaf of a graph or not.
#[cfg_attr(not(feature = "cuda"), expect(clippy::unnecessary_wraps, unused_variables))]
pub(crate) fn tensor(
    device: &Device,
    values: CpuStorage,
    shape: impl Into<Shape>,
    is_leaf: bool,
) -> candle_core::Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        let values = Storage::Cuda(zero_model::device::sent(device, values)?);
        return Ok(Tensor::from_storage(values, shape, BackpropOp::none(), is_leaf));
    }
    Ok(Tensor::from_storage(Storage::Cpu(values), shape, BackpropOp::none(), is_leaf))
}

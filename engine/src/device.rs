//! The device that layers run on.

use std::sync::Arc;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, Shape, Storage, Tensor};
#[cfg(feature = "cuda")]
use zero_comm::Buffer;
use zero_comm::Communicator;
#[cfg(feature = "cuda")]
use zero_config::GpuTransport;
use zero_config::{Compute, Config, Model, OffloadDevice, PartitionMethod, ZeroStage};
use zero_partition::OnGpu;

use crate::error::Error;
use crate::timing::gpu_timeline::GpuTimeline;
#[cfg(feature = "cuda")]
use crate::timing::is_traced;

const KEY: &str = "training.device";

/// Checks that the configuration is supported on its device.
///
/// # Errors
/// Fails if the configuration trains on a GPU with an unsupported combination of keys, or if this program was built
/// without the feature `cuda`.
pub(crate) fn check(config: &Config) -> Result<(), Error> {
    const RATIO: &str = "zero_optimization.offload_optimizer.ratio";
    let offloaded = &config.zero.offload_optimizer;
    let is_split = offloaded.device != OffloadDevice::None && offloaded.ratio < 1.0;
    if config.training.device == Compute::Cpu {
        let message = "optimizer state can be split between a GPU and the host only if `training.device` is `cuda`";
        return if is_split { Err(Error::setting(RATIO, message, "remove it")) } else { Ok(()) };
    }
    if cfg!(not(feature = "cuda")) {
        let help = "build it with `--features cuda`, as docs/gpu.md says, or set `device: cpu`";
        return Err(Error::setting(KEY, "this program was built without GPU support", help));
    }
    let zero = &config.zero;
    if let Some((key, name)) = config.of_whole_parameters() {
        let message = format!("{name} is implemented on the CPU only");
        return Err(Error::setting(&key, message, "use AdamW, or set `training.device: cpu`"));
    }
    if matches!(config.optimizer, zero_config::Optimizer::Custom(_)) {
        let message = "a custom optimizer runs on the CPU only";
        return Err(Error::setting("optimizer.type", message, "use AdamW, or set `training.device: cpu`"));
    }
    let not_there = |key: &str, message: &str, help: &str| Err(Error::setting(key, message, help));
    let mut groups = config.training.param_groups.iter().flatten();
    if let Some(index) = groups.position(|group| group.clipping().is_some()) {
        let (key, help) = (format!("training.param_groups.{index}"), "use the same clipping for all parameters");
        return not_there(&key, "clipping the gradients of one group is implemented on the CPU only", help);
    }
    if config.training.gradient_noise_scale.is_some() {
        let help = "remove the section, or set `training.device: cpu`";
        return not_there(
            "training.gradient_noise_scale",
            "the gradient noise scale is measured on the CPU only",
            help,
        );
    }
    if config.quantization_config.as_ref().is_some_and(|section| section.quantizes()) {
        let help = "remove the section, or set `training.device: cpu`";
        return not_there("quantization_config", "quantized weights are not implemented on GPUs", help);
    }
    if zero.offload_optimizer.device == OffloadDevice::None && zero.offload_param.device != OffloadDevice::None {
        let message = "parameters on the host are updated on the host, so their optimizer state cannot be on the GPU";
        let help = "set `offload_optimizer: {device: cpu}` as well, or remove `offload_param`";
        return not_there("zero_optimization.offload_param.device", message, help);
    }
    if zero.offload_optimizer.device == OffloadDevice::Nvme
        && zero.offload_param.device == OffloadDevice::None
        && zero.stage == ZeroStage::Three
    {
        let message = "if the optimizer state is on a disk, the parameter shards must be on the host or on a disk";
        return not_there("zero_optimization.offload_param.device", message, "set `offload_param: {device: cpu}`");
    }
    if is_split {
        if offloaded.device == OffloadDevice::Nvme {
            return not_there(RATIO, "if optimizer state is on a disk, no part of it can stay on the GPU", "remove it");
        }
        if zero.offload_param.device != OffloadDevice::None {
            let message =
                "with `offload_param`, the host updates all parameters, so the optimizer state cannot be split";
            return not_there(RATIO, message, "remove it");
        }
    }
    if let Some((key, dropout)) = config.model.as_ref().and_then(Model::attention_dropout)
        && dropout > 0.0
    {
        let message = "dropout of attention probabilities is supported on the CPU only";
        return not_there(key, message, &format!("set `{key}: 0.0`, or train on the CPU"));
    }
    if let Some(key) = config.model.as_ref().and_then(Model::only_on_the_cpu) {
        let message = "the GPU has no kernel for this value";
        return not_there(key, message, "train this model on the CPU: `training: {device: cpu}`");
    }
    if config.preference.is_some() {
        return not_there("preference", "preference losses are computed on the CPU only", "train on the CPU");
    }
    if config.pipeline.stages > 1 && config.pipeline.partition_method == PartitionMethod::Time {
        let message = "layers are timed on the CPU only";
        return not_there("pipeline.partition_method", message, "use `parameters` or `uniform`");
    }
    if config.training.cost_table.is_some() {
        let message = "cost tables describe the CPU only";
        return not_there("training.cost_table", message, "remove it");
    }
    if config.model.as_ref().is_some_and(|model| model.tiled_mlp_rows().is_some()) {
        return not_there("model.tiled_mlp_rows", "tiled MLPs are unsupported on a GPU", "remove it");
    }
    if config.activation_checkpointing.as_ref().is_some_and(|kept| kept.device == OffloadDevice::Cpu) {
        let message = "on a GPU, checkpointed activations can be offloaded to a disk, but not to host memory";
        return not_there("activation_checkpointing.cpu_checkpointing", message, "remove it");
    }
    Ok(())
}

/// Decides which values reside in GPU memory. [`connect`] sets `gathers` and `sums` once the ranks know their
/// transport.
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

/// Rejects a configuration that trains on a GPU, for a feature (`what`) that can measure only the CPU.
///
/// # Errors
/// Fails if `training.device` is `cuda`.
pub fn only_the_processor(config: &Config, what: &str) -> Result<(), Error> {
    match config.training.device {
        Compute::Cpu => Ok(()),
        Compute::Cuda => Err(Error::setting(KEY, format!("{what} measures the CPU only"), "set `device: cpu`")),
    }
}

/// Opens the device that the configuration names. With several GPUs, each rank opens the GPU of its local rank.
///
/// # Errors
/// Fails if this host has no usable GPU or lacks a library for it.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(crate) fn open(config: &Config, comm: &dyn Communicator) -> Result<Device, Error> {
    check(config)?;
    #[cfg(feature = "cuda")]
    if config.training.device == Compute::Cuda {
        let unusable = |why: String| Error::setting(KEY, why, "run `zero-train doctor` to see what is missing");
        let count = zero_cuda::Device::count().map_err(|error| unusable(format!("no GPU: {error}")))?;
        if count == 0 {
            return Err(unusable("no GPU is visible; check CUDA_VISIBLE_DEVICES".into()));
        }
        let ordinal = local_rank(comm) % count;
        let opened = zero_model::device::open(ordinal).and_then(|device| {
            // Load kernels before the first collective: a rank that loads them during a collective delays all others.
            zero_model::device::load_kernels(&device)?;
            Ok(device)
        });
        return opened.map_err(|error| unusable(format!("GPU {ordinal}: {error}")));
    }
    Ok(Device::Cpu)
}

/// Returns the number of NVIDIA GPUs that this program can use. Respects `CUDA_VISIBLE_DEVICES`. Returns 0 without the
/// feature `cuda`.
#[must_use]
pub fn gpus() -> usize {
    #[cfg(feature = "cuda")]
    return zero_cuda::Device::count().unwrap_or(0);
    #[cfg(not(feature = "cuda"))]
    0
}

/// Returns the memory in bytes of the smallest GPU that this program can use; `None` if it can use none.
#[must_use]
pub fn gpu_bytes() -> Option<u64> {
    zero_cuda::inventory().ok()?.devices.iter().map(|device| device.memory).min()
}

/// Creates the GPU's timeline if a trace or the profiler needs it.
///
/// # Errors
/// Returns errors of the driver.
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

/// Attaches NCCL to the communicator for buffers on GPUs, if the configuration allows and the hosts support it.
/// Collective.
///
/// Sets in `on_gpu` which transfers use NCCL. Returns the communicator and one line that describes the transport.
///
/// # Errors
/// Fails on every rank if the configuration requires NCCL but a rank lacks the library or shares its GPU with another
/// rank. Fails if a rank is lost.
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
        let device = device.map_err(|error| {
            Error::setting(KEY, error.to_string(), "run `zero-train doctor` to see what is missing")
        })?;
        let own = nccl::facts(&device);
        let all = Buffer::U8(vec![0; own.len() * comm.size()]);
        let all = comm.all_gather(Buffer::U8(own.to_vec()), all, &vec![own.len(); comm.size()]).wait()?;
        match (nccl::obstacle(&all.output.into_u8()?), config.launcher.gpu_transport) {
            (None, _) => {
                // Gathered parameters are the same with every transport. But NCCL chooses the order in which it sums,
                // so `reproducible` sums on the host.
                on_gpu.gathers = true;
                on_gpu.sums = on_gpu.states > 0.0 && !config.training.reproducible;
                let activations =
                    if config.context_size() * config.tensor_size() > 1 { " and activations" } else { "" };
                let what = match (on_gpu.sums, on_gpu.states < 1.0) {
                    (true, false) => "everything".into(),
                    (true, true) => format!("parameters{activations}, and the gradients that stay on the GPU"),
                    (false, _) if config.training.reproducible => {
                        format!(
                            "parameters{activations}; because of `training.reproducible`, sums are computed on the host"
                        )
                    }
                    (false, _) => format!("parameters{activations}; gradients are summed on the host"),
                };
                let recorder = timeline.map(GpuTimeline::recorder);
                let attached = zero_nccl::attach_recorded(&*comm, &device, recorder)?;
                return Ok((attached, Some(format!("between GPUs: NCCL for {what}"))));
            }
            (Some(why), GpuTransport::Nccl) => {
                let help = "set it to `auto`, which copies through the host where NCCL is unavailable";
                return Err(Error::setting("launcher.gpu_transport", why, help));
            }
            (Some(why), _) => return Ok((comm, Some(format!("between GPUs: copies through the host, because {why}")))),
        }
    }
    Ok((comm, None))
}

#[cfg(feature = "cuda")]
mod nccl {
    //! Decides whether the ranks of a job can use NCCL, from facts that each rank contributes.

    use std::collections::HashMap;
    use std::sync::Arc;

    use zero_cuda::{Device, Library};

    /// Returns this rank's facts: whether NCCL is available (byte 0) and the UUID of its device (bytes 1 to 16).
    pub(super) fn facts(device: &Arc<Device>) -> [u8; 17] {
        let mut facts = [0; 17];
        // Devices without a UUID compare equal, so they count as shared.
        let uuid = device.uuid().unwrap_or_default();
        facts[0] = u8::from(Library::Nccl.available().is_ok());
        facts[1..].copy_from_slice(&uuid);
        facts
    }

    /// Returns the reason why NCCL cannot be used; `None` if it can.
    pub(super) fn obstacle(all: &[u8]) -> Option<String> {
        let mut seen = HashMap::new();
        for (rank, facts) in all.chunks(17).enumerate() {
            if facts[0] == 0 {
                return Some(format!("rank {rank} lacks {}", Library::Nccl.file()));
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
            assert_eq!(why.as_deref(), Some("rank 1 lacks libnccl.so.2"));
            let why = obstacle(&[facts(1, 0), facts(1, 1), facts(1, 0)].concat());
            assert_eq!(why.as_deref(), Some("ranks 0 and 2 share a GPU"));
        }
    }
}

/// Returns this rank's index among the ranks of its host.
#[cfg(feature = "cuda")]
fn local_rank(comm: &dyn Communicator) -> usize {
    // Ranks that are threads share one environment, and all of them run on this host.
    if comm.transport() == "threads" {
        return comm.rank();
    }
    zero_comm::launcher_environment::LauncherEnvironment::from_environment(|name| std::env::var(name).ok())
        .map_or(0, |place| place.local_rank)
}

/// Returns the peak bytes of GPU memory in use by this process, as the driver counts them; `None` on the CPU.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(crate) fn peak(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    return zero_model::device::peak(device).ok().flatten();
    #[cfg(not(feature = "cuda"))]
    None
}

/// Returns the peak bytes that the driver's memory pool reserved on the GPU; `None` on the CPU.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(crate) fn reserved(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    return zero_model::device::reserved(device).ok().flatten();
    #[cfg(not(feature = "cuda"))]
    None
}

/// Turns a CUDA out-of-memory error into [`Error::Memory`] with help. Returns other errors unchanged.
pub(crate) fn explained(error: Error) -> Error {
    let said = error.to_string();
    if !said.contains("CUDA_ERROR_OUT_OF_MEMORY") {
        return error;
    }
    let said = said.lines().next().unwrap_or_default();
    let help = "use a smaller `train_micro_batch_size_per_gpu`, `activation_checkpointing`, `stage: 3` or bf16";
    Error::Memory(format!("out of GPU memory: {said}\n  in: {KEY}\n  help: {help}"))
}

/// Copies a tensor to a device. Does not wait for the GPU's stream.
pub(crate) fn onto(device: &Device, x: &Tensor) -> candle_core::Result<Tensor> {
    #[cfg(feature = "cuda")]
    return zero_model::device::onto(device, x);
    #[cfg(not(feature = "cuda"))]
    x.to_device(device)
}

/// Creates a tensor on a device from host values. With `is_leaf`, it is a variable, for which a backward computes a
/// gradient.
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

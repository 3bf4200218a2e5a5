//! `offload_param`, `offload_optimizer` and `aio`: which state is offloaded, and how its files are read and
//! written.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::choice;
use crate::config::{Zero, ZeroStage};
use crate::errors::ErrorKind;
use crate::node::At;
use crate::reader::{Reader, Resolver};

choice! {
    /// Where state is kept while it is not in use.
    pub enum OffloadDevice {
        /// No offload.
        None = "none",
        /// Host memory. Without an accelerator this is the same as no offload.
        Cpu = "cpu",
        /// Files on a local disk.
        Nvme = "nvme",
    }
}

/// `zero_optimization.offload_optimizer`: where a rank keeps its optimizer state and master weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OffloadOptimizer {
    /// Target device.
    pub device: OffloadDevice,
    /// Folder of the files, relative to the working directory. Set if the device is [`OffloadDevice::Nvme`].
    #[serde(serialize_with = "crate::yaml_out::path")]
    pub nvme_path: Option<PathBuf>,
    /// Maximum number of tiles of [`Zero::sub_group_size`] in memory, including those being read or written. At
    /// least 2 if reads or writes are pipelined.
    pub buffer_count: usize,
    /// Read the next tile during the update of the current one.
    pub pipeline_read: bool,
    /// Write the previous tile during the update of the current one.
    pub pipeline_write: bool,
    /// Fraction of the elements whose state is offloaded, from 0 to 1; the rest stays on the GPU.
    pub ratio: f64,
}

/// `zero_optimization.offload_param`: where a rank keeps its shards of the parameters (stage 3).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OffloadParam {
    /// Target device.
    pub device: OffloadDevice,
    /// Folder of the files, relative to the working directory. Set if the device is [`OffloadDevice::Nvme`].
    #[serde(serialize_with = "crate::yaml_out::path")]
    pub nvme_path: Option<PathBuf>,
    /// Maximum number of shards in memory, including those being read or written.
    pub buffer_count: usize,
    /// Number of elements that stay in memory if the device is [`OffloadDevice::Nvme`].
    pub max_in_cpu: usize,
}

/// `aio`: how offload reads and writes its files.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Aio {
    /// Bytes per read or write, a multiple of 4096.
    pub block_size: usize,
    /// Maximum number of reads and writes in flight.
    pub queue_depth: usize,
    /// Submit each request to the kernel by itself instead of all waiting requests in one call.
    pub single_submit: bool,
    /// Submit further requests before those in flight have completed.
    pub overlap_events: bool,
    /// Number of threads that share the reads and writes of a rank.
    pub intra_op_parallelism: usize,
}

impl OffloadOptimizer {
    pub(super) fn read(keys: &mut Reader<'_, '_>) -> Self {
        Self {
            device: keys.choice("device", OffloadDevice::None),
            nvme_path: keys.optional_path("nvme_path"),
            buffer_count: keys.int("buffer_count"),
            pipeline_read: keys.bool("pipeline_read"),
            pipeline_write: keys.bool("pipeline_write"),
            ratio: keys.float("ratio"),
        }
    }
}

impl OffloadParam {
    pub(super) fn read(keys: &mut Reader<'_, '_>) -> Self {
        Self {
            device: keys.choice("device", OffloadDevice::None),
            nvme_path: keys.optional_path("nvme_path"),
            buffer_count: keys.int("buffer_count"),
            max_in_cpu: keys.int("max_in_cpu"),
        }
    }
}

impl Aio {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("aio");
        Self {
            block_size: keys.int("block_size"),
            queue_depth: keys.int("queue_depth"),
            single_submit: keys.bool("single_submit"),
            overlap_events: keys.bool("overlap_events"),
            intra_op_parallelism: keys.int("intra_op_parallelism"),
        }
    }
}

/// Checks what offload requires of the ZeRO stage, and the device of its section.
pub(super) fn check(zero: &Zero, resolver: &mut Resolver<'_>) {
    const PARAM: &str = "zero_optimization.offload_param";
    const OPTIMIZER: &str = "zero_optimization.offload_optimizer";
    let (param, optimizer) = (&zero.offload_param, &zero.offload_optimizer);
    sharded(OPTIMIZER, optimizer.device, zero.stage, (ZeroStage::One, "optimizer state"), resolver);
    sharded(PARAM, param.device, zero.stage, (ZeroStage::Three, "parameters"), resolver);
    for (section, device, path, buffers) in [
        (PARAM, param.device, &param.nvme_path, param.buffer_count),
        (OPTIMIZER, optimizer.device, &optimizer.nvme_path, optimizer.buffer_count),
    ] {
        has_device(section, resolver);
        has_path(section, device, path.is_some(), resolver);
        if device == OffloadDevice::Nvme && buffers == 0 {
            let (count, device) = (format!("{section}.buffer_count"), format!("{section}.device"));
            let message = format!("`{count}: 0` leaves no memory to read into, and `{device}` is nvme");
            resolver.contradiction(&[&count, &device], message, Some("write 1 or more, or leave it out".to_string()));
        }
    }
    let pipelined = [("pipeline_read", optimizer.pipeline_read), ("pipeline_write", optimizer.pipeline_write)];
    if let Some((name, _)) = pipelined.into_iter().find(|(_, on)| *on)
        && optimizer.device == OffloadDevice::Nvme
        && optimizer.buffer_count == 1
    {
        let message = format!("`{name}` has one tile under way while another is updated, and `buffer_count` is 1");
        let help = "write `buffer_count: 2` or more, or `pipeline_read: false` and `pipeline_write: false`".to_string();
        let paths = ["buffer_count", name].map(|name| format!("{OPTIMIZER}.{name}"));
        resolver.contradiction(&paths.each_ref().map(String::as_str), message, Some(help));
    }
}

/// Checks that the stage shards what is to be offloaded: a rank offloads only its own shard.
fn sharded(
    section: &str,
    device: OffloadDevice,
    stage: ZeroStage,
    (least, what): (ZeroStage, &str),
    resolver: &mut Resolver<'_>,
) {
    if device != OffloadDevice::None && stage < least {
        let (stage, least) = (u8::from(stage), u8::from(least));
        let message =
            format!("`{section}.device: {device}` keeps a rank's shard of the {what}, and stage {stage} has none");
        let or_more = if least < 3 { " or more" } else { "" };
        let help = format!("write `stage: {least}`{or_more}, or leave `device` out");
        let path = format!("{section}.device");
        resolver.contradiction(&[&path, "zero_optimization.stage"], message, Some(help));
    }
}

/// Warns about a section without the `device` key, which would switch it on.
fn has_device(section: &str, resolver: &mut Resolver<'_>) {
    let path = format!("{section}.device");
    if resolver.has_section(section) && resolver.at(&path) == At::Default {
        resolver.warn(section, format!("`{section}` does nothing without `device`, which is none by default"));
    }
}

/// Checks that a section with files has a folder. Each section has its own, as in DeepSpeed.
pub(super) fn has_path(section: &str, device: OffloadDevice, is_given: bool, resolver: &mut Resolver<'_>) {
    let path = format!("{section}.nvme_path");
    if device == OffloadDevice::Nvme && !is_given && !resolver.report.is_poisoned(&path) {
        let at = resolver.at(&format!("{section}.device"));
        let message = format!("`{section}.device: nvme` needs `{path}`, and it is not written");
        let help = "write the folder for its files, on a local disk; each section has its own".to_string();
        resolver.report.error(ErrorKind::Missing, &path, at, message, Some(help));
    }
}

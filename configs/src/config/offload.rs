//! `offload_param`, `offload_optimizer` and `aio`: which state is offloaded, and how its files are read and
//! written.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::{Zero, ZeroStage};
use crate::errors::ErrorKind;
use crate::path::last;
use crate::read::node::At;
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

/// Number of staging buffers, each the size of a tile. More than 64 would defeat the purpose of staging.
const BUFFERS: Kind = Kind::Int { min: 0, max: 64 };
/// Unit and alignment of direct I/O, large enough for every current disk.
const BLOCK: Kind = Kind::Multiple { of: 4096, max: 1 << 30 };

pub(super) const PINNED: &str = "host memory is always pinned if a GPU copies from or to it, and never otherwise";

choice! {
    /// Where state is kept while it is not in use.
    pub enum OffloadDevice {
        /// No offload.
        None = "none",
        /// Host memory. Without an accelerator, this is the same as no offload.
        Cpu = "cpu",
        /// Files on a local disk.
        Nvme = "nvme",
    }
}

section! {
    /// `zero_optimization.offload_optimizer`: where a rank keeps its optimizer state and master weights.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct OffloadOptimizer(keys) in "zero_optimization.offload_optimizer", off while device is ["none"] {
        pub device: OffloadDevice = now(OffloadDevice::KIND, "none", "Where a rank keeps its optimizer state and master weights: none, in device memory; cpu, in host memory (no change on a machine without a GPU); nvme, in files. Requires stage 1, 2 or 3");
        #[serde(serialize_with = "crate::write::yaml_out::path")]
        pub nvme_path: Option<PathBuf> = key(Kind::Path, "null", "Folder for the files, on a local disk; relative to the working directory; required for nvme");
        pub buffer_count: usize = now(BUFFERS, "4", "With nvme: number of tiles of `sub_group_size` elements in memory, including tiles in flight; at least 1, or 2 with pipeline_read or pipeline_write");
        pub pipeline_read: bool = now(Kind::Bool, "true", "With nvme: read the next tile while the current one is updated; faster, with bit-identical results (DeepSpeed's default is false)");
        pub pipeline_write: bool = now(Kind::Bool, "true", "With nvme: write the previous tile while the current one is updated; faster, with bit-identical results (DeepSpeed's default is false)");
        = ignored("pin_memory", Kind::Bool, "true", PINNED);
        = ignored("fast_init", Kind::Bool, "false", "the initial optimizer state is not read back before the first step");
        pub ratio: f64 = now(RATIO, "1.0", "Fraction of the state that is offloaded; the state of the last layers stays on the GPU");
        = rejected("super_offload", "false", "SuperOffload is for superchips such as GH200 only");
        = rejected("cpuadam_cores_perc", "0.8", "the key belongs to `super_offload`");
    }
}

section! {
    /// `zero_optimization.offload_param`: where a rank keeps its shards of the parameters (stage 3).
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct OffloadParam(keys) in "zero_optimization.offload_param", off while device is ["none"] {
        pub device: OffloadDevice = now(OffloadDevice::KIND, "none", "Where a rank keeps its parameter shards: none, in device memory; cpu, in host memory (no change on a machine without a GPU); nvme, in files. Requires stage 3");
        #[serde(serialize_with = "crate::write::yaml_out::path")]
        pub nvme_path: Option<PathBuf> = key(Kind::Path, "null", "Folder for the files, on a local disk; relative to the working directory; required for nvme");
        pub buffer_count: usize = now(BUFFERS, "5", "With nvme: number of shards in memory, including shards in flight; at least 1, and at least the number of shards that one layer gathers");
        pub max_in_cpu: usize = now(SIZE, "0", "With nvme: number of elements that stay in memory (DeepSpeed's default of 1e9 would keep small models entirely in memory)");
        = ignored("buffer_size", SIZE, "= derived", "a buffer is as large as the largest shard");
        = ignored("pin_memory", Kind::Bool, "true", PINNED);
    }
}

section! {
    /// `aio`: how offload reads and writes its files.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Aio(keys) in "aio" {
        /// Number of bytes per read or write, a multiple of 4096.
        pub block_size: usize = now(BLOCK, "1048576", "Bytes per read or write");
        pub queue_depth: usize = now(Kind::Int { min: 1, max: 1024 }, "8", "Reads and writes in flight at a time");
        pub single_submit: bool = now(Kind::Bool, "true", "Submit each read or write to the kernel separately; false: submit all that are ready in one call, which is slower (DeepSpeed's default is false)");
        pub overlap_events: bool = now(Kind::Bool, "true", "Submit further reads and writes while others are in flight; false: wait for each batch of `queue_depth`");
        pub intra_op_parallelism: usize = now(Kind::Int { min: 1, max: 64 }, "1", "Threads that share the reads and writes of a rank");
        = rejected("use_gds", "false", "GPUDirect Storage is not implemented");
        = ignored("thread_count", COUNT, "1", "DeepSpeed does not read the key either; use `intra_op_parallelism`");
    }
}

/// Checks that the ZeRO stage supports the offload, and that each section has a valid `device`.
pub(super) fn check(zero: &Zero, resolver: &mut Resolver<'_>) {
    let (param, optimizer) = (&zero.offload_param, &zero.offload_optimizer);
    let device = (OffloadOptimizer::device, optimizer.device);
    sharded(device, zero.stage, (ZeroStage::One, "optimizer state"), resolver);
    let device = (OffloadParam::device, param.device);
    sharded(device, zero.stage, (ZeroStage::Three, "parameters"), resolver);
    for (section, device, path, (count, buffers)) in [
        (
            Zero::offload_param,
            (OffloadParam::device, param.device),
            (OffloadParam::nvme_path, &param.nvme_path),
            (OffloadParam::buffer_count, param.buffer_count),
        ),
        (
            Zero::offload_optimizer,
            (OffloadOptimizer::device, optimizer.device),
            (OffloadOptimizer::nvme_path, &optimizer.nvme_path),
            (OffloadOptimizer::buffer_count, optimizer.buffer_count),
        ),
    ] {
        has_device(section, device.0, resolver);
        has_path(device, path, resolver);
        if device.1 == OffloadDevice::Nvme && buffers == 0 {
            let message = format!("`{count}: 0` leaves no memory into which `{}: nvme` could read", device.0);
            let help = "set it to 1 or more, or remove it".to_string();
            resolver.contradiction(&[count, device.0], message, Some(help));
        }
    }
    let pipelined = [
        (OffloadOptimizer::pipeline_read, optimizer.pipeline_read),
        (OffloadOptimizer::pipeline_write, optimizer.pipeline_write),
    ];
    if let Some((path, _)) = pipelined.into_iter().find(|(_, on)| *on)
        && optimizer.device == OffloadDevice::Nvme
        && optimizer.buffer_count == 1
    {
        let name = last(path);
        let message =
            format!("`{name}` needs two tiles in memory, one in flight and one being updated, but `buffer_count` is 1");
        let help = "set `buffer_count: 2` or more, or `pipeline_read: false` and `pipeline_write: false`".to_string();
        resolver.contradiction(&[OffloadOptimizer::buffer_count, path], message, Some(help));
    }
}

/// Checks that the ZeRO stage shards the offloaded state: a rank offloads only its own shard.
fn sharded(
    (path, device): (&str, OffloadDevice),
    stage: ZeroStage,
    (least, what): (ZeroStage, &str),
    resolver: &mut Resolver<'_>,
) {
    if device != OffloadDevice::None && stage < least {
        let (stage, least) = (stage.number(), least.number());
        let message =
            format!("`{path}: {device}` offloads each rank's shard of the {what}, which stage {stage} does not shard");
        let or_more = if least < 3 { " or more" } else { "" };
        let help = format!("set `stage: {least}`{or_more}, or remove `device`");
        resolver.contradiction(&[path, Zero::stage], message, Some(help));
    }
}

/// Warns about a section without the key `device`: only this key switches the section on.
fn has_device(section: &str, device: &str, resolver: &mut Resolver<'_>) {
    if resolver.has_section(section) && resolver.at(device) == At::Default {
        resolver.warn(section, format!("`{section}` does nothing without `device`, which is none by default"));
    }
}

/// Checks that a section with files has a folder. Each section has its own folder, as in DeepSpeed.
pub(super) fn has_path(
    (device_path, device): (&str, OffloadDevice),
    (path, folder): (&str, &Option<PathBuf>),
    resolver: &mut Resolver<'_>,
) {
    if device == OffloadDevice::Nvme && folder.is_none() && !resolver.report.is_poisoned(path) {
        let message = format!("`{device_path}: nvme` needs `{path}`, which is missing");
        let help = "set it to a folder on a local disk; each section has its own `nvme_path`".to_string();
        resolver.report.error(ErrorKind::Missing, path, resolver.at(device_path), message, Some(help));
    }
}

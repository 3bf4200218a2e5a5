//! Keys about state that is offloaded or recomputed: `offload_param` and `offload_optimizer` in
//! `zero_optimization`, `aio`, `activation_checkpointing`.

use super::*;
use crate::choice::Choice as _;
use crate::config::OffloadDevice;

const DEVICE: Kind = Kind::Choice { names: OffloadDevice::NAMES, later: &[] };
/// Number of staging buffers, each the size of a tile. A larger number would no longer be staging.
const BUFFERS: Kind = Kind::Int { min: 0, max: 64 };
/// Unit and alignment of direct I/O, large enough for every current disk.
const BLOCK: Kind = Kind::Multiple { of: 4096, max: 1 << 30 };

pub(super) const PINNED: &str = "memory of the host is pinned where a GPU copies from it or to it, and nowhere else";

#[rustfmt::skip]
pub(super) static OFFLOAD_PARAM: Section = Section { switch: Switch::Key("device", &["none"]), keys: &[
    now("device", DEVICE, "none", "Where a rank keeps its shards of the parameters: in memory, in the memory of the host, which on a machine without accelerator is the same, or in files; stage 3 only"),
    key("nvme_path", Kind::Path, "null", "Folder of the files, on a local disk; relative to the working directory; needed for nvme"),
    now("buffer_count", BUFFERS, "5", "With nvme: shards in memory at a time, those being read and written included; 1 or more"),
    now("max_in_cpu", SIZE, "0", "With nvme: elements that stay in memory all the same (DeepSpeed's default of 1e9 would leave small models wholly in memory)"),
    ignored("buffer_size", SIZE, "= derived", "a buffer is as large as the largest shard"),
    ignored("pin_memory", Kind::Bool, "true", PINNED),
] };

#[rustfmt::skip]
pub(super) static OFFLOAD_OPTIMIZER: Section = Section { switch: Switch::Key("device", &["none"]), keys: &[
    now("device", DEVICE, "none", "Where a rank keeps its optimizer state and master weights: in memory, in the memory of the host, which on a machine without accelerator is the same, or in files; stages 1 to 3"),
    key("nvme_path", Kind::Path, "null", "Folder of the files, on a local disk; relative to the working directory; needed for nvme"),
    now("buffer_count", BUFFERS, "4", "With nvme: tiles of `sub_group_size` in memory at a time, those being read and written included; 1 or more, 2 or more with pipeline_read or pipeline_write"),
    now("pipeline_read", Kind::Bool, "true", "With nvme: read the next tile while this one is updated. The bits are the same, and it is faster (DeepSpeed's default is false)"),
    now("pipeline_write", Kind::Bool, "true", "With nvme: write the last tile while this one is updated. The bits are the same, and it is faster (DeepSpeed's default is false)"),
    ignored("pin_memory", Kind::Bool, "true", PINNED),
    ignored("fast_init", Kind::Bool, "false", "nothing is read back before the first step"),
    now("ratio", RATIO, "1.0", "Share of the state that is offloaded; that of the last layers stays on the GPU"),
    rejected("super_offload", "false", "it is for one kind of machine"),
    rejected("cpuadam_cores_perc", "0.8", "it belongs to super_offload"),
] };

#[rustfmt::skip]
pub(super) static AIO: Section = Section { switch: Switch::Keys, keys: &[
    now("block_size", BLOCK, "1048576", "Bytes of one read or write"),
    now("queue_depth", Kind::Int { min: 1, max: 1024 }, "8", "Reads and writes under way at a time"),
    now("single_submit", Kind::Bool, "true", "Hand each read or write to the kernel by itself, not as many as there are at once, which is slower (DeepSpeed's default is false)"),
    now("overlap_events", Kind::Bool, "true", "Hand over further reads and writes before those under way have ended; false: one batch of `queue_depth` after the other"),
    now("intra_op_parallelism", Kind::Int { min: 1, max: 64 }, "1", "Threads that share the reads and writes of a rank"),
    rejected("use_gds", "false", "GPUDirect Storage needs a GPU"),
    ignored("thread_count", COUNT, "1", "DeepSpeed does not read it either; write `intra_op_parallelism`"),
] };

#[rustfmt::skip]
pub(super) static ACTIVATION_CHECKPOINTING: Section = Section { switch: Switch::Key("enabled", &["false"]), keys: &[
    now("enabled", Kind::Bool, "true", "Recompute; the section alone switches it on (in DeepSpeed it does nothing until the program asks for it)"),
    now("interval", COUNT, "= 1, unless number_checkpoints is given", "Layers between two inputs that are kept; what lies between is computed again in the backward"),
    now("number_checkpoints", COUNT, "null", "How many inputs are kept, at equal distances, instead of interval"),
    now("layers", Kind::Patterns, "= every layer that gains from it", "Regular expressions, upper or lower case: only layers in whose name one is found are computed again"),
    now("cpu_checkpointing", Kind::Bool, "= true when device is cpu", "DeepSpeed's way to write `device: cpu`"),
    now("device", DEVICE, "= cpu when cpu_checkpointing is true, else none", "Where inputs that are kept wait for the backward: in memory, in the memory of the host, which on a machine without accelerator is the same, or in files"),
    key("nvme_path", Kind::Path, "null", "Folder of the files, on a local disk; relative to the working directory; needed for nvme"),
    ignored("contiguous_memory_optimization", Kind::Bool, "false", "each input that is kept has memory of its own"),
    ignored("synchronize_checkpoint_boundary", Kind::Bool, "false", "there is no queue of a device to wait for"),
    ignored("profile", Kind::Bool, "false", "`training.trace` shows the time of every part of a step"),
    ignored("partition_activations", Kind::Bool, "false", "there are no tensor-parallel ranks to shard activations over"),
] };

//! Converts `offload_optimizer`, `offload_param` and `aio` to the options of the disk tier.

use std::path::PathBuf;

use zero_config::{Config, Dtype, OffloadDevice};
use zero_partition::passes::OffloadOptions;
use zero_partition::{DiskOptions, TierOptions};

/// Number of elements of a tile, the unit of an offloaded update, with `sub_group_size: auto`. A tile has 4 MiB of each
/// state. That is large enough for a disk's full bandwidth, and small enough that four tiles take little memory
/// compared with a layer.
const TILE: usize = 1 << 20;

/// Selects the values that reside on disk.
pub(crate) fn tiers(config: &Config) -> TierOptions {
    let zero = &config.zero;
    let is_nvme = |device| device == OffloadDevice::Nvme;
    TierOptions {
        optimizer: is_nvme(zero.offload_optimizer.device),
        // `reproducible` keeps a binary tree of partial sums instead of one sum, so these gradients stay in memory.
        // Gradients in bf16 also stay in memory.
        gradients: (config.gradient_accumulation_steps == 1 || !config.training.reproducible)
            && config.gradient_dtype() == Dtype::F32,
        parameters: is_nvme(zero.offload_param.device),
        parameters_in_memory: zero.offload_param.max_in_cpu,
        sub_group_size: zero.sub_group_size.unwrap_or(TILE),
        // A smaller shard would still cost a whole I/O request.
        smallest: config.aio.block_size / 4,
    }
}

/// Returns the options of the pass that schedules transfers.
pub(crate) fn passes(config: &Config) -> OffloadOptions {
    let (optimizer, parameters) = (&config.zero.offload_optimizer, &config.zero.offload_param);
    OffloadOptions {
        shards: parameters.buffer_count,
        tiles: optimizer.buffer_count,
        reads_ahead: optimizer.pipeline_read,
        writes_behind: optimizer.pipeline_write,
    }
}

/// Returns the folders and the I/O options.
pub(crate) fn disk(config: &Config) -> DiskOptions {
    let (optimizer, parameters, aio) = (&config.zero.offload_optimizer, &config.zero.offload_param, &config.aio);
    let folder = |device, path: &Option<PathBuf>| path.clone().filter(|_| device == OffloadDevice::Nvme);
    DiskOptions {
        optimizer: folder(optimizer.device, &optimizer.nvme_path),
        parameters: folder(parameters.device, &parameters.nvme_path),
        aio: zero_tier::Options {
            block_size: aio.block_size,
            queue_depth: aio.queue_depth,
            single_submit: aio.single_submit,
            overlap_events: aio.overlap_events,
            intra_op_parallelism: aio.intra_op_parallelism,
            ..zero_tier::Options::default()
        },
    }
}

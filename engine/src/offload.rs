//! What lives on a disk: from `offload_optimizer`, `offload_param` and `aio` to what the layers below want to be told.

use std::path::PathBuf;

use zero_config::{Config, OffloadDevice};
use zero_partition::passes::OffloadOptions;
use zero_partition::{DiskOptions, TierOptions};

/// Elements of a tile where `sub_group_size` is `auto`: 4 MiB of each state, with which a disk is at its full rate, and few enough that
/// four of them are little beside a layer.
const TILE: usize = 1 << 20;

/// What lives on a disk.
pub(crate) fn tiers(config: &Config) -> TierOptions {
    let zero = &config.zero;
    let is_nvme = |device| device == OffloadDevice::Nvme;
    TierOptions {
        optimizer: is_nvme(zero.offload_optimizer.device),
        // A tree of partial sums is not one sum: it stays in memory.
        gradients: config.gradient_accumulation_steps == 1 || !config.training.reproducible,
        parameters: is_nvme(zero.offload_param.device),
        parameters_in_memory: zero.offload_param.max_in_cpu,
        sub_group_size: zero.sub_group_size.unwrap_or(TILE),
        // What is smaller than one request would cost a whole one.
        smallest: config.aio.block_size / 4,
    }
}

/// How it moves.
pub(crate) fn passes(config: &Config) -> OffloadOptions {
    let (optimizer, parameters) = (&config.zero.offload_optimizer, &config.zero.offload_param);
    OffloadOptions {
        shards: parameters.buffer_count,
        tiles: optimizer.buffer_count,
        reads_ahead: optimizer.pipeline_read,
        writes_behind: optimizer.pipeline_write,
    }
}

/// Where, and how it is read and written.
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

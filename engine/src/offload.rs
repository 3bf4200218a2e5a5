//! What lives on a disk: from `offload_optimizer`, `offload_param` and `aio` to what the layers below want to be told.

use std::collections::BTreeSet;
use std::path::PathBuf;

use zero_config::{Compute, Config, OffloadDevice};
use zero_model::Model;
use zero_partition::passes::OffloadOptions;
use zero_partition::{DiskOptions, Layout, TierOptions, disk_bytes};
use zero_pipeline::{Coordinates, Instruction, Item, LayerId, Program, Stages, Tier, Tiers};

use crate::costs::forms::Table;
use crate::engine::Engine;
use crate::error::Error;
use crate::executor::kept::KeptOnDisk;
use crate::settings::Settings;
use crate::words::bytes;

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

/// Whether the folders can be written to and have room for the files of all ranks, which are on this machine.
///
/// # Errors
/// The key of the folder that cannot or has not.
pub fn check_space(layout: &Layout, stages: &Stages, settings: &Settings) -> Result<(), Error> {
    let disk = &settings.zero.disk;
    if !layout.uses_disk() {
        return Ok(());
    }
    let (width, states) = (settings.dtype.size_in_bytes(), settings.zero.optimizer.states().len());
    let of_rank = |(stage, replica)| disk_bytes(layout, stages, Coordinates { stage, replica }, width, states);
    let ranks = (0..stages.count()).flat_map(|stage| (0..layout.ranks()).map(move |replica| (stage, replica)));
    let (optimizer, parameters) =
        ranks.map(of_rank).fold((0, 0), |sum, bytes| (sum.0 + bytes.optimizer, sum.1 + bytes.parameters));
    let mut folders = vec![("offload_optimizer", &disk.optimizer, optimizer)];
    match (&disk.optimizer, &disk.parameters) {
        // One folder has room for both.
        (Some(one), Some(other)) if one == other => folders[0].2 += parameters,
        _ => folders.push(("offload_param", &disk.parameters, parameters)),
    }
    for (section, folder, bytes) in folders {
        let Some(folder) = folder else { continue };
        zero_tier::check(folder, bytes).map_err(|error| {
            let key = format!("zero_optimization.{section}.nvme_path");
            Error::setting(&key, error.to_string(), error.help())
        })?;
    }
    Ok(())
}

/// The file of inputs that are kept for layers to be run again, if they wait on a disk.
///
/// # Errors
/// What the disk says, and a model of whose layers only a run can tell what they take.
pub(crate) fn kept(
    config: &Config,
    settings: &Settings,
    model: &Model,
    program: &Program,
) -> Result<Option<KeptOnDisk>, Error> {
    let Some(section) = &config.activation_checkpointing else { return Ok(None) };
    let items: BTreeSet<(LayerId, usize)> = program
        .instructions
        .iter()
        .filter_map(|instruction| match instruction {
            Instruction::Offload { item: Item::Activations { layer, micro_batch } } => Some((*layer, *micro_batch)),
            _ => None,
        })
        .collect();
    let (Some(folder), false) = (&section.nvme_path, items.is_empty()) else { return Ok(None) };
    let table = Table::of(config, model);
    let table = table.ok_or_else(|| {
        Error::setting(
            "activation_checkpointing.device",
            "how large the inputs of this model's layers are shows only when it runs, and room on the disk is made before",
            "leave the key out: inputs are kept in memory",
        )
    })?;
    let largest = items.iter().map(|&(layer, _)| table.inputs[layer]).max().unwrap_or(0);
    KeptOnDisk::new(folder, items.len(), largest, &settings.zero.disk.aio).map(Some)
}

/// What the user should know of where things live; nothing where all of it is in memory.
pub fn describe(engine: &Engine) -> Vec<String> {
    let mut lines = vec![];
    if let Some(used) = engine.zero().disk_use() {
        let segments = engine.zero().layout().segments();
        let lives = |tier: fn(&Tiers) -> Tier| segments.iter().any(|segment| tier(&segment.tiers) == Tier::Nvme);
        let mut what = vec![];
        if lives(|tiers| tiers.optimizer) {
            what.push("optimizer state");
        }
        if lives(|tiers| tiers.gradients) {
            what.push("gradients");
        }
        if lives(|tiers| tiers.parameters) {
            what.push("parameters");
        }
        let disk = &engine.settings.zero.disk;
        let mut folders: Vec<String> =
            [&disk.optimizer, &disk.parameters].into_iter().flatten().map(|f| f.display().to_string()).collect();
        folders.dedup();
        lines.push(format!("disk: {} of rank 0 in {}: {}", bytes(used.bytes), folders.join(" and "), what.join(", ")));
        lines.extend(used.notices);
        let elements = engine.zero().layout().elements();
        if lives(|tiers| tiers.parameters) && engine.config().zero.stage3_max_reuse_distance >= elements {
            let why =
                "by stage3_max_reuse_distance, a layer's parameters stay in memory from its forward to its backward";
            lines.push(format!("{why}; with 0 only those in use do"));
        }
    }
    let disk = &engine.settings.zero.disk;
    if engine.zero().disk_use().is_none() && (disk.optimizer.is_some() || disk.parameters.is_some()) {
        let least = bytes(engine.config().aio.block_size as u64);
        lines.push(format!(
            "disk: nothing of rank 0 goes there; what is smaller than aio.block_size, {least}, stays in memory"
        ));
    }
    if let Some(kept) = &engine.kept {
        lines.push("disk: inputs that are kept for layers to be run again".to_string());
        lines.extend(kept.notices().iter().cloned());
    }
    let sections = on_host(engine.config());
    if !sections.is_empty() && engine.config().training.device == Compute::Cpu {
        let device = "the memory of this machine is the device's";
        lines.push(format!("{}: `device: cpu` changes nothing, {device}", sections.join(", ")));
    }
    lines
}

/// Sections that ask for the memory of the host, which here is where everything lies anyway.
fn on_host(config: &Config) -> Vec<&'static str> {
    let zero = &config.zero;
    let checkpointing = config.activation_checkpointing.as_ref().map_or(OffloadDevice::None, |c| c.device);
    [
        ("offload_optimizer", zero.offload_optimizer.device),
        ("offload_param", zero.offload_param.device),
        ("activation_checkpointing", checkpointing),
    ]
    .into_iter()
    .filter(|(_, device)| *device == OffloadDevice::Cpu)
    .map(|(section, _)| section)
    .collect()
}

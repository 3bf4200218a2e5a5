//! Describes offloaded state in the lines that a run prints when it starts.

use zero_config::{Compute, Config, OffloadDevice};
use zero_engine::Engine;
use zero_engine::format::bytes;
use zero_pipeline::{Tier, Tiers};

/// Returns lines about the location of offloaded state. Returns none if nothing is offloaded.
pub(crate) fn describe(engine: &Engine) -> Vec<String> {
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
        let disk = &engine.settings().zero.disk;
        let mut folders: Vec<String> =
            [&disk.optimizer, &disk.parameters].into_iter().flatten().map(|f| f.display().to_string()).collect();
        folders.dedup();
        lines.push(format!("disk: {} of rank 0 in {}: {}", bytes(used.bytes), folders.join(" and "), what.join(", ")));
        lines.extend(used.notices);
        let elements = engine.zero().layout().elements();
        if lives(|tiers| tiers.parameters) && engine.config().zero.stage3_max_reuse_distance >= elements {
            let why = "a layer's parameters stay in memory from its forward to its backward";
            lines.push(format!("{why}; set stage3_max_reuse_distance to 0 to keep only the parameters in use"));
        }
    }
    let disk = &engine.settings().zero.disk;
    if engine.zero().disk_use().is_none() && (disk.optimizer.is_some() || disk.parameters.is_some()) {
        let least = bytes(engine.config().aio.block_size as u64);
        lines.push(format!(
            "disk: rank 0 offloads nothing, because segments smaller than aio.block_size ({least}) stay in memory"
        ));
    }
    if let Some(used) = engine.offloaded_inputs() {
        lines.push(format!("disk: {} of rank 0 for checkpointed activations", bytes(used.bytes)));
        lines.extend(used.notices);
    }
    let sections = on_host(engine.config());
    if !sections.is_empty() && engine.config().training.device == Compute::Cpu {
        let device = "because training runs on the CPU";
        lines.push(format!("{}: `device: cpu` has no effect, {device}", sections.join(", ")));
    }
    lines
}

/// Returns the sections that place state in host memory. With `training.device: cpu` they have no effect.
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

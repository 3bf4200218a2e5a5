//! `activation_checkpointing`: which activations the forward discards and the backward recomputes.

use std::path::PathBuf;

use serde::Serialize;

use crate::config::offload::has_path;
use crate::config::{LayerPattern, OffloadDevice};
use crate::reader::Resolver;

/// `activation_checkpointing`: keeps the inputs of some layers and recomputes everything between them in the
/// backward.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivationCheckpointing {
    /// Which layers' inputs are kept.
    pub spacing: CheckpointSpacing,
    /// Patterns of layer names. Only layers that match one of them are recomputed; `None` recomputes every layer
    /// that saves memory by it.
    pub layers: Option<Vec<LayerPattern>>,
    /// Where kept inputs are stored until the backward.
    pub device: OffloadDevice,
    /// Folder of the files, relative to the working directory. Set if the device is [`OffloadDevice::Nvme`].
    pub nvme_path: Option<PathBuf>,
}

/// Which layers' inputs are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointSpacing {
    /// The input of every n-th layer; 1 keeps the input of each layer.
    Interval(usize),
    /// This many inputs, at equal distances.
    Number(usize),
}

const SECTION: &str = "activation_checkpointing";

impl ActivationCheckpointing {
    /// Reads the section. Returns `None` if the section is missing or switched off.
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Option<Self> {
        if !resolver.has_section(SECTION) {
            return None;
        }
        let mut keys = resolver.section(SECTION);
        if !keys.bool("enabled") {
            return None;
        }
        let (interval, number) = (keys.optional_int("interval"), keys.optional_int("number_checkpoints"));
        let layers = keys.texts("layers");
        let (on_host, device) = (keys.optional_bool("cpu_checkpointing"), keys.optional_choice("device"));
        let nvme_path = keys.optional_path("nvme_path");
        if interval.is_some() && number.is_some() {
            let message =
                format!("`{SECTION}.interval` and `{SECTION}.number_checkpoints` both say which inputs are kept");
            contradiction(["interval", "number_checkpoints"], message, resolver);
        }
        if let (Some(on_host), Some(device)) = (on_host, device)
            && on_host != (device == OffloadDevice::Cpu)
            // `cpu_checkpointing: false` does not rule out files.
            && (on_host || device == OffloadDevice::Cpu)
        {
            let message = format!("`{SECTION}.cpu_checkpointing: {on_host}` contradicts `device: {device}`");
            contradiction(["cpu_checkpointing", "device"], message, resolver);
        }
        let host = if on_host == Some(true) { OffloadDevice::Cpu } else { OffloadDevice::None };
        let device = device.unwrap_or(host);
        has_path(SECTION, device, nvme_path.is_some(), resolver);
        Some(Self {
            spacing: number.map_or(CheckpointSpacing::Interval(interval.unwrap_or(1)), CheckpointSpacing::Number),
            // The schema's check has already reported invalid patterns.
            layers: layers.map(|layers| layers.iter().filter_map(|layer| LayerPattern::new(layer).ok()).collect()),
            device,
            nvme_path,
        })
    }
}

fn contradiction(names: [&str; 2], message: String, resolver: &mut Resolver<'_>) {
    let paths = names.map(|name| format!("{SECTION}.{name}"));
    let help = "keep one of the two".to_string();
    resolver.contradiction(&paths.each_ref().map(String::as_str), message, Some(help));
}

/// Serialises the section with its keys in `ds.yaml`.
impl Serialize for ActivationCheckpointing {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (interval, number) = match self.spacing {
            CheckpointSpacing::Interval(interval) => (Some(interval), None),
            CheckpointSpacing::Number(number) => (None, Some(number)),
        };
        serde_json::json!({
            "enabled": true,
            "interval": interval,
            "number_checkpoints": number,
            "layers": self.layers,
            "cpu_checkpointing": self.device == OffloadDevice::Cpu,
            "device": self.device,
            "nvme_path": self.nvme_path.as_ref().map(|path| path.to_string_lossy()),
        })
        .serialize(serializer)
    }
}

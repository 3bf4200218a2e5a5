//! `activation_checkpointing`: which activations the forward discards and the backward recomputes.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::Choice as _;
use crate::config::offload::has_path;
use crate::config::{LayerPattern, OffloadDevice};
use crate::read::reader::{Find, Read as _, Reader, Resolver};
use crate::schema::*;
use crate::table::section;

/// `activation_checkpointing`: keeps the inputs of some layers and recomputes everything between them in the
/// backward.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivationCheckpointing {
    /// Which layers' inputs are kept.
    pub spacing: CheckpointSpacing,
    /// Patterns of layer names. Only layers that match one of them are recomputed; `None` recomputes every layer whose
    /// recomputation saves memory.
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
    /// This number of inputs, at equal distances.
    Number(usize),
}

section! {
    /// The section as written.
    #[derive(Debug, Clone, Serialize)]
    pub(crate) struct Written(keys) in "activation_checkpointing", off while enabled is ["false"] {
        pub enabled: bool = now(Kind::Bool, "true", "Recompute activations; adding the section is enough to enable it (in DeepSpeed the program must also call it)");
        pub interval: Option<usize> = now(COUNT, "= 1, unless number_checkpoints is given", "Keep the input of every n-th layer; the activations between two kept inputs are recomputed in the backward pass");
        pub number_checkpoints: Option<usize> = now(COUNT, "null", "Number of layer inputs to keep, evenly spaced, instead of interval");
        pub layers: Option<Vec<LayerPattern>> = now(Kind::Patterns, "= every layer whose recomputation saves memory", "Case-insensitive regular expressions: only layers whose name matches one of them are recomputed");
        pub cpu_checkpointing: Option<bool> = now(Kind::Bool, "= true when device is cpu", "DeepSpeed's name for `device: cpu`");
        pub device: Option<OffloadDevice> = now(OffloadDevice::KIND, "= cpu when cpu_checkpointing is true, else none", "Where kept inputs are stored until the backward pass: none, in device memory; cpu, in host memory (no change on a machine without a GPU); nvme, in files");
        #[serde(serialize_with = "crate::write::yaml_out::path")]
        pub nvme_path: Option<PathBuf> = key(Kind::Path, "null", "Folder for the files, on a local disk; relative to the working directory; required for nvme");
        = ignored("contiguous_memory_optimization", Kind::Bool, "false", "each kept input has its own buffer");
        = ignored("synchronize_checkpoint_boundary", Kind::Bool, "false", "the key only adds waits for the device and does not change results");
        = ignored("profile", Kind::Bool, "false", "`training.trace` shows the time of every part of a step");
        = ignored("partition_activations", Kind::Bool, "false", "between layers, tensor-parallel ranks always hold only slices of the activations");
    }
}

/// Also returns `None` if the section is switched off.
impl Find for ActivationCheckpointing {
    fn find(keys: &mut Reader<'_, '_>, name: &'static str) -> Option<Self> {
        let written = Written::find(keys, name).filter(|written| written.enabled)?;
        let host = if written.cpu_checkpointing == Some(true) { OffloadDevice::Cpu } else { OffloadDevice::None };
        Some(Self {
            spacing: match (written.number_checkpoints, written.interval) {
                (Some(number), _) => CheckpointSpacing::Number(number),
                (None, interval) => CheckpointSpacing::Interval(interval.unwrap_or(1)),
            },
            layers: written.layers,
            device: written.device.unwrap_or(host),
            nvme_path: written.nvme_path,
        })
    }
}

impl ActivationCheckpointing {
    /// Checks the keys against each other.
    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        let written = Written::read(&mut resolver.top(), Written::PATH);
        let mut contradiction = |paths: [&str; 2], message: String| {
            resolver.contradiction(&paths, message, Some("keep one of the two".to_string()));
        };
        if written.interval.is_some() && written.number_checkpoints.is_some() {
            let paths = [Written::interval, Written::number_checkpoints];
            contradiction(paths, format!("`{}` and `{}` both set which inputs are kept", paths[0], paths[1]));
        }
        if let (Some(on_host), Some(device)) = (written.cpu_checkpointing, written.device)
            && on_host != (device == OffloadDevice::Cpu)
            // `cpu_checkpointing: false` still allows `device: nvme`.
            && (on_host || device == OffloadDevice::Cpu)
        {
            let paths = [Written::cpu_checkpointing, Written::device];
            contradiction(paths, format!("`{}: {on_host}` contradicts `device: {device}`", paths[0]));
        }
        has_path((Written::device, self.device), (Written::nvme_path, &self.nvme_path), resolver);
    }
}

/// Serialises the section with its keys in `ds.yaml`.
impl Serialize for ActivationCheckpointing {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (interval, number_checkpoints) = match self.spacing {
            CheckpointSpacing::Interval(interval) => (Some(interval), None),
            CheckpointSpacing::Number(number) => (None, Some(number)),
        };
        let cpu_checkpointing = Some(self.device == OffloadDevice::Cpu);
        let (layers, device, nvme_path) = (self.layers.clone(), Some(self.device), self.nvme_path.clone());
        Written { enabled: true, interval, number_checkpoints, layers, cpu_checkpointing, device, nvme_path }
            .serialize(serializer)
    }
}

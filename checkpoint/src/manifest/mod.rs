//! `manifest.json`: the contents of a checkpoint.

mod local;
mod parameter;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use zero_optim::{Average, AverageSums, ScheduleFree};

pub(crate) use local::MOMENTUM;
pub use local::{LocalPiece, LocalSteps};
pub use parameter::{CutEntry, ParameterEntry, PieceEntry};
pub(crate) use parameter::{QuantizedEntry, is_zero};

use zero_model::ops::QuantizedFormat;

use crate::error::CheckpointError;

/// The name of the file. A folder with this file is a complete checkpoint, because the file is written last and removed
/// first.
pub const MANIFEST: &str = "manifest.json";
/// The value of `format`.
pub const FORMAT: &str = "zero-train-checkpoint";
/// The value of `version`: the only format version that this library writes and reads.
pub const VERSION: u32 = 3;
/// Maximum size of a manifest in bytes. Larger files are rejected before parsing.
const MAX_BYTES: u64 = 256 << 20;
/// The manifest's last key, with the line break before it. Its value is the CRC-32 of all bytes before that line break.
const SEAL: &str = "\n  \"crc32\": ";

/// The manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always [`FORMAT`].
    pub format: String,
    /// Always [`VERSION`].
    pub version: u32,
    /// Number of optimizer steps of the run, including skipped ones.
    pub step: u64,
    /// Number of optimizer steps taken, excluding skipped ones. Adam's bias correction uses it.
    pub updates: u64,
    /// Number of samples trained on, from which the data loader resumes.
    pub samples: u64,
    /// State of the dynamic loss scale in f16 training. The key is left out without a dynamic loss scale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// The sums of a schedule-free optimizer over its steps. With this optimizer, the weights to evaluate are the sum
    /// of a parameter and its state `x_minus_y`. Other optimizers leave the key out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_free: Option<ScheduleFreeSums>,
    /// The replicates of a run with local steps. Each has optimizer states of its own. The key is left out without
    /// local steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_steps: Option<LocalSteps>,
    /// Number of ranks that wrote the checkpoint.
    pub world_size: usize,
    /// ZeRO stage of the run that wrote the checkpoint.
    pub zero_stage: u8,
    /// Names of the states of all optimizers.
    pub states: Vec<String>,
    /// Other state of the engine: early stopping, seeds.
    pub engine: serde_json::Value,
    /// Model and tokenizer settings of the configuration, used by an export. Null for a caller-defined model.
    pub config: serde_json::Value,
    /// Values of the model's buffers (running statistics) by name, row-major. The key is left out if the model has no
    /// buffers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub buffers: BTreeMap<String, Vec<f32>>,
    /// One shard per rank.
    pub shards: Vec<ShardEntry>,
    /// Parameters by name.
    pub parameters: BTreeMap<String, ParameterEntry>,
}

/// State of a dynamic loss scale.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// Factor for the next step's loss.
    pub scale: f64,
    /// Number of steps so far, including skipped ones.
    pub steps: u64,
    /// The last step whose gradients overflowed, counted from 1, or 0 if none did.
    pub last_overflow: u64,
    /// Number of overflows left until the scale is halved.
    pub hysteresis: u64,
}

/// Sums over the steps of a schedule-free optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleFreeSums {
    /// Sum of the weights of all iterates.
    pub weights: f64,
    /// Largest learning rate.
    pub largest_lr: f64,
}

impl ScheduleFreeSums {
    /// Returns the sums if `states` includes the state of a schedule-free optimizer.
    pub(crate) fn of(states: &[&str], AverageSums { weights, largest_lr }: AverageSums) -> Option<Self> {
        states.contains(&ScheduleFree::OFFSET).then_some(Self { weights, largest_lr })
    }
}

/// The file of one shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// File name in the checkpoint's folder.
    pub file: String,
    /// Size in bytes.
    pub bytes: u64,
    /// CRC-32 (IEEE) of the whole file.
    pub crc32: u32,
}

/// Returns the name of a piece's tensor in its shard.
pub(crate) fn tensor_name(parameter: &str, start: usize, state: Option<&str>) -> String {
    match state {
        None => format!("{parameter}@{start}"),
        Some(state) => format!("{parameter}@{start}/{state}"),
    }
}

impl Manifest {
    /// Returns the name, the element type and count, and the CRC-32 of each tensor of a shard, in file order.
    pub(crate) fn tensors(&self, shard: usize) -> impl Iterator<Item = (String, (Dtype, usize), u32)> {
        self.parameters.iter().flat_map(move |(name, parameter)| {
            let of_pieces = parameter.pieces.iter().filter(move |piece| piece.shard == shard).flat_map(move |piece| {
                let names = parameter.own_states(&self.states);
                let states = std::iter::once(None).chain((0..names.len()).map(Some));
                let tensor = move |(state, &crc32): (Option<usize>, &u32)| {
                    let held = (parameter.dtype(), parameter.stored(state, piece.start..piece.end).len());
                    (tensor_name(name, piece.start, state.map(|state| names[state].as_str())), held, crc32)
                };
                states.zip(&piece.crc32).map(tensor)
            });
            let local = parameter.local.iter().filter(move |piece| piece.shard == shard).map(move |piece| {
                let held = (parameter.dtype(), piece.stored(parameter, &self.states).len());
                (piece.tensor_name(name), held, piece.crc32)
            });
            of_pieces.chain(local)
        })
    }

    /// Reads and checks the manifest of a checkpoint's folder.
    ///
    /// # Errors
    /// Fails if the manifest is missing, has a different version, is damaged or is inconsistent.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(MANIFEST);
        let size = std::fs::metadata(&path).map_err(CheckpointError::io(&path))?.len();
        if size > MAX_BYTES {
            return Err(CheckpointError::damaged(
                &path,
                format!("the manifest has {size} bytes, more than the maximum of {MAX_BYTES}"),
            ));
        }
        let text = std::fs::read(&path).map_err(CheckpointError::io(&path))?;
        Self::parse(&text).map_err(|reason| CheckpointError::damaged(&path, reason))
    }

    /// Writes the manifest into a checkpoint's folder and syncs it.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), CheckpointError> {
        let path = folder.join(MANIFEST);
        let text = self.text().map_err(|e| CheckpointError::damaged(&path, e.to_string()))?;
        let mut file = File::create(&path).map_err(CheckpointError::io(&path))?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(CheckpointError::io(&path))
    }

    /// Returns the manifest as JSON. Its last key is the checksum of everything before it.
    pub(crate) fn text(&self) -> serde_json::Result<String> {
        let text = serde_json::to_string_pretty(self)?;
        let body = format!("{},", text.trim_end_matches("\n}"));
        Ok(format!("{body}{SEAL}{}\n}}\n", crc32fast::hash(body.as_bytes())))
    }

    /// Appends the checksum line of a manifest to any bytes.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
        [body, format!("{SEAL}{}\n}}\n", crc32fast::hash(body)).as_bytes()].concat()
    }

    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        let seal = text.windows(SEAL.len()).rposition(|window| window == SEAL.as_bytes());
        let Some((body, sealed)) = seal.map(|at| text.split_at(at)) else {
            // A text without a checksum may be a manifest of a different version. In that case an error about the
            // version is more useful than an error about the checksum.
            let other: Version = serde_json::from_slice(text).map_err(|e| e.to_string())?;
            other.check()?;
            return Err("the last key is not `crc32`".into());
        };
        if sealed != format!("{SEAL}{}\n}}\n", crc32fast::hash(body)).as_bytes() {
            return Err("the checksum does not match".into());
        }
        let body = [body.strip_suffix(b",").unwrap_or(body), b"}"].concat();
        let version: Version = serde_json::from_slice(&body).map_err(|e| e.to_string())?;
        version.check()?;
        let manifest: Self = serde_json::from_slice(&body).map_err(|e| e.to_string())?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Returns the state that is added to a trainable parameter for evaluation: the first state of a schedule-free
    /// optimizer.
    pub(crate) fn offset(&self) -> Option<&str> {
        self.schedule_free.and_then(|_| self.states.first()).map(String::as_str)
    }

    fn check(&self) -> Result<(), String> {
        if self.schedule_free.is_some() && self.offset() != Some(ScheduleFree::OFFSET) {
            return Err(format!("the first state is not `{}`", ScheduleFree::OFFSET));
        }
        for (rank, shard) in self.shards.iter().enumerate() {
            if shard.file != shard_file(rank, self.shards.len()) {
                return Err(format!("shard {rank} is named `{}`", shard.file));
            }
        }
        if self.local_steps.as_ref().is_some_and(|local| local.updates.is_empty()) {
            return Err("`local_steps` has no replicate".into());
        }
        for (name, parameter) in &self.parameters {
            let elements = parameter.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).unwrap_or(0);
            if let Some(values) = &parameter.state_values {
                // The first state may be the average of the weights, or be added to the weights for evaluation. In both
                // cases it has one value per element.
                let is_of_weights = self.states.first().is_some_and(|state| state == Average::STATE);
                let is_of_weights = is_of_weights || self.schedule_free.is_some();
                let names = parameter.states.as_ref().unwrap_or(&self.states);
                if values.len() > names.len() || is_of_weights && values.first() != Some(&elements) {
                    return Err(format!(
                        "the sizes of the optimizer states of `{name}` do not match the states of the run"
                    ));
                }
            }
            let own = || parameter.states.iter().flatten();
            let names: BTreeSet<&String> = own().collect();
            if names.len() < own().count() || !names.iter().all(|name| self.states.contains(name)) {
                return Err(format!("`{name}` has optimizer states that the run does not have"));
            }
            if parameter.quantized.is_some() && !parameter.frozen {
                return Err(format!("`{name}` is quantized and not frozen"));
            }
            let elements = parameter.quantized.as_ref().map_or(elements, |quantized| quantized.bytes);
            let has_scales = parameter.quantized.as_ref().is_some_and(|of| of.format == QuantizedFormat::Int8.name());
            let is_wrong = |cut: &CutEntry| {
                elements == 0 || cut.ranks == 0 || cut.ranks > self.shards.len() || cut.shared > 0 && !has_scales
            };
            if parameter.cut.as_ref().is_some_and(is_wrong) {
                return Err(format!("`cut` of `{name}` does not match the parameter or the number of shards"));
            }
            let slices = parameter.slices(elements)?;
            let (mut slice, mut next) = (0, 0);
            for piece in &parameter.pieces {
                while next == *slices.get(slice).unwrap_or(&usize::MAX) {
                    (slice, next) = (slice + 1, 0);
                }
                let is_next = (piece.slice, piece.start) == (slice, next) && piece.end > piece.start;
                if !is_next || slice >= slices.len() || piece.end > slices[slice] || piece.shard >= self.shards.len() {
                    return Err(format!("the pieces of `{name}` have a gap or an overlap at element {next}"));
                }
                let needed = parameter.tensors_per_piece(self.states.len());
                if piece.crc32.len() != needed {
                    let found = piece.crc32.len();
                    return Err(format!("the piece of `{name}` at element {next} has {found} of {needed} checksums"));
                }
                next = piece.end;
            }
            let covered = parameter.pieces.iter().map(|piece| piece.end - piece.start).sum::<usize>();
            let stored = slices.iter().try_fold(0usize, |sum, &slice| sum.checked_add(slice));
            if stored != Some(covered) {
                let stored = stored.unwrap_or(usize::MAX);
                return Err(format!("the pieces of `{name}` cover {covered} of {stored} elements"));
            }
            let of_run = (self.states.as_slice(), slices.as_slice(), self.shards.len());
            local::check((name, parameter), self.local_steps.as_ref(), of_run)?;
        }
        Ok(())
    }
}

/// The keys that identify the version. They are parsed first, because a manifest of a different version may have other
/// keys besides these.
#[derive(Deserialize)]
struct Version {
    format: String,
    version: u32,
}

impl Version {
    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("the format is `{}`, not `{FORMAT}`", self.format));
        }
        if self.version != VERSION {
            return Err(format!("the manifest has version {}; this program reads version {VERSION}", self.version));
        }
        Ok(())
    }
}

/// Returns the file name of a rank's shard.
pub(crate) fn shard_file(rank: usize, ranks: usize) -> String {
    format!("shard-{rank:05}-of-{ranks:05}.safetensors")
}

//! Suggests changes that make a configuration fit into memory. Small changes come first, and each change is planned
//! like the configuration itself.

use std::fmt;

use zero_config::{Config, Model, OffloadDevice};

use crate::memory::{Limit, MemoryKind};
use crate::plan::MemoryPlan;
use zero_engine::Error;
use zero_engine::costs::Prediction;
use zero_engine::format::bytes;

/// A change that makes a configuration fit.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// The changed settings, in the syntax of `--set`.
    pub settings: Vec<String>,
    /// Largest peak of any rank after the change, in bytes, in the memory where its layers compute (host or GPU).
    pub peak_bytes: u64,
    /// Maximum number of bytes that a rank needs on its disk after the change.
    pub disk_bytes: u64,
    /// Predicted seconds per step, or a description of the values missing from the cost table; `None` without a table.
    pub seconds: Option<Result<f64, String>>,
}

/// Maximum number of suggestions. Later candidates cost more, so they are not needed.
const SHOWN: usize = 4;

/// Finds the smallest changes to `config` with which no rank exceeds any of the limits. `change` adds settings, in the
/// syntax of `--set`, and returns the resulting configuration.
///
/// # Errors
/// Fails if a changed configuration is valid but cannot be planned.
pub fn advice(
    config: &Config,
    limits: &[Limit],
    change: impl Fn(&[String]) -> Result<Config, Error>,
    memory_plan: impl Fn(&Config) -> Result<MemoryPlan, Error>,
) -> Result<Vec<Advice>, Error> {
    let mut found = vec![];
    for settings in candidates(config) {
        let includes = |found: &Advice| found.settings.iter().all(|setting| settings.contains(setting));
        let cuts = |settings: &[String]| settings.iter().any(|setting| setting.starts_with(TENSOR));
        if found.iter().any(|found| includes(found) || cuts(&found.settings) && cuts(&settings)) {
            // A subset of these settings, or a smaller tensor-parallel degree, already fits.
            continue;
        }
        // Skip settings that contradict the file.
        let Ok(changed) = change(&settings) else { continue };
        let memory_plan = memory_plan(&changed)?;
        if memory_plan.exceeded(limits).is_none() {
            let plan = memory_plan.plan()?;
            if plan.disk_bytes() == 0 && settings.iter().any(|setting| setting.ends_with(".device=nvme")) {
                // The plan offloads nothing to the disk, so the configuration already fits with the other settings.
                continue;
            }
            let of =
                |time: &Result<Prediction, String>| time.as_ref().map(|time| time.step_seconds).map_err(Clone::clone);
            found.push(Advice {
                settings,
                peak_bytes: plan.peak_in(MemoryKind::of_layers(config)),
                disk_bytes: plan.disk_bytes(),
                seconds: plan.prediction().map(of),
            });
        }
        if found.len() == SHOWN {
            break;
        }
    }
    Ok(found)
}

/// A different number of ranks with which no rank exceeds its limit.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranks {
    /// The number of ranks.
    pub ranks: usize,
    /// Further settings to change, in the syntax of `--set`.
    pub settings: Vec<String>,
    /// Largest peak of any rank in bytes, in the memory where its layers compute.
    pub peak_bytes: u64,
    /// The limit per rank in the same memory, with this number of ranks.
    pub limit: u64,
}

/// Factors by which the number of ranks is increased. If 1024 times as many ranks do not help, more will not help
/// either.
const MORE: [usize; 4] = [2, 8, 64, 1024];
/// Maximum number of ranks to suggest.
const MOST: usize = 1 << 16;

/// Finds a number of ranks that fits, for a configuration that does not fit with any change of settings. If all ranks
/// share one machine's memory, `shares` returns the limits of a rank for a given number of ranks. In that case, first
/// tries fewer ranks, because each rank's share grows. Then tries more ranks on additional machines, each rank with the
/// same `limits`. `change` adds settings and returns the resulting configuration for a given number of ranks. Returns
/// `None` if no number of ranks helps, because a part that cannot be sharded is too large.
pub fn other_ranks(
    config: &Config,
    limits: &[Limit],
    shares: Option<&dyn Fn(usize) -> Vec<Limit>>,
    change: impl Fn(&[String], usize) -> Result<Config, Error>,
    memory_plan: impl Fn(&Config) -> Result<MemoryPlan, Error>,
) -> Option<Ranks> {
    let now = config.world_size;
    // Skip numbers of ranks that contradict the file or its batch size.
    let memory = MemoryKind::of_layers(config);
    let fits = |settings: &[String], ranks: usize, limits: &[Limit]| {
        let plan = memory_plan(&change(settings, ranks).ok()?).ok()?;
        let limit = limits.iter().find(|limit| limit.memory == memory).map_or(u64::MAX, |limit| limit.bytes);
        let found = || Ranks { ranks, settings: settings.to_vec(), peak_bytes: plan.peak_in(memory), limit };
        plan.exceeded(limits).is_none().then(found)
    };
    if let Some(shares) = shares {
        let mut fewer = std::iter::successors(Some(now / 2), |ranks| Some(ranks / 2)).take_while(|&ranks| ranks > 0);
        if let Some(found) = fewer.find_map(|ranks| fits(&[], ranks, &shares(ranks))) {
            return Some(found);
        }
    }
    let three = if config.zero.stage.number() == 3 { vec![] } else { one(STAGE_3) };
    let recompute = one(RECOMPUTE);
    let late = [one(GATHERS_LATE), one(NO_PREFETCH)].concat();
    let least = halvings(config).pop().unwrap_or_default();
    let sparing = [vec![], three.clone(), recompute.clone(), [three, late, recompute, least].concat()];
    let mut more = MORE.iter().map(|more| now.saturating_mul(*more)).filter(|&ranks| ranks <= MOST);
    more.find_map(|ranks| sparing.iter().find_map(|settings| fits(settings, ranks, limits)))
}

const STAGE_3: &str = "zero_optimization.stage=3";
const GATHERS_LATE: &str = "zero_optimization.stage3_max_reuse_distance=0";
const NO_PREFETCH: &str = "zero_optimization.stage3_prefetch_bucket_size=0";
const RING: &str = "mesh.context_parallel_rotate_method=alltoall";
const SLICES: &str = "sequence_parallel_size";
const TENSOR: &str = "tensor_parallel.autotp_size";
const RECOMPUTE: &str = "activation_checkpointing.enabled=true";

fn one(setting: &str) -> Vec<String> {
    vec![setting.to_string()]
}

/// Returns the candidate changes, in order of their cost.
fn candidates(config: &Config) -> Vec<Vec<String>> {
    let stage = config.zero.stage.number();
    let shards = config.shard_group_size();
    let recompute = if config.activation_checkpointing.is_none() { one(RECOMPUTE) } else { vec![] };
    let higher: Vec<Vec<String>> = match shards {
        // A single rank has no other rank to shard with.
        1 => vec![],
        _ => (stage + 1..=3).map(|stage| vec![format!("zero_optimization.stage={stage}")]).collect(),
    };
    let smaller: Vec<Vec<String>> = halvings(config);
    let nvme = |section: &str| {
        vec![format!("zero_optimization.{section}.device=nvme"), format!("zero_optimization.{section}.nvme_path=.")]
    };
    let offloads = config.zero.offload_optimizer.device == OffloadDevice::Nvme;
    let three = if stage < 3 { one(STAGE_3) } else { vec![] };
    let state = if offloads {
        vec![]
    } else {
        [if stage == 0 { one("zero_optimization.stage=2") } else { vec![] }, nvme("offload_optimizer")].concat()
    };
    let gathers = one(GATHERS_LATE);
    let sparing = [gathers.clone(), one(NO_PREFETCH)].concat();
    let parameters =
        if config.zero.offload_param.device == OffloadDevice::Nvme { vec![] } else { nvme("offload_param") };
    let everything =
        [three.clone(), if offloads { vec![] } else { nvme("offload_optimizer") }, parameters, gathers.clone()]
            .concat();
    let least = smaller.last().cloned().unwrap_or_default();
    let tiles = tiles(config);
    // Ring attention sends the same bytes as a gather of keys and values, but holds fewer keys and values at a time.
    let gathers_keys = config.mesh.context_parallel_degree > 1 && !config.uses_ring_attention();
    let ring = if gathers_keys { one(RING) } else { vec![] };
    let mut all: Vec<Vec<String>> = vec![ring, tiles.clone(), recompute.clone(), [recompute.clone(), tiles].concat()];
    all.extend(smaller.iter().cloned());
    let spared = [gathers.clone(), sparing.clone(), [sparing.clone(), recompute.clone()].concat()];
    if stage == 3 {
        all.extend(spared.clone());
    }
    all.extend(shared_sequences(config));
    all.extend(higher.iter().cloned());
    all.extend(higher.iter().map(|higher| [higher.clone(), recompute.clone()].concat()));
    if !higher.is_empty() {
        all.extend(spared.iter().map(|spared| [three.clone(), spared.clone()].concat()));
    }
    all.push([three.clone(), gathers.clone(), recompute.clone(), least.clone()].concat());
    // A model that is smaller than the prefetch bucket would be gathered as a whole, so also try without prefetching.
    all.push([three.clone(), sparing.clone(), recompute.clone(), least.clone()].concat());
    all.extend(cut_layers(config));
    all.push(state.clone());
    all.push([state, recompute.clone()].concat());
    all.push(everything.clone());
    all.push([everything.clone(), recompute.clone()].concat());
    all.push([everything.clone(), one(NO_PREFETCH), recompute.clone()].concat());
    all.push([everything.clone(), recompute.clone(), least.clone()].concat());
    all.push([everything, one(NO_PREFETCH), recompute, least].concat());
    all.retain(|settings| !settings.is_empty());
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|settings| seen.insert(settings.clone()));
    all
}

/// Returns the setting that runs feed-forward networks in tiles with as many rows as the model's width, so that the
/// inner activations of one tile are about as large as a weight.
fn tiles(config: &Config) -> Vec<String> {
    let width = match &config.model {
        Some(Model::Gpt2(model)) if model.tiled_mlp_rows.is_none() => model.n_embd,
        Some(Model::Llama(model)) if model.tiled_mlp_rows.is_none() => model.hidden_size,
        _ => return vec![],
    };
    vec![format!("model.tiled_mlp_rows={}", width.next_multiple_of(zero_model::ops::TILE_UNIT))]
}

/// Returns settings with smaller and more micro-batches, for the same global batch.
fn halvings(config: &Config) -> Vec<Vec<String>> {
    let (mut size, mut count) = (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps);
    let mut all = vec![];
    while size > 1 && size.is_multiple_of(2) {
        (size, count) = (size / 2, count * 2);
        all.push(vec![
            format!("train_micro_batch_size_per_gpu={size}"),
            format!("gradient_accumulation_steps={count}"),
        ]);
    }
    all
}

/// Returns settings with more ranks that share each sequence, and more micro-batches, for the same global batch. Helps
/// if a single sample is too large. As long as the model has enough heads, ranks exchange heads; further ranks exchange
/// keys and values.
fn shared_sequences(config: &Config) -> Vec<Vec<String>> {
    if config.train_micro_batch_size_per_gpu > 1 {
        return vec![];
    }
    let (of_file, degree) = (config.sequence_parallel_size, config.mesh.context_parallel_degree);
    let (mut replicas, mut heads, mut queries) = (config.data_parallel_size(), of_file, degree);
    let mut count = config.gradient_accumulation_steps;
    let mut all = vec![];
    while replicas > 1 && replicas.is_multiple_of(2) {
        (replicas, count) = (replicas / 2, count * 2);
        match config.heads_of_a_rank() {
            Some((_, most)) if degree > 1 || 2 * heads > most => queries *= 2,
            _ => heads *= 2,
        }
        let mut settings = vec![];
        if heads > of_file {
            settings.push(format!("{SLICES}={heads}"));
        }
        if queries > degree {
            settings.push(format!("mesh.context_parallel_degree={queries}"));
        }
        if queries > 1 && !config.uses_ring_attention() {
            settings.push(RING.to_string());
        }
        settings.push(format!("gradient_accumulation_steps={count}"));
        all.push(settings);
    }
    all
}

/// Returns settings with more tensor-parallel ranks, and more micro-batches, for the same global batch. Helps if a
/// layer is too large.
fn cut_layers(config: &Config) -> Vec<Vec<String>> {
    let (mut replicas, mut parts) = (config.data_parallel_size(), config.tensor_size());
    let mut count = config.gradient_accumulation_steps;
    let mut all = vec![];
    while replicas > 1 && replicas.is_multiple_of(2) {
        (replicas, parts, count) = (replicas / 2, parts * 2, count * 2);
        let settings = [format!("{TENSOR}={parts}"), format!("gradient_accumulation_steps={count}")];
        all.push(settings.to_vec());
    }
    all
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<String> = self.settings.iter().map(|setting| format!("--set {setting}")).collect();
        write!(f, "{}: {} per rank", settings.join(" "), bytes(self.peak_bytes))?;
        if self.disk_bytes > 0 {
            write!(f, ", {} of disk per rank", bytes(self.disk_bytes))?;
        }
        match &self.seconds {
            None => Ok(()),
            Some(Ok(seconds)) => write!(f, ", {:.1} ms per step", seconds * 1e3),
            Some(Err(missing)) => write!(f, ", time unknown: {missing}"),
        }
    }
}

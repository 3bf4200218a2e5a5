//! Enumerates the configurations to try. For keys in `autotuning.space`, tries the values listed there; for other keys
//! that affect the step time, tries built-in values.
//!
//! Values that make no difference are skipped, for example a ZeRO stage with one replica, or a schedule with one
//! pipeline stage. The accumulation is adjusted so that the global batch size stays constant, unless the batch size is
//! itself a key to try.

mod batches;
mod meshes;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use zero_config::{Autotuning, Config, Dimension};

use super::correction::Setting;
use zero_engine::Error;

/// Maximum number of configurations to plan.
const MOST: usize = 20_000;

const RANKS: &str = "launcher.num_processes";
const STAGES: &str = "pipeline.stages";
const SLICES: &str = "sequence_parallel_size";
const CONTEXT: &str = "mesh.context_parallel_degree";
const ROTATE: &str = "mesh.context_parallel_rotate_method";
const TENSOR: &str = "tensor_parallel.autotp_size";
const SCHEDULE: &str = "pipeline.schedule";
const ZERO: &str = "zero_optimization.stage";
const BATCH: &str = "train_batch_size";
const MICRO: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATION: &str = "gradient_accumulation_steps";
const RECOMPUTE: &str = "activation_checkpointing.enabled";
const INTERVAL: &str = "activation_checkpointing.interval";
const OVERLAP: &str = "zero_optimization.overlap_comm";
const PREFETCH: &str = "zero_optimization.stage3_prefetch_bucket_size";
const REUSE: &str = "zero_optimization.stage3_max_reuse_distance";
const BUCKET: &str = "zero_optimization.reduce_bucket_size";
const STATE: &str = "zero_optimization.offload_optimizer.device";
const PARAMETERS: &str = "zero_optimization.offload_param.device";

/// The keys with built-in values.
const OURS: [&str; 15] = [
    RANKS,
    STAGES,
    SCHEDULE,
    ZERO,
    BATCH,
    MICRO,
    ACCUMULATION,
    RECOMPUTE,
    INTERVAL,
    OVERLAP,
    PREFETCH,
    REUSE,
    BUCKET,
    STATE,
    PARAMETERS,
];

/// A configuration to try.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The number of ranks.
    pub ranks: usize,
    /// The settings that differ from the user's file: key and value, in the syntax of `--set`.
    pub settings: Vec<(String, String)>,
}

/// The user's configuration and the tuning settings.
struct Space<'a> {
    base: &'a Config,
    tuning: &'a Autotuning,
    /// The values of the user's configuration, by path.
    values: BTreeMap<String, String>,
}

/// A partially decided configuration.
#[derive(Debug, Clone)]
struct Partial {
    ranks: usize,
    stages: usize,
    /// Number of ranks that share a sequence.
    slices: usize,
    /// Number of tensor-parallel ranks.
    tensor: usize,
    zero: String,
    settings: Vec<Setting>,
}

/// Returns all candidates; the first is the user's own configuration.
///
/// # Errors
/// Fails if there are more than [`MOST`] candidates.
pub(super) fn candidates(base: &Config, tuning: &Autotuning) -> Result<Vec<Candidate>, Error> {
    let values = base.leaves().into_iter().map(|(path, value)| (path, plain(&value).to_string())).collect();
    let space = Space { base, tuning, values };
    let mut all = vec![Candidate { ranks: base.world_size, settings: vec![] }];
    let mut seen: BTreeSet<(usize, Vec<Setting>)> = BTreeSet::from([(base.world_size, vec![])]);
    for partial in space.all()? {
        let settings = partial.settings.into_iter().filter(|(path, value)| space.differs(path, value));
        let settings: Vec<Setting> = settings.collect();
        if seen.insert((partial.ranks, settings.clone())) {
            all.push(Candidate { ranks: partial.ranks, settings });
        }
    }
    Ok(all)
}

impl Space<'_> {
    fn all(&self) -> Result<Vec<Partial>, Error> {
        type Choose<'s> = &'s dyn Fn(&Partial) -> Vec<Vec<Setting>>;
        let one = |path: &str, values: Vec<String>| -> Vec<Vec<Setting>> {
            values.into_iter().map(|value| vec![(path.to_string(), value)]).collect()
        };
        // Number of ranks of a pipeline stage.
        let ranks = |partial: &Partial| partial.ranks / partial.stages;
        let choices: [Choose<'_>; 9] = [
            &|p| one(SCHEDULE, self.where_it_matters(SCHEDULE, p.stages > 1, || self.schedules())),
            &|p| self.batches(ranks(p) / p.slices / p.tensor),
            &|_| self.recomputations(),
            &|p| one(OVERLAP, self.where_it_matters(OVERLAP, ranks(p) > 1, || vec!["true".into(), "false".into()])),
            &|p| {
                let matters = p.zero == "3" && ranks(p) > 1;
                one(REUSE, self.where_it_matters(REUSE, matters, || self.base_and(REUSE, &["0", "1000000000"])))
            },
            &|p| {
                let waits = p.settings.iter().any(|(path, value)| path == OVERLAP && value == "false");
                let matters = p.zero == "3" && ranks(p) > 1 && !waits;
                one(PREFETCH, self.where_it_matters(PREFETCH, matters, || self.base_and(PREFETCH, &["0"])))
            },
            &|p| {
                // A large bucket delays the reductions of its segments, whereas `auto` reduces layer by layer. Either
                // can be faster.
                let matters = p.zero != "3" && ranks(p) > 1;
                one(BUCKET, self.where_it_matters(BUCKET, matters, || self.base_and(BUCKET, &["500000000"])))
            },
            &|_| one(STATE, self.or_ours(STATE, || self.devices(STATE))),
            &|p| one(PARAMETERS, self.where_it_matters(PARAMETERS, p.zero == "3", || self.devices(PARAMETERS))),
        ];
        let mut all = self.meshes();
        for choose in choices {
            all = self.multiply(all, choose)?;
        }
        let is_left = |of: &&Dimension| {
            ![SLICES, CONTEXT, ROTATE, TENSOR].contains(&of.path.as_str()) && !OURS.contains(&of.path.as_str())
        };
        for Dimension { path, values, .. } in self.tuning.space.iter().filter(is_left) {
            all = self.multiply(all, &|_| one(path, values.clone()))?;
        }
        Ok(all)
    }

    fn multiply(
        &self,
        all: Vec<Partial>,
        choose: &dyn Fn(&Partial) -> Vec<Vec<Setting>>,
    ) -> Result<Vec<Partial>, Error> {
        let mut more = vec![];
        for partial in all {
            for settings in choose(&partial) {
                let mut next = partial.clone();
                next.settings.extend(settings);
                more.push(next);
            }
            if more.len() > MOST {
                return Err(Error::setting(
                    "autotuning.space",
                    format!("the search space has more than {MOST} configurations"),
                    "give some keys fewer values; `autotuning.fast: true` tries only ZeRO stages and micro-batches",
                ));
            }
        }
        Ok(more)
    }

    fn recomputations(&self) -> Vec<Vec<Setting>> {
        let setting = |path: &str, value: &str| (path.to_string(), value.to_string());
        if self.tuning.fast && self.said(RECOMPUTE).is_none() && self.said(INTERVAL).is_none() {
            return vec![vec![]];
        }
        let mut all = vec![];
        let own = self.value(RECOMPUTE).to_string();
        let switches = self.or_ours(RECOMPUTE, || match self.said(INTERVAL) {
            Some(_) => vec!["true".into()],
            None => vec!["false".into(), "true".into()],
        });
        for switch in switches {
            if switch != "true" {
                // Without the key, recomputation is off, so the setting is needed only if the file turns it on.
                all.push(if own == "true" { vec![setting(RECOMPUTE, &switch)] } else { vec![] });
                continue;
            }
            // If the file sets `number_checkpoints`, a built-in interval would contradict it.
            let has_number = self.is_typed("activation_checkpointing.number_checkpoints");
            let intervals = match self.said(INTERVAL) {
                Some(values) => values.to_vec(),
                None if has_number => vec![],
                None => vec!["1".into(), "2".into()],
            };
            if intervals.is_empty() {
                all.push(vec![setting(RECOMPUTE, "true")]);
            }
            for interval in intervals {
                let mut settings = vec![setting(RECOMPUTE, "true")];
                // 1 is the default interval.
                if interval != "1" || !self.value(INTERVAL).is_empty() {
                    settings.push(setting(INTERVAL, &interval));
                }
                all.push(settings);
            }
        }
        all
    }

    fn schedules(&self) -> Vec<String> {
        self.base_and(SCHEDULE, &["1f1b", "zb_h1"])
    }

    /// Returns the devices to try: memory and NVMe if the user's file names a folder for NVMe, otherwise only the
    /// user's device.
    fn devices(&self, path: &str) -> Vec<String> {
        let folder = path.replace(".device", ".nvme_path");
        let has_folder = self.values.get(&folder).is_some_and(|folder| folder != "null");
        self.base_and(path, if has_folder { &["none", "nvme"] } else { &[] })
    }

    /// Returns the values that `autotuning.space` lists for a key.
    fn said(&self, path: &str) -> Option<&[String]> {
        self.tuning.space.iter().find(|of| of.path == path).map(|of| &of.values[..])
    }

    /// Returns the values that `autotuning.space` lists for a key. Without a list, returns the built-in values `ours`.
    /// With `autotuning.fast`, returns built-in values only for the main keys, and for other keys only the user's
    /// value.
    fn or_ours(&self, path: &str, ours: impl FnOnce() -> Vec<String>) -> Vec<String> {
        match self.said(path) {
            Some(values) => values.iter().map(|value| plain(value).to_string()).collect(),
            None if self.tuning.fast && ![ZERO, RANKS, STAGES].contains(&path) => vec![self.value(path).to_string()],
            None => ours(),
        }
    }

    /// Returns the values of [`or_ours`](Self::or_ours) if the key matters. Otherwise returns a single value: the
    /// user's value or, if `autotuning.space` lists values without the user's value, the first listed value.
    fn where_it_matters(&self, path: &str, matters: bool, ours: impl FnOnce() -> Vec<String>) -> Vec<String> {
        if matters {
            return self.or_ours(path, ours);
        }
        let own = self.value(path).to_string();
        match self.said(path) {
            Some(values) if !values.iter().any(|value| plain(value) == own) => {
                values.first().cloned().into_iter().collect()
            }
            _ => vec![own],
        }
    }

    fn base_and(&self, path: &str, more: &[&str]) -> Vec<String> {
        let own = self.value(path);
        let others = more.iter().filter(|&&value| value != own).map(ToString::to_string);
        std::iter::once(own.to_string()).chain(others).collect()
    }

    /// Returns the value in the user's configuration. Recomputation is off if its section is missing.
    fn value(&self, path: &str) -> &str {
        match self.values.get(path) {
            Some(value) => value,
            None if path == RECOMPUTE => "false",
            None => "",
        }
    }

    fn differs(&self, path: &str, value: &str) -> bool {
        let own = self.value(path);
        let as_number = |text: &str| text.parse::<f64>().ok();
        own != value && (as_number(own).is_none() || as_number(own) != as_number(value))
    }

    fn is_typed(&self, path: &str) -> bool {
        self.base.origins.is_written(path)
    }
}

/// Strips the quotes of a YAML scalar.
fn plain(value: &str) -> &str {
    let inner = |quote: char| value.strip_prefix(quote).and_then(|value| value.strip_suffix(quote));
    inner('"').or_else(|| inner('\'')).unwrap_or(value)
}

/// Returns whether a key has built-in values. Of these keys, only the number of ranks and the micro-batch size affect
/// the cost of a layer, and cost tables record both separately.
pub(super) fn is_ours(path: &str) -> bool {
    OURS.contains(&path)
}

//! Compares layouts of a job on several hosts by the bytes that the hosts send to each other.

use zero_config::Config;
use zero_engine::Error;
use zero_partition::HostBytes;

use crate::memory::MemoryKind;
use crate::plan::MemoryPlan;

/// A layout of a job on several hosts.
#[derive(Debug, Clone, PartialEq)]
pub struct OnHosts {
    /// Name of the layout.
    pub name: String,
    /// The settings that select the layout, in the syntax of `--set`; empty for the configuration itself.
    pub settings: Vec<String>,
    /// Whether the layout rounds gradients and gathered weights, because collectives send 8-bit or 4-bit codes.
    pub rounds: bool,
    /// Bytes that all ranks together send per step between hosts and within hosts; `None` if these are only known at
    /// run time.
    pub bytes: Option<HostBytes>,
    /// Largest peak of any rank, in bytes.
    pub peak_bytes: u64,
    /// Predicted seconds per step, or a description of the values missing from the cost table; `None` without a table.
    pub seconds: Option<Result<f64, String>>,
}

/// Plans a configuration for hosts with `ranks` ranks each, and compares it with other layouts of the same ranks.
/// `change` adds settings, in the syntax of `--set`, and returns the resulting configuration. Omits layouts that
/// contradict the configuration, and layouts that the model does not support. The configuration itself comes first; the
/// other layouts are sorted by the bytes between hosts.
///
/// # Errors
/// Fails if the configuration itself cannot be planned.
///
/// # Panics
/// Panics if `ranks` is 0.
pub fn layouts_on_hosts(
    config: &Config,
    ranks: usize,
    change: impl Fn(&[String]) -> Result<Config, Error>,
    memory_plan: impl Fn(&Config) -> Result<MemoryPlan, Error>,
) -> Result<Vec<OnHosts>, Error> {
    let planned = |name: String, settings: Vec<String>, config: &Config| -> Result<OnHosts, Error> {
        let plan = memory_plan(config)?;
        let seconds = plan.prediction().map(|time| time.map(|time| time.step_seconds));
        let (bytes, peak_bytes) = (plan.host_bytes(ranks), plan.peak_in(MemoryKind::of_layers(config)));
        Ok(OnHosts { name, settings, rounds: config.zero.sends_codes(), bytes, peak_bytes, seconds })
    };
    let mut others = vec![];
    for (name, mut settings) in candidates(config, ranks) {
        let Ok(mut changed) = change(&settings) else { continue };
        if changed.train_batch_size != config.train_batch_size {
            // The settings change the number of replicas, so the global batch size of `config` must be set explicitly.
            settings.push(format!("train_batch_size={}", config.train_batch_size));
            match change(&settings) {
                Ok(same_batch) => changed = same_batch,
                Err(_) => continue,
            }
        }
        // Skip layouts with a different number of replicates: with local steps, they would train differently.
        let replicates = |of: &Config| of.training.local_steps.map(|_| of.mesh.data_parallel_replicate_degree);
        if is_same(&changed, config) || replicates(&changed) != replicates(config) {
            continue;
        }
        // Planning fails for layouts that the model does not support, for example a pipeline with more stages than
        // layers.
        others.extend(planned(name, settings, &changed));
    }
    others.sort_by_key(|layout| (layout.bytes.map_or(u64::MAX, |bytes| bytes.between), layout.peak_bytes));
    let mut all = vec![planned("as configured".into(), vec![], config)?];
    all.append(&mut others);
    Ok(all)
}

/// Returns whether two configurations have the same layout: the same ZeRO stage, groups, pipeline stages and codes.
fn is_same(a: &Config, b: &Config) -> bool {
    let layout = |config: &Config| {
        let zero = &config.zero;
        let codes = (zero.sends_codes(), zero.zero_quantized_weights, zero.zero_quantized_gradients);
        (zero.stage, config.shard_group_size(), config.pipeline.stages, config.secondary_group_size(), codes)
    };
    layout(a) == layout(b)
}

const HPZ: &str = "zero_optimization.zero_hpz_partition_size";

/// Returns the name and the settings of each layout for hosts with `ranks` ranks each.
fn candidates(config: &Config, ranks: usize) -> Vec<(String, Vec<String>)> {
    let hosts = config.world_size / ranks;
    let as_one = config.context_size() * config.tensor_size();
    // The following closures return a setting only if the configuration has a different value.
    let stage = |stage: u8| (config.zero.stage.number() != stage).then(|| format!("zero_optimization.stage={stage}"));
    let one_stage = || (config.pipeline.stages > 1).then(|| "pipeline.stages=1".to_string());
    let one_group = || {
        let is_one = config.mesh.data_parallel_replicate_degree == 1;
        (!is_one).then(|| "mesh={data_parallel_replicate_degree: 1}".to_string())
    };
    let no_copy = || config.secondary_group_size().map(|_| format!("{HPZ}=1"));
    let chosen = |name: &str, zero: u8, more: [Option<String>; 3]| {
        (format!("stage {zero}{name}"), [stage(zero)].into_iter().chain(more).flatten().collect::<Vec<_>>())
    };
    let flat = |zero: u8| chosen("", zero, [one_group(), one_stage(), no_copy()]);
    let groups = |zero: u8| {
        // `data_parallel_shard_degree` counts the ranks that share a sequence, and the ranks of a tensor group, as one
        // rank.
        let mesh = format!("mesh={{data_parallel_shard_degree: {}}}", ranks / as_one);
        chosen(", a shard group per host (HSDP)", zero, [Some(mesh), one_stage(), no_copy()])
    };
    let pipeline = |zero: u8| {
        let stages = format!("pipeline.stages={hosts}");
        chosen(", a pipeline stage per host", zero, [one_group(), Some(stages), no_copy()])
    };
    let mut all: Vec<_> = (1..=3).map(flat).collect();
    if ranks > 1 && hosts > 1 && ranks.is_multiple_of(as_one) {
        all.extend((1..=3).map(groups));
    }
    if ranks > 1 && hosts > 1 {
        let (name, mut settings) = chosen(", secondary shards per host (hpZ)", 3, [one_group(), one_stage(), None]);
        settings.push(format!("{HPZ}={}", (ranks / config.tensor_size()).max(1)));
        settings.push("zero_optimization.stage3_max_reuse_distance=0".to_string());
        let codes = ["weights", "gradients"].map(|what| format!("zero_optimization.zero_quantized_{what}=true"));
        all.push((format!("{name}, codes (qwZ, qgZ)"), settings.iter().cloned().chain(codes).collect()));
        all.push((name, settings));
    }
    if hosts > 1 {
        all.extend((1..=2).map(pipeline));
    }
    all
}

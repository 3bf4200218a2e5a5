//! `autotuning`: what `zero-train autotune` searches, how it measures, and when it stops.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::choice;
use crate::node::At;
use crate::reader::Resolver;
use crate::yaml_out;

/// `autotuning`. The section is optional: without it, every field has its default.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Autotuning {
    /// DeepSpeed's switch. Training never tunes, and warns if it is on.
    pub enabled: bool,
    /// Tune only the ZeRO stage and the micro-batch size.
    pub fast: bool,
    /// Folder for the results, relative to the working directory.
    #[serde(serialize_with = "yaml_out::folder")]
    pub results_dir: PathBuf,
    /// Delete the results of an earlier search.
    pub overwrite: bool,
    /// The metric to optimise.
    pub metric: Metric,
    /// File for the best value of the metric.
    #[serde(serialize_with = "yaml_out::path")]
    pub metric_path: Option<PathBuf>,
    /// First step to measure; at least 1.
    pub start_profile_step: usize,
    /// Last step to measure; not before the first.
    pub end_profile_step: usize,
    /// Order in which configurations are tried.
    pub tuner_type: TunerType,
    /// Stop after this many configurations in a row without an improvement; 0 never stops early.
    pub tuner_early_stopping: usize,
    /// Maximum number of configurations to measure; at least 1.
    pub tuner_num_trials: usize,
    /// Maximum global batch size, in samples.
    pub max_train_batch_size: Option<usize>,
    /// Minimum global batch size, in samples.
    pub min_train_batch_size: usize,
    /// Maximum micro-batch size, in samples.
    pub max_train_micro_batch_size_per_gpu: usize,
    /// Minimum micro-batch size, in samples.
    pub min_train_micro_batch_size_per_gpu: usize,
    /// Maximum number of micro-batch sizes to try; `None` tries all.
    pub num_tuning_micro_batch_sizes: Option<usize>,
    /// The search space, in the order of the file. No path appears twice, and none lies inside another.
    #[serde(serialize_with = "yaml_out::space")]
    pub space: Vec<Dimension>,
    /// Time limit for one run of a trial, in seconds. Longer runs are stopped.
    pub trial_timeout_seconds: u64,
    /// Time limit for all measurements, in seconds.
    pub budget_seconds: Option<u64>,
    /// Maximum number of runs per configuration, interleaved with the other configurations.
    pub repeats: usize,
    /// Hyperparameter search, if the section is present.
    pub sweep: Option<Sweep>,
}

/// `autotuning.sweep`: a hyperparameter search that minimises the evaluation loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sweep {
    /// The search space, in the order of the file; at least one dimension.
    #[serde(serialize_with = "yaml_out::space")]
    pub space: Vec<Dimension>,
    /// How points of the search space are chosen.
    pub method: SweepMethod,
    /// Number of trials of [`SweepMethod::Random`] and [`SweepMethod::Tpe`].
    pub trials: usize,
    /// Optimizer steps of a trial; `None` trains as long as the run itself.
    pub max_steps: Option<usize>,
    /// Seed of [`SweepMethod::Random`] and [`SweepMethod::Tpe`].
    pub seed: u64,
}

/// One dimension of a search space: a key and the values to try.
#[derive(Debug, Clone, PartialEq)]
pub struct Dimension {
    /// Path of the key under its primary name, for example `zero_optimization.stage`.
    pub path: String,
    /// Values of the type that the key expects, each written as in `--set path=VALUE`. Empty if `range` is set.
    pub values: Vec<String>,
    /// A continuous range, for [`SweepMethod::Random`] and [`SweepMethod::Tpe`].
    pub range: Option<Interval>,
}

/// A range from `low` to `high`, both included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Lower bound.
    pub low: f64,
    /// Upper bound; greater than `low`.
    pub high: f64,
    /// Draw values log-uniformly; `low` is then positive.
    pub log: bool,
    /// Draw whole numbers only, because the key takes no others.
    pub is_integer: bool,
}

choice! {
    /// The metric by which the best configuration is chosen.
    pub enum Metric {
        /// Most samples per second.
        Throughput = "throughput",
        /// Least time per step.
        Latency = "latency",
        /// Most floating-point operations per second.
        Flops = "flops",
    }
}

choice! {
    /// Order in which configurations are tried.
    pub enum TunerType {
        /// Configurations with the best predicted performance first.
        ModelBased = "model_based",
        /// All configurations in turn.
        GridSearch = "gridsearch",
        /// In random order.
        Random = "random",
    }
}

choice! {
    /// How points of a sweep's search space are chosen.
    pub enum SweepMethod {
        /// All combinations of the values.
        Grid = "grid",
        /// Random points.
        Random = "random",
        /// Points close to good earlier trials, chosen by a tree-structured Parzen estimator.
        Tpe = "tpe",
    }
}

const SECTION: &str = "autotuning";

impl Autotuning {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section(SECTION);
        let mut dimensions = Vec::new();
        let autotuning = Self {
            enabled: keys.bool("enabled"),
            fast: keys.bool("fast"),
            results_dir: PathBuf::from(keys.text("results_dir")),
            overwrite: keys.bool("overwrite"),
            metric: keys.choice("metric", Metric::Throughput),
            metric_path: keys.optional_path("metric_path"),
            start_profile_step: keys.int("start_profile_step"),
            end_profile_step: keys.int("end_profile_step"),
            tuner_type: keys.choice("tuner_type", TunerType::ModelBased),
            tuner_early_stopping: keys.int("tuner_early_stopping"),
            tuner_num_trials: keys.int("tuner_num_trials"),
            max_train_batch_size: keys.optional_int("max_train_batch_size"),
            min_train_batch_size: keys.int("min_train_batch_size"),
            max_train_micro_batch_size_per_gpu: keys.int("max_train_micro_batch_size_per_gpu"),
            min_train_micro_batch_size_per_gpu: keys.int("min_train_micro_batch_size_per_gpu"),
            num_tuning_micro_batch_sizes: keys.optional_int("num_tuning_micro_batch_sizes"),
            space: keys.space("space").into_iter().map(|(dimension, _)| dimension).collect(),
            trial_timeout_seconds: keys.u64("trial_timeout_seconds"),
            budget_seconds: keys.optional_u64("budget_seconds"),
            repeats: keys.int("repeats"),
            sweep: keys.inner("sweep").map(|mut keys| {
                dimensions = keys.space("space");
                Sweep {
                    space: dimensions.iter().map(|(dimension, _)| dimension.clone()).collect(),
                    method: keys.choice("method", SweepMethod::Grid),
                    trials: keys.int("trials"),
                    max_steps: keys.optional_int("max_steps"),
                    seed: keys.u64("seed"),
                }
            }),
        };
        autotuning.bounds(resolver);
        if let Some(sweep) = &autotuning.sweep {
            sweep.check(&dimensions, resolver);
        }
        if autotuning.enabled {
            let message = "a training run does not tune: `zero-train autotune` does".to_string();
            resolver.warn("autotuning.enabled", message);
        }
        autotuning
    }

    /// Checks that lower bounds do not exceed upper bounds.
    fn bounds(&self, resolver: &mut Resolver<'_>) {
        let pairs = [
            ("start_profile_step", Some(self.start_profile_step), "end_profile_step", Some(self.end_profile_step)),
            (
                "min_train_batch_size",
                Some(self.min_train_batch_size),
                "max_train_batch_size",
                self.max_train_batch_size,
            ),
            (
                "min_train_micro_batch_size_per_gpu",
                Some(self.min_train_micro_batch_size_per_gpu),
                "max_train_micro_batch_size_per_gpu",
                Some(self.max_train_micro_batch_size_per_gpu),
            ),
        ];
        for (low_name, low, high_name, high) in pairs {
            if let (Some(low), Some(high)) = (low, high)
                && low > high
            {
                let message = format!("{low_name} {low} is more than {high_name} {high}");
                let paths = [low_name, high_name].map(|name| format!("{SECTION}.{name}"));
                resolver.contradiction(&[&paths[0], &paths[1]], message, None);
            }
        }
    }
}

impl Sweep {
    fn check(&self, dimensions: &[(Dimension, At)], resolver: &mut Resolver<'_>) {
        if let Some((dimension, at)) = dimensions.iter().find(|(dimension, _)| dimension.range.is_some())
            && self.method == SweepMethod::Grid
        {
            const METHOD: &str = "autotuning.sweep.method";
            let path = format!("autotuning.sweep.space.{}", dimension.path);
            let places = [(path.as_str(), *at), (METHOD, resolver.at(METHOD))];
            let message = format!("a grid has no end over all values between two numbers, as of `{}`", dimension.path);
            let help = "write `method: random` or `method: tpe`, or a list of values".to_string();
            resolver.report.contradiction(&places, message, Some(help));
        }
    }
}

//! `autotuning`: what `zero-train autotune` searches, how it measures, and when it ends.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::choice;
use crate::node::At;
use crate::reader::Resolver;
use crate::yaml_out;

/// `autotuning`. Without the section every field has its default: tuning needs none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Autotuning {
    /// DeepSpeed's switch. Training never tunes, and warns when this is on.
    pub enabled: bool,
    /// Tune the ZeRO stage and the micro-batch only.
    pub fast: bool,
    /// Folder of the results, relative to the working directory.
    #[serde(serialize_with = "yaml_out::folder")]
    pub results_dir: PathBuf,
    /// Delete the results of an earlier search.
    pub overwrite: bool,
    /// What is best.
    pub metric: Metric,
    /// File that the best value of the metric is written to.
    #[serde(serialize_with = "yaml_out::path")]
    pub metric_path: Option<PathBuf>,
    /// First step that is measured; at least 1.
    pub start_profile_step: usize,
    /// Last step that is measured; not before the first.
    pub end_profile_step: usize,
    /// Order in which configurations are tried.
    pub tuner_type: TunerType,
    /// The search ends after so many configurations in a row that were no better; 0 never.
    pub tuner_early_stopping: usize,
    /// Most configurations that are measured; at least 1.
    pub tuner_num_trials: usize,
    /// Largest global batch, in samples.
    pub max_train_batch_size: Option<usize>,
    /// Smallest global batch, in samples.
    pub min_train_batch_size: usize,
    /// Largest micro-batch, in samples.
    pub max_train_micro_batch_size_per_gpu: usize,
    /// Smallest micro-batch, in samples.
    pub min_train_micro_batch_size_per_gpu: usize,
    /// Most sizes of a micro-batch that are tried; `None` is all.
    pub num_tuning_micro_batch_sizes: Option<usize>,
    /// What is tried, in the order of the file. No path is given twice, and none lies inside of another.
    #[serde(serialize_with = "yaml_out::space")]
    pub space: Vec<Dimension>,
    /// A run of a trial that takes longer is ended.
    pub trial_timeout_seconds: u64,
    /// Measuring ends after so long.
    pub budget_seconds: Option<u64>,
    /// Most runs of a configuration, in turn with the others.
    pub repeats: usize,
    /// Search of hyperparameters, when the section was written.
    pub sweep: Option<Sweep>,
}

/// `autotuning.sweep`: a search of hyperparameters, judged by the evaluation loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sweep {
    /// What is tried, in the order of the file; one dimension at least.
    #[serde(serialize_with = "yaml_out::space")]
    pub space: Vec<Dimension>,
    /// How points of the space are chosen.
    pub method: SweepMethod,
    /// Trials of [`SweepMethod::Random`] and [`SweepMethod::Tpe`].
    pub trials: usize,
    /// Optimizer steps of a trial; `None` is those of the run.
    pub max_steps: Option<usize>,
    /// Seed of [`SweepMethod::Random`] and [`SweepMethod::Tpe`].
    pub seed: u64,
}

/// What is tried for a key.
#[derive(Debug, Clone, PartialEq)]
pub struct Dimension {
    /// The key, `zero_optimization.stage`, under its first name.
    pub path: String,
    /// Each as `--set path=VALUE` takes it, and of the type that the key expects. Empty when there is a range.
    pub values: Vec<String>,
    /// All between two numbers, for [`SweepMethod::Random`] and [`SweepMethod::Tpe`].
    pub range: Option<Interval>,
}

/// All numbers from `low` to `high`, both included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The smallest.
    pub low: f64,
    /// The largest; more than `low`.
    pub high: f64,
    /// Drawn so that their logarithms are uniform; `low` is then more than 0.
    pub log: bool,
    /// Whole numbers only, because the key takes no others.
    pub is_integer: bool,
}

choice! {
    /// What the best configuration has most, or least, of.
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
        /// Those that are predicted to be best come first.
        ModelBased = "model_based",
        /// All in turn.
        GridSearch = "gridsearch",
        /// At random.
        Random = "random",
    }
}

choice! {
    /// How points of a sweep's space are chosen.
    pub enum SweepMethod {
        /// All combinations of the values.
        Grid = "grid",
        /// At random.
        Random = "random",
        /// Where earlier trials were good: a tree of Parzen estimators.
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

    /// What must not be larger than what.
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

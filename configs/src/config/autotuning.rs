//! `autotuning`: what `zero-train autotune` searches, how it measures, and when it stops.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::dimension::Dimension;
use crate::path::last;
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;
use crate::value::{Field, Leaf};
use crate::write::yaml_out;

section! {
    /// `autotuning`. The section is optional: without it, every field has its default.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Autotuning(keys) in "autotuning" {
        pub enabled: bool = now(Kind::Bool, "false", "DeepSpeed's switch. A training run never tunes, and warns if this is true; `zero-train autotune` ignores the value");
        pub fast: bool = now(Kind::Bool, "false", "Tune the ZeRO stage and the micro-batch only (DeepSpeed's default is true)");
        #[serde(serialize_with = "yaml_out::folder")]
        pub results_dir: PathBuf = key(Kind::Path, "autotuning_results", "Results folder, relative to the working directory");
        pub overwrite: bool = now(Kind::Bool, "true", "Delete the results of an earlier search");
        pub metric: Metric = now(Metric::KIND, "throughput", "Objective: throughput, most tokens (or samples) per second; latency, shortest step (DeepSpeed picks the longest); flops, most operations per second");
        #[serde(serialize_with = "yaml_out::path")]
        pub metric_path: Option<PathBuf> = key(Kind::Path, "null", "JSON file to which the best metric value is written");
        pub start_profile_step: usize = now(COUNT, "3", "First measured step");
        pub end_profile_step: usize = now(COUNT, "5", "Last measured step");
        pub tuner_type: TunerType = now(TunerType::KIND, "model_based", "Order of the configurations: model_based, best prediction first; gridsearch, all in turn; random (DeepSpeed's default is gridsearch)");
        pub tuner_early_stopping: usize = now(COUNT_OR_0, "5", "End the search after this number of consecutive configurations without an improvement; 0: no limit");
        pub tuner_num_trials: usize = now(COUNT, "50", "Maximum number of configurations to measure");
        pub max_train_batch_size: Option<usize> = now(COUNT, "null", "Largest global batch size");
        pub min_train_batch_size: usize = now(COUNT, "1", "Smallest global batch size");
        pub max_train_micro_batch_size_per_gpu: usize = now(COUNT, "1024", "Largest micro-batch");
        pub min_train_micro_batch_size_per_gpu: usize = now(COUNT, "1", "Smallest micro-batch");
        pub num_tuning_micro_batch_sizes: Option<usize> = now(COUNT, "null", "Maximum number of micro-batch sizes to try; null: all (DeepSpeed's default is 3)");
        /// The search space, in the order of the file. No path appears twice, and no path lies inside another.
        #[serde(serialize_with = "yaml_out::space")]
        pub space: Vec<Dimension> = key(Kind::Space { continuous: false }, "{}", SPACE);
        pub trial_timeout_seconds: u64 = key(COUNT, "300", "Stop a trial after this time; the results list the timeout as the reason");
        pub budget_seconds: Option<u64> = key(COUNT, "null", "Stop measuring after this time; null: no time limit");
        pub repeats: usize = key(COUNT, "5", "Maximum number of runs per configuration; the runs of different configurations alternate");
        pub sweep: Option<Sweep> = section(&Sweep::SECTION, "Hyperparameter search that compares evaluation losses: `zero-train autotune --sweep`");
        = ignored("exps_dir", Kind::Path, "autotuning_exps", "trials write to folders in `results_dir`");
        = ignored("model_info_path", Kind::Path, "null", SIZES);
        = section("model_info", &MODEL_INFO, "Sizes of the model, which DeepSpeed measures in a separate run");
        = later("mp_size", "1", "Number of model-parallel ranks").instead("`autotuning.space` may try `pipeline.stages`");
        = rejected("arg_mappings", "null", "the tuner does not start a script that takes arguments");
    }
}

section! {
    /// `autotuning.sweep`: a hyperparameter search that minimises the evaluation loss.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Sweep(keys) in "autotuning.sweep" {
        /// The search space, in the order of the file; at least one dimension.
        #[serde(serialize_with = "yaml_out::space")]
        pub space: Vec<Dimension> = key(Kind::Space { continuous: true }, REQUIRED, "Same form as `autotuning.space`; the methods random and tpe also accept a range such as `{low: 1e-5, high: 1e-2, log: true}`, from which they draw values");
        pub method: SweepMethod = key(SweepMethod::KIND, "grid", "How values are chosen: grid, all combinations; random; tpe, near good earlier trials (tree-structured Parzen estimator)");
        pub trials: usize = key(COUNT, "16", "Number of trials with random and tpe");
        pub max_steps: Option<usize> = key(COUNT, "null", "Optimizer steps per trial; null: the steps of the training run");
        pub seed: u64 = key(SIZE, "42", "Seed for random and tpe");
    }
}

choice! {
    /// The metric by which the best configuration is chosen.
    pub enum Metric {
        /// Most tokens per second, or samples if the data has no tokens.
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

impl Autotuning {
    /// Checks that the keys do not contradict each other.
    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        self.bounds(resolver);
        if let Some(sweep) = &self.sweep {
            sweep.check(resolver);
        }
        if self.enabled {
            let message = "a training run does not tune; use `zero-train autotune`".to_string();
            resolver.warn(Self::enabled, message);
        }
    }

    /// Checks that lower bounds do not exceed upper bounds.
    fn bounds(&self, resolver: &mut Resolver<'_>) {
        let pairs = [
            (Self::start_profile_step, self.start_profile_step, Self::end_profile_step, Some(self.end_profile_step)),
            (
                Self::min_train_batch_size,
                self.min_train_batch_size,
                Self::max_train_batch_size,
                self.max_train_batch_size,
            ),
            (
                Self::min_train_micro_batch_size_per_gpu,
                self.min_train_micro_batch_size_per_gpu,
                Self::max_train_micro_batch_size_per_gpu,
                Some(self.max_train_micro_batch_size_per_gpu),
            ),
        ];
        for (low_path, low, high_path, high) in pairs {
            if let Some(high) = high.filter(|high| low > *high) {
                let message = format!("{} {low} is more than {} {high}", last(low_path), last(high_path));
                resolver.contradiction(&[low_path, high_path], message, None);
            }
        }
    }
}

impl Sweep {
    fn check(&self, resolver: &mut Resolver<'_>) {
        let fields = resolver.fields;
        if let Some(Field { leaf: Leaf::Space(dimensions), .. }) = fields.values.get(Self::space)
            && let Some((dimension, at)) = dimensions.iter().find(|(dimension, _)| dimension.range.is_some())
            && self.method == SweepMethod::Grid
        {
            let path = join(Self::space, &dimension.path);
            let places = [(path.as_str(), *at), (Self::method, resolver.at(Self::method))];
            let message = format!(
                "`method: grid` needs a list of values for each key, but `{}` has a continuous range",
                dimension.path
            );
            let help = "set `method: random` or `method: tpe`, or give a list of values".to_string();
            resolver.report.contradiction(&places, message, Some(help));
        }
    }
}

const SPACE: &str = "Values to try: `path.to.key` with a list of values, one value, `{from: 1, to: 16, times: 2}` or `{from: 0, to: 64, step: 16}`; keys may also be nested in their sections";
const SIZES: &str = "the tuner takes the sizes from the model itself";

#[rustfmt::skip]
static MODEL_INFO: Section = Section { switch: Switch::Keys, keys: &[
    ignored("profile", Kind::Bool, "false", SIZES),
    ignored("num_params", SIZE_1, "null", SIZES),
    ignored("hidden_size", SIZE_1, "null", SIZES),
    ignored("num_layers", SIZE_1, "null", SIZES),
] };

//! Keys of `autotuning`, which configures `zero-train autotune`: DeepSpeed's keys with their meaning there, and our
//! own.

use super::*;
use crate::choice::Choice as _;
use crate::config::{Metric, SweepMethod, TunerType};

const SPACE: &str = "What is tried: `path.to.key` with a list of values, one value, or `{from: 1, to: 16, times: 2}` or `{from: 0, to: 64, step: 16}`; keys may also stand in their sections";
const SIZES: &str = "the tuner takes the sizes from the model itself";

#[rustfmt::skip]
pub(super) static AUTOTUNING: Section = Section { switch: Switch::Keys, keys: &[
    now("enabled", Kind::Bool, "false", "DeepSpeed's switch. A training run never tunes and says so when this is on; `zero-train autotune` tunes whatever it is"),
    now("fast", Kind::Bool, "false", "Tune the ZeRO stage and the micro-batch only (DeepSpeed's default is true)"),
    key("results_dir", Kind::Path, "autotuning_results", "Folder of the results, relative to the working directory"),
    now("overwrite", Kind::Bool, "true", "Delete the results of an earlier search"),
    now("metric", Kind::Choice { names: Metric::NAMES, later: &[] }, "throughput", "What is best: most samples per second, least time per step (DeepSpeed looks for the most), or most operations per second"),
    key("metric_path", Kind::Path, "null", "File that the best value of the metric is written to, as JSON"),
    now("start_profile_step", COUNT, "3", "First step that is measured"),
    now("end_profile_step", COUNT, "5", "Last step that is measured"),
    now("tuner_type", Kind::Choice { names: TunerType::NAMES, later: &[] }, "model_based", "Order of the configurations: those that are predicted to be best first, all in turn, or at random (DeepSpeed's default is gridsearch)"),
    now("tuner_early_stopping", COUNT_OR_0, "5", "The search ends after so many configurations in a row that were no better; 0 never"),
    now("tuner_num_trials", COUNT, "50", "Most configurations that are measured"),
    now("max_train_batch_size", COUNT, "null", "Largest global batch"),
    now("min_train_batch_size", COUNT, "1", "Smallest global batch"),
    now("max_train_micro_batch_size_per_gpu", COUNT, "1024", "Largest micro-batch"),
    now("min_train_micro_batch_size_per_gpu", COUNT, "1", "Smallest micro-batch"),
    now("num_tuning_micro_batch_sizes", COUNT, "null", "Most sizes of a micro-batch that are tried; null: all (DeepSpeed's default is 3)"),
    key("space", Kind::Space { continuous: false }, "{}", SPACE),
    key("trial_timeout_seconds", COUNT, "300", "A run of a trial that takes longer is ended, and listed with that reason"),
    key("budget_seconds", COUNT, "null", "Measuring ends after so long; null: when the search does"),
    key("repeats", COUNT, "5", "Most runs of a configuration, in turn with the others"),
    section("sweep", &SWEEP, "Search of hyperparameters, judged by the evaluation loss: `zero-train autotune --sweep`"),
    ignored("exps_dir", Kind::Path, "autotuning_exps", "trials have their folders in `results_dir`"),
    ignored("model_info_path", Kind::Path, "null", SIZES),
    section("model_info", &MODEL_INFO, "Sizes of the model, which DeepSpeed measures in a run of its own"),
    later("mp_size", "1", "Ranks of the model axis"),
    rejected("arg_mappings", "null", "there is no script to pass arguments to"),
] };

#[rustfmt::skip]
static SWEEP: Section = Section { switch: Switch::Keys, keys: &[
    key("space", Kind::Space { continuous: true }, REQUIRED, "As `autotuning.space`; with random and tpe also `{low: 1e-5, high: 1e-2, log: true}`, all between the two"),
    key("method", Kind::Choice { names: SweepMethod::NAMES, later: &[] }, "grid", "All combinations, at random, or where earlier trials were good (a tree of Parzen estimators)"),
    key("trials", COUNT, "16", "Trials of random and tpe"),
    key("max_steps", COUNT, "null", "Optimizer steps of a trial; null: those of the run"),
    key("seed", SIZE, "42", "Seed of random and tpe"),
] };

#[rustfmt::skip]
static MODEL_INFO: Section = Section { switch: Switch::Keys, keys: &[
    ignored("profile", Kind::Bool, "false", SIZES),
    ignored("num_params", SIZE_1, "null", SIZES),
    ignored("hidden_size", SIZE_1, "null", SIZES),
    ignored("num_layers", SIZE_1, "null", SIZES),
] };

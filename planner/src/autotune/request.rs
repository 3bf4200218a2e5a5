//! The inputs and outputs of a search, and the setup that speed searches and sweeps share.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};
use zero_config::{Autotuning, Config, Source};
use zero_engine::Error;

use super::interval::Interval;
use super::journal::Journal;
use super::row::Row;
use crate::memory::Limit;
use crate::plan::Planner;

/// Fraction of the machine's memory that a trial may use; the rest is for the system and the tuner.
const SHARE_OF_MEMORY: f64 = 0.95;
/// Number of bytes added to a rank's limit, for memory that the rank's allocator does not count.
const BESIDES: u64 = 64 << 20;

/// Keys that a resumed search may change: its limits and the paths of its files.
const EXTENT: [&str; 7] = [
    "autotuning.budget_seconds",
    "autotuning.trial_timeout_seconds",
    "autotuning.tuner_early_stopping",
    "autotuning.tuner_num_trials",
    "autotuning.results_dir",
    "autotuning.overwrite",
    "autotuning.metric_path",
];

/// The inputs of a search.
pub struct Request<'a> {
    /// The user's file.
    pub source: Source,
    /// Overrides of the command line, in the syntax of `--set`.
    pub overrides: Vec<String>,
    /// Maximum number of ranks; `None` means the number in the file.
    pub ranks: Option<usize>,
    /// The path of `zero-train` itself.
    pub program: PathBuf,
    /// Returns the number of compute threads of each rank of a configuration on this machine.
    pub threads: &'a dyn Fn(&Config) -> usize,
    /// Opens the data of the configuration and returns a planner for it.
    pub planner: &'a dyn Fn(&Config) -> Result<Planner, Error>,
    /// The folder for results; `None` means `autotuning.results_dir`.
    pub results_dir: Option<PathBuf>,
    /// Whether to continue from the results of an earlier search.
    pub resume: bool,
    /// Set when the user interrupts the search.
    pub stop: &'a AtomicBool,
}

/// The outcome of a search.
#[derive(Debug)]
pub struct Tuned {
    /// All configurations, the user's own first.
    pub rows: Vec<Row>,
    /// Index of the best configuration that ran; `None` if no configuration ran.
    pub best: Option<usize>,
    /// How many times better the best configuration is than the user's own. If these two configurations never ran in
    /// the same round, the interval is 0 to infinity.
    pub gain: Option<Interval>,
    /// The settings of the search.
    pub tuning: Autotuning,
    /// The files written: `best.yaml` if there is a best configuration, `report.html`, `results.jsonl`.
    pub files: Vec<PathBuf>,
    /// Whether the user interrupted the search.
    pub interrupted: bool,
}

/// Loads the user's configuration and its autotuning settings. Also builds the first line of the journal, which
/// identifies the search.
pub(super) fn begin(request: &Request<'_>) -> Result<(Config, Autotuning, Value), Error> {
    let base = zero_config::load(request.source.clone(), &request.overrides)?.resolve(request.ranks)?;
    base.model_and_data()?;
    let mut tuning = base.autotuning.clone();
    if let Some(folder) = &request.results_dir {
        tuning.results_dir.clone_from(folder);
    }
    let head = json!({
        "event": "begin", "version": 1, "program": concat!("zero-train ", env!("CARGO_PKG_VERSION")),
        "configuration": request.source.name, "ranks": base.world_size, "crc32": identity(&base),
    });
    Ok((base, tuning, head))
}

/// Returns a checksum of all keys that results depend on.
fn identity(base: &Config) -> u32 {
    let keys = base.leaves().into_iter().filter(|(path, _)| !EXTENT.contains(&path.as_str()));
    keys.fold(0, |checksum, (path, value)| crc32c::crc32c_append(checksum, format!("{path}: {value}\n").as_bytes()))
}

/// Builds an error about the results folder or a folder in it.
pub(super) fn unwritable(folder: &Path) -> impl Fn(std::io::Error) -> Error + Copy + '_ {
    |source| {
        let error = Error::Io { path: folder.to_path_buf(), source };
        error.named("autotuning.results_dir", "set this key or --out to a writable folder")
    }
}

/// Creates the folder of `autotuning.metric_path`, so that a wrong path is reported before the search.
pub(super) fn prepare_metric_path(tuning: &Autotuning) -> Result<(), Error> {
    let Some(folder) = tuning.metric_path.as_deref().and_then(Path::parent) else { return Ok(()) };
    let failed = |source| of_metric_path(Error::Io { path: folder.to_path_buf(), source });
    std::fs::create_dir_all(folder).map_err(failed)
}

/// Adds the key `autotuning.metric_path` to an error about its file or folder.
pub(super) fn of_metric_path(error: Error) -> Error {
    error.named("autotuning.metric_path", "set this key to a file in a writable folder")
}

/// Rejects a results folder that already has this journal, unless `autotuning.overwrite` is true.
pub(super) fn refuse_to_overwrite(tuning: &Autotuning, journal: &str) -> Result<(), Error> {
    let folder = &tuning.results_dir;
    if tuning.overwrite || !Journal::exists(folder, journal) {
        return Ok(());
    }
    Err(Error::setting(
        "autotuning.results_dir",
        format!("{} already contains results, and `autotuning.overwrite` is false", folder.display()),
        "continue with --resume, or choose another folder",
    ))
}

pub(super) fn too_long(tuning: &Autotuning) -> String {
    format!("the trial took longer than {} s (autotuning.trial_timeout_seconds)", tuning.trial_timeout_seconds)
}

pub(super) fn too_much(bytes: u64) -> String {
    format!("the trial used {}, which is more memory than this machine has", zero_engine::bytes(bytes))
}

/// Returns the bytes that a trial with this number of ranks may use, if known.
pub(super) fn memory(base: &Config, ranks: usize) -> Option<u64> {
    let machine = Limit::of_machine().map(|limit| (limit.bytes as f64 * SHARE_OF_MEMORY) as u64);
    // Each rank stops by itself when it reaches its own limit. The margin covers memory that plans do not count: the
    // program and its threads.
    let own = base.training.memory_limit.map(|bytes| ranks as u64 * (bytes + bytes / 4 + BESIDES));
    machine.into_iter().chain(own).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_may_be_resumed_with_other_limits() {
        let resolved = |more: &str| {
            let text = format!("train_batch_size: 4\nautotuning: {{enabled: true{more}}}\n");
            Config::parse("ds.yaml", text).expect("valid")
        };
        let plain = resolved("");
        let leaves = plain.leaves();
        EXTENT.iter().for_each(|key| assert!(leaves.iter().any(|(path, _)| path == key), "{key} is not a key"));
        let limits = ", budget_seconds: 5, tuner_num_trials: 7, results_dir: elsewhere";
        assert_eq!(identity(&resolved(limits)), identity(&plain));
        assert_ne!(identity(&resolved(", end_profile_step: 9")), identity(&plain));
    }
}

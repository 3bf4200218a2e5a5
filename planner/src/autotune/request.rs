//! What a search is asked for and what it gives back; what both kinds of searches begin with.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};
use zero_config::{Autotuning, Config, Source};
use zero_engine::Error;

use super::interval::Interval;
use super::row::Row;
use crate::memory::Limit;
use crate::plan::Planner;

/// Of what the machine has, a trial may hold so much; the rest is the system's and the tuner's.
const SHARE_OF_MEMORY: f64 = 0.95;
/// Bytes that a rank holds besides what it counts.
const BESIDES: u64 = 64 << 20;

/// What is to be tuned.
pub struct Request<'a> {
    /// The user's file.
    pub source: Source,
    /// Overrides of the command line, as `--set` takes them.
    pub overrides: Vec<String>,
    /// The most ranks; `None`: those of the file.
    pub ranks: Option<usize>,
    /// `zero-train` itself.
    pub program: PathBuf,
    /// Compute threads of each rank of a configuration, on this machine.
    pub threads: &'a dyn Fn(&Config) -> usize,
    /// Opens the data of the configuration, and plans those that train on them.
    pub planner: &'a dyn Fn(&Config) -> Result<Planner, Error>,
    /// Where results are written, if not to `autotuning.results_dir`.
    pub results_dir: Option<PathBuf>,
    /// Go on with what an earlier search has found out.
    pub resume: bool,
    /// Set when the user wants an end.
    pub stop: &'a AtomicBool,
}

/// What was found.
#[derive(Debug)]
pub struct Tuned {
    /// All configurations, the user's own first.
    pub rows: Vec<Row>,
    /// The best one that ran; `None` if none did.
    pub best: Option<usize>,
    /// How many times better than the user's own it is; of runs that were not in turn, an interval from 0 to infinity.
    pub gain: Option<Interval>,
    /// What was tuned for.
    pub tuning: Autotuning,
    /// The files that were written: `best.yaml` if there is a best one, `report.html`, `results.jsonl`.
    pub files: Vec<PathBuf>,
    /// Whether the user ended it.
    pub interrupted: bool,
}

/// The user's configuration, what it says of tuning, and the first line of a journal: who wants what.
pub(super) fn begin(request: &Request<'_>) -> Result<(Config, Autotuning, Value), Error> {
    let base = zero_config::load(request.source.clone(), &request.overrides)?.resolve(request.ranks)?;
    base.model_and_data()?;
    let mut tuning = base.autotuning.clone();
    if let Some(folder) = &request.results_dir {
        tuning.results_dir.clone_from(folder);
    }
    let head = json!({
        "event": "begin", "version": 1, "program": concat!("zero-train ", env!("CARGO_PKG_VERSION")),
        "configuration": request.source.name, "ranks": base.world_size, "overrides": request.overrides,
        "crc32": crc32c::crc32c(request.source.text.as_bytes()),
    });
    Ok((base, tuning, head))
}

/// An error of the folder of the results, or of one in it.
pub(super) fn unwritable(folder: &Path) -> impl Fn(std::io::Error) -> Error + Copy + '_ {
    |source| {
        let error = Error::Io { path: folder.to_path_buf(), source };
        error.named("autotuning.results_dir", "name a folder that can be written to, there or with --out")
    }
}

/// Refuses a folder that has this journal already, unless that may be overwritten.
pub(super) fn refuse_to_overwrite(tuning: &Autotuning, journal: &str) -> Result<(), Error> {
    let folder = &tuning.results_dir;
    if tuning.overwrite || !folder.join(journal).exists() {
        return Ok(());
    }
    Err(Error::setting(
        "autotuning.results_dir",
        format!("{} has results already, and `autotuning.overwrite` is false", folder.display()),
        "go on with --resume, or name another folder",
    ))
}

pub(super) fn too_long(tuning: &Autotuning) -> String {
    format!("it took longer than {} s: autotuning.trial_timeout_seconds", tuning.trial_timeout_seconds)
}

pub(super) fn too_much(bytes: u64) -> String {
    format!("it held {}, more than this machine can give", zero_engine::bytes(bytes))
}

/// Bytes that a trial of so many ranks may hold, if that is known.
pub(super) fn memory(base: &Config, ranks: usize) -> Option<u64> {
    let machine = Limit::of_machine().map(|limit| (limit.bytes as f64 * SHARE_OF_MEMORY) as u64);
    // The ranks themselves end at this limit; what is above it is what no plan counts, the program and its threads.
    let own = base.training.memory_limit.map(|bytes| ranks as u64 * (bytes + bytes / 4 + BESIDES));
    machine.into_iter().chain(own).min()
}

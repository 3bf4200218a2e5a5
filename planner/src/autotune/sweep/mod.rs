//! A sweep trains the configuration with different hyperparameters; the lowest evaluation loss wins.
//!
//! The module `search` runs the trials, `propose` and `tpe` choose their points, and `median` decides which trials to
//! stop early. `zero-train autotune --sweep` calls [`sweep`], which starts copies of that program, one at a time, each
//! with all ranks.

mod bench;
mod domain;
mod median;
mod metrics;
mod propose;
mod search;
mod tpe;
mod trial;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use zero_config::{Autotuning, Config, Sweep};

pub use trial::{Evaluation, SweepTrial, TrialState};

use super::journal::Journal;
use super::request::{Request, begin, refuse_to_overwrite, unwritable};
use super::results::edited;
use super::search::End;
use bench::Bench;
use zero_engine::Error;
use zero_engine::format::counted;

/// The files of a sweep.
const JOURNAL: &str = "sweep.jsonl";
const BEST: &str = "sweep-best.yaml";
/// The folder with the folders of the trials.
const TRIALS: &str = "sweep";
/// Number of evaluations per trial, if the file does not set the interval.
const EVALUATIONS: usize = 10;

/// Observes a sweep.
pub trait SweepWatch {
    /// Called when a trial has ended.
    fn trial(&mut self, trial: &SweepTrial);

    /// Called with a progress message.
    fn say(&mut self, word: &str);
}

/// The outcome of a sweep.
#[derive(Debug)]
pub struct Swept {
    /// All trials, in the order in which they ran.
    pub trials: Vec<SweepTrial>,
    /// The trial that finished with the lowest evaluation loss; `None` if none finished.
    pub best: Option<usize>,
    /// The files written: `sweep-best.yaml` if there is a best trial, `sweep.jsonl`.
    pub files: Vec<PathBuf>,
    /// Whether the user interrupted the sweep.
    pub interrupted: bool,
}

/// Searches `autotuning.sweep` for the hyperparameters with the lowest evaluation loss.
///
/// # Errors
/// Fails if the configuration lacks the section or is invalid, if a grid has too many combinations, or if a folder
/// cannot be written. A failed trial is not an error.
pub fn sweep(request: &Request<'_>, watch: &mut dyn SweepWatch) -> Result<Swept, Error> {
    let began = Instant::now();
    let (base, tuning, head) = begin(request)?;
    let Some(sweep) = &tuning.sweep else {
        let help = "add it, for example `autotuning: {sweep: {space: {optimizer.params.lr: [1e-4, 3e-4, 1e-3]}}}`";
        return Err(Error::setting(
            "autotuning.sweep",
            "--sweep needs this section, which lists the values to try",
            help,
        ));
    };
    let (_, most) = propose::strategy(sweep)?;
    let changes = changes(&base, sweep, watch)?;
    let (journal, lines, skipped) = open(&tuning, request.resume, &head)?;
    journal.skipped(skipped).iter().for_each(|line| watch.say(line));
    let folder = tuning.results_dir.join(TRIALS);
    let file = folder.join("base.yaml");
    std::fs::write(&file, &request.source.text).map_err(|source| Error::Io { path: file.clone(), source })?;
    watch.say(&format!("{} of {}", counted(most, "trial", "trials"), method(sweep)));
    let earlier = lines.iter().filter(|line| line["event"] == "trial").count();
    if earlier > 0 {
        watch.say(&format!("resumed {} from an earlier sweep", counted(earlier, "trial", "trials")));
    }
    let overrides = request.overrides.iter().cloned().chain(changes).collect();
    let mut bench = Bench { request, base: &base, tuning: &tuning, overrides, file, folder, journal, watch };
    let until = tuning.budget_seconds.map(|seconds| began + Duration::from_secs(seconds));
    let (trials, end) = search::run(sweep, &lines, until, &mut bench)?;
    if end == End::Budget {
        bench.watch.say("stopped: autotuning.budget_seconds is used up");
    }
    finish(request, &tuning.results_dir, bench.journal, trials, end)
}

fn method(sweep: &Sweep) -> String {
    let dimensions = counted(sweep.space.len(), "hyperparameter", "hyperparameters");
    format!("{dimensions}, by {}", sweep.method)
}

/// Returns the overrides of all trials.
fn changes(base: &Config, sweep: &Sweep, watch: &mut dyn SweepWatch) -> Result<Vec<String>, Error> {
    const EVAL_EVERY: &str = "training.eval_every";
    // The command line of each trial sets these keys, so a sweep cannot search them.
    let ours = ["launcher.num_processes", "training.output_dir"];
    if let Some(dimension) = sweep.space.iter().find(|dimension| ours.contains(&dimension.path.as_str())) {
        let message = format!(
            "a sweep cannot search `{}`: the sweep itself sets the number of ranks and the output folder of each trial",
            dimension.path
        );
        return Err(Error::setting("autotuning.sweep.space", message, "remove it"));
    }
    // Trials save no checkpoints, and a trial that dies is not restarted.
    let mut changes: Vec<String> =
        ["save_every=0", "save_last=false", "keep_best=", "sample="].map(|set| format!("training.{set}")).to_vec();
    changes.push("launcher.max_restarts=0".into());
    if let Some(steps) = sweep.max_steps {
        changes.extend(["training.epochs=".into(), format!("training.max_steps={steps}")]);
    }
    let steps = sweep.max_steps.or(base.training.max_steps);
    let is_tried = sweep.space.iter().any(|dimension| dimension.path == EVAL_EVERY);
    match (base.training.eval_every, steps) {
        _ if is_tried => {}
        (0, Some(steps)) => {
            let every = (steps / EVALUATIONS).max(1);
            watch.say(&format!(
                "training.eval_every is not set: trials are evaluated every {}",
                counted(every, "step", "steps")
            ));
            changes.push(format!("{EVAL_EVERY}={every}"));
        }
        (0, None) => {
            let message = "the value is 0, but a sweep compares evaluation losses";
            return Err(Error::setting(EVAL_EVERY, message, "set it to the number of steps between evaluations"));
        }
        (every, Some(steps)) if every > steps => {
            let message =
                format!("{every} is more than the {steps} steps of a trial, so trials would never be evaluated");
            return Err(Error::setting(
                EVAL_EVERY,
                message,
                "use a smaller number, or a larger autotuning.sweep.max_steps",
            ));
        }
        _ => {}
    }
    Ok(changes)
}

/// Opens the journal, and reads the lines of an earlier sweep when resuming.
fn open(tuning: &Autotuning, resume: bool, head: &Value) -> Result<(Journal, Vec<Value>, usize), Error> {
    let folder = tuning.results_dir.join(TRIALS);
    let failed = unwritable(&folder);
    std::fs::create_dir_all(&folder).map_err(failed)?;
    if resume && let Some(found) = Journal::reopen(&tuning.results_dir, JOURNAL, head)? {
        return Ok(found);
    }
    refuse_to_overwrite(tuning, JOURNAL)?;
    // Remove only files and folders that a sweep writes.
    for entry in std::fs::read_dir(&folder).map_err(failed)?.flatten() {
        let is_trial = entry.file_name().to_str().is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        if is_trial {
            std::fs::remove_dir_all(entry.path()).map_err(failed)?;
        }
    }
    let _ = std::fs::remove_file(tuning.results_dir.join(BEST));
    Ok((Journal::create(&tuning.results_dir, JOURNAL, head)?, vec![], 0))
}

/// Writes `sweep-best.yaml` and the last line of the journal.
fn finish(
    request: &Request<'_>,
    folder: &Path,
    mut journal: Journal,
    trials: Vec<SweepTrial>,
    end: End,
) -> Result<Swept, Error> {
    let finished = trials.iter().filter(|trial| trial.state == TrialState::Finished);
    let best = finished.min_by(|a, b| a.compare(b));
    let mut files = vec![];
    if let Some(best) = best {
        let path = folder.join(BEST);
        let text = edited(request, request.ranks, &best.settings)?;
        std::fs::write(&path, text).map_err(|source| Error::Io { path: path.clone(), source })?;
        files.push(path);
    }
    files.push(folder.join(JOURNAL));
    let (best, interrupted) = (best.map(|best| best.id), end == End::Interrupted);
    journal.write(&json!({ "event": "end", "best": best, "interrupted": interrupted }))?;
    Ok(Swept { trials, best, files, interrupted })
}

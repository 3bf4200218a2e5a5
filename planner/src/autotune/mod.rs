//! Autotuning: finds the fastest configuration that fits into memory.
//!
//! All candidates are planned, and those that do not fit are never started. Short profiles fill cost tables, from which
//! the simulator predicts the step time of each candidate. The best candidates run in turn, each run in new processes,
//! until the fastest candidate is known. The measurements correct the predictions.
//!
//! `zero-train autotune` calls [`tune`], and with `--sweep` it calls [`sweep()`], which searches hyperparameters by the
//! evaluation loss. Both start copies of `zero-train` for their runs.

mod correction;
mod interval;
mod journal;
mod objective;
mod outlook;
mod report;
mod request;
mod results;
mod rounds;
mod row;
mod search;
mod space;
mod sweep;
mod tables;
mod trial;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};
use zero_config::{Autotuning, Config};

pub use interval::Interval;
pub use objective::{StepWork, cost, is_better_higher, unit, value};
pub use request::{Request, Tuned};
pub use row::{Planned, Row, Run, State};
pub use space::Candidate;
pub use sweep::{Evaluation, SweepTrial, SweepWatch, Swept, TrialState, sweep};

use journal::Journal;
use outlook::Outlook;
use request::{begin, memory, prepare_metric_path, refuse_to_overwrite, too_long, too_much, unwritable};
use search::{End, Measure, RunOutcome, Search};
use tables::{Conditions, Tables, measured, uses_disk};
use trial::{Ended, Trial};
use zero_engine::Error;
use zero_engine::costs::CostTable;

/// The file that records runs.
const JOURNAL: &str = "results.jsonl";
/// Maximum number of measured steps of a profile, after at most two warm-up steps.
const PROFILE_STEPS: &str = "4";
/// Number of seconds after which a profile starts no further step. A profiled step of a large model takes long, because
/// it runs every layer many times.
const PROFILE_SECONDS: &str = "6";
/// Maximum number of micro-batches per profiled step.
const PROFILE_MICRO_BATCHES: usize = 4;
/// Minimum number of seconds that a run measures. If steps are short, a run measures more steps than configured.
const AT_LEAST: &str = "1";
/// Observes a search.
pub trait Watch {
    /// Called with all rows whenever a row has changed.
    fn rows(&mut self, rows: &[Row], changed: Option<usize>, tuning: &Autotuning);

    /// Called with a progress message.
    fn say(&mut self, word: &str);
}

/// Searches for the fastest configuration.
///
/// # Errors
/// Fails if the configuration is invalid, the data cannot be read, or a folder cannot be written. A failed trial is not
/// an error.
pub fn tune(request: &Request<'_>, watch: &mut dyn Watch) -> Result<Tuned, Error> {
    let began = Instant::now();
    let (base, tuning, head) = begin(request)?;
    if tuning.sweep.is_some() {
        watch.say("autotuning.sweep has no effect without --sweep: this search optimizes speed");
    }
    zero_engine::device::only_the_processor(&base, "a search for speed")?;
    let planner = (request.planner)(&base)?;
    let outlook =
        Outlook { source: &request.source, overrides: &request.overrides, planner: &planner, threads: request.threads };
    let candidates = space::candidates(&base, &tuning)?;
    watch
        .say(&format!("{} to plan", zero_engine::format::counted(candidates.len(), "configuration", "configurations")));
    let mut rows: Vec<Row> =
        candidates.into_iter().enumerate().map(|(id, candidate)| outlook.row(id, candidate)).collect();
    if rows[0].state == State::Refused {
        // The user's own configuration is invalid: return its full error.
        planner.memory_plan(&base)?;
    }
    prepare_metric_path(&tuning)?;
    let (folder, journal, skipped) = open(&tuning, request.resume, &head, &mut rows)?;
    journal.skipped(skipped).iter().for_each(|line| watch.say(line));
    let file = folder.join("base.yaml");
    std::fs::write(&file, &request.source.text).map_err(|source| Error::Io { path: file.clone(), source })?;
    let mut bench = Bench {
        began,
        base: &base,
        request,
        outlook: &outlook,
        folder: &folder,
        file,
        tuning: &tuning,
        journal,
        watch,
    };
    bench.watch.rows(&rows, None, &tuning);
    let (tables, interrupted) = bench.profile(&rows)?;
    let mut end = if interrupted { End::Interrupted } else { End::Done };
    if !interrupted {
        for row in rows.iter_mut().filter(|row| row.planned.is_some() && row.state != State::TooLarge) {
            match outlook.timeline(row, &tables) {
                Ok(timeline) => row.predicted = Some(timeline.makespan()),
                Err(reason) => row.reason = row.reason.take().or(Some(format!("not predicted: {reason}"))),
            }
        }
        bench.watch.rows(&rows, None, &tuning);
        end = Search::new(&mut rows, &tuning).run(&mut bench)?;
    }
    let journal = bench.journal;
    let found = results::Found { request, base: &base, outlook: &outlook, tables: &tables, folder: &folder };
    results::finish(&found, rows, tuning.clone(), journal, end, began)
}

/// Opens the results folder, and loads the results of an earlier search when resuming. Also returns the number of
/// results that were skipped because they are damaged.
fn open(tuning: &Autotuning, resume: bool, head: &Value, rows: &mut [Row]) -> Result<(PathBuf, Journal, usize), Error> {
    let folder = tuning.results_dir.clone();
    let failed = unwritable(&folder);
    std::fs::create_dir_all(folder.join("costs")).map_err(failed)?;
    if resume && let Some((journal, lines, unreadable)) = Journal::reopen(&folder, JOURNAL, head)? {
        let damaged = lines.iter().filter(|line| replay(line, rows).is_none()).count();
        return Ok((folder, journal, unreadable + damaged));
    }
    refuse_to_overwrite(tuning, JOURNAL)?;
    // Removes only files that a search writes.
    for entry in std::fs::read_dir(folder.join("costs")).map_err(failed)?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "json") {
            std::fs::remove_file(entry.path()).map_err(failed)?;
        }
    }
    for name in ["best.yaml", "report.html"] {
        let _ = std::fs::remove_file(folder.join(name));
    }
    let journal = Journal::create(&folder, JOURNAL, head)?;
    Ok((folder, journal, 0))
}

/// Applies a journal line of an earlier search to its row. Ignores lines about rows that this search does not have.
/// Returns `None` if the line is damaged.
fn replay(line: &Value, rows: &mut [Row]) -> Option<()> {
    let event = line["event"].as_str()?;
    if !matches!(event, "run" | "fell") {
        return (event == "end").then_some(());
    }
    let id = usize::try_from(line["id"].as_u64()?).ok()?;
    let Some(row) = rows.get_mut(id).filter(|row| line["settings"] == settings(row)) else { return Some(()) };
    if event == "run" {
        let step = |seconds: &Value| seconds.as_f64().filter(|seconds| *seconds > 0.0);
        let step_seconds = line["step_seconds"].as_array()?.iter().map(step).collect::<Option<Vec<f64>>>()?;
        let round = u32::try_from(line["round"].as_u64()?).ok()? as usize;
        let run = Run { round, step_seconds, peak_bytes: line["peak_bytes"].as_u64()? };
        row.runs.push(Some(run).filter(|run| !run.step_seconds.is_empty())?);
        row.state = State::Measured;
    } else {
        let state = State::deserialize(&line["state"]).ok().filter(|state| state.has_fallen())?;
        (row.state, row.reason) = (state, line["reason"].as_str().map(str::to_string));
    }
    Some(())
}

fn settings(row: &Row) -> Value {
    json!(correction::overrides(&row.candidate.settings).collect::<Vec<_>>())
}

/// Runs `zero-train` on candidates.
struct Bench<'a> {
    began: Instant,
    base: &'a Config,
    request: &'a Request<'a>,
    outlook: &'a Outlook<'a>,
    folder: &'a Path,
    /// A copy of the user's file, made when the search began.
    file: PathBuf,
    tuning: &'a Autotuning,
    journal: Journal,
    watch: &'a mut dyn Watch,
}

impl Bench<'_> {
    fn trial(&self, command: &[&str], ranks: usize, overrides: &[String]) -> Ended {
        let mut arguments: Vec<OsString> = command.iter().map(OsString::from).collect();
        arguments.extend(trial::arguments(&self.file, ranks, overrides));
        let trial = Trial {
            program: &self.request.program,
            arguments,
            deadline: Duration::from_secs(self.tuning.trial_timeout_seconds),
            memory: memory(self.base, ranks),
            stop: self.request.stop,
        };
        trial.run()
    }

    /// Profiles layers, transfers and the disk for all candidates that need a prediction. Returns the tables, and
    /// whether the user interrupted the search.
    fn profile(&mut self, rows: &[Row]) -> Result<(Tables, bool), Error> {
        let mut tables = Tables::default();
        let mut wanted: std::collections::BTreeMap<Conditions, Vec<(usize, usize)>> = std::collections::BTreeMap::new();
        let mut on_disk = None;
        for row in rows.iter().filter(|row| row.planned.is_some() && row.state != State::TooLarge) {
            let Ok(config) = self.outlook.resolve(row.candidate.ranks, &row.candidate.settings) else { continue };
            let conditions = self.outlook.conditions(&config, &row.candidate);
            wanted.entry(conditions).or_default().push((config.train_micro_batch_size_per_gpu, row.id));
            if uses_disk(&config) && on_disk.is_none() {
                on_disk = Some(row.id);
            }
        }
        let mut asked: Vec<(Conditions, usize, usize)> = vec![];
        for (conditions, of) in &wanted {
            let micro_batches: Vec<usize> = of.iter().map(|(micro, _)| *micro).collect();
            for micro in measured(&micro_batches) {
                // The first match is the candidate with the fewest changed settings.
                if let Some((_, id)) = of.iter().find(|(of, _)| *of == micro) {
                    asked.push((conditions.clone(), micro, *id));
                }
            }
        }
        asked.extend(on_disk.and_then(|id| {
            let config = self.outlook.resolve(rows[id].candidate.ranks, &rows[id].candidate.settings).ok()?;
            Some((self.outlook.conditions(&config, &rows[id].candidate), config.train_micro_batch_size_per_gpu, id))
        }));
        // Profile the user's own configuration first, so that it is profiled even if the time budget is too short for
        // all profiles.
        let own = self.outlook.conditions(self.base, &rows[0].candidate);
        asked.sort_by_key(|(conditions, ..)| *conditions != own);
        let enough = self.tuning.budget_seconds.map(|seconds| Duration::from_secs(seconds) / 2);
        for (index, (conditions, micro, id)) in asked.iter().enumerate() {
            let file = self.folder.join(format!("costs/{index}.json"));
            if let (true, Ok(table)) = (self.request.resume, CostTable::read(&file)) {
                tables.add(conditions.clone(), table);
                continue;
            }
            if enough.is_some_and(|enough| self.began.elapsed() >= enough) {
                let left = zero_engine::format::counted(asked.len() - index, "profile is", "profiles are");
                self.watch.say(&format!("{left} skipped: half of autotuning.budget_seconds is used up"));
                break;
            }
            self.watch.say(&format!(
                "profile {} of {}: micro-batch {micro}, {} × {}",
                index + 1,
                asked.len(),
                zero_engine::format::counted(conditions.ranks, "rank", "ranks"),
                zero_engine::format::counted(conditions.threads, "thread", "threads"),
            ));
            let settings = &rows[*id].candidate.settings;
            // Accumulating a gradient costs more than storing it, because it also reads the previous sum. The profile
            // must therefore accumulate if the candidate does.
            let accumulation = self.outlook.resolve(rows[*id].candidate.ranks, settings);
            let accumulation =
                accumulation.map_or(1, |config| config.gradient_accumulation_steps.min(PROFILE_MICRO_BATCHES));
            let mut overrides = self.outlook.overrides(settings);
            overrides.extend([
                "pipeline.stages=1".into(),
                format!("gradient_accumulation_steps={accumulation}"),
                "train_batch_size=".into(),
                "training.rampup_batch_size=".into(),
                format!("train_micro_batch_size_per_gpu={micro}"),
                format!("launcher.threads_per_rank={}", conditions.threads),
            ]);
            let out = file.display().to_string();
            let command = ["bench", "costs", "--steps", PROFILE_STEPS, "--seconds", PROFILE_SECONDS, "--out", &out];
            let ended = self.trial(&command, conditions.ranks, &overrides);
            let told = match ended {
                Ended::Interrupted => return Ok((tables, true)),
                Ended::Well(_) => match CostTable::read(&file) {
                    Ok(table) => {
                        tables.add(conditions.clone(), table);
                        continue;
                    }
                    Err(error) => error.to_string(),
                },
                Ended::Badly { reason, .. } => reason,
                Ended::TimedOut | Ended::Dropped => too_long(self.tuning),
                Ended::TooLarge(bytes) => too_much(bytes),
            };
            self.watch.say(&format!("  the profile failed: {told}"));
        }
        Ok((tables, false))
    }
}

impl Measure for Bench<'_> {
    fn run(&mut self, row: &Row, round: usize) -> Result<RunOutcome, Error> {
        let steps = (self.tuning.end_profile_step + 1 - self.tuning.start_profile_step).to_string();
        let before = (self.tuning.start_profile_step - 1).to_string();
        let command = ["bench", "step", "--json", "--steps", &steps, "--warm-up", &before, "--seconds", AT_LEAST];
        let overrides = self.outlook.overrides(&row.candidate.settings);
        let ended = self.trial(&command, row.candidate.ranks, &overrides);
        let outcome = match ended {
            Ended::Interrupted => return Ok(RunOutcome::Interrupted),
            Ended::Well(text) => match read(&text) {
                Some((step_seconds, peak_bytes)) => RunOutcome::Ran { step_seconds, peak_bytes },
                None => RunOutcome::Fell(State::Failed, "the trial printed no step times".into()),
            },
            Ended::Badly { reason, .. } => RunOutcome::Fell(State::Failed, reason),
            Ended::TimedOut | Ended::Dropped => RunOutcome::Fell(State::TimedOut, too_long(self.tuning)),
            Ended::TooLarge(bytes) => RunOutcome::Fell(State::OutOfMemory, too_much(bytes)),
        };
        let line = match &outcome {
            RunOutcome::Ran { step_seconds, peak_bytes } => json!({
                "event": "run", "id": row.id, "settings": settings(row), "round": round, "step_seconds": step_seconds,
                "peak_bytes": peak_bytes,
            }),
            RunOutcome::Fell(state, reason) => json!({
                "event": "fell", "id": row.id, "settings": settings(row), "round": round, "state": state.name(), "reason": reason,
            }),
            RunOutcome::Interrupted => return Ok(outcome),
        };
        self.journal.write(&line)?;
        Ok(outcome)
    }

    fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    fn changed(&mut self, rows: &[Row], changed: usize) {
        self.watch.rows(rows, Some(changed), self.tuning);
    }

    fn say(&mut self, word: &str) {
        self.watch.say(word);
    }
}

/// Parses the output of `bench step --json`: the seconds of its steps, and the peak bytes of a rank.
fn read(text: &str) -> Option<(Vec<f64>, u64)> {
    let line = text.lines().rev().find(|line| line.starts_with('{'))?;
    let value: Value = serde_json::from_str(line).ok()?;
    let steps: Vec<f64> = value["step_ms"].as_array()?.iter().filter_map(|ms| Some(ms.as_f64()? / 1e3)).collect();
    let is_time = |seconds: &f64| seconds.is_finite() && *seconds > 0.0;
    (!steps.is_empty() && steps.iter().all(is_time)).then_some((steps, value["peak_bytes"].as_u64()?))
}

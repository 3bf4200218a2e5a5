//! Runs trials as processes of `zero-train` and reads their evaluations while they train.

use std::cell::RefCell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use zero_config::{Autotuning, Config, Origin};

use super::SweepWatch;
use super::metrics::{Evaluated, Metrics};
use super::search::{Judge, Train};
use super::trial::{Evaluation, SweepTrial, TrialOutcome, TrialState};
use crate::autotune::correction::{Setting, overrides};
use crate::autotune::journal::Journal;
use crate::autotune::outlook;
use crate::autotune::request::{Request, memory, too_long, too_much};
use crate::autotune::trial::{self, Ended, Trial};
use zero_engine::Error;

/// The exit status of a run that diverged; see `Error::exit_status`.
const DIVERGED: i32 = 5;

/// Runs `zero-train` as the trials of a sweep.
pub(super) struct Bench<'a> {
    pub(super) request: &'a Request<'a>,
    pub(super) base: &'a Config,
    pub(super) tuning: &'a Autotuning,
    /// Overrides of all trials, applied before a trial's settings.
    pub(super) overrides: Vec<String>,
    /// The user's file, as it was when the sweep began.
    pub(super) file: PathBuf,
    /// The folder with the folders of the trials.
    pub(super) folder: PathBuf,
    pub(super) journal: Journal,
    pub(super) watch: &'a mut dyn SweepWatch,
}

/// The evaluations of a running trial.
#[derive(Default)]
struct Seen {
    evaluations: Vec<Evaluation>,
    /// The outcome of the trial and the reason; `None` while the trial should continue.
    verdict: Option<(TrialState, String)>,
}

impl Seen {
    /// Reads the new evaluations of the trial and judges them one by one. Evaluations after a verdict are ignored, so
    /// that the result does not depend on the polling interval.
    fn look(&mut self, metrics: &mut Metrics, judge: &Judge<'_>) {
        for evaluated in metrics.new_ones() {
            if self.verdict.is_some() {
                return;
            }
            match evaluated {
                Evaluated::NotFinite { step } => {
                    let reason = format!("the evaluation loss after step {step} is not finite");
                    self.verdict = Some((TrialState::Diverged, reason));
                }
                Evaluated::Loss(evaluation) => {
                    self.evaluations.push(evaluation);
                    self.verdict = judge(&self.evaluations).map(|reason| (TrialState::Stopped, reason));
                }
            }
        }
    }
}

impl Bench<'_> {
    /// Returns the time limit of a trial. The default timeout is meant for runs of a few steps, so it does not apply to
    /// the trials of a sweep, which train completely.
    fn deadline(&self) -> Duration {
        match self.base.origins.get("autotuning.trial_timeout_seconds") {
            Origin::Default => Duration::MAX,
            _ => Duration::from_secs(self.tuning.trial_timeout_seconds),
        }
    }

    /// Resolves the configuration of a trial, or returns why it is invalid.
    fn resolve(&self, overrides: &[String]) -> Result<Config, String> {
        let config = outlook::resolve(&self.request.source, overrides, self.base.world_size)?;
        match no_evaluation(&config) {
            Some(reason) => Err(reason),
            None => Ok(config),
        }
    }

    fn arguments(&self, out: &Path, overrides: &[String]) -> Vec<OsString> {
        let mut arguments = trial::arguments(&self.file, self.base.world_size, overrides);
        arguments.extend(["--plain".into(), "--out".into(), out.into()]);
        arguments
    }
}

/// Returns the reason why a run of this configuration would never evaluate; `None` if it evaluates.
fn no_evaluation(config: &Config) -> Option<String> {
    match (config.training.eval_every, config.training.max_steps) {
        (0, _) => Some("training.eval_every is 0, but a sweep compares evaluation losses".into()),
        (every, Some(steps)) if every > steps => {
            Some(format!("training.eval_every is {every}, more than the {steps} steps of a trial"))
        }
        _ => None,
    }
}

impl Train for Bench<'_> {
    fn train(&mut self, id: usize, settings: &[Setting], judge: &Judge<'_>) -> Result<Option<TrialOutcome>, Error> {
        if self.request.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let overrides: Vec<String> = self.overrides.iter().cloned().chain(overrides(settings)).collect();
        let config = match self.resolve(&overrides) {
            Ok(config) => config,
            Err(reason) => {
                let (state, reason) = (TrialState::Refused, Some(reason));
                return Ok(Some(TrialOutcome { state, reason, evaluations: vec![] }));
            }
        };
        let out = self.folder.join(format!("{id:03}"));
        // Remove the folder of an interrupted trial.
        match std::fs::remove_dir_all(&out) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::Io { path: out, source });
            }
            _ => {}
        }
        let trial = Trial {
            program: &self.request.program,
            arguments: self.arguments(&out, &overrides),
            deadline: self.deadline(),
            memory: memory(self.base, self.base.world_size),
            stop: self.request.stop,
        };
        let metrics = Metrics::new(out.join("metrics.jsonl"), config.training.eval_every as u64);
        let state = RefCell::new((Seen::default(), metrics));
        let look = || {
            let (seen, metrics) = &mut *state.borrow_mut();
            seen.look(metrics, judge);
            seen.verdict.is_none()
        };
        let ended = trial.run_while(&look);
        look();
        let (seen, _) = state.into_inner();
        let (state, reason) = match (ended, seen.verdict) {
            (Ended::Interrupted, _) => return Ok(None),
            (_, Some((state, reason))) => (state, Some(reason)),
            (Ended::Well(_), None) if !seen.evaluations.is_empty() => (TrialState::Finished, None),
            (Ended::Well(_) | Ended::Dropped, None) => {
                (TrialState::Failed, Some("the trial was never evaluated".into()))
            }
            (Ended::Badly { status: Some(DIVERGED), reason }, None) => (TrialState::Diverged, Some(reason)),
            (Ended::Badly { reason, .. }, None) => (TrialState::Failed, Some(reason)),
            (Ended::TimedOut, None) => (TrialState::TimedOut, Some(too_long(self.tuning))),
            (Ended::TooLarge(bytes), None) => (TrialState::OutOfMemory, Some(too_much(bytes))),
        };
        Ok(Some(TrialOutcome { state, reason, evaluations: seen.evaluations }))
    }

    fn ended(&mut self, trial: &SweepTrial) -> Result<(), Error> {
        self.journal.write(&trial.value())?;
        self.watch.trial(trial);
        Ok(())
    }
}

//! A trial of a sweep: its settings, its evaluations, and its outcome.

use std::cmp::Ordering;

use serde_json::{Map, Value, json};

use crate::autotune::correction::{Setting, overrides};

/// An evaluation during a trial.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Number of optimizer steps before the evaluation.
    pub step: u64,
    /// The evaluation loss.
    pub loss: f32,
}

/// How a trial ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrialState {
    /// It trained all its steps.
    Finished,
    /// The median rule stopped it.
    Stopped,
    /// Its loss became non-finite, or `training.spikes` stopped it.
    Diverged,
    /// Its settings contradict each other; it was never started.
    Refused,
    /// It ended with another error.
    Failed,
    /// It exceeded the time limit of a trial.
    TimedOut,
    /// It exceeded the memory limit and was stopped.
    OutOfMemory,
}

impl TrialState {
    const ALL: [Self; 7] =
        [Self::Finished, Self::Stopped, Self::Diverged, Self::Refused, Self::Failed, Self::TimedOut, Self::OutOfMemory];

    /// Returns the name in tables and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Stopped => "stopped early",
            Self::Diverged => "diverged",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::TimedOut => "timed out",
            Self::OutOfMemory => "out of memory",
        }
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

/// The outcome of a trial.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TrialOutcome {
    pub(super) state: TrialState,
    pub(super) reason: Option<String>,
    pub(super) evaluations: Vec<Evaluation>,
}

/// A trial that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct SweepTrial {
    /// Index among all trials, from 0.
    pub id: usize,
    /// The trial's hyperparameters: keys and values, in the syntax of `--set`.
    pub settings: Vec<Setting>,
    /// How it ended.
    pub state: TrialState,
    /// The reason for the outcome, if any.
    pub reason: Option<String>,
    /// The evaluations in step order; every loss is finite.
    pub evaluations: Vec<Evaluation>,
}

impl SweepTrial {
    pub(super) fn new(id: usize, settings: Vec<Setting>, outcome: TrialOutcome) -> Self {
        let TrialOutcome { state, reason, evaluations } = outcome;
        Self { id, settings, state, reason, evaluations }
    }

    /// Returns the evaluation with the lowest loss; the earliest if several tie.
    #[must_use]
    pub fn best(&self) -> Option<Evaluation> {
        self.evaluations.iter().copied().min_by(|a, b| a.loss.total_cmp(&b.loss))
    }

    /// Orders better trials first: finished trials by loss, then stopped trials by loss, then the others.
    #[must_use]
    pub fn compare(&self, other: &Self) -> Ordering {
        let key = |trial: &Self| {
            let place = match trial.state {
                TrialState::Finished => 0,
                TrialState::Stopped => 1,
                _ => 2,
            };
            (place, trial.best().map_or(f32::INFINITY, |of| of.loss), trial.id)
        };
        let (a, b) = (key(self), key(other));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2))
    }

    /// Returns the settings on one line.
    #[must_use]
    pub fn words(&self) -> String {
        overrides(&self.settings).collect::<Vec<_>>().join(" ")
    }

    /// Returns the trial as a line of `sweep.jsonl`.
    #[must_use]
    pub fn value(&self) -> Value {
        let settings: Map<String, Value> =
            self.settings.iter().map(|(path, value)| (path.clone(), json!(value))).collect();
        let evaluations: Vec<Value> = self.evaluations.iter().map(|of| json!([of.step, of.loss])).collect();
        let best = self.best().map(|of| json!({ "step": of.step, "loss": of.loss }));
        json!({
            "event": "trial", "id": self.id, "settings": settings, "state": self.state.name(), "reason": self.reason, "best": best,
            "evaluations": evaluations,
        })
    }

    /// Parses the outcome from a line of `sweep.jsonl`, if the line is about the trial with this number and these
    /// settings.
    pub(super) fn outcome(line: &Value, id: usize, settings: &[Setting]) -> Option<TrialOutcome> {
        let told: Map<String, Value> = settings.iter().map(|(path, value)| (path.clone(), json!(value))).collect();
        if line["event"] != "trial" || line["id"] != id || line["settings"] != Value::Object(told) {
            return None;
        }
        let loss = |of: &Value| of.as_f64().map(|loss| loss as f32).filter(|loss| loss.is_finite());
        let evaluation = |of: &Value| Some(Evaluation { step: of[0].as_u64()?, loss: loss(&of[1])? });
        Some(TrialOutcome {
            state: TrialState::named(line["state"].as_str()?)?,
            reason: line["reason"].as_str().map(str::to_string),
            evaluations: line["evaluations"].as_array()?.iter().map(evaluation).collect::<Option<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_round_trips_to_the_same_trial() {
        for state in TrialState::ALL {
            let evaluations = vec![Evaluation { step: 7, loss: 0.1 }, Evaluation { step: 14, loss: f32::MIN_POSITIVE }];
            let settings = vec![("a.b".to_string(), "[1, 2]".to_string()), ("c".to_string(), "0.1".to_string())];
            let trial =
                SweepTrial { id: 3, settings: settings.clone(), state, reason: Some("why".into()), evaluations };
            let line: Value = serde_json::from_str(&trial.value().to_string()).unwrap();
            let outcome = SweepTrial::outcome(&line, 3, &settings).unwrap();
            assert_eq!(SweepTrial::new(3, settings.clone(), outcome), trial);
            assert_eq!(SweepTrial::outcome(&line, 2, &settings), None);
            assert_eq!(SweepTrial::outcome(&line, 3, &settings[..1]), None);
            for (key, odd) in [("evaluations", json!([[7, 1e300]])), ("evaluations", json!(7)), ("state", json!("odd"))]
            {
                let mut line = line.clone();
                line[key] = odd;
                assert_eq!(SweepTrial::outcome(&line, 3, &settings), None, "{line}");
            }
        }
    }
}

//! A row of the results table: a configuration with everything known about it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use zero_config::Metric;

use super::correction::overrides;
use super::interval::{Interval, median};
use super::objective::{StepWork, cost, value};
use super::space::Candidate;

/// The state of a configuration in the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its settings contradict each other, or the model cannot be split this way.
    Refused,
    /// By its plan, it needs more memory than a rank may use; it is never started.
    #[serde(rename = "too large")]
    TooLarge,
    /// It fits into memory and has not been measured.
    Predicted,
    /// It ran.
    Measured,
    /// It started and ended with an error.
    Failed,
    /// It exceeded the time limit of a trial.
    #[serde(rename = "timed out")]
    TimedOut,
    /// It exceeded the memory limit and was stopped.
    #[serde(rename = "out of memory")]
    OutOfMemory,
}

impl State {
    /// Returns the name in tables and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::TooLarge => "too large",
            Self::Predicted => "predicted",
            Self::Measured => "measured",
            Self::Failed => "failed",
            Self::TimedOut => "timed out",
            Self::OutOfMemory => "out of memory",
        }
    }

    /// Returns whether the configuration started but did not finish.
    pub(super) fn has_fallen(self) -> bool {
        matches!(self, Self::Failed | Self::TimedOut | Self::OutOfMemory)
    }
}

/// One run of a configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The round of the run. Runs of the same round took turns on the machine, so they can be compared with each other.
    pub round: usize,
    /// Seconds of each measured step.
    pub step_seconds: Vec<f64>,
    /// Peak bytes of a rank, as counted by the program itself.
    pub peak_bytes: u64,
}

impl Run {
    /// Returns the median step time.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        median(&self.step_seconds)
    }
}

/// The plan of a configuration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Planned {
    /// Largest peak of any rank, in bytes.
    pub peak_bytes: u64,
    /// Maximum number of bytes that a rank needs on its disk.
    pub disk_bytes: u64,
    /// The limit in bytes per rank, if known.
    pub limit_bytes: Option<u64>,
    /// The work of a step.
    pub work: StepWork,
}

/// A configuration and its results.
#[derive(Debug, Clone)]
pub struct Row {
    /// Index among all rows; 0 is the user's own configuration.
    pub id: usize,
    /// The configuration.
    pub candidate: Candidate,
    /// The configuration's state in the search.
    pub state: State,
    /// The reason for the state, if any.
    pub reason: Option<String>,
    /// The plan; `None` if the configuration was refused.
    pub planned: Option<Planned>,
    /// Seconds per step, from the simulator and the cost table.
    pub predicted: Option<f64>,
    /// The prediction, corrected by the measurements.
    pub corrected: Option<f64>,
    /// Its runs, in order.
    pub runs: Vec<Run>,
}

impl Row {
    /// Returns the seconds per step over all runs; `None` without runs.
    #[must_use]
    pub fn seconds(&self) -> Option<Interval> {
        let runs: Vec<f64> = self.runs.iter().map(Run::seconds).collect();
        let mut of = Interval::of(&runs)?;
        if let [run] = &self.runs[..] {
            // A single run shows the spread of its steps, but not the spread between runs.
            let steps = run.step_seconds.iter().copied();
            (of.low, of.high) = (steps.clone().fold(f64::INFINITY, f64::min), steps.fold(0.0, f64::max));
        }
        Some(of)
    }

    /// Returns the measured cost to minimize, adjusted for the speed of the machine in each round.
    pub(super) fn measured_cost(&self, slowness: &BTreeMap<usize, f64>, metric: Metric) -> Option<f64> {
        let evened = |run: &Run| run.seconds() / slowness.get(&run.round).copied().unwrap_or(1.0);
        let runs: Vec<f64> = self.runs.iter().map(evened).collect();
        let planned = self.planned.as_ref()?;
        (!runs.is_empty()).then(|| cost(metric, &planned.work, median(&runs)))
    }

    /// Returns the predicted cost to minimize.
    pub(super) fn predicted_cost(&self, metric: Metric) -> Option<f64> {
        Some(cost(metric, &self.planned.as_ref()?.work, self.corrected.or(self.predicted)?))
    }

    /// Returns the ratio of this row's cost to the cost of `other`, over the rounds in which both ran; `None` if they
    /// never ran in the same round.
    #[must_use]
    pub fn over(&self, other: &Self, metric: Metric) -> Option<Interval> {
        let (own, others) = (&self.planned.as_ref()?.work, &other.planned.as_ref()?.work);
        let pairs = self.runs.iter().filter_map(|run| {
            let beside = other.runs.iter().find(|beside| beside.round == run.round)?;
            Some(cost(metric, own, run.seconds()) / cost(metric, others, beside.seconds()))
        });
        Interval::of(&pairs.collect::<Vec<_>>())
    }

    /// Returns the settings that differ from the user's file, on one line.
    #[must_use]
    pub fn words(&self) -> String {
        if self.candidate.settings.is_empty() {
            return "as configured".into();
        }
        overrides(&self.candidate.settings).collect::<Vec<_>>().join(" ")
    }

    /// Returns the row as JSON, for files and the report.
    #[must_use]
    pub fn value(&self, metric: Metric) -> Value {
        let settings: serde_json::Map<String, Value> =
            self.candidate.settings.iter().map(|(path, value)| (path.clone(), json!(value))).collect();
        let seconds = self.seconds();
        let work = self.planned.as_ref().map(|planned| planned.work);
        let of = |seconds: f64| work.as_ref().map(|work| value(metric, work, seconds));
        let ends = |low: f64, high: f64| match (of(low), of(high)) {
            (Some(a), Some(b)) => (a.min(b), a.max(b)),
            _ => (0.0, 0.0),
        };
        json!({
            "id": self.id,
            "ranks": self.candidate.ranks,
            "settings": settings,
            "state": self.state.name(),
            "reason": self.reason,
            "planned_bytes": self.planned.as_ref().map(|planned| planned.peak_bytes),
            "measured_bytes": self.runs.iter().map(|run| run.peak_bytes).max(),
            "predicted_seconds": self.predicted,
            "corrected_seconds": self.corrected,
            "seconds": seconds.map(|of| json!({"median": of.mean, "low": of.low, "high": of.high})),
            "runs": self.runs.len(),
            "metric": seconds.map(|seconds| {
                let (low, high) = ends(seconds.low, seconds.high);
                json!({"value": of(seconds.mean), "low": low, "high": high})
            }),
            "predicted_metric": self.corrected.or(self.predicted).and_then(of),
        })
    }
}

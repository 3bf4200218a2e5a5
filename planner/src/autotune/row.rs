//! A configuration with all that is known of it: a row of the table.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};
use zero_config::Metric;

use super::correction::overrides;
use super::interval::{Interval, median};
use super::objective::{StepWork, cost, value};
use super::space::Candidate;

/// How far a configuration has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Settings that contradict each other, or a model that cannot be cut so.
    Refused,
    /// Its plan needs more memory than a rank may have: it is never started.
    #[serde(rename = "too large")]
    TooLarge,
    /// It fits, and was not measured.
    Predicted,
    /// It ran.
    Measured,
    /// It ran, and ended with an error.
    Failed,
    /// It took longer than a trial may.
    #[serde(rename = "timed out")]
    TimedOut,
    /// It took more memory than there is, and was ended.
    #[serde(rename = "out of memory")]
    OutOfMemory,
}

impl State {
    /// As it is written in tables and files.
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

    /// Whether it ran, and not to its end.
    pub(super) fn has_fallen(self) -> bool {
        matches!(self, Self::Failed | Self::TimedOut | Self::OutOfMemory)
    }

    /// That of a name.
    pub(super) fn named(name: &str) -> Option<Self> {
        let all = [
            Self::Refused,
            Self::TooLarge,
            Self::Predicted,
            Self::Measured,
            Self::Failed,
            Self::TimedOut,
            Self::OutOfMemory,
        ];
        all.into_iter().find(|state| state.name() == name)
    }
}

/// One start of a configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// In which round: runs of one round came one after another, and can be compared as pairs.
    pub round: usize,
    /// Of each measured step.
    pub step_seconds: Vec<f64>,
    /// The most bytes that a rank held by the program's own count.
    pub peak_bytes: u64,
}

impl Run {
    /// The middle step.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        median(&self.step_seconds)
    }
}

/// What is planned for a configuration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Planned {
    /// The most bytes that a rank needs.
    pub peak_bytes: u64,
    /// Of its disk.
    pub disk_bytes: u64,
    /// That a rank may have, if that is known.
    pub limit_bytes: Option<u64>,
    /// What a step does.
    pub work: StepWork,
}

/// A configuration.
#[derive(Debug, Clone)]
pub struct Row {
    /// Its place among all; 0 is the user's own configuration.
    pub id: usize,
    /// What it is.
    pub candidate: Candidate,
    /// How far it has come.
    pub state: State,
    /// Why it came no further.
    pub reason: Option<String>,
    /// `None` where it is refused.
    pub planned: Option<Planned>,
    /// Seconds of a step, by the simulator and the cost table.
    pub predicted: Option<f64>,
    /// The same, after what the measured ones have taught.
    pub corrected: Option<f64>,
    /// Its runs, in order.
    pub runs: Vec<Run>,
}

impl Row {
    /// Seconds of a step over all its runs.
    #[must_use]
    pub fn seconds(&self) -> Option<Interval> {
        let runs: Vec<f64> = self.runs.iter().map(Run::seconds).collect();
        let mut of = Interval::of(&runs)?;
        if let [run] = &self.runs[..] {
            // Its steps are all there is to tell how sure it is; they know nothing of other runs.
            let steps = run.step_seconds.iter().copied();
            (of.low, of.high) = (steps.clone().fold(f64::INFINITY, f64::min), steps.fold(0.0, f64::max));
        }
        Some(of)
    }

    /// What is minimised: by its runs, as if all rounds had been as fast.
    pub(super) fn measured_cost(&self, slowness: &BTreeMap<usize, f64>, metric: Metric) -> Option<f64> {
        let evened = |run: &Run| run.seconds() / slowness.get(&run.round).copied().unwrap_or(1.0);
        let runs: Vec<f64> = self.runs.iter().map(evened).collect();
        let planned = self.planned.as_ref()?;
        (!runs.is_empty()).then(|| cost(metric, &planned.work, median(&runs)))
    }

    /// By its prediction.
    pub(super) fn predicted_cost(&self, metric: Metric) -> Option<f64> {
        Some(cost(metric, &self.planned.as_ref()?.work, self.corrected.or(self.predicted)?))
    }

    /// How many times as much as `other` it costs, in the rounds in which both ran; `None` if there is none.
    #[must_use]
    pub fn over(&self, other: &Self, metric: Metric) -> Option<Interval> {
        let (own, others) = (&self.planned.as_ref()?.work, &other.planned.as_ref()?.work);
        let pairs = self.runs.iter().filter_map(|run| {
            let beside = other.runs.iter().find(|beside| beside.round == run.round)?;
            Some(cost(metric, own, run.seconds()) / cost(metric, others, beside.seconds()))
        });
        Interval::of(&pairs.collect::<Vec<_>>())
    }

    /// What differs from the user's file, as a line.
    #[must_use]
    pub fn words(&self) -> String {
        if self.candidate.settings.is_empty() {
            return "as configured".into();
        }
        overrides(&self.candidate.settings).collect::<Vec<_>>().join(" ")
    }

    /// As JSON, for files and the report.
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

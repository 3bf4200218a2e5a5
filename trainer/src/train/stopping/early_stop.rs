//! Early stopping, decided after each evaluation.

use std::fmt;

use serde_json::{Value, json};
use zero_config::EarlyStopping;

use super::objective::Objective;
use crate::train::evaluation::Evaluation;
use crate::train::metrics::Metric;
use zero_engine::Error;

/// The options `training.early_stopping` and the state of the search for a better evaluation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EarlyStop {
    options: Option<(Objective, EarlyStopping)>,
    /// The lowest cost.
    best: f64,
    without_improvement: usize,
}

impl EarlyStop {
    pub(crate) fn new(options: Option<EarlyStopping>) -> Self {
        let options = options.map(|it| (Objective::new(&it.metric, it.mode), it));
        Self { options, best: f64::INFINITY, without_improvement: 0 }
    }

    /// Checks that the evaluations of the run have the metric.
    pub(crate) fn check<'a>(&self, metrics: &[Metric], sets: impl IntoIterator<Item = &'a str>) -> Result<(), Error> {
        let key = "training.early_stopping.metric";
        self.options.as_ref().map_or(Ok(()), |(objective, _)| objective.check(key, metrics, sets))
    }

    /// Processes the result of an evaluation. Returns whether training should stop.
    pub(crate) fn is_over(&mut self, evaluation: &Evaluation) -> bool {
        let Some((objective, options)) = &self.options else { return false };
        let cost = objective.cost(evaluation);
        if cost < self.best - options.min_delta {
            self.best = cost;
            self.without_improvement = 0;
        } else {
            self.without_improvement += 1;
        }
        self.without_improvement >= options.patience
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self) -> Value {
        let best = self.best.is_finite().then_some(self.best);
        json!({ "early_stopping": { "best": best, "without_improvement": self.without_improvement } })
    }

    /// Restores the state from a checkpoint.
    pub(crate) fn restore(&mut self, state: &Value) {
        let state = &state["early_stopping"];
        self.best = state["best"].as_f64().unwrap_or(f64::INFINITY);
        self.without_improvement = state["without_improvement"].as_u64().unwrap_or(0) as usize;
    }
}

impl fmt::Display for EarlyStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((objective, _)) = &self.options else { return Ok(()) };
        let (metric, than, best) = (objective.name(), objective.than(), objective.value(self.best));
        write!(f, "no {metric} {than} {best:.4} in the last {} evaluations", self.without_improvement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_config::StopMode;

    fn of(loss: f32) -> Evaluation {
        Evaluation {
            step: 1,
            loss,
            metrics: vec![("accuracy".into(), f64::from(-loss))],
            by_dataset: vec![("code".into(), loss)],
            samples: 1,
        }
    }

    #[test]
    fn stops_after_patience_and_survives_a_checkpoint() {
        for (metric, mode) in [("loss", StopMode::Min), ("accuracy", StopMode::Max), ("loss_code", StopMode::Min)] {
            let options = Some(EarlyStopping { patience: 2, min_delta: 0.1, metric: metric.into(), mode });
            let mut early = EarlyStop::new(options.clone());
            assert!(!early.is_over(&of(1.0)));
            assert!(!early.is_over(&of(0.95))); // not better by min_delta
            let mut resumed = EarlyStop::new(options);
            resumed.restore(&early.state());
            assert_eq!(early, resumed);
            assert!(!resumed.is_over(&of(0.8)));
            assert!(!resumed.is_over(&of(0.8)));
            assert!(resumed.is_over(&of(f32::NAN)));
            let expected = match metric {
                "loss" => "no evaluation loss below 0.8",
                "accuracy" => "no accuracy above -0.8",
                _ => "no loss_code below 0.8",
            };
            assert!(resumed.to_string().starts_with(expected), "{resumed}");
        }
    }

    #[test]
    fn an_unknown_metric_is_an_error() {
        let early = |metric: &str| {
            let options = EarlyStopping { patience: 2, min_delta: 0.0, metric: metric.into(), mode: StopMode::Min };
            EarlyStop::new(Some(options)).check(&[], ["code"]).map_err(|error| error.to_string())
        };
        assert_eq!((early("loss"), early("loss_code")), (Ok(()), Ok(())));
        assert!(early("loss_text").unwrap_err().contains("use one of these: loss, loss_code"));
        let error = early("accuracy").unwrap_err();
        assert!(error.contains("unknown metric `accuracy`") && error.contains("use one of these: loss"), "{error}");
    }
}

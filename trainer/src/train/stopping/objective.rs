//! Compares evaluations by their loss or a metric. The configuration sets whether lower or higher values are better.

use zero_config::StopMode;

use crate::train::evaluation::Evaluation;
use crate::train::metrics::Metric;
use zero_engine::Error;

/// The name of the loss, which every evaluation reports.
const LOSS: &str = "loss";

/// `metric` and `mode` of a section of `training` that compares evaluations.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Objective {
    metric: String,
    mode: StopMode,
}

impl Objective {
    pub(crate) fn new(metric: &str, mode: StopMode) -> Self {
        Self { metric: metric.into(), mode }
    }

    /// Checks that the metric is the loss, one of `metrics`, or the loss of one of the data sets `sets`. The error
    /// names the configuration key `key`.
    pub(crate) fn check<'a>(
        &self,
        key: &'static str,
        metrics: &[Metric],
        sets: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), Error> {
        let known = std::iter::once(LOSS).chain(metrics.iter().map(Metric::name)).map(String::from);
        let known: Vec<String> = known.chain(sets.into_iter().map(|set| format!("loss_{set}"))).collect();
        if known.contains(&self.metric) {
            return Ok(());
        }
        let known = known.join(", ");
        Err(Error::setting(key, format!("unknown metric `{}`", self.metric), format!("use one of these: {known}")))
    }

    /// Returns the value of an evaluation, negated if higher values are better. Returns NaN if the evaluation does not
    /// have the metric.
    pub(crate) fn cost(&self, evaluation: &Evaluation) -> f64 {
        let value = match self.metric.as_str() {
            LOSS => f64::from(evaluation.loss),
            metric => evaluation.metric(metric).unwrap_or(f64::NAN),
        };
        if self.mode == StopMode::Max { -value } else { value }
    }

    /// Returns the metric's value for a cost.
    pub(crate) fn value(&self, cost: f64) -> f64 {
        if self.mode == StopMode::Max { -cost } else { cost }
    }

    /// Returns the name of the metric for messages.
    pub(crate) fn name(&self) -> &str {
        if self.metric == LOSS { "evaluation loss" } else { &self.metric }
    }

    /// Returns on which side of the best value a better value would be, `above` or `below`, for messages.
    pub(crate) fn than(&self) -> &'static str {
        if self.mode == StopMode::Max { "above" } else { "below" }
    }
}

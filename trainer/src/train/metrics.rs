//! The program's own metrics: functions of the last layer's outputs and the targets, averaged over an evaluation.

use candle_core::{DType, Result, Tensor};
use zero_engine::{Activations, Error, ExactSum, Observed};

use crate::monitor::metric;

type Function = Box<dyn Fn(&Activations, &Tensor) -> Result<Tensor> + Send + Sync>;

/// A metric and the name under which it is logged.
pub(crate) struct Metric {
    pub(super) monitored: &'static metric::Metric,
    name: String,
    function: Function,
}

impl Metric {
    /// Creates a metric that evaluations report as `name`.
    ///
    /// # Errors
    /// Fails if the name has characters other than lowercase letters, digits and `_`, does not begin with a letter, or
    /// is taken. `loss` is always taken.
    pub(crate) fn new(name: &str, taken: &[Self], function: Function) -> std::result::Result<Self, Error> {
        let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(is_word) {
            let message = format!("`{name}` is not a valid name of a metric");
            return Err(Error::setting("Trainer::metric", message, "use lowercase letters, digits and `_`"));
        }
        if name == "loss" || taken.iter().any(|other| other.name == name) {
            let message = format!("another metric already has the name `{name}`");
            return Err(Error::setting("Trainer::metric", message, "give every metric a different name"));
        }
        Ok(Self { monitored: metric::evaluated(name), name: name.into(), function })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// Sums over an evaluation. They are exact, so their bits do not depend on which rank evaluated which sample.
pub(super) struct Sums {
    loss: ExactSum,
    samples: ExactSum,
    /// Per metric, the sum of its values and their number.
    metrics: Vec<(ExactSum, ExactSum)>,
}

impl Sums {
    pub(super) fn new(metrics: &[Metric]) -> Self {
        let metrics = metrics.iter().map(|_| (ExactSum::new(), ExactSum::new())).collect();
        Self { loss: ExactSum::new(), samples: ExactSum::new(), metrics }
    }

    /// Adds the loss and the metrics of a micro-batch of `samples` samples.
    pub(super) fn add(
        &mut self,
        metrics: &[Metric],
        seen: &Observed<'_>,
        samples: usize,
    ) -> std::result::Result<(), Error> {
        let weight = samples as f64;
        self.loss.add(f64::from(seen.loss.to_dtype(DType::F32)?.to_scalar::<f32>()?) * weight);
        self.samples.add(weight);
        for (metric, (sum, count)) in metrics.iter().zip(&mut self.metrics) {
            let values =
                values(metric, seen, samples).map_err(|e| e.context(format!("in the metric `{}`", metric.name)))?;
            match values {
                Values::Mean(mean) => {
                    sum.add(mean * weight);
                    count.add(weight);
                }
                Values::Each(values) => {
                    values.iter().for_each(|&value| sum.add(value));
                    count.add(values.len() as f64);
                }
            }
        }
        Ok(())
    }

    /// Returns all sums in a fixed order, to be added up over the ranks.
    pub(super) fn into_sums(self) -> Vec<ExactSum> {
        [self.loss, self.samples]
            .into_iter()
            .chain(self.metrics.into_iter().flat_map(|(sum, count)| [sum, count]))
            .collect()
    }
}

enum Values {
    Mean(f64),
    Each(Vec<f64>),
}

fn values(metric: &Metric, seen: &Observed<'_>, samples: usize) -> Result<Values> {
    let value = (metric.function)(seen.outputs, seen.targets)?;
    let numbers = value.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    match value.dims() {
        [] => Ok(Values::Mean(numbers[0])),
        [rows, ..] if *rows == samples => Ok(Values::Each(numbers)),
        dims => {
            candle_core::bail!("the shape {dims:?} is neither a scalar nor one value for each of {samples} samples")
        }
    }
}

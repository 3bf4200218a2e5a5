//! The program's own metrics: functions of the model's outputs and the targets, averaged over an evaluation.

use candle_core::{DType, Result, Tensor};
use zero_engine::{Activations, Batch, Error, ExactSum, Observed, Signature};

use crate::monitor::metric;

/// A metric's function of outputs and targets.
pub(super) type Of<O, T> = Box<dyn Fn(&O, &T) -> Result<Tensor> + Send + Sync>;

/// A metric's function, by the type of its arguments.
pub(crate) enum Function {
    /// The only output and the only target.
    Single(Of<Tensor, Tensor>),
    /// All outputs and the only target.
    All(Of<Activations, Tensor>),
    /// The outputs and targets with these names.
    Named { outputs: Vec<String>, targets: Vec<String>, function: Of<Activations, Activations> },
}

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

    /// Checks that the model and the evaluation data have the outputs and targets that the metric uses.
    ///
    /// # Errors
    /// Fails if an output or target is missing. The error lists the available names.
    pub(super) fn check(&self, model: &Signature, batch: &Batch) -> std::result::Result<(), Error> {
        let refused = |message: String, help: String| {
            Err(Error::setting("Trainer::metric", format!("the metric `{}` takes {message}", self.name), help))
        };
        let outputs = || format!("the loss sees the outputs {}", model.outputs.join(", "));
        match &self.function {
            Function::Single(_) if model.outputs.len() != 1 => refused(
                format!("one output, but {}", outputs()),
                "name the outputs and targets with `.metric_of(…)`".into(),
            ),
            Function::Single(_) | Function::All(_) => match batch.only_target() {
                Ok(_) => Ok(()),
                Err(error) => {
                    refused(format!("one target: {error}"), "name the outputs and targets with `.metric_of(…)`".into())
                }
            },
            Function::Named { outputs: of, targets, .. } => {
                if let Some(output) = of.iter().find(|output| !model.outputs.contains(output)) {
                    return refused(format!("the output `{output}`, which the loss does not see"), outputs());
                }
                let of_loss = model.targets.as_deref().unwrap_or_default();
                match targets.iter().find(|target| !batch.has_target(target) && !of_loss.contains(target)) {
                    Some(target) => {
                        let message = format!("the target `{target}`, which the evaluation data do not have");
                        refused(message, format!("their tensors are {}", batch.names().collect::<Vec<_>>().join(", ")))
                    }
                    None => Ok(()),
                }
            }
        }
    }
}

/// Sums over an evaluation. They are exact, so their bits do not depend on which rank evaluates which sample.
pub(super) struct Sums {
    /// The sum of the losses times their weights.
    loss: ExactSum,
    weights: ExactSum,
    samples: ExactSum,
    /// For each metric, the sum and the number of its values.
    metrics: Vec<(ExactSum, ExactSum)>,
}

/// Checks that metrics receive whole sequences.
///
/// # Errors
/// Fails if ranks share sequences, because the metric of a slice differs from the metric of the whole sequence. The
/// error names the first metric.
pub(super) fn check(config: &zero_config::Config, metrics: &[Metric]) -> std::result::Result<(), Error> {
    match metrics.first() {
        Some(metric) if config.context_size() > 1 => {
            let message =
                format!("the metric `{}` needs whole sequences, but each rank has only slices of them", metric.name);
            let help = format!("write `{}: 1`, or remove the metrics from the program", config.context_key());
            Err(Error::setting(config.context_key(), message, help))
        }
        _ => Ok(()),
    }
}

impl Sums {
    pub(super) fn new(metrics: &[Metric]) -> Self {
        let metrics = metrics.iter().map(|_| (ExactSum::new(), ExactSum::new())).collect();
        let [loss, weights, samples] = [(); 3].map(|()| ExactSum::new());
        Self { loss, weights, samples, metrics }
    }

    /// Adds the loss and the metrics of a micro-batch of `samples` samples.
    pub(super) fn add(
        &mut self,
        metrics: &[Metric],
        seen: &Observed<'_>,
        samples: usize,
    ) -> std::result::Result<(), Error> {
        // A loss whose weight is 0 may be NaN, so it is not added.
        let of_loss = seen.weight.map_or(samples as f64, |weight| weight as f64);
        if of_loss > 0.0 {
            self.loss.add(f64::from(seen.loss.to_dtype(DType::F32)?.to_scalar::<f32>()?) * of_loss);
        }
        self.weights.add(of_loss);
        let weight = samples as f64;
        self.samples.add(weight);
        for (metric, (sum, count)) in metrics.iter().zip(&mut self.metrics) {
            let values = values(metric, seen, samples)?;
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

    /// Returns all sums in a fixed order. The caller adds them over the ranks.
    pub(super) fn into_sums(self) -> Vec<ExactSum> {
        [self.loss, self.weights, self.samples]
            .into_iter()
            .chain(self.metrics.into_iter().flat_map(|(sum, count)| [sum, count]))
            .collect()
    }
}

enum Values {
    Mean(f64),
    Each(Vec<f64>),
}

fn values(metric: &Metric, seen: &Observed<'_>, samples: usize) -> std::result::Result<Values, Error> {
    let value = match &metric.function {
        Function::Single(function) => function(seen.outputs.single()?, seen.batch.only_target()?),
        Function::All(function) => function(seen.outputs, seen.batch.only_target()?),
        Function::Named { outputs, targets, function } => {
            function(&seen.outputs_of(outputs)?, &Activations::new(seen.batch.get(targets)?))
        }
    };
    let values = value.and_then(|value| numbers(&value, samples));
    Ok(values.map_err(|e| e.context(format!("in the metric `{}`", metric.name)))?)
}

fn numbers(value: &Tensor, samples: usize) -> Result<Values> {
    let numbers = value.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    match value.dims() {
        [] => Ok(Values::Mean(numbers[0])),
        [rows, ..] if *rows == samples => Ok(Values::Each(numbers)),
        dims => {
            candle_core::bail!(
                "a metric must return a scalar or one value for each of {samples} samples, not the shape {dims:?}"
            )
        }
    }
}

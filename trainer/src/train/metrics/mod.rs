//! Custom metrics: functions of the model's outputs and the targets. They are averaged over an evaluation, or computed
//! once from all its samples.

mod dataset;

use candle_core::{DType, Result, Tensor};
use zero_engine::{Activations, Batch, Error, ExactSum, Observed, Signature};

use crate::monitor::metric;
pub(super) use dataset::Predictions;

/// A function of outputs and targets.
pub(crate) type Of<T> = Box<dyn Fn(&Activations, &Activations) -> Result<T> + Send + Sync>;

/// The outputs and targets that a metric receives.
#[derive(PartialEq, Eq)]
pub(crate) enum Selection {
    /// The only output and the only target.
    Single,
    /// All outputs and the only target.
    All,
    /// The outputs and targets with these names.
    Named { outputs: Vec<String>, targets: Vec<String> },
}

/// A metric's function.
pub(crate) enum Function {
    /// Computes values of a micro-batch. The metric is their mean.
    Mean(Of<MetricValues>),
    /// Computes the metric from the outputs and targets of all evaluation samples.
    Dataset(Of<f64>),
}

/// The values of a metric for the samples of a micro-batch, and optionally their weights in the mean over all samples.
/// A tensor converts into values of equal weight, and a pair of tensors of the same shape into values and weights.
#[derive(Debug, Clone)]
pub struct MetricValues {
    values: Tensor,
    weights: Option<Tensor>,
}

impl From<Tensor> for MetricValues {
    fn from(values: Tensor) -> Self {
        Self { values, weights: None }
    }
}

impl From<(Tensor, Tensor)> for MetricValues {
    fn from((values, weights): (Tensor, Tensor)) -> Self {
        Self { values, weights: Some(weights) }
    }
}

/// A metric and the name under which it is logged.
pub(crate) struct Metric {
    pub(super) monitored: &'static metric::Metric,
    name: String,
    selection: Selection,
    function: Function,
}

impl Metric {
    /// Creates a metric that evaluations report as `name`.
    ///
    /// # Errors
    /// Fails if the name has characters other than lowercase letters, digits and `_`, does not begin with a letter, or
    /// is taken. `loss` is always taken.
    pub(crate) fn new(
        name: &str,
        taken: &[Self],
        selection: Selection,
        function: Function,
    ) -> std::result::Result<Self, Error> {
        let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(is_word) {
            let message = format!("`{name}` is not a valid metric name");
            return Err(Error::setting("Trainer::metric", message, "use lowercase letters, digits and `_`"));
        }
        if name == "loss" || taken.iter().any(|other| other.name == name) {
            let message = format!("another metric already has the name `{name}`");
            return Err(Error::setting("Trainer::metric", message, "give every metric a different name"));
        }
        Ok(Self { monitored: metric::evaluated(name), name: name.into(), selection, function })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the metric is a mean over the samples.
    pub(super) fn is_mean(&self) -> bool {
        matches!(self.function, Function::Mean(_))
    }

    fn located(&self, error: candle_core::Error) -> candle_core::Error {
        error.context(format!("in the metric `{}`", self.name))
    }

    /// Checks that the model and the evaluation data have the outputs and targets that the metric uses.
    ///
    /// # Errors
    /// Fails if an output or target is missing. The error lists the available names.
    pub(super) fn check(&self, model: &Signature, batch: &Batch) -> std::result::Result<(), Error> {
        let refused = |message: String, help: String| {
            Err(Error::setting("Trainer::metric", format!("the metric `{}` needs {message}", self.name), help))
        };
        let outputs = || format!("the loss receives the outputs {}", model.outputs.join(", "));
        match &self.selection {
            Selection::Single if model.outputs.len() != 1 => refused(
                format!("one output, but {}", outputs()),
                "name the outputs and targets with `.metric_of(…)`".into(),
            ),
            Selection::Single | Selection::All => match batch.only_target() {
                Ok(_) => Ok(()),
                Err(error) => {
                    refused(format!("one target: {error}"), "name the outputs and targets with `.metric_of(…)`".into())
                }
            },
            Selection::Named { outputs: of, targets } => {
                if let Some(output) = of.iter().find(|output| !model.outputs.contains(output)) {
                    return refused(format!("the output `{output}`, which the loss does not receive"), outputs());
                }
                let of_loss = model.targets.as_deref().unwrap_or_default();
                match targets.iter().find(|target| !batch.has_target(target) && !of_loss.contains(target)) {
                    Some(target) => {
                        let message = format!("the target `{target}`, which the evaluation data does not have");
                        refused(
                            message,
                            format!(
                                "the evaluation data has the tensors {}",
                                batch.names().collect::<Vec<_>>().join(", ")
                            ),
                        )
                    }
                    None => Ok(()),
                }
            }
        }
    }
}

impl Selection {
    pub(crate) fn named<const O: usize, const T: usize>(outputs: [&str; O], targets: [&str; T]) -> Self {
        Self::Named { outputs: outputs.map(String::from).to_vec(), targets: targets.map(String::from).to_vec() }
    }

    /// Returns the selected outputs and targets of a micro-batch.
    fn of(&self, seen: &Observed<'_>) -> std::result::Result<(Activations, Activations), Error> {
        match self {
            Self::Single | Self::All => Ok((seen.outputs()?, seen.batch.only_target()?.clone().into())),
            Self::Named { outputs, targets } => {
                Ok((seen.outputs_of(outputs)?, Activations::new(seen.batch.get(targets)?)))
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
            let help = format!("set `{}: 1`, or remove the metrics from the program", config.context_key());
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
        // A loss with the weight 0 may be NaN, so it is not added.
        let of_loss = seen.weight.map_or(samples as f64, |weight| weight as f64);
        if of_loss > 0.0 {
            self.loss.add(f64::from(seen.loss.to_dtype(DType::F32)?.to_scalar::<f32>()?) * of_loss);
        }
        self.weights.add(of_loss);
        let weight = samples as f64;
        self.samples.add(weight);
        for (metric, (sum, count)) in metrics.iter().zip(&mut self.metrics) {
            let Function::Mean(function) = &metric.function else { continue };
            let (outputs, targets) = metric.selection.of(seen)?;
            let values = function(&outputs, &targets).and_then(|values| numbers(&values, samples));
            for [value, weight] in values.map_err(|error| metric.located(error))? {
                sum.add(value * weight);
                count.add(weight);
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

/// Returns each value with its weight.
fn numbers(values: &MetricValues, samples: usize) -> Result<Vec<[f64; 2]>> {
    let of = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let MetricValues { values, weights } = values;
    if let Some(weights) = weights
        && weights.dims() != values.dims()
    {
        let [values, weights] = [values, weights].map(Tensor::dims);
        candle_core::bail!("the values have the shape {values:?}, but their weights have the shape {weights:?}")
    }
    let default = match values.dims() {
        [] => samples as f64,
        [rows, ..] if *rows == samples => 1.0,
        dims => {
            candle_core::bail!(
                "a metric must return a scalar or one value for each of {samples} samples, not the shape {dims:?}"
            )
        }
    };
    let numbers = of(values)?;
    let weights = weights.as_ref().map_or_else(|| Ok(vec![default; numbers.len()]), of)?;
    // A value with the weight 0 may be NaN.
    Ok(numbers
        .into_iter()
        .zip(weights)
        .map(|(value, weight)| [if weight == 0.0 { 0.0 } else { value }, weight])
        .collect())
}

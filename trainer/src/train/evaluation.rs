//! Evaluation: the loss and the program's metrics over the evaluation data.

use super::corpus::{Corpus, Extent};
use super::metrics::{Metric, Predictions, Sums};
use crate::data::Dataset;
use zero_engine::Engine;
use zero_engine::Error;
use zero_engine::Observed;

/// Number of micro-batches per pass through the pipeline. Within a pass, the first stage does not wait for the last
/// stage, so up to this many boundary activations can be in memory.
pub(super) const IN_A_ROW: usize = 16;

/// The result of an evaluation. It is the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// The step after which the evaluation ran.
    pub step: u64,
    /// Mean loss over all samples or, for a loss with weights, over all targets that are not ignored.
    pub loss: f32,
    /// Name and value of each metric, in the order in which the program added them.
    pub metrics: Vec<(String, f64)>,
    /// Name and mean loss of each evaluated data set of `data.datasets`.
    pub by_dataset: Vec<(String, f32)>,
    /// Number of evaluated samples.
    pub samples: usize,
}

impl Evaluation {
    /// Returns the value of the metric `name`. For `loss_<data set>`, returns the loss of that data set. Returns `None`
    /// if neither exists.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<f64> {
        let loss_of =
            |set: &str| self.by_dataset.iter().find(|(other, _)| other == set).map(|(_, loss)| f64::from(*loss));
        let metric = self.metrics.iter().find(|(other, _)| other == name).map(|(_, value)| *value);
        metric.or_else(|| name.strip_prefix("loss_").and_then(loss_of))
    }
}

/// Formats as `evaluation loss 0.1234  accuracy 0.9712`.
impl std::fmt::Display for Evaluation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "evaluation loss {:.4}", self.loss)?;
        self.by_dataset.iter().try_for_each(|(name, loss)| write!(f, "  {name} {loss:.4}"))?;
        self.metrics.iter().try_for_each(|(name, value)| write!(f, "  {name} {value:.4}"))
    }
}

/// Runs an evaluation; a collective. Uses the averaged weights if they are configured for evaluation. Returns `None`
/// without evaluation data.
pub(super) fn evaluate(engine: &mut Engine, corpus: &Corpus, metrics: &[Metric]) -> Result<Option<Evaluation>, Error> {
    let Some(eval) = &corpus.eval else { return Ok(None) };
    with_evaluated(engine, |engine| of_weights(engine, corpus, &**eval, metrics)).map(Some)
}

/// Calls `with` while the model has the weights for evaluations: the averaged weights, if the run keeps and evaluates
/// them.
pub(super) fn with_evaluated<T>(
    engine: &mut Engine,
    with: impl FnOnce(&mut Engine) -> Result<T, Error>,
) -> Result<T, Error> {
    let config = engine.config();
    let is_schedule_free = matches!(config.optimizer, zero_config::Optimizer::ScheduleFree(_));
    match is_schedule_free || config.training.ema.is_some_and(|ema| ema.evaluate) {
        true => engine.with_averages(with),
        false => with(engine),
    }
}

/// Computes the metrics of one micro-batch, so that a faulty metric fails before training and not at the first
/// evaluation. Metrics of the whole data set are not computed, because they may need more samples. A collective.
pub(super) fn try_metrics(engine: &mut Engine, corpus: &Corpus, metrics: &[Metric]) -> Result<(), Error> {
    let Some(eval) = corpus.eval.as_deref().filter(|_| !metrics.is_empty()) else { return Ok(()) };
    let rows = engine.config().train_micro_batch_size_per_gpu;
    let first = engine.replica() * rows;
    let (load, mut sums) = (|_| corpus.evaluation_batch(eval, first as u64, rows), Sums::new(metrics));
    engine.eval_observed(1, load, |seen| sums.add(metrics, &seen, rows)).map(drop)
}

fn of_weights(
    engine: &mut Engine,
    corpus: &Corpus,
    eval: &dyn Dataset,
    metrics: &[Metric],
) -> Result<Evaluation, Error> {
    let (rows, step) = (engine.config().train_micro_batch_size_per_gpu, engine.steps());
    let tensor_index = engine.zero().groups().tensor_index();
    let mut seen = Observations { metrics, sums: vec![], predictions: Predictions::new(tensor_index == 0) };
    let parts: Vec<&dyn Dataset> = match &corpus.eval_sets[..] {
        [] => vec![eval],
        sets => sets.iter().map(|set| &*set.data).collect(),
    };
    for (index, part) in parts.iter().enumerate() {
        let samples = match corpus.extent {
            Extent::All => part.len(),
            Extent::Batches(batches) => part.len().min(batches * rows * engine.replicas()),
        };
        seen.sums.push(Sums::new(metrics));
        of_part(engine, corpus, (index, *part, samples), &mut seen)?;
    }
    let totals = engine.sum_exactly(&seen.sums.into_iter().flat_map(Sums::into_sums).collect::<Vec<_>>())?;
    let of_parts: Vec<&[f64]> = totals.chunks_exact(3 + 2 * metrics.len()).collect();
    if of_parts.iter().any(|sums| sums[1] == 0.0) {
        let message = "all targets of the evaluation data are ignored (-100), so the evaluation loss is undefined";
        return Err(Error::Batch(message.into()));
    }
    let total = |index: usize| of_parts.iter().map(|sums| sums[index]).sum::<f64>();
    // Each rank of a context or tensor group has counted the same sequence, so the sum is divided by the group sizes.
    let samples = total(2) as usize / (engine.config().context_size() * engine.config().tensor_size());
    let mut of_dataset = seen.predictions.values(&**engine.communicator(), metrics)?.into_iter();
    let mut value = |i: usize, metric: &Metric| match metric.is_mean() {
        true => Some(total(3 + 2 * i) / total(4 + 2 * i)),
        false => of_dataset.next(),
    };
    let named = |(i, metric): (usize, &Metric)| Some((metric.name().to_string(), value(i, metric)?));
    let values = metrics.iter().enumerate().filter_map(named).collect();
    let losses = of_parts.iter().map(|sums| (sums[0] / sums[1]) as f32);
    let by_dataset = corpus.eval_sets.iter().map(|set| set.name.clone()).zip(losses).collect();
    Ok(Evaluation { step, loss: (total(0) / total(1)) as f32, metrics: values, by_dataset, samples })
}

/// The results of the micro-batches that this rank has evaluated.
struct Observations<'a> {
    metrics: &'a [Metric],
    /// The sums of each data set. New results are added to the last element.
    sums: Vec<Sums>,
    predictions: Predictions,
}

impl Observations<'_> {
    /// Adds a micro-batch that begins with sample `first` of the data set `part`.
    fn add(&mut self, seen: &Observed<'_>, (part, first): (usize, usize), samples: usize) -> Result<(), Error> {
        if let Some(sums) = self.sums.last_mut() {
            sums.add(self.metrics, seen, samples)?;
        }
        self.predictions.add(self.metrics, seen, (part, first))
    }
}

/// Evaluates the first `samples` samples of a data set, each once. Each replica runs whole micro-batches. In the last
/// round, some replicas have a smaller micro-batch or none. A replica without samples runs a micro-batch that does not
/// count, because the other ranks cannot gather their layers without this replica.
fn of_part(
    engine: &mut Engine,
    corpus: &Corpus,
    (part, eval, samples): (usize, &dyn Dataset, usize),
    observations: &mut Observations<'_>,
) -> Result<(), Error> {
    let rows = engine.config().train_micro_batch_size_per_gpu;
    let (replica, replicas) = (engine.replica(), engine.replicas());
    let start = |round: usize| (round * replicas + replica) * rows;
    let rounds = samples / (rows * replicas);
    for first in (0..rounds).step_by(IN_A_ROW) {
        let load = |batch: usize| corpus.evaluation_batch(eval, start(first + batch) as u64, rows);
        engine.eval_observed(IN_A_ROW.min(rounds - first), load, |seen| {
            observations.add(&seen, (part, start(first + seen.micro_batch)), rows)
        })?;
    }
    if rounds * rows * replicas < samples {
        let own = samples.saturating_sub(start(rounds)).min(rows);
        let load = |_| corpus.evaluation_batch(eval, start(rounds) as u64, own.max(1));
        engine.eval_observed(1, load, |seen| match own {
            0 => Ok(()),
            _ => observations.add(&seen, (part, start(rounds)), own),
        })?;
    }
    Ok(())
}

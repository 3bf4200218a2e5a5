//! The inputs that a program passes to a run in addition to the configuration, and the results that the run returns.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use zero_config::Config;

use super::configured_data;
use super::corpus::Corpus;
use super::evaluation::Evaluation;
use super::metrics::Metric;
use super::options::Finished;
use super::stopping::best::BestCheckpoint;
use crate::data::{Dataset, Watch};
use zero_engine::configured_model;
use zero_engine::optimizer::{CustomOptimizer, LrLambda};
use zero_engine::{Error, Layers, Step};
use zero_model::zoo::POSITION_IDS;

/// The training data and, if given, the evaluation data.
pub(crate) type Datasets = (Arc<dyn Dataset>, Option<Arc<dyn Dataset>>);
/// A callback. Returns whether the run ends.
type Callback<'a, T> = Box<dyn FnMut(&T) -> bool + 'a>;

/// What a callback may return: nothing, or whether the run continues.
pub trait CallbackResult {
    /// Returns whether the run ends after this step.
    fn stops(&self) -> bool;
}

impl CallbackResult for () {
    fn stops(&self) -> bool {
        false
    }
}

impl CallbackResult for ControlFlow<()> {
    fn stops(&self) -> bool {
        self.is_break()
    }
}

/// The model, data, metrics and callbacks that the program supplies. The program `zero-train` supplies none of them,
/// because its configuration describes the model and the data.
pub(crate) struct Task<'a> {
    pub(crate) layers: Option<Layers>,
    pub(crate) optimizer: Option<Arc<dyn CustomOptimizer>>,
    pub(crate) lr_lambda: Option<LrLambda>,
    pub(crate) data: Option<Datasets>,
    pub(crate) shuffle: bool,
    pub(crate) metrics: Vec<Metric>,
    pub(crate) on_step: Vec<Callback<'a, StepInfo>>,
    pub(crate) on_evaluation: Vec<Callback<'a, Evaluation>>,
    /// Whether to evaluate after the last step even if `training.eval_every` does not require it.
    pub(crate) evaluates_last: bool,
}

impl Default for Task<'_> {
    fn default() -> Self {
        Self {
            layers: None,
            optimizer: None,
            lr_lambda: None,
            data: None,
            shuffle: true,
            metrics: vec![],
            on_step: vec![],
            on_evaluation: vec![],
            evaluates_last: false,
        }
    }
}

impl Task<'_> {
    /// Opens the program's data or the configuration's data. Fails if both exist.
    pub(super) fn corpus(&mut self, config: &Config, watch: &dyn Watch) -> Result<Corpus, Error> {
        let both = |key: &str, method: &str| {
            let message = format!("the configuration has a `{key}` section, but the program also calls `{method}`");
            Error::setting(key, message, format!("remove the section or the call to `{method}`"))
        };
        if self.layers.is_some() && config.model.is_some() {
            return Err(both("model", "Trainer::model"));
        }
        match self.data.take() {
            Some(_) if config.data.is_some() => Err(both("data", "Trainer::data")),
            Some(data) => Corpus::given(config, data, self.shuffle),
            None if self.layers.is_some() && config.data.is_none() => {
                let help = "call `Trainer::data` or add a `data` section";
                Err(Error::setting("data", "the run has no training data", help))
            }
            None => configured_data::open(config, self.layers.is_some(), watch),
        }
    }

    /// Returns the program's model, or builds the configured model. Before anything runs, checks that the data have the
    /// names that the program's model and metrics use.
    pub(super) fn layers(&mut self, config: &Config, corpus: &Corpus) -> Result<Layers, Error> {
        let own = self.layers.take();
        let is_own = own.is_some();
        if is_own && config.preference.is_some() {
            return Err(Error::setting(
                "preference",
                "the section needs the built-in loss, but the custom model computes its own",
                "remove the section, and build the loss with `ops::preference_loss`",
            ));
        }
        let mut layers = own.map_or_else(|| configured_model::from_config(config, corpus.vocabulary), Ok)?;
        if let Some(optimizer) = self.optimizer.take() {
            layers = layers.optimizer(optimizer);
        }
        if let Some(factor) = self.lr_lambda.take() {
            layers = layers.lr_lambda(move |steps| factor(steps));
        }
        if !is_own && self.metrics.is_empty() {
            return Ok(layers);
        }
        let signature = layers.signature()?;
        if is_own {
            // Loads a whole micro-batch, so that a data set that returns a wrong number of samples fails here.
            let batch = corpus.sampler.batch(0)?;
            batch.fits(&signature, true)?;
            let takes_positions = signature.inputs.iter().any(|(input, _)| input == POSITION_IDS);
            if config.data.as_ref().is_some_and(|data| data.sample_packing) && !takes_positions {
                return Err(Error::setting(
                    "data.sample_packing",
                    format!(
                        "the model does not accept `{POSITION_IDS}`, so conversations in the same sample would attend to each other"
                    ),
                    format!("add `.with([\"{POSITION_IDS}\"])` to the layers with attention, or remove the key"),
                ));
            }
        }
        if let Some(eval) = &corpus.eval {
            let batch = corpus.evaluation_batch(&**eval, 0, 1)?;
            batch.fits(&signature, true)?;
            self.metrics.iter().try_for_each(|metric| metric.check(&signature, &batch))?;
        }
        Ok(layers)
    }
}

/// An optimizer step, as passed to [`Trainer::on_step`](crate::Trainer::on_step).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepInfo {
    /// The number of the step, counted from 1.
    pub step: u64,
    /// Total optimizer steps of the run.
    pub steps: u64,
    /// Number of samples trained on so far.
    pub samples: u64,
    /// Mean loss of the global batch, before the update.
    pub loss: f32,
    /// Learning rate of the update.
    pub lr: f64,
    /// Global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Whether the update was skipped because the gradient norm was not finite or exceeded the limit.
    pub skipped: bool,
    /// Wall-clock time of the step on the slowest rank.
    pub duration: Duration,
}

impl StepInfo {
    pub(super) fn new(step: &Step, steps: u64, samples: u64, duration: Duration) -> Self {
        let Step { step, loss, lr, grad_norm, skipped, .. } = *step;
        Self { step, steps, samples, loss, lr, grad_norm, skipped, duration }
    }
}

/// The outcome of a run that ended without an error. It is the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// How the run ended.
    pub finished: Finished,
    /// Optimizer steps of the run, including the steps before it was resumed.
    pub steps: u64,
    /// Loss of the last step. `None` if no step was left to run.
    pub loss: Option<f32>,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// The final checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// The best checkpoint with `training.keep_best`.
    pub best: Option<BestCheckpoint>,
    /// The checkpoint from which the run resumed.
    pub resumed_from: Option<PathBuf>,
    /// The run's folder.
    pub folder: PathBuf,
}

impl Summary {
    /// Describes a run that trained nothing: a signal ended it before its first step, or it only verified steps.
    pub(super) fn untrained(finished: Finished, steps: u64, folder: PathBuf) -> Self {
        let (loss, evaluation, checkpoint, best, resumed_from) = (None, None, None, None, None);
        Self { finished, steps, loss, evaluation, checkpoint, best, resumed_from, folder }
    }
}

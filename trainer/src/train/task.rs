//! What a program brings to a run besides its configuration, and what it gets of it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use zero_config::Config;

use super::configured_data;
use super::corpus::Corpus;
use super::evaluation::Evaluation;
use super::metrics::Metric;
use super::options::Finished;
use crate::data::Dataset;
use zero_engine::configured_model;
use zero_engine::{Error, Layers, Step};

/// Data to train on, and to evaluate on.
pub(crate) type Datasets = (Arc<dyn Dataset>, Option<Arc<dyn Dataset>>);
type OnStep<'a> = Box<dyn FnMut(&StepInfo) + 'a>;
type OnEvaluation<'a> = Box<dyn FnMut(&Evaluation) + 'a>;

/// What is the program's own. The binary brings nothing: model and data are the configuration's.
pub(crate) struct Task<'a> {
    pub(crate) layers: Option<Layers>,
    pub(crate) data: Option<Datasets>,
    pub(crate) shuffle: bool,
    pub(crate) metrics: Vec<Metric>,
    pub(crate) on_step: Vec<OnStep<'a>>,
    pub(crate) on_evaluation: Vec<OnEvaluation<'a>>,
    /// Evaluate after the last step in any case.
    pub(crate) evaluates_last: bool,
}

impl Default for Task<'_> {
    fn default() -> Self {
        Self {
            layers: None,
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
    /// Opens the data: the program's, or those of the configuration, but not both.
    pub(super) fn corpus(&mut self, config: &Config) -> Result<Corpus, Error> {
        let both = |key: &str, method: &str| {
            let message = format!("the configuration has a `{key}` section, and the program gives `{method}`");
            Error::setting(key, message, format!("leave out the section, or the call of `{method}`"))
        };
        if self.layers.is_some() && config.model.is_some() {
            return Err(both("model", "Trainer::model"));
        }
        match self.data.take() {
            Some(_) if config.data.is_some() => Err(both("data", "Trainer::data")),
            Some(data) => Corpus::given(config, data, self.shuffle),
            None if self.layers.is_some() && config.data.is_none() => {
                let help = "call `Trainer::data`, or add a `data` section";
                Err(Error::setting("data", "there is nothing to train on", help))
            }
            None => configured_data::open(config, self.layers.is_some()),
        }
    }

    /// The model: the program's, or that of the configuration.
    pub(super) fn layers(&mut self, config: &Config, corpus: &Corpus) -> Result<Layers, Error> {
        match self.layers.take() {
            Some(layers) => Ok(layers),
            None => configured_model::from_config(config, corpus.vocabulary),
        }
    }
}

/// An optimizer step, as [`Trainer::on_step`](crate::Trainer::on_step) sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepInfo {
    /// From 1.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Samples of the run so far.
    pub samples: u64,
    /// Mean loss of the global batch, before the update.
    pub loss: f32,
    /// Learning rate of the update.
    pub lr: f64,
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// No update was made: the gradient was not finite, or above the limit.
    pub skipped: bool,
    /// Wall-clock time of the slowest rank.
    pub duration: Duration,
}

impl StepInfo {
    pub(super) fn new(step: &Step, steps: u64, samples: u64, duration: Duration) -> Self {
        let Step { step, loss, lr, grad_norm, skipped, .. } = *step;
        Self { step, steps, samples, loss, lr, grad_norm, skipped, duration }
    }
}

/// A run that ended well; the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// How it ended.
    pub finished: Finished,
    /// Optimizer steps of the run, those before it was resumed included.
    pub steps: u64,
    /// Loss of the last step; none if the run was at its end already.
    pub loss: Option<f32>,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// The checkpoint at the end.
    pub checkpoint: Option<PathBuf>,
    /// The checkpoint that the run went on from.
    pub resumed_from: Option<PathBuf>,
    /// The run's folder.
    pub folder: PathBuf,
}

//! The data sets of a run, and the order of their samples.

use std::sync::Arc;

use serde_json::Value;
use zero_config::Config;

use super::curriculum::Lengths;
use super::mixing::{MixedSet, Mixing};
use crate::data::{Dataset, PairDataset, Tokenizer, sample_index};
use crate::monitor::metric::{self, Metric};
use zero_engine::Batch;
use zero_engine::Error;
use zero_engine::format::counted;

/// The data sets of a run.
pub(super) struct Corpus {
    pub(super) sampler: Sampler,
    pub(super) eval: Option<Arc<dyn Dataset>>,
    /// The parts of `eval` that `data.datasets` names; empty if it names none.
    pub(super) eval_sets: Vec<EvalSet>,
    pub(super) extent: Extent,
    pub(super) tokenizer: Tokenizer,
    /// Number of tokens in the tokenizer's vocabulary, if the samples consist of its tokens.
    pub(super) vocabulary: Option<usize>,
    /// What the run says about its data when it starts.
    pub(super) notes: Vec<String>,
    /// The pairs of training and evaluation data whose log-probabilities under the reference model the loss needs.
    pub(super) reference: Vec<Arc<PairDataset>>,
}

/// Evaluation data of a data set of `data.datasets`.
pub(super) struct EvalSet {
    pub(super) name: String,
    pub(super) data: Arc<dyn Dataset>,
    pub(super) monitored: &'static Metric,
}

/// Loads training samples by their position in the run.
#[derive(Clone)]
pub(super) struct Sampler {
    pub(super) data: Arc<dyn Dataset>,
    pub(super) order: Order,
    /// Samples used per epoch: all of them, or only whole batches.
    pub(super) per_epoch: u64,
    /// How `data` is mixed from several data sets.
    pub(super) mixing: Option<Mixing>,
    /// How many tokens of a sample are trained at each step; `None` for all of them.
    pub(super) lengths: Option<Lengths>,
}

impl Sampler {
    /// Loads the samples at positions `position..position + rows` of the run, as step `step` trains on them.
    ///
    /// # Errors
    /// Fails as the data set does.
    pub(super) fn step_batch(&self, step: u64, position: u64, rows: usize) -> Result<Batch, Error> {
        let batch = self.batch(position, rows)?;
        match &self.lengths {
            Some(lengths) => lengths.truncate(batch, step),
            None => Ok(batch),
        }
    }

    /// Loads the whole samples at positions `position..position + rows` of the run.
    ///
    /// # Errors
    /// Fails as the data set does.
    pub(super) fn batch(&self, position: u64, rows: usize) -> Result<Batch, Error> {
        let (n, Order { seed, shuffle }) = (self.data.len(), self.order);
        let at = |row: u64| match &self.mixing {
            Some(mixing) => mixing.index(seed, position + row, self.per_epoch, shuffle),
            None => {
                let (epoch, within) = ((position + row) / self.per_epoch, (position + row) % self.per_epoch);
                sample_index(seed, epoch * n as u64 + within, n, shuffle)
            }
        };
        batch(&*self.data, &(0..rows as u64).map(at).collect::<Vec<_>>())
    }
}

/// The order of the training samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Order {
    pub(super) seed: u64,
    pub(super) shuffle: bool,
}

/// How much of the evaluation data an evaluation uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// This many micro-batches per replica.
    Batches(usize),
    /// Every sample once.
    All,
}

impl Corpus {
    /// Creates a corpus from the training data, and the evaluation data if any.
    pub(super) fn new(
        config: &Config,
        (train, eval): (Arc<dyn Dataset>, Option<Arc<dyn Dataset>>),
        order: Order,
        extent: Extent,
        sets: Vec<MixedSet>,
    ) -> Result<Self, Error> {
        let mixing = (!sets.is_empty()).then(|| Mixing::new(&sets)).transpose()?;
        let samples = mixing.as_ref().map_or(train.len() as u64, Mixing::per_epoch);
        let per_epoch = samples_per_epoch(samples, config)?;
        let mut notes = mixing.as_ref().map_or(vec![], |mixing| mixing.lines(&sets));
        let lengths = Lengths::of(config, &*train);
        notes.extend(lengths.as_ref().map(Lengths::describe));
        let of_set = |set: MixedSet| {
            let monitored = metric::evaluated(&format!("loss_{}", set.name));
            Some(EvalSet { data: Arc::new(set.eval?), name: set.name, monitored })
        };
        Ok(Self {
            sampler: Sampler { data: train, order, per_epoch, mixing, lengths },
            eval,
            eval_sets: sets.into_iter().filter_map(of_set).collect(),
            extent,
            tokenizer: Tokenizer::Byte,
            vocabulary: None,
            notes,
            reference: vec![],
        })
    }

    /// Creates a corpus from the program's own data sets. An evaluation uses all samples unless `training.eval_batches`
    /// is set.
    pub(super) fn given(
        config: &Config,
        (train, eval): (Arc<dyn Dataset>, Option<Arc<dyn Dataset>>),
        shuffle: bool,
    ) -> Result<Self, Error> {
        for (dataset, what) in [(Some(&train), "training"), (eval.as_ref(), "evaluation")] {
            if dataset.is_some_and(|dataset| dataset.is_empty()) {
                return Err(Error::setting(
                    "Trainer::data",
                    format!("the {what} data set has no samples"),
                    "pass a data set with at least one sample",
                ));
            }
        }
        if config.data_efficiency.curriculum().is_some() {
            let message = "a curriculum truncates the samples of a `data` section, and the program has its own";
            let help = "leave the section out, or read the data through a `data` section";
            return Err(Error::setting("data_efficiency", message, help));
        }
        evaluates_on(config, eval.as_ref(), "pass an evaluation data set to `Trainer::data`, or leave the key out")?;
        let order = Order { seed: config.training.seed, shuffle };
        let extent = match config.origins.is_written("training.eval_batches") {
            true => Extent::Batches(config.training.eval_batches.max(1)),
            false => Extent::All,
        };
        Self::new(config, (train, eval), order, extent, vec![])
    }

    /// Continues with the data sets where the checkpoint at sample `position` left them.
    pub(super) fn restore(&mut self, state: &Value, position: u64, config: &Config) {
        if let Some(mixing) = &mut self.sampler.mixing {
            let used = |per_epoch| samples_per_epoch(per_epoch, config).unwrap_or(per_epoch);
            self.notes.extend(mixing.restore(state, position, used));
        }
    }

    /// Loads the whole training samples at positions `position..position + rows` of the run.
    pub(super) fn training_batch(&self, position: u64, rows: usize) -> Result<Batch, Error> {
        self.sampler.batch(position, rows)
    }

    /// Loads `rows` evaluation samples in the order of the data set, starting again at its first sample after the last.
    pub(super) fn evaluation_batch(&self, eval: &dyn Dataset, position: u64, rows: usize) -> Result<Batch, Error> {
        let n = eval.len() as u64;
        batch(eval, &(0..rows as u64).map(|row| ((position + row) % n) as usize).collect::<Vec<_>>())
    }

    /// Returns the number of tokens per sample; a row of a table counts as one token.
    pub(super) fn tokens_per_sample(&self) -> usize {
        self.sampler.data.tokens_per_sample()
    }

    /// Returns the number of tokens per sample that a step trains on.
    pub(super) fn tokens_at(&self, step: u64) -> usize {
        self.sampler.lengths.as_ref().map_or_else(|| self.tokens_per_sample(), |lengths| lengths.at(step))
    }

    /// Returns the number of optimizer steps in `epochs` epochs, rounded up.
    pub(super) fn steps(&self, epochs: f64, train_batch_size: usize) -> u64 {
        (epochs * self.sampler.per_epoch as f64 / train_batch_size as f64).ceil() as u64
    }
}

/// Rejects `training.eval_every` without evaluation data; `help` says how to add some.
pub(super) fn evaluates_on(config: &Config, eval: Option<&Arc<dyn Dataset>>, help: &str) -> Result<(), Error> {
    match config.training.eval_every > 0 && eval.is_none() {
        true => Err(Error::setting("training.eval_every", "the run has no evaluation data", help)),
        false => Ok(()),
    }
}

/// Returns the samples used per epoch. With `dataloader_drop_last`, an epoch ends with its last whole batch; without, a
/// batch may span two epochs.
fn samples_per_epoch(samples: u64, config: &Config) -> Result<u64, Error> {
    let whole = samples - samples % config.train_batch_size as u64;
    match (config.dataloader_drop_last, whole) {
        (false, _) => Ok(samples),
        (true, 0) => Err(Error::setting(
            "dataloader_drop_last",
            format!("the {samples} samples are fewer than one batch of {}", config.train_batch_size),
            "set it to false, or use a smaller `train_batch_size`",
        )),
        (true, whole) => Ok(whole),
    }
}

fn batch(dataset: &dyn Dataset, indices: &[usize]) -> Result<Batch, Error> {
    let batch = dataset.batch(indices).map_err(Error::of_dataset)?;
    let rows = batch.rows()?;
    if rows != indices.len() {
        return Err(Error::Batch(format!(
            "the data set returned a batch of {rows} instead of {}",
            counted(indices.len(), "sample", "samples")
        )));
    }
    Ok(batch)
}

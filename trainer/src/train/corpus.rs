//! The data sets of a run, and the order of their samples.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use serde_json::Value;
use zero_comm::Communicator;
use zero_config::{BatchSizes, Config};

use super::curriculum::Lengths;
use super::mixing::{MixedSet, Mixing};
use super::token_batches::{MicroBatchSamples, TokenBatches};
use crate::data::{Dataset, PairDataset, Tokenizer, sample_index};
use crate::monitor::metric::{self, Metric};
use zero_engine::Batch;
use zero_engine::Error;
use zero_engine::format::counted;

/// Number of samples that ranks compare before training.
const CHECKED: usize = 8;

/// The data sets of a run.
pub(super) struct Corpus {
    pub(super) sampler: Sampler,
    pub(super) eval: Option<Arc<dyn Dataset>>,
    /// The parts of `eval`: the evaluation data of each data set in `data.datasets`. Empty without `data.datasets`.
    pub(super) eval_sets: Vec<EvalSet>,
    pub(super) extent: Extent,
    pub(super) tokenizer: Tokenizer,
    /// Number of tokens in the tokenizer's vocabulary, if the samples consist of its tokens.
    pub(super) vocabulary: Option<usize>,
    /// Lines about the data that the run prints when it starts.
    pub(super) notes: Vec<String>,
    /// Pairs of answers in the training and evaluation data. The loss needs the log-probabilities of the answers under
    /// the reference model.
    pub(super) reference: Vec<Arc<PairDataset>>,
}

/// The evaluation data of one data set in `data.datasets`.
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
    /// Number of samples used per epoch: all samples, or only those in whole batches.
    pub(super) per_epoch: u64,
    /// How `data` is mixed from several data sets. `None` if it is not mixed.
    pub(super) mixing: Option<Mixing>,
    /// Number of tokens of each sample that a step trains on. `None` for whole samples.
    pub(super) lengths: Option<Lengths>,
    /// How the samples of a step are distributed by length. With `None`, each micro-batch gets `rows` consecutive
    /// samples.
    pub(super) token_batches: Option<TokenBatches>,
    /// Number of samples per micro-batch, if samples are not distributed by length.
    pub(super) rows: usize,
    /// Number of samples per step.
    pub(super) batch_sizes: BatchSizes,
}

impl Sampler {
    /// Distributes the samples of a step to micro-batches. `start` is the position of the step's first sample in the
    /// run.
    ///
    /// # Errors
    /// Fails if the length of a sample cannot be read.
    pub(super) fn distribute(&self, step: u64, start: u64) -> Result<Vec<MicroBatchSamples>, Error> {
        let count = self.batch_sizes.at(start);
        let Some(token_batches) = &self.token_batches else {
            let whole = || self.data.tokens_per_sample();
            let length = self.lengths.as_ref().map_or_else(whole, |lengths| lengths.at(step));
            let starts = (0..count).step_by(self.rows);
            let micro_batch = |first| MicroBatchSamples { samples: (first..first + self.rows).collect(), length };
            return Ok(starts.map(micro_batch).collect());
        };
        let length = |sample: usize| self.data.length(self.index(start + sample as u64)).map_err(Error::of_dataset);
        Ok(token_batches.distribute(&(0..count).map(length).collect::<Result<Vec<_>, _>>()?))
    }

    /// Loads a micro-batch of a step. `micro_batch` is one element of the result of [`distribute`](Self::distribute).
    ///
    /// # Errors
    /// Fails if the data set fails.
    pub(super) fn load(&self, start: u64, micro_batch: &MicroBatchSamples) -> Result<Batch, Error> {
        let indices: Vec<usize> = micro_batch.samples.iter().map(|&sample| self.index(start + sample as u64)).collect();
        truncate(batch(&*self.data, &indices)?, self.data.tokens_per_sample(), micro_batch.length)
    }

    /// Loads a micro-batch of `rows` whole samples, the first of them at `position` of the run.
    ///
    /// # Errors
    /// Fails if the data set fails.
    pub(super) fn batch(&self, position: u64) -> Result<Batch, Error> {
        batch(&*self.data, &(0..self.rows as u64).map(|row| self.index(position + row)).collect::<Vec<_>>())
    }

    /// Returns the index of a sample in the data set from its position in the run.
    fn index(&self, position: u64) -> usize {
        let (n, Order { seed, shuffle }) = (self.data.len(), self.order);
        match &self.mixing {
            Some(mixing) => mixing.index(seed, position, self.per_epoch, shuffle),
            None => {
                let (epoch, within) = (position / self.per_epoch, position % self.per_epoch);
                sample_index(seed, epoch * n as u64 + within, n, shuffle)
            }
        }
    }
}

/// The order of the training samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Order {
    pub(super) seed: u64,
    pub(super) shuffle: bool,
}

/// Selects the part of the evaluation data that an evaluation uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// This number of micro-batches per replica.
    Batches(usize),
    /// Every sample once.
    All,
}

impl Corpus {
    /// Creates a corpus from the training data and, if given, the evaluation data.
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
        let token_batches = TokenBatches::of(config, train.tokens_per_sample());
        notes.extend(token_batches.as_ref().map(TokenBatches::describe));
        let of_set = |set: MixedSet| {
            let monitored = metric::evaluated(&format!("loss_{}", set.name));
            Some(EvalSet { data: Arc::new(set.eval?), name: set.name, monitored })
        };
        Ok(Self {
            sampler: Sampler {
                data: train,
                order,
                per_epoch,
                mixing,
                lengths,
                token_batches,
                rows: config.train_micro_batch_size_per_gpu,
                batch_sizes: config.batch_sizes(),
            },
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
            let message = "a curriculum can truncate only the samples of a `data` section, but the program passes its own data set";
            let help = "remove the section, or read the data through a `data` section";
            return Err(Error::setting("data_efficiency", message, help));
        }
        evaluates_on(config, eval.as_ref(), "pass an evaluation data set to `Trainer::data`, or remove the key")?;
        let order = Order { seed: config.training.seed, shuffle };
        let extent = match config.origins.is_written("training.eval_batches") {
            true => Extent::Batches(config.training.eval_batches.max(1)),
            false => Extent::All,
        };
        Self::new(config, (train, eval), order, extent, vec![])
    }

    /// Checks that all ranks have the same tokenizer, and data sets of the same size. If the samples are tokens of the
    /// configured data, also compares a few training samples. Hosts may have different files at the same path. A
    /// collective.
    pub(super) fn agree(&self, comm: &dyn Communicator) -> Result<(), Error> {
        if comm.size() == 1 {
            return Ok(());
        }
        let evaluation = self.eval.as_ref().map_or(0, |eval| eval.len());
        let terms = [
            ("the number of training samples", self.sampler.data.len().to_string()),
            ("the number of evaluation samples", evaluation.to_string()),
            ("the length of a sample", self.tokens_per_sample().to_string()),
            ("the checksum of the tokenizer", self.tokenizer.fingerprint().to_string()),
            ("the checksum of training samples", self.checksum()?.to_string()),
        ];
        let terms = terms.map(|(key, value)| (key.to_string(), value));
        Ok(zero_comm::agree(comm, &terms)?)
    }

    /// Returns a checksum of a few training samples. Returns 0 for pairs of answers, and for samples that are not
    /// tokens of the configured data.
    fn checksum(&self) -> Result<u32, Error> {
        if self.vocabulary.is_none() || !self.reference.is_empty() {
            return Ok(0);
        }
        let last = self.sampler.data.len() - 1;
        let some: Vec<usize> = (0..CHECKED).map(|i| i * last / (CHECKED - 1)).collect();
        let mut checksum = 0;
        let batch = self.sampler.data.batch(&some).map_err(Error::of_dataset)?;
        batch.map(|tensor| {
            let values = tensor.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
            let add = |checksum, value: i64| crc32c::crc32c_append(checksum, &value.to_le_bytes());
            checksum = values.into_iter().fold(checksum, add);
            Ok(tensor.clone())
        })?;
        Ok(checksum)
    }

    /// Restores the positions in the data sets from the state of a checkpoint that was saved at sample `position`. Adds
    /// a note if the tokenizer or the number of training samples has changed.
    pub(super) fn restore(&mut self, state: &Value, position: u64, config: &Config) {
        if state["tokenizer"].as_str().is_some_and(|before| before != self.tokenizer.fingerprint()) {
            self.notes.push(
                "the tokenizer differs from that of the checkpoint: the same token may stand for different text".into(),
            );
        }
        if let Some(mixing) = &mut self.sampler.mixing {
            let used = |per_epoch| samples_per_epoch(per_epoch, config).unwrap_or(per_epoch);
            self.notes.extend(mixing.restore(&state["mixture"], position, used));
            return;
        }
        let now = self.sampler.data.len() as u64;
        if let Some(before) = state["training_samples"].as_u64().filter(|&before| before != now) {
            self.notes.push(format!(
                "the training data changed from {before} to {now} samples: the current epoch may use some samples twice, \
                 and others not at all"
            ));
        }
    }

    /// Loads `rows` evaluation samples in the order of the data set. After the last sample, continues with the first.
    pub(super) fn evaluation_batch(&self, eval: &dyn Dataset, position: u64, rows: usize) -> Result<Batch, Error> {
        let n = eval.len() as u64;
        batch(eval, &(0..rows as u64).map(|row| ((position + row) % n) as usize).collect::<Vec<_>>())
    }

    /// Returns the number of tokens per sample; a row of a table counts as one token.
    pub(super) fn tokens_per_sample(&self) -> usize {
        self.sampler.data.tokens_per_sample()
    }

    /// Returns the number of optimizer steps from `consumed` samples to the end of `epochs` epochs, rounded up.
    pub(super) fn steps(&self, epochs: f64, consumed: u64) -> u64 {
        let end = (epochs * self.sampler.per_epoch as f64).ceil() as u64;
        self.sampler.batch_sizes.steps(consumed, end)
    }
}

/// Rejects `training.eval_every` without evaluation data. `help` describes how to add evaluation data.
pub(super) fn evaluates_on(config: &Config, eval: Option<&Arc<dyn Dataset>>, help: &str) -> Result<(), Error> {
    match config.training.eval_every > 0 && eval.is_none() {
        true => Err(Error::setting("training.eval_every", "the run has no evaluation data", help)),
        false => Ok(()),
    }
}

/// Returns the number of samples used per epoch. With `dataloader_drop_last`, only whole batches of `train_batch_size`
/// are used. Without `dataloader_drop_last`, and while the batch size grows, a batch may span two epochs.
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

/// Truncates the samples of a batch from `whole` tokens to their first `length` tokens.
fn truncate(batch: Batch, whole: usize, length: usize) -> Result<Batch, Error> {
    if length == whole {
        return Ok(batch);
    }
    let truncate = |tensor: &Tensor| match tensor.dims().get(1) == Some(&whole) {
        true => tensor.narrow(1, 0, length)?.contiguous(),
        false => candle_core::bail!(
            "the curriculum truncates sequences of {whole} tokens, but a tensor of the batch has the shape {:?}",
            tensor.dims()
        ),
    };
    Ok(batch.map(truncate)?)
}

fn batch(dataset: &dyn Dataset, indices: &[usize]) -> Result<Batch, Error> {
    let batch = dataset.batch(indices).map_err(Error::of_dataset)?;
    let rows = batch.rows()?;
    if rows != indices.len() {
        return Err(Error::Batch(format!(
            "the data set returned a batch with {rows} instead of {}",
            counted(indices.len(), "sample", "samples")
        )));
    }
    Ok(batch)
}

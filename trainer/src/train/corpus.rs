//! The datasets of a run, and batches out of them.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use zero_config::{self as config, Config};

use crate::data::{self, DataOptions, Dataset, SampleShape, Samples, Tokenizer, sample_index};
use zero_engine::Batch;
use zero_engine::Error;
use zero_engine::configured_model::{self, longest_sequence};

/// What `data.train` and `data.eval` are to name.
const READABLE: &str = "name files that can be read, or a glob";

/// What a run trains and evaluates on.
pub(super) struct Corpus {
    pub(super) train: Arc<dyn Dataset>,
    pub(super) eval: Option<Arc<dyn Dataset>>,
    pub(super) tokenizer: Tokenizer,
    /// Number of tokens of the tokenizer, where the data are made of its tokens.
    pub(super) vocabulary: Option<usize>,
    seed: u64,
    shuffle: bool,
    /// Samples of an epoch that are used: all, or whole batches only.
    per_epoch: u64,
}

impl Corpus {
    pub(super) fn open(config: &Config) -> Result<Self, Error> {
        refuse(config)?;
        let (model, data) = config.model_and_data()?;
        let tokenizer = match &data.tokenizer {
            config::Tokenizer::Byte => Tokenizer::Byte,
            config::Tokenizer::File(path) => Tokenizer::from_file(path).map_err(|error| {
                Error::from(error).named("data.tokenizer", "name a Hugging Face tokenizer.json, or `byte`")
            })?,
        };
        let vocabulary = vocabulary(model, data, &tokenizer)?;
        if vocabulary.is_some() {
            are_the_models(config, model, vocabulary)?;
        }
        // A model that cannot take these tokens is told of before gigabytes are read.
        configured_model::from_config(config, vocabulary)?;
        let sequence_length = sequence_length(model, data)?;
        let options = |sources: &[String]| DataOptions {
            sources: sources.to_vec(),
            format: format(model, data),
            text_key: data.text_key.clone(),
            token_dtype: match data.token_dtype {
                config::TokenDtype::U16 => data::TokenDtype::U16,
                config::TokenDtype::U32 => data::TokenDtype::U32,
            },
            sequence_length,
            vocabulary: classes(model).or(vocabulary).unwrap_or(usize::MAX),
        };
        let open = |key: &str, sources: &[String]| {
            data::open(&options(sources), &tokenizer).map_err(|error| Error::from(error).named(key, READABLE))
        };
        let all = open("data.train", &data.train)?;
        fits(model, all.shape())?;
        let (train, eval) = match &data.eval {
            Some(sources) => (all, Some(open("data.eval", sources)?)),
            None if data.eval_fraction > 0.0 => data::split(all, data.eval_fraction)?,
            None => (all, None),
        };
        if config.training.eval_every > 0 && eval.is_none() {
            return Err(Error::setting(
                "training.eval_every",
                "there is nothing to evaluate on",
                "name files in `data.eval`, or set `data.eval_fraction`",
            ));
        }
        let (seed, shuffle) = (config.training.seed, data.shuffle);
        let per_epoch = samples_per_epoch(train.samples(), config)?;
        Ok(Self { train, eval, tokenizer, vocabulary, seed, shuffle, per_epoch })
    }

    /// Training samples at `position..position + rows` of the run.
    pub(super) fn training_batch(&self, position: u64, rows: usize) -> Result<Batch, Error> {
        let n = self.train.samples();
        let at = |row: u64| {
            let (epoch, within) = ((position + row) / self.per_epoch, (position + row) % self.per_epoch);
            sample_index(self.seed, epoch * n as u64 + within, n, self.shuffle)
        };
        batch(&*self.train, (0..rows as u64).map(at))
    }

    /// Samples for an evaluation, in the order of the files; from the start again when they end.
    pub(super) fn evaluation_batch(&self, eval: &dyn Dataset, position: u64, rows: usize) -> Result<Batch, Error> {
        let n = eval.samples() as u64;
        batch(eval, (0..rows as u64).map(|row| ((position + row) % n) as usize))
    }

    /// Tokens of a sample; a row of a table counts as one.
    pub(super) fn tokens_per_sample(&self) -> usize {
        match self.train.shape() {
            SampleShape::Tokens(length) => length,
            SampleShape::Features(_) => 1,
        }
    }

    /// Optimizer steps of so many epochs.
    pub(super) fn steps(&self, epochs: f64, train_batch_size: usize) -> u64 {
        (epochs * self.per_epoch as f64 / train_batch_size as f64).ceil() as u64
    }
}

/// Refuses what [`Corpus::open`] refuses, as far as no file has to be looked at.
pub(super) fn refuse(config: &Config) -> Result<(), Error> {
    let (model, data) = config.model_and_data()?;
    sequence_length(model, data)?;
    let format = match format(model, data) {
        data::Format::Auto => data.train.first().and_then(|source| data::format_of_source(source)),
        format => Some(format),
    };
    match (model, format, &data.tokenizer) {
        (config::Model::Mlp(_), Some(data::Format::Csv), _) | (_, None, _) => Ok(()),
        (config::Model::Mlp(_), Some(_), _) => fits(model, SampleShape::Tokens(1)),
        (_, Some(data::Format::Csv), _) => fits(model, SampleShape::Features(1)),
        (_, Some(data::Format::Tokens), _) | (.., config::Tokenizer::File(_)) => Ok(()),
        (_, Some(_), config::Tokenizer::Byte) => {
            let vocabulary = Some(Tokenizer::Byte.vocabulary());
            are_the_models(config, model, vocabulary)?;
            configured_model::from_config(config, vocabulary).map(drop)
        }
    }
}

fn format(model: &config::Model, data: &config::Data) -> data::Format {
    match (data.format, model) {
        (config::DataFormat::Auto, config::Model::Mlp(_)) => data::Format::Csv,
        (config::DataFormat::Auto, _) => data::Format::Auto,
        (config::DataFormat::Text, _) => data::Format::Text,
        (config::DataFormat::Bytes, _) => data::Format::Bytes,
        (config::DataFormat::Tokens, _) => data::Format::Tokens,
        (config::DataFormat::Jsonl, _) => data::Format::Jsonl,
        (config::DataFormat::Csv, _) => data::Format::Csv,
    }
}

/// How many tokens the data may have, where the tokenizer says. Of token files the byte tokenizer, which is the default, says nothing:
/// what their numbers mean is known to whoever made them.
fn vocabulary(model: &config::Model, data: &config::Data, tokenizer: &Tokenizer) -> Result<Option<usize>, Error> {
    let is_of_tokenizer = match (model, data.format, tokenizer) {
        (config::Model::Mlp(_), ..) | (_, config::DataFormat::Csv, _) => false,
        (_, config::DataFormat::Tokens, Tokenizer::Byte) => false,
        (_, config::DataFormat::Auto, Tokenizer::Byte) => {
            let numbers = data::are_token_files(&data.train);
            !numbers.map_err(|error| Error::from(error).named("data.train", READABLE))?
        }
        _ => true,
    };
    Ok(is_of_tokenizer.then(|| tokenizer.vocabulary()))
}

/// Bytes by default are not the tokens of a pretrained model with another vocabulary.
fn are_the_models(config: &Config, model: &config::Model, vocabulary: Option<usize>) -> Result<(), Error> {
    let by_default = config.origins.get("data.tokenizer") == config::Origin::Default;
    match (model.pretrained(), classes(model)) {
        (Some(folder), Some(known)) if by_default && vocabulary != Some(known) => Err(Error::setting(
            "data.tokenizer",
            format!("{folder} has no tokenizer.json, and its model knows {known} tokens, which are not bytes"),
            "name the tokenizer.json that the model was trained with",
        )),
        _ => Ok(()),
    }
}

/// With `dataloader_drop_last` an epoch ends with its last whole batch; without, a batch reaches into the next epoch.
fn samples_per_epoch(samples: usize, config: &Config) -> Result<u64, Error> {
    let whole = samples - samples % config.train_batch_size;
    match (config.dataloader_drop_last, whole) {
        (false, _) => Ok(samples as u64),
        (true, 0) => Err(Error::setting(
            "dataloader_drop_last",
            format!("{samples} samples are less than one batch of {}", config.train_batch_size),
            "switch it off, or make `train_batch_size` smaller",
        )),
        (true, whole) => Ok(whole as u64),
    }
}

/// Tokens of a sample, as many as the model takes unless the data say; without a look at the files.
pub(super) fn sequence_length(model: &config::Model, data: &config::Data) -> Result<usize, Error> {
    let longest = longest_sequence(model);
    match (data.sequence_length, longest) {
        (Some(length), Some(longest)) if length > longest => Err(Error::setting(
            "data.sequence_length",
            format!("{length} tokens are more than the model's {longest}"),
            format!("set it to at most {longest}, or make the model's longest sequence longer"),
        )),
        (Some(length), _) => Ok(length),
        (None, longest) => Ok(longest.unwrap_or(1)),
    }
}

/// How many tokens or classes the model tells apart, if the configuration says.
fn classes(model: &config::Model) -> Option<usize> {
    match model {
        config::Model::Gpt2(m) => m.vocab_size,
        config::Model::Llama(m) => m.vocab_size,
        config::Model::Mlp(m) => Some(m.output_size),
    }
}

fn fits(model: &config::Model, shape: SampleShape) -> Result<(), Error> {
    match (model, shape) {
        (config::Model::Mlp(m), SampleShape::Features(n)) if m.input_size == n => Ok(()),
        (config::Model::Mlp(m), SampleShape::Features(n)) => Err(Error::setting(
            "model.input_size",
            format!("it is {}, and the table has {n} features besides the label", m.input_size),
            format!("set it to {n}"),
        )),
        (config::Model::Mlp(_), SampleShape::Tokens(_)) => Err(Error::setting(
            "data.format",
            "an mlp trains on tables, not on tokens",
            "name .csv files in `data.train`",
        )),
        (_, SampleShape::Features(_)) => Err(Error::setting(
            "data.format",
            "a language model trains on text or tokens, not on a table",
            "use `model.type: mlp`, or other files",
        )),
        (_, SampleShape::Tokens(_)) => Ok(()),
    }
}

fn batch(dataset: &dyn Dataset, indices: impl Iterator<Item = usize>) -> Result<Batch, Error> {
    let (mut samples, mut rows) = (Samples::default(), 0);
    for index in indices {
        dataset.append(index, &mut samples)?;
        rows += 1;
    }
    let cpu = &Device::Cpu;
    Ok(match dataset.shape() {
        SampleShape::Tokens(length) => Batch::new(
            Tensor::from_vec(samples.tokens, (rows, length), cpu)?,
            Tensor::from_vec(samples.targets, (rows, length), cpu)?,
        ),
        SampleShape::Features(features) => Batch::new(
            Tensor::from_vec(samples.features, (rows, features), cpu)?,
            Tensor::from_vec(samples.targets, rows, cpu)?,
        ),
    })
}

//! Opens the configured data.

mod mixed;

use std::sync::Arc;

use zero_config::{self as config, Config};

use super::corpus::{Corpus, Extent, Order, evaluates_on};
use super::mixing::MixedSet;
use crate::data::{
    self, CacheOptions, ChatOptions, DataError, DataOptions, Dataset, FileDataset, PairDataset, SampleShape, Tokenizer,
    Watch,
};
use zero_engine::Error;
use zero_engine::configured_model::{self, longest_sequence};

/// The help for errors in `data.train` and `data.eval`.
const READABLE: &str = "specify readable files or a glob";
/// The help for errors in `data.cache_dir`.
const WRITABLE: &str = "set it to a folder that is writable and has room for the tokens";

/// The configured data sets, and their tokenizer.
pub(super) struct Opened<D> {
    pub(super) train: D,
    pub(super) eval: Option<D>,
    /// The data sets of `data.datasets`. `train` and `eval` are their concatenations.
    pub(super) sets: Vec<MixedSet>,
    pub(super) tokenizer: Tokenizer,
    pub(super) vocabulary: Option<usize>,
}

/// Opens the data sets for the configured model, or with `has_own_model` for the program's own model.
pub(super) fn open(config: &Config, has_own_model: bool, watch: &dyn Watch) -> Result<Corpus, Error> {
    if let Some(preference) = &config.preference {
        let opened = pairs(config, preference, has_own_model, watch)?;
        let reference = match preference.has_reference() {
            true => std::iter::once(&opened.train).chain(&opened.eval).cloned().collect(),
            false => vec![],
        };
        let mut corpus = corpus(config, opened, |pairs| Some(pairs.description()))?;
        corpus.reference = reference;
        return Ok(corpus);
    }
    corpus(config, files(config, has_own_model, watch)?, FileDataset::description)
}

fn corpus<D: Dataset + 'static>(
    config: &Config,
    Opened { train: all, eval, sets, tokenizer, vocabulary }: Opened<D>,
    description: impl Fn(&D) -> Option<String>,
) -> Result<Corpus, Error> {
    let described = [("training data", Some(&all)), ("evaluation data", eval.as_ref())].into_iter();
    let notes: Vec<String> =
        described.filter_map(|(name, data)| Some(format!("{name}: {}", description(data?)?))).collect();
    let fraction = config.data.as_ref().map_or(0.0, |data| data.eval_fraction);
    let (train, eval): (Arc<dyn Dataset>, Option<Arc<dyn Dataset>>) = match eval {
        Some(eval) => (Arc::new(all), Some(Arc::new(eval))),
        None if fraction > 0.0 => {
            let (train, eval) = data::split(all, fraction)?;
            (Arc::new(train), Some(Arc::new(eval)))
        }
        None => (Arc::new(all), None),
    };
    evaluates_on(config, eval.as_ref(), "set `data.eval` to files, or set `data.eval_fraction`")?;
    let shuffle = config.data.as_ref().is_none_or(|data| data.shuffle);
    let order = Order { seed: config.training.seed, shuffle };
    let extent = Extent::Batches(config.training.eval_batches.max(1));
    let mut corpus = Corpus::new(config, (train, eval), order, extent, sets)?;
    corpus.notes.extend(notes);
    (corpus.tokenizer, corpus.vocabulary) = (tokenizer, vocabulary);
    Ok(corpus)
}

/// The configured files, before they are opened.
struct Sources<'c> {
    model: Option<&'c config::Model>,
    data: &'c config::Data,
    tokenizer: Tokenizer,
    vocabulary: Option<usize>,
    sequence_length: usize,
}

impl<'c> Sources<'c> {
    fn of(config: &'c Config, has_own_model: bool, watch: &dyn Watch) -> Result<Self, Error> {
        let (model, data) = match (&config.data, has_own_model) {
            (Some(data), true) => (None, data),
            _ => {
                refuse(config)?;
                config.model_and_data().map(|(model, data)| (Some(model), data))?
            }
        };
        let tokenizer = tokenizer_of(data)?;
        let vocabulary = vocabulary(model, data, &tokenizer, watch)?;
        if vocabulary.is_some() {
            are_the_models(config, model, vocabulary)?;
        }
        // Before reading gigabytes of data, rejects a model that does not fit the tokenizer's vocabulary.
        if model.is_some() {
            configured_model::from_config(config, vocabulary)?;
        }
        let sequence_length = sequence_length(model, data)?;
        let sources = Self { model, data, tokenizer, vocabulary, sequence_length };
        if sets(data).iter().any(|set| set.format == config::DataFormat::Chat) {
            sources.has_length()?
        }
        Ok(sources)
    }

    /// Fails if neither the model nor the `data` section sets the number of tokens per sample.
    fn has_length(&self) -> Result<(), Error> {
        match self.model.is_some() || self.data.sequence_length.is_some() {
            true => Ok(()),
            false => Err(Error::setting(
                "data.sequence_length",
                "the model does not specify its maximum number of tokens",
                "set it to the number of tokens per sample",
            )),
        }
    }

    /// Calls `open` with the options for these files.
    fn open<D>(
        &self,
        (key, sources): (&str, &[String]),
        set: &Set<'_>,
        split: Option<&config::SplitPart>,
        open: impl Fn(&DataOptions, &Tokenizer) -> Result<D, DataError>,
    ) -> Result<D, Error> {
        let (model, data) = (self.model, self.data);
        let options = DataOptions {
            sources: sources.to_vec(),
            split: split.cloned(),
            format: format(model, set.format),
            text_key: set.text_key.into(),
            token_dtype: data.token_dtype,
            sequence_length: self.sequence_length,
            vocabulary: model.and_then(classes).or(self.vocabulary).unwrap_or(usize::MAX),
            sample_packing: data.sample_packing,
            chat: data.chat.as_ref().map_or_else(ChatOptions::default, |chat| chat_options(chat, model)),
            cache: cache_options(data),
        };
        open(&options, &self.tokenizer).map_err(|error| match error {
            DataError::Cache { .. } => Error::from(error).named("data.cache_dir", WRITABLE),
            error => Error::from(error).named(key, READABLE),
        })
    }

    /// Calls `open` with the options of `data.train` and of `data.eval`.
    fn open_all<D>(self, open: impl Fn(&DataOptions, &Tokenizer) -> Result<D, DataError>) -> Result<Opened<D>, Error> {
        let set = &sets(self.data)[0];
        let train = self.open((&set.key, set.sources), set, None, &open)?;
        let eval =
            self.data.eval.as_ref().map(|sources| self.open(("data.eval", sources), set, None, &open)).transpose()?;
        Ok(Opened { train, eval, sets: vec![], tokenizer: self.tokenizer, vocabulary: self.vocabulary })
    }
}

/// A data set in the configuration: `data.train`, or one of `data.datasets`.
struct Set<'c> {
    key: String,
    sources: &'c [String],
    /// The slices of splits to train on. If empty, all files are used.
    splits: Vec<config::SplitPart>,
    format: config::DataFormat,
    text_key: &'c str,
}

fn sets(data: &config::Data) -> Vec<Set<'_>> {
    let (format, text_key) = (data.format, data.text_key.as_str());
    let mixed = data.datasets.iter().flatten().enumerate().map(|(index, set)| Set {
        key: format!("data.datasets.{index}.path"),
        sources: &set.path,
        splits: set.split_parts(),
        format: set.format.unwrap_or(format),
        text_key: set.text_key.as_deref().unwrap_or(text_key),
    });
    let train = |sources| Set { key: "data.train".into(), sources, splits: vec![], format, text_key };
    let train = data.train.as_deref().map(train);
    train.into_iter().chain(mixed).collect()
}

/// Opens the configured files.
pub(super) fn files(config: &Config, has_own_model: bool, watch: &dyn Watch) -> Result<Opened<FileDataset>, Error> {
    let sources = Sources::of(config, has_own_model, watch)?;
    let (model, length) = (sources.model, sources.has_length());
    let opened = match &sources.data.datasets {
        None => sources.open_all(|options, tokenizer| data::open_watched(options, tokenizer, watch))?,
        Some(mixed) => sources.open_mixed(mixed, watch)?,
    };
    opened.eval.iter().try_for_each(|eval| mixed::fits_first("data.eval", eval, &opened.train))?;
    fits(model, opened.train.shape())?;
    if matches!(opened.train.shape(), SampleShape::Tokens(_)) {
        length?;
    }
    Ok(opened)
}

/// Opens the configured pairs of answers.
pub(super) fn pairs(
    config: &Config,
    preference: &config::Preference,
    has_own_model: bool,
    watch: &dyn Watch,
) -> Result<Opened<Arc<PairDataset>>, Error> {
    let labels_prompts = preference.kind == config::PreferenceType::Orpo;
    Sources::of(config, has_own_model, watch)?
        .open_all(|options, tokenizer| PairDataset::open(options, tokenizer, labels_prompts, watch).map(Arc::new))
}

/// Performs the checks of [`open`] that need no files.
pub(super) fn refuse(config: &Config) -> Result<(), Error> {
    let (model, data) = config.model_and_data().map(|(model, data)| (Some(model), data))?;
    sequence_length(model, data)?;
    sets(data).iter().try_for_each(|set| refuse_set(config, (model, data), set))
}

fn refuse_set(
    config: &Config,
    (model, data): (Option<&config::Model>, &config::Data),
    set: &Set<'_>,
) -> Result<(), Error> {
    let format = match format(model, set.format) {
        // The files of a split are only known when they are opened.
        data::Format::Auto if !set.splits.is_empty() => None,
        data::Format::Auto => set.sources.first().and_then(|source| data::format_of_source(source)),
        format => Some(format),
    };
    match (model, format, &data.tokenizer) {
        (Some(config::Model::Mlp(_)), Some(data::Format::Csv), _) | (_, None, _) => Ok(()),
        (Some(config::Model::Mlp(_)), Some(_), _) => fits(model, SampleShape::Tokens(1)),
        (_, Some(data::Format::Csv), _) => fits(model, SampleShape::Features(1)),
        (_, Some(data::Format::Tokens | data::Format::Mds), _) | (.., config::Tokenizer::File(_)) => Ok(()),
        (_, Some(_), config::Tokenizer::Byte) => {
            let vocabulary = Some(Tokenizer::Byte.vocabulary());
            are_the_models(config, model, vocabulary)?;
            configured_model::from_config(config, vocabulary).map(drop)
        }
    }
}

fn cache_options(data: &config::Data) -> CacheOptions {
    let (folder, limit) = (data.cache_dir.clone().map(Into::into), data.cache_limit);
    CacheOptions { folder, limit, ..CacheOptions::default() }
}

fn chat_options(chat: &config::Chat, model: Option<&config::Model>) -> ChatOptions {
    let config::Roles { user, assistant, system, tool } = chat.roles.clone();
    ChatOptions {
        kind: chat.kind,
        chat_template: chat.chat_template.clone(),
        pretrained: model.and_then(|model| model.pretrained()).map(Into::into),
        field_messages: chat.field_messages.clone(),
        field_role: chat.message_property_mappings.role.clone(),
        field_content: chat.message_property_mappings.content.clone(),
        field_training: chat.message_field_training.clone(),
        roles: [("user", user), ("assistant", assistant), ("system", system), ("tool", tool)]
            .map(|(role, names)| (role.into(), names))
            .into(),
        roles_to_train: chat.roles_to_train.clone(),
        train_on_inputs: chat.train_on_inputs,
        train_on_eos: chat.train_on_eos,
        excess_length: chat.excess_length_strategy,
        untrained: chat.untrained_strategy,
    }
}

fn format(model: Option<&config::Model>, written: config::DataFormat) -> config::DataFormat {
    use config::DataFormat::{Arrow, Auto, Csv, Parquet};
    match (written, model) {
        // An MLP trains on rows of numbers. The content of a file shows whether it stores them as CSV, Parquet or
        // Arrow.
        (Auto | Parquet | Arrow, Some(config::Model::Mlp(_))) => Csv,
        _ => written,
    }
}

/// Returns the size of the tokenizer's vocabulary. Returns `None` if the tokenizer does not define the vocabulary of
/// the data: the default byte tokenizer does not define the vocabulary of token files.
fn vocabulary(
    model: Option<&config::Model>,
    data: &config::Data,
    tokenizer: &Tokenizer,
    watch: &dyn Watch,
) -> Result<Option<usize>, Error> {
    let mut is_of_tokenizer = false;
    for set in sets(data) {
        is_of_tokenizer |= match (model, set.format, tokenizer) {
            (Some(config::Model::Mlp(_)), ..) | (_, config::DataFormat::Csv, _) => false,
            (_, config::DataFormat::Tokens, Tokenizer::Byte) => false,
            (_, config::DataFormat::Auto | config::DataFormat::Mds, Tokenizer::Byte) => {
                let (cache, format) = (cache_options(data), format(model, set.format));
                let split = set.splits.first().map(|split| split.name.as_str());
                let numbers = data::have_tokens((set.sources, split), format, set.text_key, (&cache, watch));
                !numbers.map_err(|error| Error::from(error).named(&set.key, READABLE))?
            }
            _ => true,
        };
    }
    Ok(is_of_tokenizer.then(|| tokenizer.vocabulary()))
}

/// Rejects the default byte tokenizer for a pretrained model with a different vocabulary.
fn are_the_models(config: &Config, model: Option<&config::Model>, vocabulary: Option<usize>) -> Result<(), Error> {
    let by_default = config.origins.get("data.tokenizer") == config::Origin::Default;
    match (model.and_then(|model| model.pretrained()), model.and_then(classes)) {
        (Some(folder), Some(known)) if by_default && vocabulary != Some(known) => Err(Error::setting(
            "data.tokenizer",
            format!(
                "the default byte tokenizer does not match the model in {folder}, which has {known} tokens; the folder has no tokenizer.json"
            ),
            "set it to the tokenizer.json that the model was trained with",
        )),
        _ => Ok(()),
    }
}

/// Returns the tokens per sample: `data.sequence_length`, or else the model's longest sequence. Reads no files.
pub(super) fn sequence_length(model: Option<&config::Model>, data: &config::Data) -> Result<usize, Error> {
    let longest = model.and_then(longest_sequence);
    match (data.sequence_length, longest) {
        (Some(length), Some(longest)) if length > longest => Err(Error::setting(
            "data.sequence_length",
            format!("{length} tokens exceed the model's maximum of {longest}"),
            format!("set it to at most {longest}, or increase the maximum sequence length of the model"),
        )),
        (Some(length), _) => Ok(length),
        (None, longest) => Ok(longest.unwrap_or(1)),
    }
}

/// Returns the number of tokens or classes that the model distinguishes, if the configuration sets it.
pub(super) fn classes(model: &config::Model) -> Option<usize> {
    match model {
        config::Model::Gpt2(m) => m.vocab_size,
        config::Model::Llama(m) => m.vocab_size,
        config::Model::Mlp(m) => Some(m.output_size),
    }
}

/// Loads the tokenizer of the data.
pub(super) fn tokenizer_of(data: &config::Data) -> Result<Tokenizer, Error> {
    match &data.tokenizer {
        config::Tokenizer::Byte => Ok(Tokenizer::Byte),
        config::Tokenizer::File(path) => Tokenizer::from_file(path).map_err(|error| {
            Error::from(error)
                .named("data.tokenizer", "set it to the path of a Hugging Face tokenizer.json, or to `byte`")
        }),
    }
}

fn fits(model: Option<&config::Model>, shape: SampleShape) -> Result<(), Error> {
    let Some(model) = model else { return Ok(()) };
    match (model, shape) {
        (config::Model::Mlp(m), SampleShape::Features(n)) if m.input_size == n => Ok(()),
        (config::Model::Mlp(m), SampleShape::Features(n)) => Err(Error::setting(
            "model.input_size",
            format!(
                "the value is {}, but must be {n}, the number of features in the table, excluding the label",
                m.input_size
            ),
            format!("set it to {n}"),
        )),
        (config::Model::Mlp(_), SampleShape::Tokens(_)) => Err(Error::setting(
            "data.format",
            "an MLP trains on tables, not on tokens",
            "list .csv files in `data.train`",
        )),
        (_, SampleShape::Features(_)) => Err(Error::setting(
            "data.format",
            "a language model trains on text or tokens, not on a table",
            "use `model.type: mlp`, or other files",
        )),
        (_, SampleShape::Tokens(_)) => Ok(()),
    }
}

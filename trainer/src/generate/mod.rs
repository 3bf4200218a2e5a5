//! Generates text with a trained model. The command `zero-train generate` uses this module.

mod options;
mod sampling;
mod text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value, json};
use zero_engine::{Error, StoredModel, StoredTokenizer};
use zero_model::ops::Cache;
use zero_model::random::Stream;
use zero_model::{Layers, Model};

use crate::data::{At, ChatOptions, PlacedRecord, Tokenizer, eos_token, prompts};

pub use options::{Finish, Generate, Generated};
pub use sampling::Sampling;
use text::Writer;

/// A model that generates text on the CPU, in f32, with a key-value cache.
///
/// ```no_run
/// use zero_train::generate::{Generate, Generator, Sampling};
///
/// let generator = Generator::open("out", None)?; // a run, a checkpoint, an export or a Hugging Face folder
/// let options = Generate { sampling: Sampling { temperature: 0.8, ..Sampling::default() }, ..Generate::default() };
/// let prompt = generator.encode("Once upon a time")?;
/// let all = generator.generate(&[prompt], &options, |_, text| print!("{text}"))?;
/// println!("\n{} tokens", all[0].tokens.len());
/// # Ok::<(), zero_train::Error>(())
/// ```
pub struct Generator {
    model: Model,
    vocabulary: Option<usize>,
    longest: Option<usize>,
    /// Number of cached tokens beyond which the model uses a second set of rotary angles for all positions, as with
    /// LongRoPE. At this number, the cache must be computed again.
    before_other_angles: Option<usize>,
    tokenizer: Option<Tokenizer>,
    eos: Vec<u32>,
    chat: ChatOptions,
    folders: Vec<PathBuf>,
    warnings: Vec<String>,
}

impl Generator {
    /// Opens a checkpoint, the newest checkpoint of a run, or a Hugging Face folder such as an export. `adapter` is a
    /// folder in PEFT's format.
    ///
    /// # Errors
    /// Fails if the folder has no language model, or if its files are missing, damaged or do not match each other.
    pub fn open(folder: impl AsRef<Path>, adapter: Option<&Path>) -> Result<Self, Error> {
        let stored = StoredModel::open(folder.as_ref(), adapter)?;
        let tokenizer = opened(stored.tokenizer.as_ref())?;
        let eos = stored.eos_tokens()?;
        let StoredModel { model, vocabulary, longest, before_other_angles, folders, warnings, .. } = stored;
        let generator = Self {
            model,
            vocabulary: Some(vocabulary),
            longest: Some(longest),
            before_other_angles,
            tokenizer: None,
            eos,
            chat: ChatOptions::default(),
            folders,
            warnings: warnings.iter().map(ToString::to_string).collect(),
        };
        match tokenizer {
            Some(tokenizer) => generator.with_tokenizer(tokenizer),
            None => Ok(generator),
        }
    }

    /// Creates a generator for a custom model, with the weights of a checkpoint or of a run's newest checkpoint. The
    /// model maps tokens `[batch, time]` (u32) to logits. Its layers must mix positions only with the operations in
    /// [`ops`](crate::ops). `longest` is its maximum sequence length, if it has one.
    ///
    /// # Errors
    /// Fails if the layers cannot be built, or if the checkpoint is damaged or belongs to another model.
    pub fn of_layers(layers: Layers, checkpoint: impl AsRef<Path>, longest: Option<usize>) -> Result<Self, Error> {
        Ok(Self {
            model: zero_engine::fill_layers(layers, checkpoint.as_ref())?,
            vocabulary: None,
            longest,
            before_other_angles: None,
            tokenizer: None,
            eos: vec![],
            chat: ChatOptions::default(),
            folders: vec![],
            warnings: vec![],
        })
    }

    /// Replaces the tokenizer. If the model's folder names no end-of-text tokens, uses the `eos_token` in the
    /// tokenizer's folder.
    ///
    /// # Errors
    /// Fails if a file in the tokenizer's folder is malformed.
    pub fn with_tokenizer(mut self, tokenizer: Tokenizer) -> Result<Self, Error> {
        if self.eos.is_empty() {
            self.eos = eos_token(&tokenizer, &self.folders)?.into_iter().collect();
        }
        self.tokenizer = Some(tokenizer);
        Ok(self)
    }

    /// Replaces the model's chat template. `template` is the text of a template, or the path of its file.
    #[must_use]
    pub fn with_chat_template(mut self, template: impl Into<String>) -> Self {
        self.chat.chat_template = Some(template.into());
        self
    }

    /// Returns one line for each key of the model's `config.json` that is ignored.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the tokens of a text, including the special tokens that the tokenizer adds to each text.
    ///
    /// # Errors
    /// Fails if there is no tokenizer, or if the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.tokenizer()?.encode_with_special(text)?)
    }

    /// Returns the tokens of a conversation, rendered with the model's chat template and the generation prompt. A
    /// message is a role and a text.
    ///
    /// # Errors
    /// Fails without a tokenizer or a template, or if the template rejects the conversation.
    pub fn encode_chat(&self, messages: &[(&str, &str)]) -> Result<Vec<u32>, Error> {
        let messages: Vec<Value> =
            messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        let record = Map::from_iter([("messages".to_string(), messages.into())]);
        let mut all = self.encode_records(vec![(At::Record(1), record)], "conversation".as_ref())?;
        Ok(all.pop().unwrap_or_default())
    }

    /// Returns the tokens of each record in a file. A record has a string `prompt`, or a conversation `messages` in the
    /// same form as in training data.
    ///
    /// # Errors
    /// Fails like [`Generator::encode`] and [`Generator::encode_chat`], and names the file and the position of the
    /// record. Also fails if a record has neither field.
    pub fn encode_records(&self, records: Vec<PlacedRecord>, path: &Path) -> Result<Vec<Vec<u32>>, Error> {
        let options = ChatOptions { pretrained: self.folders.first().cloned(), ..self.chat.clone() };
        Ok(prompts(records, path, &options, self.tokenizer()?)?)
    }

    fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.tokenizer.as_ref().ok_or_else(|| {
            let message =
                "the model has no tokenizer: its folder has no tokenizer.json and does not refer to an existing one";
            Error::setting("--tokenizer", message, "give the path of the model's tokenizer.json")
        })
    }

    /// Generates a text for each prompt, which is a list of tokens. `on_text` receives the prompt's index and the next
    /// part of its text, as soon as the part is certain. A part contains only complete characters. Returns the texts in
    /// the order of the prompts.
    ///
    /// # Errors
    /// Fails if an option is out of range, if a prompt is empty, exceeds the model's maximum length or has tokens
    /// outside the vocabulary, or if the model fails.
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        options: &Generate,
        on_text: impl FnMut(usize, &str),
    ) -> Result<Vec<Generated>, Error> {
        let mut done = Vec::with_capacity(prompts.len());
        self.generate_each(prompts, options, on_text, |generated| {
            done.push(generated);
            Ok(())
        })?;
        Ok(done)
    }

    /// Generates texts as [`Generator::generate`] does. `on_done` receives each text when it and all texts before it
    /// are complete, in the order of the prompts.
    ///
    /// # Errors
    /// Fails like [`Generator::generate`], and returns the errors of `on_done`.
    pub fn generate_each(
        &self,
        prompts: &[Vec<u32>],
        options: &Generate,
        mut on_text: impl FnMut(usize, &str),
        mut on_done: impl FnMut(Generated) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.check(prompts, options)?;
        let (mut done, mut next_done) = (BTreeMap::new(), 0);
        let (mut running, mut waiting) = (Vec::<Sequence>::new(), prompts.iter().enumerate());
        loop {
            while running.len() < options.batch.max(1)
                && let Some((index, prompt)) = waiting.next()
            {
                let mut sequence = self.begin(index, prompt, options);
                let logits = self.run(prompt, &mut [&mut sequence.cache])?;
                self.take(&mut sequence, logits, options, &mut on_text)?;
                running.push(sequence);
            }
            let (ended, rest): (Vec<Sequence>, _) = running.into_iter().partition(|sequence| sequence.finish.is_some());
            running = rest;
            for Sequence { index, tokens, prompt, writer, finish, .. } in ended {
                let finish = finish.unwrap_or(Finish::Length);
                let (text, tokens) = (writer.into_text(), tokens[prompt..].to_vec());
                done.insert(index, Generated { text, tokens, prompt_tokens: prompt, finish });
            }
            while let Some(generated) = done.remove(&next_done) {
                on_done(generated)?;
                next_done += 1;
            }
            if running.is_empty() && waiting.len() == 0 {
                return Ok(());
            }
            if running.is_empty() {
                continue;
            }
            let is_stale = |sequence: &Sequence| Some(sequence.cache.tokens()) == self.before_other_angles;
            let (stale, mut next): (Vec<&mut Sequence>, Vec<_>) =
                running.iter_mut().partition(|sequence| is_stale(sequence));
            for sequence in stale {
                sequence.cache = Cache::default();
                let tokens = sequence.tokens.clone();
                let logits = self.run(&tokens, &mut [&mut sequence.cache])?;
                self.take(sequence, logits, options, &mut on_text)?;
            }
            if next.is_empty() {
                continue;
            }
            let last: Vec<u32> = next.iter().filter_map(|sequence| sequence.tokens.last().copied()).collect();
            let mut caches: Vec<&mut Cache> = next.iter_mut().map(|sequence| &mut sequence.cache).collect();
            let logits = self.run(&last, &mut caches)?;
            let width = logits.len() / next.len();
            for (sequence, logits) in next.into_iter().zip(logits.chunks_exact(width)) {
                self.take(sequence, logits.to_vec(), options, &mut on_text)?;
            }
        }
    }

    fn check(&self, prompts: &[Vec<u32>], options: &Generate) -> Result<(), Error> {
        options.sampling.check()?;
        if options.max_new_tokens == 0 {
            return Err(Error::setting("--max-new-tokens", "0 would generate no text", "use at least 1"));
        }
        if options.stop.iter().any(String::is_empty) {
            return Err(Error::setting(
                "--stop",
                "an empty string would end every text at once",
                "use at least one character",
            ));
        }
        if !options.stop.is_empty() {
            self.tokenizer()?;
        }
        for (index, prompt) in prompts.iter().enumerate() {
            let refused =
                |message: String, help: &str| Err(Error::setting(&format!("prompt {}", index + 1), message, help));
            if prompt.is_empty() {
                return refused("the prompt has no tokens".into(), "give a prompt that is not empty");
            }
            if let Some(longest) = self.longest.filter(|&longest| prompt.len() > longest) {
                let message =
                    format!("the prompt has {} tokens, more than the model's {longest} positions", prompt.len());
                return refused(message, "shorten the prompt");
            }
            if let Some(vocabulary) = self.vocabulary
                && let Some(token) = prompt.iter().find(|&&token| token as usize >= vocabulary)
            {
                let message = format!(
                    "the prompt contains the token {token}, which is outside the model's vocabulary of {vocabulary} tokens"
                );
                return refused(message, "use the tokenizer that the model was trained with");
            }
        }
        Ok(())
    }

    fn begin<'a>(&'a self, index: usize, prompt: &[u32], options: &'a Generate) -> Sequence<'a> {
        let longest = self.longest.map_or(usize::MAX, |longest| longest + 1);
        Sequence {
            index,
            tokens: prompt.to_vec(),
            prompt: prompt.len(),
            // The last token is never an input, so it needs no position.
            end: prompt.len().saturating_add(options.max_new_tokens).min(longest),
            cache: Cache::default(),
            writer: Writer::new(self.tokenizer.as_ref(), &options.stop, prompt),
            random: Stream::new(options.seed, "generate", 0),
            finish: None,
        }
    }

    /// Runs the model on the next tokens of one sequence, or on one token of each of several sequences. Returns the
    /// logits for the next tokens.
    fn run(&self, tokens: &[u32], caches: &mut [&mut Cache]) -> Result<Vec<f32>, Error> {
        let tokens = Tensor::from_slice(tokens, (caches.len(), tokens.len() / caches.len()), &Device::Cpu)?;
        let logits = self.model.next_logits(&tokens, caches)?;
        Ok(logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }

    /// Chooses the next token of a sequence.
    fn take(
        &self,
        sequence: &mut Sequence,
        mut logits: Vec<f32>,
        options: &Generate,
        on_text: &mut impl FnMut(usize, &str),
    ) -> Result<(), Error> {
        // The model's vocabulary may be larger than the tokenizer's, for example because it was rounded up.
        let known = self.tokenizer.as_ref().map_or(usize::MAX, Tokenizer::vocabulary);
        let known = logits.len().min(known);
        let draws = sequence.tokens.len() - sequence.prompt;
        let uniform = sequence.random.f32_at(draws as u64);
        let token = options.sampling.next(&mut logits[..known], &sequence.tokens, uniform);
        sequence.tokens.push(token);
        let is_end = !options.ignore_eos && self.eos.contains(&token);
        let stops = is_end || sequence.writer.push(token)?;
        if stops {
            sequence.finish = Some(Finish::Stop);
        } else if sequence.tokens.len() >= sequence.end {
            sequence.finish = Some(Finish::Length);
        }
        let news = sequence.writer.news(sequence.finish.is_some())?;
        if !news.is_empty() {
            on_text(sequence.index, news);
        }
        Ok(())
    }
}

/// Finds an empty prompt in the records of a file before the model in `folder` is loaded. Records without a text
/// `prompt` are not checked. `tokenizer` replaces the tokenizer of the folder.
///
/// # Errors
/// Fails if a prompt has no tokens, or if the tokenizer cannot be read.
pub fn check_prompts(
    records: &[PlacedRecord],
    path: &Path,
    folder: &Path,
    tokenizer: Option<&Tokenizer>,
) -> Result<(), Error> {
    let is_empty = |record: &Map<String, Value>| record.get("prompt").is_some_and(|prompt| prompt == "");
    let Some((at, _)) = records.iter().find(|(_, record)| is_empty(record)) else { return Ok(()) };
    let stored = if tokenizer.is_none() { opened(StoredTokenizer::of_folder(folder).as_ref())? } else { None };
    match tokenizer.or(stored.as_ref()) {
        // Some tokenizers add a token to each text.
        Some(tokenizer) if tokenizer.encode_with_special("")?.is_empty() => {
            let message = format!("{at}: the prompt has no tokens");
            Err(Error::setting(&path.display().to_string(), message, "give a prompt that is not empty"))
        }
        _ => Ok(()),
    }
}

/// Reads a tokenizer. A checkpoint may name a file that no longer exists; the tokenizer is only needed for text.
fn opened(tokenizer: Option<&StoredTokenizer>) -> Result<Option<Tokenizer>, Error> {
    Ok(match tokenizer {
        Some(StoredTokenizer::Byte) => Some(Tokenizer::Byte),
        Some(StoredTokenizer::File(path)) if path.is_file() => Some(Tokenizer::from_file(path)?),
        _ => None,
    })
}

/// A text that is being generated.
struct Sequence<'a> {
    /// Index of the prompt.
    index: usize,
    /// The prompt and all tokens after it.
    tokens: Vec<u32>,
    /// Number of tokens of the prompt.
    prompt: usize,
    /// Maximum number of tokens, including the prompt.
    end: usize,
    cache: Cache,
    writer: Writer<'a>,
    random: Stream,
    finish: Option<Finish>,
}

#[cfg(test)]
mod tests;

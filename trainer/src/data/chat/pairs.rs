//! Pairs of a chosen and a rejected answer to one prompt, for training on preferences.
//!
//! A sample is both answers, each after the prompt and each a document of its own, padded to T tokens: 2·T positions. An
//! answer begins where its tokens differ from those of the prompt with the template's generation prompt, as in TRL.

use std::path::Path;
use std::sync::OnceLock;

use candle_core::{Device, Tensor};
use rayon::prelude::*;
use zero_config::Untrained;
use zero_engine::format::counted;
use zero_engine::{At, Batch, DataError};
use zero_model::ops::{IGNORE_INDEX, PreferenceLoss};
use zero_model::zoo::{LABEL_COUNTS, LABEL_GROUPS, LABELS, POSITION_IDS, REFERENCE_LOG_PROBS};

use super::super::dataset::{BoxError, Dataset};
use super::super::files::sources;
use super::super::fingerprint::DocumentFacts;
use super::super::options::{DataOptions, Format};
use super::super::tokenizer::Tokenizer;
use super::excess::Excess;
use super::mask::shown;
use super::pair_record;
use super::record::{Problem, in_parallel};
use super::renderer::Renderer;

/// The label groups of a pair: [`LABEL_GROUPS`].
const CHOSEN: u8 = 0;
const REJECTED: u8 = 1;
const PROMPT: u8 = 2;

/// Both answers to a prompt, as tokens.
pub(super) struct Pair {
    /// The prompt with the chosen answer, and with the rejected answer.
    pub(super) tokens: [Vec<u32>; 2],
    /// The number of tokens before each answer.
    pub(super) prompt: usize,
    /// Whether the end of the prompt alone has other tokens than before an answer.
    pub(super) is_cut: bool,
    /// The rendered texts, for errors.
    pub(super) texts: [String; 2],
}

/// Pairs of a chosen and a rejected answer, in memory.
pub(crate) struct PairDataset {
    tokens: Vec<u32>,
    /// Where each text begins, two per pair, and the number of all tokens at the end.
    starts: Vec<usize>,
    /// The number of tokens before both answers of each pair.
    prompts: Vec<usize>,
    sequence_length: usize,
    padding: u32,
    labels_prompts: bool,
    /// Chosen and rejected, for each pair.
    reference: OnceLock<Vec<[f32; 2]>>,
    excess: Excess,
    /// Number of pairs that were left out because an answer has no tokens.
    unanswered: usize,
    /// Number of pairs whose prompt ends in other tokens than before an answer.
    cut: usize,
}

impl PairDataset {
    /// Reads, renders and tokenizes the files that the options name. `labels_prompts` says whether the prompts before
    /// chosen answers get labels too, which ORPO needs.
    ///
    /// # Errors
    /// Fails if a file cannot be read, a record is no pair, or the template rejects it.
    pub(crate) fn open(options: &DataOptions, tokenizer: &Tokenizer, labels_prompts: bool) -> Result<Self, DataError> {
        let sources = sources(&options.sources, Format::Chat)?;
        let renderer = Renderer::new(&options.chat, tokenizer, options.vocabulary)?;
        let mut all = Self {
            tokens: vec![],
            starts: vec![0],
            prompts: vec![],
            sequence_length: options.sequence_length,
            padding: renderer.padding,
            labels_prompts,
            reference: OnceLock::new(),
            excess: Excess::new(options),
            unanswered: 0,
            cut: 0,
        };
        for source in &sources {
            let path = &source.path;
            let pair = |(at, record)| {
                let record = pair_record::pair(record, &options.chat).map_err(|problem| problem.at(path, at));
                (at, record.and_then(|record| renderer.pair(record, path, at)))
            };
            for records in in_parallel(source.records(&options.chat.fields())?) {
                for (at, pair) in records?.into_par_iter().map(pair).collect::<Vec<_>>() {
                    all.push(pair?, path, at, options)?;
                }
            }
        }
        all.excess.check()?;
        match all.prompts.is_empty() {
            true => Err(DataError::Empty { sources: options.sources.clone() }),
            false => Ok(all),
        }
    }

    /// Adds a pair, or leaves it out.
    fn push(&mut self, mut pair: Pair, path: &Path, at: At, options: &DataOptions) -> Result<(), DataError> {
        let tokens = || pair.tokens.iter().flatten();
        if let Some(&token) = tokens().find(|&&token| token as usize >= options.vocabulary) {
            return Err(DataError::Token { token, vocabulary: options.vocabulary, path: path.into(), at });
        }
        let (length, most) = (pair.tokens[0].len().max(pair.tokens[1].len()), self.excess.most());
        if !self.excess.admits(length, path, at) {
            return Ok(());
        }
        pair.tokens.iter_mut().for_each(|tokens| tokens.truncate(most));
        if let Some(side) = pair.tokens.iter().position(|tokens| tokens.len() <= pair.prompt.max(1)) {
            if options.chat.untrained == Untrained::Drop {
                self.unanswered += 1;
                return Ok(());
            }
            let which = ["chosen", "rejected"][side];
            let why = match length > most {
                true => format!("the first {most} tokens contain nothing of the {which} answer"),
                false => format!("the {which} answer has no tokens"),
            };
            let help = "correct the record, or leave such ones out: `data.chat.untrained_strategy: drop`";
            return Err(Problem::new(format!("{why}\n{}", shown(&pair.texts[side])), help).at(path, at));
        }
        self.cut += usize::from(pair.is_cut);
        for tokens in pair.tokens {
            self.tokens.extend(tokens);
            self.starts.push(self.tokens.len());
        }
        self.prompts.push(pair.prompt);
        Ok(())
    }

    /// Returns the prompt with the chosen answer (`side` 0) or with the rejected answer (1).
    fn text(&self, pair: usize, side: usize) -> &[u32] {
        &self.tokens[self.starts[2 * pair + side]..self.starts[2 * pair + side + 1]]
    }

    /// Returns the number of inputs of both texts, without padding.
    pub(crate) fn lengths(&self, pair: usize) -> [usize; 2] {
        [0, 1].map(|side| self.text(pair, side).len().min(self.sequence_length))
    }

    /// Returns how many labels the answers, and the prompt before the chosen answer, have.
    fn label_counts(&self, pair: usize) -> [usize; PreferenceLoss::SUMS] {
        // The first token of a text is no label.
        let prompt = self.prompts[pair];
        let answer = |side| self.text(pair, side).len() - prompt.max(1);
        [answer(0), answer(1), prompt.saturating_sub(1)]
    }

    /// Sets the log-probabilities of the chosen and the rejected answer of each pair under the reference model, once.
    /// Until then they are 0.
    pub(crate) fn set_reference(&self, log_probs: Vec<[f32; 2]>) {
        assert_eq!(log_probs.len(), self.len(), "one entry per pair");
        let _ = self.reference.set(log_probs);
    }

    /// Returns a checksum of the tokens, by which log-probabilities of other data are recognized.
    pub(crate) fn checksum(&self) -> u32 {
        let crc = self.tokens.iter().fold(0, |crc, token| crc32c::crc32c_append(crc, &token.to_le_bytes()));
        let sizes = self.starts.iter().chain(&self.prompts).chain([&self.sequence_length]);
        sizes.fold(crc, |crc, &size| crc32c::crc32c_append(crc, &(size as u64).to_le_bytes()))
    }

    /// Calls `visit` with the prompt and each answer of all pairs.
    pub(crate) fn each_document(&self, visit: &mut dyn FnMut(DocumentFacts)) {
        self.starts.windows(2).for_each(|text| visit(DocumentFacts::of(&self.tokens[text[0]..text[1]])));
    }

    /// Describes the pairs in one line.
    pub(crate) fn description(&self) -> String {
        let positions = self.len() * 2 * self.sequence_length;
        let share = |part: usize| format!("{:.1} %", 100.0 * part as f64 / positions as f64);
        let used: usize = (0..self.len()).flat_map(|pair| self.lengths(pair)).sum();
        let answers =
            (0..self.len()).map(|pair| self.label_counts(pair)).map(|[chosen, rejected, _]| chosen + rejected);
        let text = format!(
            "{}, {} of positions belong to answers, {} padding",
            counted(self.len(), "pair", "pairs"),
            share(answers.sum()),
            share(positions - used)
        );
        let others = [
            (self.unanswered, "left out without an answer"),
            (self.cut, "with a prompt whose last tokens depend on the answer"),
        ];
        text + &self.excess.description(others)
    }
}

impl std::fmt::Debug for PairDataset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pairs of {} tokens", self.len(), self.sequence_length)
    }
}

impl Dataset for PairDataset {
    fn len(&self) -> usize {
        self.prompts.len()
    }

    /// Returns tokens `[rows, 2·T]` with the inputs [`POSITION_IDS`], [`LABELS`] and [`LABEL_GROUPS`], and the targets
    /// [`LABEL_COUNTS`] and [`REFERENCE_LOG_PROBS`].
    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        let (rows, room) = (indices.len(), indices.len() * self.tokens_per_sample());
        let (mut tokens, mut position_ids) = (Vec::with_capacity(room), Vec::with_capacity(room));
        let (mut labels, mut groups) = (Vec::with_capacity(room), Vec::with_capacity(room));
        let (mut counts, mut reference): (Vec<f32>, Vec<f32>) = (vec![], vec![]);
        for &index in indices {
            if index >= self.len() {
                return Err(DataError::Index { index, samples: self.len() }.into());
            }
            for (side, answer) in [CHOSEN, REJECTED].into_iter().enumerate() {
                let text = self.text(index, side);
                let used = text.len().min(self.sequence_length);
                let padding = self.sequence_length - used;
                tokens.extend(&text[..used]);
                tokens.extend(std::iter::repeat_n(self.padding, padding));
                // Padding is a document of its own.
                position_ids.extend((0..used as u32).chain(0..padding as u32));
                for next in 1..=self.sequence_length {
                    let (label, group) = match text.get(next) {
                        Some(&token) if next >= self.prompts[index] => (i64::from(token), answer),
                        Some(&token) if self.labels_prompts && answer == CHOSEN => (i64::from(token), PROMPT),
                        _ => (IGNORE_INDEX, answer),
                    };
                    labels.push(label);
                    groups.push(group);
                }
            }
            counts.extend(self.label_counts(index).map(|count| count as f32));
            reference.extend(self.reference.get().map_or([0.0; 2], |reference| reference[index]));
        }
        let (cpu, shape) = (&Device::Cpu, (rows, self.tokens_per_sample()));
        Ok(Batch::from(Tensor::from_vec(tokens, shape, cpu)?)
            .input(POSITION_IDS, Tensor::from_vec(position_ids, shape, cpu)?)
            .input(LABELS, Tensor::from_vec(labels, shape, cpu)?)
            .input(LABEL_GROUPS, Tensor::from_vec(groups, shape, cpu)?)
            .target(LABEL_COUNTS, Tensor::from_vec(counts, (rows, PreferenceLoss::SUMS), cpu)?)
            .target(REFERENCE_LOG_PROBS, Tensor::from_vec(reference, (rows, 2), cpu)?))
    }

    /// Returns 2·T.
    fn tokens_per_sample(&self) -> usize {
        2 * self.sequence_length
    }
}

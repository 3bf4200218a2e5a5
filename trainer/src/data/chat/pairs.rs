//! Pairs of a chosen and a rejected answer to one prompt, for preference training.
//!
//! A sample has 2·T positions, T for each answer: a document with the prompt and the answer, and then padding. As in
//! TRL, an answer begins at the first token that differs from the tokens of the prompt and the generation prompt.

use std::sync::OnceLock;

use candle_core::{Device, Tensor};
use zero_config::Untrained;
use zero_engine::format::counted;
use zero_engine::{Batch, DataError};
use zero_model::ops::{IGNORE_INDEX, PreferenceLoss};
use zero_model::zoo::{LABEL_COUNTS, LABEL_GROUPS, LABELS, POSITION_IDS, REFERENCE_LOG_PROBS};

use super::super::dataset::{BoxError, Dataset};
use super::super::files::{Access, sources};
use super::super::fingerprint::DocumentFacts;
use super::super::options::{DataOptions, Format};
use super::super::records::TokenizedWhere;
use super::super::watch::Watch;
use super::excess::Excess;
use super::renderer::Renderer;
use super::rendering::{Layout, Rendering};
use super::texts::{Chosen, Text, Texts};
use crate::data::tokens::tokenizer::Tokenizer;

/// The label groups of a pair, used in [`LABEL_GROUPS`].
const CHOSEN: u8 = 0;
const REJECTED: u8 = 1;
const PROMPT: u8 = 2;

/// Pairs of a chosen and a rejected answer.
pub(crate) struct PairDataset {
    /// Two texts per pair: the prompt with the chosen answer, and the prompt with the rejected answer.
    texts: Texts,
    /// Indices of the pairs that are used.
    used: Chosen,
    sequence_length: usize,
    padding: u32,
    labels_prompts: bool,
    /// Log-probabilities of the chosen and the rejected answer of each pair.
    reference: OnceLock<Vec<[f32; 2]>>,
    excess: Excess,
    /// Number of pairs that were left out because an answer has no tokens.
    unanswered: usize,
    /// Number of pairs whose prompt ends with different tokens when it is tokenized together with an answer.
    cut: usize,
    /// Number of inputs of all used texts, and number of labels of all answers.
    positions: usize,
    answers: usize,
}

impl PairDataset {
    /// Reads, renders and tokenizes the files in the options, or opens their entries in the cache. `labels_prompts`
    /// adds labels to the prompts before chosen answers, which ORPO needs.
    ///
    /// # Errors
    /// Fails if a file cannot be read, a record is not a pair, or the template rejects it.
    pub(crate) fn open(
        options: &DataOptions,
        tokenizer: &Tokenizer,
        labels_prompts: bool,
        watch: &dyn Watch,
    ) -> Result<Self, DataError> {
        let sources = sources((&options.sources, None), Format::Chat, &Access::new(&options.cache, watch))?;
        let renderer = &Renderer::new(&options.chat, tokenizer, options.vocabulary)?;
        let rendering = Rendering { renderer, tokenizer, options, layout: Layout::Pairs };
        let mut all = Self {
            texts: Texts::open(&sources, &options.cache, &rendering, watch)?,
            used: Chosen::default(),
            sequence_length: options.sequence_length,
            padding: renderer.padding,
            labels_prompts,
            reference: OnceLock::new(),
            excess: Excess::new(options),
            unanswered: 0,
            cut: 0,
            positions: 0,
            answers: 0,
        };
        let (mut chosen, most) = (None, rendering.most());
        all.texts.each(|rejected, file, number| {
            let Some(chosen) = chosen.take() else {
                chosen = Some(rejected);
                return Ok(());
            };
            let (pair, facts) = ([chosen, rejected], rejected.facts);
            let longest = chosen.length.max(rejected.length);
            let mut is_used = all.excess.admits(longest, &sources[file].path, facts.at);
            if is_used && pair.iter().any(|text| text.length.min(most) <= facts.first.max(1)) {
                if options.chat.untrained == Untrained::Raise {
                    return Err(rendering.error(&sources[file], number / rendering.layout.texts()));
                }
                (is_used, all.unanswered) = (false, all.unanswered + 1);
            }
            if is_used {
                all.cut += usize::from(facts.is_cut);
                all.positions += pair.iter().map(|text| text.length.min(options.sequence_length)).sum::<usize>();
                let [chosen, rejected, _] = label_counts(pair, options.sequence_length);
                all.answers += chosen + rejected;
            }
            all.used.push(is_used);
            Ok(())
        })?;
        all.excess.check()?;
        match all.used.len() {
            0 => Err(DataError::Empty { sources: options.sources.clone() }),
            _ => Ok(all),
        }
    }

    /// Returns the index of a text of a pair: `side` 0 is the prompt with the chosen answer, 1 the prompt with the
    /// rejected answer.
    fn text(&self, pair: usize, side: usize) -> usize {
        2 * self.used.get(pair) + side
    }

    /// Returns the lengths and the facts of both texts, without their tokens.
    fn pair(&self, pair: usize) -> Result<[Text; 2], DataError> {
        Ok([self.texts.text(self.text(pair, 0))?, self.texts.text(self.text(pair, 1))?])
    }

    /// Reads the tokens of a text that a sample uses.
    fn read(&self, pair: usize, side: usize) -> Result<Vec<u32>, DataError> {
        Ok(self.texts.read(self.text(pair, side), self.sequence_length + 1)?.0)
    }

    /// Returns the number of inputs of each of the two texts, without padding.
    ///
    /// # Errors
    /// Fails if the cache cannot be read.
    pub(crate) fn lengths(&self, pair: usize) -> Result<[usize; 2], DataError> {
        Ok(self.pair(pair)?.map(|text| text.length.min(self.sequence_length)))
    }

    /// Sets the log-probabilities of the chosen and the rejected answer of each pair under the reference model. Only
    /// the first call has an effect. Before this call, all log-probabilities are 0.
    pub(crate) fn set_reference(&self, log_probs: Vec<[f32; 2]>) {
        assert_eq!(log_probs.len(), self.len(), "one entry per pair");
        let _ = self.reference.set(log_probs);
    }

    /// Returns a checksum of the tokens. It detects log-probabilities that belong to other data.
    ///
    /// # Errors
    /// Fails if the cache cannot be read.
    pub(crate) fn checksum(&self) -> Result<u32, DataError> {
        let mut crc = 0;
        for_each_text(self.len(), |pair, side| {
            let tokens = self.read(pair, side)?;
            crc = tokens.iter().fold(crc, |crc, token| crc32c::crc32c_append(crc, &token.to_le_bytes()));
            Ok(())
        })?;
        let mut push = |size: usize| crc = crc32c::crc32c_append(crc, &(size as u64).to_le_bytes());
        // The start of each text in the concatenated tokens, followed by the total number of tokens.
        let mut start = 0;
        push(start);
        for pair in 0..self.len() {
            for text in self.pair(pair)? {
                start += text.length.min(self.sequence_length + 1);
                push(start);
            }
        }
        for pair in 0..self.len() {
            push(self.pair(pair)?[0].facts.first);
        }
        push(self.sequence_length);
        Ok(crc)
    }

    /// Calls `visit` with both texts of each pair: the prompt with the chosen answer, and with the rejected answer.
    ///
    /// # Errors
    /// Fails if the cache cannot be read.
    pub(crate) fn each_document(&self, visit: &mut dyn FnMut(DocumentFacts)) -> Result<(), DataError> {
        for_each_text(self.len(), |pair, side| {
            visit(DocumentFacts::of(&self.read(pair, side)?));
            Ok(())
        })
    }

    /// Reads all pairs that are in the cache, and checks their checksums.
    ///
    /// # Errors
    /// Fails at the first damaged position, or if `watch` stops the check.
    pub(crate) fn verify(&self, watch: &dyn Watch) -> Result<(), DataError> {
        self.texts.verify(watch)
    }

    /// Returns where the tokens of each file are stored. A pair counts as two documents.
    pub(crate) fn tokenized(&self) -> Vec<TokenizedWhere> {
        self.texts.tokenized()
    }

    /// Describes the pairs in one line.
    pub(crate) fn description(&self) -> String {
        let positions = self.len() * 2 * self.sequence_length;
        let share = |part: usize| format!("{:.1} %", 100.0 * part as f64 / positions as f64);
        let text = format!(
            "{}, {} of positions belong to answers, {} padding",
            counted(self.len(), "pair", "pairs"),
            share(self.answers),
            share(positions - self.positions)
        );
        let others = [
            (self.unanswered, "dropped because an answer is missing"),
            (self.cut, "with a prompt whose last tokens depend on the answer"),
        ];
        text + &self.excess.description(others)
    }
}

fn for_each_text(pairs: usize, mut visit: impl FnMut(usize, usize) -> Result<(), DataError>) -> Result<(), DataError> {
    (0..pairs).try_for_each(|pair| [0, 1].into_iter().try_for_each(|side| visit(pair, side)))
}

/// Returns the number of labels of the chosen answer, of the rejected answer, and of the prompt before the chosen
/// answer, if samples have `sequence_length` tokens per answer.
fn label_counts(pair: [Text; 2], sequence_length: usize) -> [usize; PreferenceLoss::SUMS] {
    // The first token of a text is never a label.
    let prompt = pair[0].facts.first;
    let [chosen, rejected] = pair.map(|text| text.length.min(sequence_length + 1) - prompt.max(1));
    [chosen, rejected, prompt.saturating_sub(1)]
}

impl std::fmt::Debug for PairDataset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pairs of {} tokens", self.len(), self.sequence_length)
    }
}

impl Dataset for PairDataset {
    fn len(&self) -> usize {
        self.used.len()
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
            let pair = self.pair(index)?;
            let prompt = pair[0].facts.first;
            for (side, answer) in [CHOSEN, REJECTED].into_iter().enumerate() {
                let text = self.read(index, side)?;
                let used = text.len().min(self.sequence_length);
                let padding = self.sequence_length - used;
                tokens.extend(&text[..used]);
                tokens.extend(std::iter::repeat_n(self.padding, padding));
                // Padding is a separate document.
                position_ids.extend((0..used as u32).chain(0..padding as u32));
                for next in 1..=self.sequence_length {
                    let (label, group) = match text.get(next) {
                        Some(&token) if next >= prompt => (i64::from(token), answer),
                        Some(&token) if self.labels_prompts && answer == CHOSEN => (i64::from(token), PROMPT),
                        _ => (IGNORE_INDEX, answer),
                    };
                    labels.push(label);
                    groups.push(group);
                }
            }
            counts.extend(label_counts(pair, self.sequence_length).map(|count| count as f32));
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

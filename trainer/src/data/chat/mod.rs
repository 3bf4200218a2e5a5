//! Conversations as training data. Each conversation is rendered with the model's chat template, tokenized, and
//! truncated or padded to one sample. Only the tokens that the assistant would generate are trained on; all other
//! targets are −100.
//!
//! With packing, a sample contains several conversations, and each is a document with its own position IDs. Files are
//! rendered and tokenized into the token cache (`rendering.rs`). The cached tokens do not depend on the sequence
//! length: truncation and packing are decided when the files are opened. Padding is at the end, where causal attention
//! hides it from the tokens before it. In a packed sample, the padding is a separate document.

mod excess;
mod mask;
mod model_files;
pub(super) mod options;
mod packing;
mod pair_record;
pub(super) mod pairs;
pub(super) mod prompt;
mod python_text;
pub(super) mod record;
mod renderer;
mod rendering;
mod template;
mod texts;

use zero_config::Untrained;
use zero_engine::DataError;
use zero_engine::format::counted;
use zero_model::ops::IGNORE_INDEX;

use super::files::Source;
use super::fingerprint::DocumentFacts;
use super::options::DataOptions;
use super::records::{Records, SampleShape, Samples, TokenizedWhere};
use super::tokens::tokenizer::Tokenizer;
use super::watch::Watch;
use excess::Excess;
use packing::{Packs, pack};
use renderer::Renderer;
use rendering::{Layout, Rendering};
use texts::{Chosen, Texts};

/// The samples of all conversations.
pub(super) struct Conversations {
    texts: Texts,
    /// Indices of the conversations that are used.
    used: Chosen,
    /// For each sample, the positions of its conversations in `used`. `None` if each conversation is a sample.
    packs: Option<Packs>,
    sequence_length: usize,
    padding: u32,
    excess: Excess,
    /// Number of conversations that were left out because no token is trained.
    untrained: usize,
    /// Number of inputs of all used conversations, and number of their trained targets.
    positions: usize,
    trained: usize,
    is_dated: bool,
}

impl Conversations {
    /// Reads, renders and tokenizes all files, or opens their entries in the cache.
    pub(super) fn open(
        sources: &[Source],
        options: &DataOptions,
        tokenizer: &Tokenizer,
        watch: &dyn Watch,
    ) -> Result<Self, DataError> {
        let renderer = &Renderer::new(&options.chat, tokenizer, options.vocabulary)?;
        let rendering = Rendering { renderer, tokenizer, options, layout: Layout::Conversations };
        let mut all = Conversations {
            texts: Texts::open(sources, &options.cache, &rendering, watch)?,
            used: Chosen::default(),
            packs: None,
            sequence_length: options.sequence_length,
            padding: renderer.padding,
            excess: Excess::new(options),
            untrained: 0,
            positions: 0,
            trained: 0,
            is_dated: renderer.is_dated(),
        };
        let (mut lengths, most): (Vec<u32>, usize) = (vec![], rendering.most());
        let (texts, mut index) = (&all.texts, 0);
        let records = options.records(texts.len() as u64)?;
        texts.each(|text, file, number| {
            if !records.contains(&(index as u64)) {
                all.used.push(false);
                index += 1;
                return Ok(());
            }
            let (facts, length) = (text.facts, text.length.min(most));
            let mut is_used = all.excess.admits(text.length, &sources[file].path, facts.at);
            if is_used && facts.first >= length {
                if options.chat.untrained == Untrained::Raise {
                    return Err(rendering.error(&sources[file], number));
                }
                (is_used, all.untrained) = (false, all.untrained + 1);
            }
            if is_used {
                let positions = length.min(options.sequence_length);
                all.positions += positions;
                all.trained += match text.length > length {
                    // Targets that are cut off do not count.
                    true => texts.read(index, most)?.1.iter().skip(1).filter(|&&trained| trained).count(),
                    false => facts.trained,
                };
                if options.sample_packing {
                    lengths.push(positions as u32);
                }
            }
            all.used.push(is_used);
            index += 1;
            Ok(())
        })?;
        all.excess.check()?;
        if all.used.len() == 0 {
            return Err(DataError::Empty { sources: options.sources.clone() });
        }
        all.packs = options.sample_packing.then(|| pack(&lengths, options.sequence_length));
        Ok(all)
    }

    /// Returns the indices of the conversations of a sample.
    fn conversations(&self, sample: usize) -> impl Iterator<Item = usize> {
        let (alone, packed) = match &self.packs {
            None => (Some(sample), &[][..]),
            Some(packs) => (None, packs.bin(sample)),
        };
        alone.into_iter().chain(packed.iter().map(|&item| item as usize)).map(|used| self.used.get(used))
    }

    /// Reads the tokens of a conversation that its sample uses, and whether each token is trained.
    fn read(&self, conversation: usize) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        self.texts.read(conversation, self.sequence_length + 1)
    }
}

impl Records for Conversations {
    fn samples(&self) -> usize {
        self.packs.as_ref().map_or(self.used.len(), Packs::len)
    }

    fn shape(&self) -> SampleShape {
        SampleShape::Tokens(self.sequence_length)
    }

    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
        if index >= self.samples() {
            return Err(DataError::Index { index, samples: self.samples() });
        }
        let texts = self.conversations(index).map(|text| self.read(text)).collect::<Result<Vec<_>, _>>()?;
        let Samples { tokens: inputs, labels, position_ids, .. } = samples;
        let mut room = self.sequence_length;
        let mut document = |tokens: &[u32], trained: &[bool]| {
            let length = tokens.len().min(self.sequence_length);
            let label = |at: usize| match trained.get(at) {
                Some(true) => i64::from(tokens[at]),
                _ => IGNORE_INDEX,
            };
            inputs.extend(&tokens[..length]);
            labels.extend((1..=length).map(label));
            if self.packs.is_some() {
                position_ids.extend(0..length as u32);
            }
            room -= length;
            room
        };
        let padding = texts.iter().map(|(tokens, trained)| document(tokens, trained)).last().unwrap_or(0);
        document(&vec![self.padding; padding], &vec![false; padding]);
        Ok(())
    }

    fn padding(&self, index: usize) -> Result<usize, DataError> {
        let used = |text| Ok(self.texts.text(text)?.length.min(self.sequence_length));
        let used = self.conversations(index).map(used).sum::<Result<usize, DataError>>()?;
        Ok(self.sequence_length - used)
    }

    fn each_document(&self, visit: &mut dyn FnMut(DocumentFacts)) -> Result<(), DataError> {
        (0..self.used.len()).try_for_each(|used| {
            visit(DocumentFacts::of(&self.read(self.used.get(used))?.0));
            Ok(())
        })
    }

    fn verify(&self, watch: &dyn Watch) -> Result<(), DataError> {
        self.texts.verify(watch)
    }

    fn tokenized(&self) -> Vec<TokenizedWhere> {
        self.texts.tokenized()
    }

    fn description(&self) -> Option<String> {
        let positions = self.samples() * self.sequence_length;
        let share = |part: usize| format!("{:.1} %", 100.0 * part as f64 / positions as f64);
        let mut what = counted(self.used.len(), "conversation", "conversations");
        if self.packs.is_some() {
            what += &format!(" in {}", counted(self.samples(), "sample", "samples"));
        }
        let (trained, padding) = (share(self.trained), share(positions - self.positions));
        let mut text = format!("{what}, {trained} of positions trained on, {padding} padding");
        text += &self.excess.description([(self.untrained, "dropped because no token is trained on")]);
        if self.is_dated {
            text += "; the template inserts today's date";
        }
        Some(text)
    }
}

#[cfg(test)]
pub(super) mod tests;

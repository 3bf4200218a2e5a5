//! Conversations as training data: each is rendered with the model's chat template, tokenized, and cut or padded to one
//! sample. Only the tokens that the assistant would generate are trained; the targets of all others are −100.
//!
//! With packing, a sample is several conversations, each a document with its own positions. Everything is done when the
//! files are opened, in parallel. Padding is at the end, where causal attention makes it invisible to the tokens before
//! it; in a packed sample it is a document of its own.

mod excess;
mod mask;
mod model_files;
pub(super) mod options;
mod packing;
mod pair_record;
pub(super) mod pairs;
pub(super) mod prompt;
pub(super) mod record;
mod renderer;
mod template;

use std::path::Path;

use rayon::prelude::*;
use zero_config::Untrained;
use zero_engine::format::counted;
use zero_engine::{At, DataError};
use zero_model::ops::IGNORE_INDEX;

use super::files::Source;
use super::fingerprint::DocumentFacts;
use super::options::DataOptions;
use super::records::{Records, SampleShape, Samples};
use super::tokenizer::Tokenizer;
use excess::Excess;
use mask::shown;
use packing::pack;
use record::Problem;
use renderer::{Renderer, Sample};

/// The samples of all conversations, in memory.
pub(super) struct Conversations {
    /// All tokens of all conversations, and whether each is trained.
    tokens: Vec<u32>,
    trained: Vec<bool>,
    /// Where each conversation begins, and the number of all tokens at the end.
    starts: Vec<usize>,
    /// The conversations of each sample; `None` if each is a sample.
    packs: Option<Vec<Vec<usize>>>,
    sequence_length: usize,
    padding: u32,
    excess: Excess,
    /// Number of conversations that were left out because no token is trained.
    untrained: usize,
    is_dated: bool,
}

impl Conversations {
    /// Reads, renders and tokenizes all files.
    pub(super) fn open(sources: &[Source], options: &DataOptions, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let renderer = Renderer::new(&options.chat, tokenizer, options.vocabulary)?;
        let mut all = Conversations {
            tokens: vec![],
            trained: vec![],
            starts: vec![0],
            packs: None,
            sequence_length: options.sequence_length,
            padding: renderer.padding,
            excess: Excess::new(options),
            untrained: 0,
            is_dated: renderer.template.as_ref().is_ok_and(|template| template.is_dated),
        };
        for source in sources {
            let path = &source.path;
            let mut kind = None;
            for records in record::in_parallel(source.records(&options.chat.fields())?) {
                let records = records?;
                let kind = match kind {
                    Some(kind) => kind,
                    None => {
                        let (at, first) = &records[0];
                        let first = record::recognize(first, &options.chat).map_err(|problem| problem.at(path, *at));
                        *kind.insert(first?)
                    }
                };
                let sample = |(at, record)| {
                    let record = record::conversation(record, kind, &options.chat);
                    let record = record.map_err(|problem| problem.at(path, at));
                    (at, record.and_then(|record| renderer.sample(record, path, at)))
                };
                for (at, sample) in records.into_par_iter().map(sample).collect::<Vec<_>>() {
                    all.push(sample?, path, at, options)?;
                }
            }
        }
        all.excess.check()?;
        if all.samples() == 0 {
            return Err(DataError::Empty { sources: options.sources.clone() });
        }
        let positions = |ends: &[usize]| (ends[1] - ends[0]).min(options.sequence_length);
        let lengths = || all.starts.windows(2).map(positions).collect::<Vec<_>>();
        all.packs = options.sample_packing.then(|| pack(&lengths(), options.sequence_length));
        Ok(all)
    }

    /// Returns the tokens of each conversation of a sample, and whether they are trained.
    fn conversations(&self, sample: usize) -> impl Iterator<Item = (&[u32], &[bool])> {
        let alone = [sample];
        let of_sample = self.packs.as_ref().map_or(&alone[..], |packs| &packs[sample]).to_vec();
        of_sample.into_iter().map(|index| {
            let range = self.starts[index]..self.starts[index + 1];
            (&self.tokens[range.clone()], &self.trained[range])
        })
    }

    /// Adds a sample, or leaves it out.
    fn push(&mut self, mut sample: Sample, path: &Path, at: At, options: &DataOptions) -> Result<(), DataError> {
        let (length, most) = (sample.tokens.len(), self.excess.most());
        if let Some(&token) = sample.tokens.iter().find(|&&token| token as usize >= options.vocabulary) {
            return Err(DataError::Token { token, vocabulary: options.vocabulary, path: path.into(), at });
        }
        if !self.excess.admits(length, path, at) {
            return Ok(());
        }
        sample.tokens.truncate(most);
        sample.trained.truncate(most);
        if !sample.trained.iter().skip(1).any(|&trained| trained) {
            if options.chat.untrained == Untrained::Drop {
                self.untrained += 1;
                return Ok(());
            }
            let why = match length > most {
                true => format!("no token of the first {most} is trained; the conversation has {length}"),
                false => "no token of the conversation is trained".to_string(),
            };
            let help = "correct the conversation, or leave such ones out: `data.chat.untrained_strategy: drop`";
            return Err(Problem::new(format!("{why}\n{}", shown(&sample.text)), help).at(path, at));
        }
        self.tokens.append(&mut sample.tokens);
        self.trained.append(&mut sample.trained);
        self.starts.push(self.tokens.len());
        Ok(())
    }
}

impl Records for Conversations {
    fn samples(&self) -> usize {
        self.packs.as_ref().map_or(self.starts.len() - 1, Vec::len)
    }

    fn shape(&self) -> SampleShape {
        SampleShape::Tokens(self.sequence_length)
    }

    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
        if index >= self.samples() {
            return Err(DataError::Index { index, samples: self.samples() });
        }
        let Samples { tokens: inputs, labels, position_ids, .. } = samples;
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
        };
        for (tokens, trained) in self.conversations(index) {
            document(tokens, trained);
        }
        let padding = self.padding(index);
        document(&vec![self.padding; padding], &vec![false; padding]);
        Ok(())
    }

    fn padding(&self, index: usize) -> usize {
        let used: usize = self.conversations(index).map(|(tokens, _)| tokens.len().min(self.sequence_length)).sum();
        self.sequence_length - used
    }

    fn each_document(&self, visit: &mut dyn FnMut(DocumentFacts)) -> Result<(), DataError> {
        self.starts.windows(2).for_each(|text| visit(DocumentFacts::of(&self.tokens[text[0]..text[1]])));
        Ok(())
    }

    fn description(&self) -> Option<String> {
        let positions = self.samples() * self.sequence_length;
        let share = |part: usize| format!("{:.1} %", 100.0 * part as f64 / positions as f64);
        let padding = (0..self.samples()).map(|index| self.padding(index)).sum();
        // The first token of a conversation is no target.
        let targets = self.starts.windows(2).flat_map(|sample| &self.trained[sample[0] + 1..sample[1]]);
        let trained = targets.filter(|&&trained| trained).count();
        let mut what = counted(self.starts.len() - 1, "conversation", "conversations");
        if self.packs.is_some() {
            what += &format!(" in {}", counted(self.samples(), "sample", "samples"));
        }
        let mut text = format!("{what}, {} of positions trained, {} padding", share(trained), share(padding));
        text += &self.excess.description([(self.untrained, "left out without a trained token")]);
        if self.is_dated {
            text += ", with today's date from the template";
        }
        Some(text)
    }
}

#[cfg(test)]
pub(super) mod tests;

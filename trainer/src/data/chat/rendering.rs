//! Renders and tokenizes the records of files for the token cache. The records are conversations, or pairs of answers.
//!
//! Complete texts are stored, so that one entry of the cache serves every sequence length. A stored number is twice the
//! token, plus one if the token is trained. In a conversation, the template and the options decide which tokens are
//! trained. In a pair, the tokens of the answer are trained. The two texts of a pair are stored next to each other.

use std::sync::mpsc::sync_channel;

use rayon::ThreadPool;
use rayon::prelude::*;
use zero_config::{ChatType, ExcessLength, Untrained};
use zero_engine::{At, DataError};

use super::super::cache::{Sink, Store, Work};
use super::super::files::Source;
use super::super::fingerprint::hash_of;
use super::super::options::DataOptions;
use super::mask::shown;
use super::pair_record;
use super::record::{self, Object, Problem, in_parallel};
use super::renderer::Renderer;
use super::texts::Facts;
use crate::data::tokens::tokenizer::Tokenizer;
use crate::data::tokens::width::Width;

/// Part of every cache key. Change it whenever the same file gets different tokens or facts than before.
const VERSION: &[u8] = b"zero-train conversations 3";

/// The kind of the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    Conversations,
    Pairs,
}

/// Renders the texts of records.
pub(super) struct Rendering<'a> {
    pub(super) renderer: &'a Renderer<'a>,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) options: &'a DataOptions,
    pub(super) layout: Layout,
}

/// The texts of a record, one for a conversation and two for a pair.
struct Rendered {
    /// The stored tokens of each text, and its facts.
    texts: Vec<(Vec<u32>, Facts)>,
    /// Total size of the rendered texts in bytes.
    bytes: usize,
}

impl Rendered {
    /// Adds a text with these tokens. `is_trained` tells whether the token at an index is trained.
    fn push(&mut self, at: At, tokens: &[u32], is_trained: impl Fn(usize) -> bool, first: usize, is_cut: bool) {
        let stored = tokens.iter().enumerate().map(|(i, &token)| token << 1 | u32::from(is_trained(i))).collect();
        // The first token of a text is never a target.
        let trained = (1..tokens.len()).filter(|&i| is_trained(i)).count();
        self.texts.push((stored, Facts { first, trained, is_cut, at }));
    }
}

impl Layout {
    /// Returns the number of texts per record.
    pub(super) fn texts(self) -> usize {
        match self {
            Layout::Conversations => 1,
            Layout::Pairs => 2,
        }
    }
}

impl Rendering<'_> {
    /// Returns the maximum number of tokens of a text that a sample uses: its inputs and the next token.
    pub(super) fn most(&self) -> usize {
        self.options.sequence_length + 1
    }

    /// Renders a record again to create an error that depends on the sequence length and is therefore not in the cache.
    /// `number` is the index of the record in its file.
    pub(super) fn error(&self, source: &Source, number: usize) -> DataError {
        let error = || {
            let mut records = source.records(&self.options.chat.fields())?;
            let Some(first) = records.next().transpose()? else { return Ok(()) };
            let kind = self.kind(&first, source)?;
            match std::iter::once(Ok(first)).chain(records).nth(number).transpose()? {
                Some((at, record)) => self.render(kind, at, record, source).map(drop),
                None => Ok(()),
            }
        };
        error().err().unwrap_or_else(|| DataError::Changed { path: source.path.clone() })
    }

    /// Determines the layout of the records of a file from the first record.
    fn kind(&self, (at, first): &(At, Object), source: &Source) -> Result<ChatType, DataError> {
        match self.layout {
            Layout::Pairs => Ok(ChatType::Preference),
            Layout::Conversations => {
                record::recognize(first, &self.options.chat).map_err(|problem| problem.at(&source.path, *at))
            }
        }
    }

    fn render(&self, kind: ChatType, at: At, record: Object, source: &Source) -> Result<Rendered, DataError> {
        match self.layout {
            Layout::Conversations => self.conversation(kind, at, record, source),
            Layout::Pairs => self.pair(at, record, source),
        }
    }

    fn conversation(&self, kind: ChatType, at: At, record: Object, source: &Source) -> Result<Rendered, DataError> {
        let path = &source.path;
        let record = record::conversation(record, kind, &self.options.chat).map_err(|problem| problem.at(path, at))?;
        let sample = self.renderer.sample(record, path, at)?;
        self.has_tokens(&sample.tokens, at, source)?;
        let (length, most) = (sample.tokens.len(), self.most());
        let first = (1..length).find(|&i| sample.trained[i]).unwrap_or(length);
        if first >= length.min(most) && self.refuses_untrained(length) {
            let why = match length > most {
                true => format!(
                    "a sample holds the first {most} of the conversation's {length} tokens, and none of these is trained on"
                ),
                false => "no token in the conversation is trained on".to_string(),
            };
            let help = "correct the conversation, or drop such conversations with `data.chat.untrained_strategy: drop`";
            return Err(Problem::new(format!("{why}\n{}", shown(&sample.text)), help).at(path, at));
        }
        let mut rendered = Rendered { texts: vec![], bytes: sample.text.len() };
        rendered.push(at, &sample.tokens, |i| sample.trained[i], first, false);
        Ok(rendered)
    }

    fn pair(&self, at: At, record: Object, source: &Source) -> Result<Rendered, DataError> {
        let path = &source.path;
        let record = pair_record::pair(record, &self.options.chat).map_err(|problem| problem.at(path, at))?;
        let pair = self.renderer.pair(record, path, at)?;
        pair.tokens.iter().try_for_each(|tokens| self.has_tokens(tokens, at, source))?;
        let (lengths, most) = (pair.tokens.each_ref().map(Vec::len), self.most());
        let longest = lengths[0].max(lengths[1]);
        if let Some(side) = lengths.iter().position(|&length| length.min(most) <= pair.prompt.max(1))
            && self.refuses_untrained(longest)
        {
            let which = ["chosen", "rejected"][side];
            let why = match longest > most {
                true => {
                    format!("a sample holds only the first {most} tokens, which contain no part of the {which} answer")
                }
                false => format!("the {which} answer has no tokens"),
            };
            let help = "correct the record, or drop such records with `data.chat.untrained_strategy: drop`";
            return Err(Problem::new(format!("{why}\n{}", shown(&pair.texts[side])), help).at(path, at));
        }
        let mut rendered = Rendered { texts: vec![], bytes: pair.texts.iter().map(String::len).sum() };
        for tokens in &pair.tokens {
            rendered.push(at, tokens, |i| i >= pair.prompt, pair.prompt, pair.is_cut);
        }
        Ok(rendered)
    }

    /// Fails if a token is outside the model's vocabulary.
    fn has_tokens(&self, tokens: &[u32], at: At, source: &Source) -> Result<(), DataError> {
        // One bit of a stored number marks trained tokens.
        let vocabulary = self.options.vocabulary.min(1 << 31);
        match tokens.iter().find(|&&token| token as usize >= vocabulary) {
            None => Ok(()),
            Some(&token) => Err(DataError::Token { token: token.into(), vocabulary, path: source.path.clone(), at }),
        }
    }

    /// Returns whether a record without trained tokens is an error. `length` is the length of its longest text. If the
    /// record is too long and the options do not truncate it, returns false: the record is left out, or an error
    /// reports its length.
    fn refuses_untrained(&self, length: usize) -> bool {
        let chat = &self.options.chat;
        let is_used = length <= self.most() || chat.excess_length == ExcessLength::Truncate;
        is_used && chat.untrained == Untrained::Raise
    }
}

impl Work for Rendering<'_> {
    const FACTS: usize = Facts::COUNT;

    fn width(&self) -> Width {
        Width::for_vocabulary(self.tokenizer.vocabulary().saturating_mul(2))
    }

    fn name(&self, source: &Source, content: &str) -> String {
        let (layout, key) = (format!("{:?}", self.layout), source.key(""));
        let parts = [content, self.tokenizer.fingerprint(), &layout, &key, &self.renderer.key];
        hash_of(&[&[VERSION], &parts.map(str::as_bytes)[..]].concat())
    }

    fn fits(&self, largest: u32) -> bool {
        ((largest >> 1) as usize) < self.options.vocabulary
    }

    fn run(&self, files: &[&Source], threads: Option<&ThreadPool>, sink: &mut impl Sink) -> Result<(), DataError> {
        for (file, source) in files.iter().enumerate() {
            let (mut store, mut bytes, mut kind) = (sink.begin(file)?, 0, None);
            let groups = in_parallel(source.records(&self.options.chat.fields())?);
            std::thread::scope(|scope| {
                let (sender, received) = sync_channel(1);
                scope.spawn(move || {
                    for group in groups {
                        let is_last = group.is_err();
                        if sender.send(group).is_err() || is_last {
                            return;
                        }
                    }
                });
                for group in received {
                    sink.goes_on(file, bytes)?;
                    let group = group?;
                    let kind = match kind {
                        Some(kind) => kind,
                        None => *kind.insert(self.kind(&group[0], source)?),
                    };
                    let render = |(at, record)| self.render(kind, at, record, source);
                    let render = || group.into_par_iter().map(render).collect::<Vec<_>>();
                    let rendered = match threads {
                        Some(threads) => threads.install(render),
                        None => render(),
                    };
                    for rendered in rendered {
                        let Rendered { texts, bytes: of_texts } = rendered?;
                        for (tokens, facts) in texts {
                            store.begin(&facts.words())?;
                            store.push(&tokens)?;
                        }
                        bytes += of_texts as u64;
                    }
                }
                Ok(())
            })?;
            sink.end(file, store, 0)?;
        }
        Ok(())
    }
}

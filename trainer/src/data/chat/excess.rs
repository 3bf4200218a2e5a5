//! Handles conversations with more tokens than a sample. The options make them an error, drop them, or truncate them.

use std::path::{Path, PathBuf};

use zero_config::ExcessLength;
use zero_engine::format::grouped;
use zero_engine::{At, DataError};

use super::super::options::DataOptions;
use super::record::Problem;

/// Decides what happens to conversations that are too long, and counts them.
pub(super) struct Excess {
    strategy: ExcessLength,
    sequence_length: usize,
    truncated: usize,
    left_out: usize,
    refused: Option<Refused>,
}

/// The conversations that are reported as an error. `path`, `at` and `length` describe the first of these
/// conversations.
struct Refused {
    path: PathBuf,
    at: At,
    length: usize,
    count: usize,
    longest: usize,
}

impl Excess {
    pub(super) fn new(options: &DataOptions) -> Self {
        let (strategy, sequence_length) = (options.chat.excess_length, options.sequence_length);
        Self { strategy, sequence_length, truncated: 0, left_out: 0, refused: None }
    }

    /// Returns the maximum length of a conversation: the tokens of a sample and the next token.
    pub(super) fn most(&self) -> usize {
        self.sequence_length + 1
    }

    /// Returns whether a conversation of `length` tokens becomes a sample. The sample uses at most [`most`](Self::most)
    /// tokens.
    pub(super) fn admits(&mut self, length: usize, path: &Path, at: At) -> bool {
        if length <= self.most() {
            return true;
        }
        match self.strategy {
            ExcessLength::Raise => {
                let new = || Refused { path: path.into(), at, length, count: 0, longest: 0 };
                let refused = self.refused.get_or_insert_with(new);
                (refused.count, refused.longest) = (refused.count + 1, refused.longest.max(length));
            }
            ExcessLength::Drop => self.left_out += 1,
            ExcessLength::Truncate => self.truncated += 1,
        }
        self.strategy == ExcessLength::Truncate
    }

    /// Fails if a conversation was too long and the options make that an error.
    pub(super) fn check(&self) -> Result<(), DataError> {
        let Some(Refused { path, at, length, count, longest }) = &self.refused else { return Ok(()) };
        let which = match count {
            1 => "no other conversation is too long".to_string(),
            &count => {
                format!("{} conversations are too long, the longest with {longest} tokens", grouped(count as u64))
            }
        };
        let message = format!(
            "the conversation has {length} tokens, but a sample has room for {} tokens and the next token; {which}",
            self.sequence_length
        );
        let help = "increase `data.sequence_length`, or set `data.chat.excess_length_strategy` to `truncate` or `drop`";
        Err(Problem::new(message, help).at(path, *at))
    }

    /// Describes how many conversations were truncated or left out, followed by the counts in `others`. Omits counts of
    /// 0.
    pub(super) fn description<const N: usize>(&self, others: [(usize, &str); N]) -> String {
        let own = [(self.truncated, "truncated"), (self.left_out, "dropped as too long")];
        let some = own.into_iter().chain(others).filter(|(count, _)| *count > 0);
        some.map(|(count, what)| format!(", {} {what}", grouped(count as u64))).collect()
    }
}

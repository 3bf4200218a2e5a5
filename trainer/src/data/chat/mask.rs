//! Decides which tokens of a conversation are trained on.
//!
//! If the template has `{% generation %}` marks, and all trained messages are the assistant's, the marked tokens of
//! these messages are trained. Otherwise a turn is found by rendering the conversation twice: up to the start of the
//! turn, and up to its end. Both texts must be prefixes of the whole text. Only the whole text is tokenized, because a
//! prefix alone may have different tokens. A token belongs to a turn if one of its characters does.

use std::ops::Range;

use minijinja::value::Value;
use tokenizers::Encoding;
use zero_config::TrainOnEos;

use super::record::{Conversation, Object, Problem};
use super::template::{Rendered, Template};

/// Advice for templates whose turns cannot be found.
const NEEDS_MARKS: &str = "set `data.chat.chat_template` to a template that encloses the model's text in \
                           `{% generation %}` and `{% endgeneration %}`";

/// Advice for messages that are not the assistant's, which marks cannot enclose.
const ONLY_ASSISTANT: &str = "train only on the assistant's messages (`data.chat.roles_to_train`, and a message's \
                              `weight`), or on all tokens (`data.chat.train_on_inputs: true`)";

/// Maximum number of bytes that are rendered to find the turns of a conversation. All messages before a turn are
/// rendered again for each turn. Rendering this many bytes takes about a minute.
const MOST: usize = 4 << 30;

/// A conversation in which to find the trained turns.
pub(super) struct Turns<'a> {
    pub(super) template: &'a Template,
    pub(super) conversation: &'a Conversation,
    pub(super) messages: &'a [Value],
    pub(super) tools: &'a Value,
    pub(super) full: &'a Rendered,
    pub(super) tokens: &'a Tokens<'a>,
}

/// The tokens of a text.
pub(super) struct Tokens<'a> {
    pub(super) encoding: &'a Encoding,
    pub(super) ranges: Vec<Range<usize>>,
    pub(super) is_special: &'a (dyn Fn(u32) -> bool + Sync),
}

impl<'a> Tokens<'a> {
    pub(super) fn new(encoding: &'a Encoding, is_special: &'a (dyn Fn(u32) -> bool + Sync)) -> Self {
        Self { encoding, ranges: ranges(encoding), is_special }
    }

    /// Returns the tokens that have a character in the byte range `bytes`.
    fn inside(&self, bytes: &Range<usize>) -> Range<usize> {
        let start = self.ranges.partition_point(|token| token.end <= bytes.start);
        let end = self.ranges.partition_point(|token| token.start < bytes.end);
        start..if bytes.is_empty() { start } else { end.max(start) }
    }

    fn is_special(&self, token: usize) -> bool {
        (self.is_special)(self.encoding.get_ids()[token])
    }
}

impl Turns<'_> {
    /// Returns the token range of each trained turn.
    pub(super) fn trained(&self) -> Result<Vec<Range<usize>>, Problem> {
        let Conversation { messages, trained, .. } = self.conversation;
        let generates = |i: usize| messages[i].get("role").is_some_and(|role| role == "assistant");
        let indices = || (0..messages.len()).filter(|&i| trained[i]);
        let turns = || {
            self.is_short(indices().count())?;
            indices().map(|i| self.turn(i)).collect::<Result<Vec<_>, _>>()
        };
        if !self.template.marks_generation || !indices().all(generates) {
            return Ok(turns()?.iter().map(|bytes| self.without_white_space(bytes)).collect());
        }
        let mut marked = self.full.generated.clone();
        if (0..messages.len()).any(|i| generates(i) && !trained[i]) {
            let turns = turns()?;
            marked.retain(|mark| turns.iter().any(|turn| turn.start <= mark.start && mark.end <= turn.end));
        }
        Ok(marked.iter().map(|bytes| self.tokens.inside(bytes)).collect())
    }

    /// Fails if `turns` turns take too long to find.
    fn is_short(&self, turns: usize) -> Result<(), Problem> {
        let bytes = self.full.text.len();
        if bytes.saturating_mul(turns) <= MOST {
            return Ok(());
        }
        let message = format!(
            "the conversation has {bytes} bytes and {turns} messages to train on; finding their tokens takes too long, \
             because the template is rendered for each of them"
        );
        Err(Problem::new(message, format!("divide the conversation into several records, or {NEEDS_MARKS}")))
    }

    /// Returns the byte range of message `i` without its header.
    fn turn(&self, i: usize) -> Result<Range<usize>, Problem> {
        let (text, end) = (&self.full.text, i + 1);
        let render = |count: usize, prompt| {
            let rendered = self.template.render(&self.messages[..count], self.tools, prompt);
            rendered.map(|rendered| rendered.text)
        };
        let is_whole_start = |start: &String| text.starts_with(start.as_str());
        let common = |start: &str| text.bytes().zip(start.bytes()).take_while(|(a, b)| a == b).count();
        let prompt = render(i, true).ok();
        let start = match &prompt {
            Some(prompt) if is_whole_start(prompt) => prompt.len(),
            _ => {
                let before = render(i, false).ok().filter(is_whole_start);
                let before = before.ok_or_else(|| {
                    self.not_found(
                        i,
                        "the output for the preceding messages is not a prefix of the output for all messages",
                    )
                })?;
                // The end of the generation prompt may differ from the turn. For example, Nemotron 3's prompt contains
                // `<think>`.
                prompt.map_or(0, |prompt| common(&prompt)).max(before.len())
            }
        };
        if end == self.messages.len() {
            return Ok(start..text.len());
        }
        let until = render(end, false).map_err(|error| self.not_found(i, &error))?;
        if is_whole_start(&until) && until.len() >= start {
            return Ok(start..until.len());
        }
        // Some templates, such as Phi's, end every conversation with the `eos_token`. The turn then ends with the last
        // special token before the `eos_token`, if the next turn begins with a special token.
        let same = common(&until);
        // `get` returns `None` for a token that ends inside a character. Such a token is not blank.
        let is_blank = |token: &Range<usize>| text.get(token.clone()).is_some_and(|text| text.trim().is_empty());
        let ranges = &self.tokens.ranges;
        let is_common = |&token: &usize| ranges[token].end <= same && self.tokens.is_special(token);
        let last = self.tokens.inside(&(start..same.max(start))).rev().find(is_common);
        let next = last.and_then(|last| (last + 1..ranges.len()).find(|&token| !is_blank(&ranges[token])));
        match (last.map(|last| ranges[last].end), next) {
            (Some(end), Some(next))
                if self.tokens.is_special(next) && until.get(end..).map(str::trim) == self.template.eos_token() =>
            {
                Ok(start..end)
            }
            _ => Err(self.not_found(i, "the template renders the message differently when other messages follow")),
        }
    }

    fn not_found(&self, i: usize, why: &str) -> Problem {
        let text = shown(&self.full.text);
        let Conversation { messages, trained, .. } = self.conversation;
        // Marks show only what the assistant generates.
        let is_other = |(message, &trained): (&Object, &bool)| {
            trained && message.get("role").is_none_or(|role| role != "assistant")
        };
        let help = if messages.iter().zip(trained).any(is_other) { ONLY_ASSISTANT } else { NEEDS_MARKS };
        Problem::new(
            format!("cannot find the tokens of message {} in the template's output: {why}\n{text}", i + 1),
            help,
        )
    }

    /// Returns the tokens of a turn. Omits white space after its last special token.
    fn without_white_space(&self, bytes: &Range<usize>) -> Range<usize> {
        let tokens = self.tokens.inside(bytes);
        match tokens.clone().rev().find(|&token| self.tokens.is_special(token)) {
            Some(last) if self.full.text[self.tokens.ranges[last].end..bytes.end].trim().is_empty() => {
                tokens.start..last + 1
            }
            _ => tokens,
        }
    }
}

/// Returns the byte range of each token. Some tokenizers report an empty range for a token of white space; its range
/// then begins at the end of the previous token.
pub(super) fn ranges(encoding: &Encoding) -> Vec<Range<usize>> {
    let mut last = 0;
    let range = |&(start, end): &(usize, usize)| {
        let start = if start == end { last.min(end) } else { start };
        last = end;
        start..end
    };
    encoding.get_offsets().iter().map(range).collect()
}

/// Returns a mask that selects the tokens of `turns`. `on_eos` adds or removes end-of-turn tokens.
pub(super) fn mask(tokens: &Tokens<'_>, turns: &[Range<usize>], on_eos: TrainOnEos, eos: Option<u32>) -> Vec<bool> {
    let ids = tokens.encoding.get_ids();
    let mut mask = vec![false; ids.len()];
    turns.iter().for_each(|turn| mask[turn.clone()].fill(true));
    if on_eos == TrainOnEos::Turn {
        return mask;
    }
    let ends = turns.iter().filter_map(|turn| turn.clone().next_back()).filter(|&last| tokens.is_special(last));
    let mut ends: Vec<u32> = ends.map(|last| ids[last]).collect();
    ends.extend(eos);
    ends.sort_unstable();
    ends.dedup();
    let is_end: Vec<usize> = (0..ids.len()).filter(|&token| ends.contains(&ids[token])).collect();
    is_end.iter().for_each(|&token| mask[token] = on_eos == TrainOnEos::All);
    if let Some(&last) = is_end.last() {
        mask[last] = true;
    }
    mask
}

/// Returns the beginning of a rendered text for an error message, with each line indented.
pub(super) fn shown(text: &str) -> String {
    const SHOWN: usize = 1000;
    let cut: String = text.chars().take(SHOWN).collect();
    let more = if cut.len() < text.len() { "…" } else { "" };
    let lines: Vec<String> = cut.lines().map(|line| format!("    | {line}")).collect();
    format!("{}{more}", lines.join("\n"))
}

//! Decodes tokens while they are generated. Returns only complete characters, and holds back text that may be the
//! beginning of a stop string.

use zero_engine::DataError;

use crate::data::Tokenizer;

/// Number of earlier tokens that are decoded together with the new tokens, because some decoders drop the space before
/// the first word.
const CONTEXT: usize = 5;

/// Decodes a growing list of tokens.
pub(super) struct Writer<'a> {
    tokenizer: Option<&'a Tokenizer>,
    stop: &'a [String],
    tokens: Vec<u32>,
    /// The next decoding starts at token `start`. The text of the tokens before `end` is already decoded.
    start: usize,
    end: usize,
    /// The whole text so far.
    text: String,
    /// Number of bytes of `text` that were already returned.
    shown: usize,
}

impl<'a> Writer<'a> {
    /// Creates a writer for the tokens that follow `prompt`. Without a tokenizer, the text stays empty.
    pub(super) fn new(tokenizer: Option<&'a Tokenizer>, stop: &'a [String], prompt: &[u32]) -> Self {
        let tokens = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        let end = tokens.len();
        Self { tokenizer, stop, tokens, start: 0, end, text: String::new(), shown: 0 }
    }

    /// Adds a token. If the text now contains a stop string, truncates the text and returns true.
    pub(super) fn push(&mut self, token: u32) -> Result<bool, DataError> {
        self.tokens.push(token);
        self.decode(false)?;
        Ok(self.cut())
    }

    /// Returns the new part of the text. Holds back the end of the text if it may become a stop string, unless `is_end`
    /// is set.
    pub(super) fn news(&mut self, is_end: bool) -> Result<&str, DataError> {
        if is_end {
            self.decode(true)?;
            self.cut();
        }
        let held = if is_end { 0 } else { self.begun() };
        let start = std::mem::replace(&mut self.shown, self.text.len() - held);
        Ok(self.text.get(start..self.shown).unwrap_or_default())
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }

    /// Decodes the tokens whose text is not known yet. Keeps an incomplete character for later, except with `is_end`.
    fn decode(&mut self, is_end: bool) -> Result<(), DataError> {
        let Some(tokenizer) = self.tokenizer else { return Ok(()) };
        let known = tokenizer.decode(&self.tokens[self.start..self.end])?;
        let all = tokenizer.decode(&self.tokens[self.start..])?;
        let Some(new) = all.get(known.len()..) else { return Ok(()) };
        if is_end || !new.is_empty() && !all.ends_with('\u{fffd}') {
            self.text += new;
            (self.start, self.end) = (self.end, self.tokens.len());
        }
        Ok(())
    }

    /// Truncates the text before the first stop string. Returns whether it found one.
    fn cut(&mut self) -> bool {
        // A stop string can begin only in text that was not returned yet.
        let rest = &self.text[self.shown..];
        let first = self.stop.iter().filter_map(|stop| rest.find(stop.as_str())).min();
        if let Some(at) = first {
            self.text.truncate(self.shown + at);
        }
        first.is_some()
    }

    /// Returns the length of the longest suffix of the text that is a prefix of a stop string.
    fn begun(&self) -> usize {
        let rest = &self.text[self.shown.min(self.text.len())..];
        let of = |stop: &String| {
            let lengths = stop.char_indices().map(|(at, _)| at).filter(|&at| at > 0);
            lengths.filter(|&at| rest.ends_with(&stop[..at])).max().unwrap_or(0)
        };
        self.stop.iter().map(of).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes bytes, and returns each part of the text.
    fn parts(bytes: &[u8], stop: &[&str]) -> (Vec<String>, String, bool) {
        let stop: Vec<String> = stop.iter().map(ToString::to_string).collect();
        let tokenizer = Tokenizer::Byte;
        let mut writer = Writer::new(Some(&tokenizer), &stop, &[104, 105]);
        let (mut parts, mut is_stopped) = (vec![], false);
        for &byte in bytes {
            is_stopped = writer.push(byte.into()).unwrap();
            parts.push(writer.news(is_stopped).unwrap().to_string());
            if is_stopped {
                break;
            }
        }
        parts.push(writer.news(true).unwrap().to_string());
        (parts, writer.into_text(), is_stopped)
    }

    #[test]
    fn only_whole_characters_are_shown() {
        let (shown, text, _) = parts("a€é".as_bytes(), &[]);
        assert_eq!(shown, ["a", "", "", "€", "", "é", ""]);
        assert_eq!(text, "a€é");
        // The text ends with an incomplete character.
        let (shown, text, _) = parts(&[97, 0xe2, 0x82], &[]);
        assert_eq!(shown.concat(), text);
        assert!(text.starts_with('a') && text.contains('\u{fffd}'), "{text:?}");
    }

    #[test]
    fn stop_strings_never_show() {
        let (shown, text, is_stopped) = parts(b"one\n\ntwo", &["\n\n"]);
        assert_eq!((shown.concat().as_str(), text.as_str(), is_stopped), ("one", "one", true));
        // The beginning of a stop string is held back. It is returned if the next characters do not complete the stop
        // string.
        let (shown, text, is_stopped) = parts(b"a STAND STOP", &["STOP", "zzz"]);
        assert_eq!(text, "a STAND ");
        assert!(is_stopped && shown[2..5] == ["", "", "STA"], "{shown:?}");
        let (_, text, is_stopped) = parts(b"a ST", &["STOP"]);
        assert_eq!((text.as_str(), is_stopped), ("a ST", false));
    }
}

//! Splits long texts into pieces. The pieces are encoded independently and in parallel. The pieces together have the
//! same tokens as the whole text, with two exceptions: a text that has no safe place for a cut in 256 KiB (see
//! [`piece_end`]), and a vocabulary with tokens that span the beginning of a word, as in a BPE that does not split at
//! spaces. Some tokens beside a cut may then differ.

use std::ops::Range;

use tokenizers::{AddedToken, Tokenizer};

use crate::data::files::streams::Document;

/// Approximate size of a piece in bytes. Pieces limit the encoder's memory, because encoding temporarily needs a
/// hundred times the memory of the resulting tokens.
const PIECE: usize = 1 << 18;

/// Where a text may be cut without changing its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cuts {
    /// Anywhere: each byte is a token.
    Anywhere,
    /// Only where tokenizers that split text into words begin a word; see [`word_start`].
    Words,
    /// Nowhere: an added token may span the beginning of a word.
    Nowhere,
}

impl Cuts {
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        #[expect(clippy::disallowed_methods, reason = "the order of the tokens does not affect the result")]
        let mut added = tokenizer.get_added_vocabulary().get_added_tokens_decoder().values();
        let has_normalizer = tokenizer.get_normalizer().is_some();
        if added.any(|token| Self::is_prevented_by(token, has_normalizer)) { Cuts::Nowhere } else { Cuts::Words }
    }

    /// Returns whether an added token may span the beginning of a word.
    fn is_prevented_by(token: &AddedToken, has_normalizer: bool) -> bool {
        let has_space = token.content.contains([' ', '\n']);
        // The tokenizer searches for this token in normalized text, where it may begin and end with any character.
        if token.normalized && has_normalizer {
            return token.lstrip || token.rstrip || has_space;
        }
        let takes_line_break = token.lstrip && is_alphanumeric(token.content.as_bytes());
        let takes_space = token.rstrip && token.content.ends_with(|c: char| c.is_ascii_lowercase());
        let is_several_words = token.content.contains(char::is_alphanumeric) && has_space;
        takes_line_break || takes_space || is_several_words
    }
}

/// Cuts a document into pieces. Each piece is encoded on its own, and the pieces together have the tokens of the whole
/// document.
pub(crate) fn pieces(document: Document, cuts: Cuts) -> impl Iterator<Item = Document> {
    let Document { at, mut text, is_continued } = document;
    let (mut start, mut is_at_end) = (0, false);
    std::iter::from_fn(move || {
        let first = start;
        let end = (!is_at_end).then(|| piece_end(&text[first..], cuts))?;
        let piece = match end {
            Some(end) => text[first..first + end].to_vec(),
            None if first == 0 => std::mem::take(&mut text),
            None => text.split_off(first),
        };
        (start, is_at_end) = (first + piece.len(), end.is_none_or(|end| first + end == text.len()));
        Some(Document { at: at.after(first as u64), text: piece, is_continued: is_continued || first > 0 })
    })
}

/// Returns the length of the first piece. Returns `None` if the text is too short to decide, or has no place for a cut.
pub(crate) fn piece_end(text: &[u8], cuts: Cuts) -> Option<usize> {
    match cuts {
        Cuts::Anywhere => (text.len() >= PIECE).then_some(PIECE),
        Cuts::Words => word_start(text, PIECE..2 * PIECE).or_else(|| {
            // The second choice, the start of a line that follows empty lines, can change the tokens of these lines.
            // Some tokenizers, such as GPT-2's, separate the last of several line breaks from the others only if a word
            // follows in the same piece.
            let follows_break = |at: &usize| text[at - 1] == b'\n';
            let mut later = 2 * PIECE..text.len().min(4 * PIECE);
            later.find(|at| follows_break(at) && is_alphanumeric(&text[*at..])).or_else(|| {
                // The third choice, the start of any line, can change the tokens of the white space around the cut. It
                // limits the size of the pieces of a text that has only blank lines. The decision needs the whole range
                // above, and the first character after it.
                (text.len() >= 4 * PIECE + 4).then(|| (4 * PIECE..text.len()).find(follows_break))?
            })
        }),
        Cuts::Nowhere => None,
    }
}

/// Returns the first position in `range` at which tokenizers that split text into words begin a word, whatever the
/// context. These positions are a letter or digit after a single line break, and a single space between lower-case
/// ASCII letters. An added token that begins with another character, such as `<mask>`, may take the line break before
/// it.
pub(crate) fn word_start(text: &[u8], range: Range<usize>) -> Option<usize> {
    let is_word = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
    let range = range.start.max(1)..range.end.min(text.len());
    range.clone().zip(text.get(range)?).find_map(|(at, byte)| match byte {
        b' ' if text[at - 1].is_ascii_lowercase() && text.get(at + 1)?.is_ascii_lowercase() => Some(at),
        b'\n' if is_word(last_char(&text[..at])) && is_alphanumeric(&text[at + 1..]) => Some(at + 1),
        _ => None,
    })
}

/// Returns whether a text begins with a letter or digit.
fn is_alphanumeric(text: &[u8]) -> bool {
    first_char(text).is_some_and(char::is_alphanumeric)
}

/// Returns the first character. Returns `None` at the end of the text, and for an incomplete character.
fn first_char(text: &[u8]) -> Option<char> {
    let start = &text[..text.len().min(4)];
    start.utf8_chunks().next()?.valid().chars().next()
}

/// Returns the last character. Returns `None` at the start of the text, and for an incomplete character.
fn last_char(text: &[u8]) -> Option<char> {
    let start = (1..=text.len().min(4)).map(|length| text.len() - length).find(|&at| text[at] & 0xc0 != 0x80)?;
    first_char(&text[start..])
}

#[cfg(test)]
mod tests {
    use zero_engine::At;

    use super::*;

    #[test]
    fn long_texts_are_cut_between_lines() {
        let line = "a line of text, éééé\n\n  indented\n";
        let text = line.repeat(3 * PIECE / line.len());
        let document = |text: &str| Document { at: At::Byte(5), text: text.into(), is_continued: false };
        let cut: Vec<Document> = pieces(document(&text), Cuts::Words).collect();
        assert_eq!(cut.iter().flat_map(|piece| piece.text.clone()).collect::<Vec<u8>>(), text.as_bytes());
        assert!(cut.len() > 1);
        let mut at = 5;
        for (i, piece) in cut.iter().enumerate() {
            assert_eq!((piece.at, piece.is_continued), (At::Byte(at), i > 0));
            at += piece.text.len() as u64;
        }
        let whole = &cut[..cut.len() - 1];
        let is_cut =
            |piece: &Document| [&b"indented\n"[..], b"a", b"line", b"of"].iter().any(|end| piece.text.ends_with(end));
        assert!(whole.iter().all(|piece| is_cut(piece) && piece.text.len() < PIECE + line.len()));
        let endless = "é".repeat(PIECE);
        assert_eq!(pieces(document(&endless), Cuts::Words).collect::<Vec<_>>(), [document(&endless)]);
        // In white space, the text is cut after any line break.
        let blank: Vec<Document> = pieces(document(&"\n \n".repeat(4 * PIECE)), Cuts::Words).collect();
        let lengths: Vec<usize> = blank.iter().map(|piece| piece.text.len()).collect();
        assert_eq!(lengths, [4 * PIECE, 4 * PIECE + 1, 4 * PIECE - 1]);
        assert!(blank[..2].iter().all(|piece| piece.text.ends_with(b"\n")));
        // Without a better place, the text is cut after several line breaks.
        let paragraphs = "字\n\n".repeat(PIECE);
        let cut: Vec<Document> = pieces(document(&paragraphs), Cuts::Words).collect();
        assert!(cut.len() == 3 && cut.iter().all(|piece| piece.text.ends_with(b"\n\n")), "{}", cut.len());
        assert_eq!(pieces(document(&text), Cuts::Nowhere).collect::<Vec<_>>(), [document(&text)]);
        let lengths: Vec<_> =
            pieces(document(&endless), Cuts::Anywhere).map(|piece| (piece.at, piece.text.len())).collect();
        assert_eq!(lengths, [(At::Byte(5), PIECE), (At::Byte(5 + PIECE as u64), PIECE)]);
    }

    /// The test expects `Nowhere` for tokens that may take the white space at a cut, or may span the cut.
    #[test]
    fn added_tokens_decide_where_texts_are_cut() {
        let plain = |content: &str| AddedToken::from(content, true).normalized(false);
        for (token, has_normalizer, expected) in [
            (plain("<mask>").lstrip(true).rstrip(true), false, Cuts::Words),
            (plain("<|end|>"), true, Cuts::Words),
            (plain("  "), false, Cuts::Words),
            (plain("zz"), false, Cuts::Words),
            (plain("zz").lstrip(true), false, Cuts::Nowhere),
            (plain("字").lstrip(true), false, Cuts::Nowhere),
            (plain("zz").rstrip(true), false, Cuts::Nowhere),
            (plain("a\nb"), false, Cuts::Nowhere),
            (plain("New York"), false, Cuts::Nowhere),
            // In lower case, this token ends with a lower-case letter.
            (plain("MASK").rstrip(true).normalized(true), true, Cuts::Nowhere),
            (plain("MASK").rstrip(true).normalized(true), false, Cuts::Words),
        ] {
            let found = if Cuts::is_prevented_by(&token, has_normalizer) { Cuts::Nowhere } else { Cuts::Words };
            assert_eq!(found, expected, "{token:?}");
        }
    }
}

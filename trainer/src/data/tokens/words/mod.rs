//! Encodes text with a byte-level BPE. It is several times as fast as the crate `tokenizers` and produces the same
//! tokens.
//!
//! The crate splits text into words with a regular expression, then looks up the tokens of each word. This module
//! splits text with hand-written code for the patterns of GPT-2, Llama 3 and Qwen 2. It uses the same character classes
//! as the crate, and each thread caches the tokens of words. The crate encodes words that are not in the cache. It also
//! encodes all text of unrecognized tokenizers, and each text that contains an added token or may need normalization.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{LazyLock, Mutex, PoisonError};

use aho_corasick::AhoCorasick;
use regex_syntax::hir::{Class, HirKind};
use serde_json::{Value, json};
use tokenizers::{Model, ModelWrapper, Tokenizer};

/// The patterns of Llama 3 and of Qwen 2. Qwen 2 makes each digit a word of its own.
pub(crate) const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const QWEN_2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Maximum number of words in a thread's cache, and maximum length of a cached word in bytes.
const KEPT: usize = 1 << 17;
const LONGEST: usize = 64;

/// The pattern that splits text into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// [`LLAMA_3`] with `numbers` = 3, or [`QWEN_2`] with `numbers` = 1: the maximum number of digits in a word.
    Llama3 { numbers: usize },
}

/// The fast encoder of a recognized tokenizer.
pub(crate) struct Words {
    pattern: Pattern,
    /// Whether the tokenizer normalizes text to Unicode's normalization form C (NFC).
    is_normalizing: bool,
    /// Finds the added tokens.
    added: AhoCorasick,
    /// The caches that no thread uses at the moment.
    idle: Mutex<Vec<WordCache>>,
}

/// A cache of the tokens of words.
#[derive(Default)]
struct WordCache {
    /// The tokens of each word: the index of the first token in `tokens`, and the number of tokens.
    words: HashMap<Box<[u8]>, (u32, u32), BuildHasherDefault<WordHasher>>,
    tokens: Vec<u32>,
}

impl Words {
    /// Recognizes a tokenizer. Returns `None` if only the crate can encode its text.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let pattern = pattern(&serde_json::to_value(tokenizer.get_pre_tokenizer()?).ok()?)?;
        let normalizer = tokenizer.get_normalizer().map(serde_json::to_value).transpose().ok()?;
        let is_normalizing = match normalizer {
            None => false,
            Some(normalizer) if normalizer == json!({"type": "NFC"}) => true,
            Some(_) => return None,
        };
        // With dropout, tokens are random.
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        if model.dropout.is_some_and(|dropout| dropout > 0.0) {
            return None;
        }
        #[expect(clippy::disallowed_methods, reason = "the order of the texts does not affect the result")]
        let added: Vec<&String> = tokenizer.get_added_vocabulary().get_vocab().keys().collect();
        if is_normalizing && !added.iter().all(|text| is_normalized(text)) {
            return None;
        }
        let added = AhoCorasick::new(added).ok()?;
        let words = Self { pattern, is_normalizing, added, idle: Mutex::default() };
        // Parts of the tokenizer that are not checked above, such as its post-processor, may change tokens. The
        // comparison detects this.
        let is_same = |text: &str| {
            let expected = tokenizer.encode_fast(text, false).ok();
            words.encode(tokenizer, text).is_none_or(|tokens| expected.is_some_and(|all| all.get_ids() == tokens))
        };
        ["", "It's 12345 words,\n\n  über all…\t"].into_iter().all(is_same).then_some(words)
    }

    /// Returns the tokens of a text, or `None` if only the crate can encode it.
    pub(crate) fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
        if self.added.is_match(text) || self.is_normalizing && !is_normalized(text) {
            return None;
        }
        let mut kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        let (mut out, mut start) = (Vec::with_capacity(text.len() / 3), 0);
        let scanner = Scanner::new(text);
        while start < text.len() {
            let end = scanner.word_end(self.pattern, start);
            kept.encode(tokenizer, &text.as_bytes()[start..end], &mut out)?;
            start = end;
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
        Some(out)
    }
}

impl WordCache {
    /// Appends the tokens of a word. Returns `None` if the crate cannot encode it.
    fn encode(&mut self, tokenizer: &Tokenizer, word: &[u8], out: &mut Vec<u32>) -> Option<()> {
        if let Some(&(first, count)) = self.words.get(word) {
            match count {
                1 => out.push(self.tokens[first as usize]),
                _ => out.extend(&self.tokens[first as usize..(first + count) as usize]),
            }
            return Some(());
        }
        let symbols: String = word.iter().map(|&byte| SYMBOLS[usize::from(byte)]).collect();
        let before = out.len();
        out.extend(tokenizer.get_model().tokenize(&symbols).ok()?.iter().map(|token| token.id));
        if word.len() <= LONGEST {
            if self.words.len() >= KEPT {
                *self = Self::default();
            }
            let tokens = &out[before..];
            self.words.insert(word.into(), (self.tokens.len() as u32, tokens.len() as u32));
            self.tokens.extend(tokens);
        }
        Some(())
    }
}

/// Returns the pattern of a pre-tokenizer in the JSON form of `tokenizer.json`.
fn pattern(pre_tokenizer: &Value) -> Option<Pattern> {
    let is = |value: &Value, expected: &[(&str, Value)]| expected.iter().all(|(name, it)| value.get(name) == Some(it));
    let is_byte_level = |value, use_regex: bool| {
        is(value, &[("type", "ByteLevel".into()), ("add_prefix_space", false.into()), ("use_regex", use_regex.into())])
    };
    if is_byte_level(pre_tokenizer, true) {
        return Some(Pattern::Gpt2);
    }
    let parts = pre_tokenizer.get("pretokenizers").filter(|_| is(pre_tokenizer, &[("type", "Sequence".into())]))?;
    let [split, level] = &parts.as_array()?[..] else { return None };
    let is_split = is(split, &[("type", "Split".into()), ("behavior", "Isolated".into()), ("invert", false.into())]);
    match split.get("pattern")?.get("Regex")?.as_str()? {
        _ if !is_split || !is_byte_level(level, false) => None,
        LLAMA_3 => Some(Pattern::Llama3 { numbers: 3 }),
        QWEN_2 => Some(Pattern::Llama3 { numbers: 1 }),
        _ => None,
    }
}

/// Returns whether a text is certainly in normalization form C: whether it consists of characters that are normalized
/// in any context.
fn is_normalized(text: &str) -> bool {
    let is_normalized = |c: char| {
        matches!(c, '\0'..='\u{2ff}' | '\u{400}'..='\u{482}' | '\u{2010}'..='\u{205f}' | '\u{3041}'..='\u{3096}'
                  | '\u{30a1}'..='\u{30fa}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}'
                  | '\u{ac00}'..='\u{d7a3}' | '\u{1f300}'..='\u{1faff}')
    };
    text.is_ascii() || text.chars().all(is_normalized)
}

/// The symbols of the 256 bytes in the vocabulary of a byte-level tokenizer. The symbol of a printable byte is the
/// character with the same number. The symbols of other bytes have the code points from 256 on.
static SYMBOLS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut others = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        byte @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(byte),
        _ => others.next().unwrap_or_default(),
    })
});

/// The class of a character, as bits. A line break is also white space.
const LETTER: u8 = 1;
const NUMBER: u8 = 2;
const SPACE: u8 = 4;
const LINE_BREAK: u8 = 8;
/// The class of the end of the text, where no character follows.
const END: u8 = 16;
/// The bits that distinguish letters, numbers, white space and the end. Other characters have none of these bits.
const KIND: u8 = LETTER | NUMBER | SPACE | END;

/// The class of each character. It is computed with the crate's regular expressions, so this module and the crate use
/// the same version of Unicode.
static CLASSES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut classes = vec![0; char::MAX as usize + 1];
    for (expression, bit) in [(r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE), (r"[\r\n]", LINE_BREAK)] {
        let parsed = regex_syntax::parse(expression).expect("the expression is valid");
        let HirKind::Class(Class::Unicode(class)) = parsed.kind() else { unreachable!("{expression} is a class") };
        for range in class.iter() {
            classes[range.start() as usize..=range.end() as usize].iter_mut().for_each(|class| *class |= bit);
        }
    }
    classes
});

/// Finds words. Positions are byte offsets of characters.
struct Scanner<'a> {
    text: &'a str,
    classes: &'static [u8],
}

impl<'a> Scanner<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, classes: &CLASSES }
    }

    /// Returns the class of the character at `at`, and the position after it.
    fn next(&self, at: usize) -> (u8, usize) {
        match self.text.as_bytes().get(at) {
            None => (END, at),
            Some(&byte) if byte < 0x80 => (self.classes[usize::from(byte)], at + 1),
            Some(_) => {
                let c = self.text[at..].chars().next().unwrap_or_default();
                (self.classes[c as usize], at + c.len_utf8())
            }
        }
    }

    /// Returns the end of the run of characters, starting at `at`, whose class has the value `kind` in the bits `mask`.
    fn run(&self, mut at: usize, mask: u8, kind: u8) -> usize {
        loop {
            let (class, after) = self.next(at);
            if class & mask != kind || class == END {
                return at;
            }
            at = after;
        }
    }

    /// Returns the end of the word that begins at `start`, which must not be the end of the text.
    fn word_end(&self, pattern: Pattern, start: usize) -> usize {
        match pattern {
            Pattern::Gpt2 => self.gpt2(start),
            Pattern::Llama3 { numbers } => self.llama3(start, numbers),
        }
    }

    fn gpt2(&self, start: usize) -> usize {
        if let Some(end) = self.contraction(start, false) {
            return end;
        }
        let is_blank = self.text.as_bytes()[start] == b' ';
        let (class, after) = self.next(if is_blank { start + 1 } else { start });
        match class & KIND {
            SPACE | END => self.white_space(start),
            kind => self.run(after, KIND, kind),
        }
    }

    fn llama3(&self, start: usize, numbers: usize) -> usize {
        if let Some(end) = self.contraction(start, true) {
            return end;
        }
        let (class, after) = self.next(start);
        if class & LETTER != 0 {
            return self.run(after, KIND, LETTER);
        }
        if class & NUMBER != 0 {
            let mut end = after;
            for _ in 1..numbers {
                match self.next(end) {
                    (class, after) if class & NUMBER != 0 => end = after,
                    _ => break,
                }
            }
            return end;
        }
        let (second, after_second) = self.next(after);
        if class & LINE_BREAK == 0 && second & LETTER != 0 {
            return self.run(after_second, KIND, LETTER);
        }
        let is_blank = self.text.as_bytes()[start] == b' ';
        if class & KIND == 0 || is_blank && second & KIND == 0 {
            let end = self.run(after, KIND, 0);
            return self.run(end, LINE_BREAK, LINE_BREAK);
        }
        let white = self.run(start, KIND, SPACE);
        match self.text[start..white].rfind(['\r', '\n']) {
            Some(last) => start + last + 1,
            None => self.white_space(start),
        }
    }

    /// Returns the end of a word of white space. Unless the text ends there, the last white-space character is left for
    /// the next word.
    fn white_space(&self, start: usize) -> usize {
        let end = self.run(start, KIND, SPACE);
        let last = self.text[start..end].char_indices().next_back().map_or(0, |(last, _)| last);
        if end == self.text.len() || last == 0 { end } else { start + last }
    }

    /// Returns the end of `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d`, in lower case, or in any case with `any_case`.
    fn contraction(&self, start: usize, any_case: bool) -> Option<usize> {
        let rest = self.text.as_bytes()[start..].strip_prefix(b"'")?;
        let small = |at: usize| rest.get(at).map(|byte| if any_case { byte.to_ascii_lowercase() } else { *byte });
        match (small(0)?, small(1)) {
            (b's' | b't' | b'm' | b'd', _) => Some(start + 2),
            (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(start + 3),
            // The long s (ſ) is equal to s in case-insensitive matching.
            _ if any_case && rest.starts_with("ſ".as_bytes()) => Some(start + 1 + "ſ".len()),
            _ => None,
        }
    }
}

/// A hash function for short texts. An attacker can make texts collide, but this only slows encoding down.
#[derive(Default)]
struct WordHasher(u64);

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut push = |value: u64| {
            let product = u128::from(self.0 ^ value) * u128::from(FACTOR);
            self.0 = (product as u64 ^ (product >> 64) as u64).wrapping_add(FACTOR);
        };
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|&word| push(u64::from_le_bytes(word)));
        push(rest.iter().fold(1, |value, &byte| value << 8 | u64::from(byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests;

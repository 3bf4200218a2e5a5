//! Converts between text and tokens, with bytes or a Hugging Face `tokenizer.json`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::de::IgnoredAny;
use zero_engine::DataError;

use super::pieces::Cuts;
use super::words::Words;
use crate::data::files::remote;
use crate::data::files::streams::Document;
use crate::data::fingerprint::hash_of;
use crate::data::guard::caught;

/// Upper bound of a vocabulary, as for `model.vocab_size`.
const MAX_VOCABULARY: usize = 1 << 30;

/// Converts text into tokens.
pub enum Tokenizer {
    /// Each byte is a token, so the vocabulary has 256 tokens.
    Byte,
    /// Tokens as defined by a `tokenizer.json`.
    HuggingFace(Box<HuggingFace>),
}

/// A loaded `tokenizer.json`.
pub struct HuggingFace {
    path: PathBuf,
    /// SHA-256 of the file.
    fingerprint: String,
    tokenizer: tokenizers::Tokenizer,
    /// One more than the largest token, because a vocabulary may have gaps.
    vocabulary: usize,
    /// The fast encoder, if it supports this tokenizer. Texts that it cannot encode go to `tokenizer`.
    words: Option<Words>,
}

impl Tokenizer {
    /// Reads a Hugging Face `tokenizer.json`. `path` may also be a URL such as `hf://gpt2/tokenizer.json`.
    ///
    /// # Errors
    /// Fails if the file cannot be read or downloaded, is not a tokenizer, or has a token ID that is too large.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = match zero_config::address(path.as_ref()) {
            Some(address) => &remote::with_its_folder(address)?,
            None => path.as_ref(),
        };
        let bytes = fs::read(path).map_err(DataError::io(path))?;
        let fingerprint = hash_of(&[&bytes]);
        // The crate panics on some files that are not JSON.
        std::str::from_utf8(&bytes).map_err(|error| failed(path)(error.into()))?;
        serde_json::from_slice::<IgnoredAny>(&bytes).map_err(|error| failed(path)(error.into()))?;
        let mut tokenizer = guarded(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(failed(path))?;
        // A tokenizer that was saved after inference may truncate or pad each text.
        tokenizer.with_padding(None).with_truncation(None).map_err(failed(path))?;
        #[expect(clippy::disallowed_methods, reason = "a maximum has no order")]
        let largest = tokenizer.get_vocab(true).into_values().max();
        let vocabulary = largest.map_or(0, |token| token as usize + 1);
        if vocabulary > MAX_VOCABULARY {
            let message = format!("the largest token is {}, but must be below {MAX_VOCABULARY}", vocabulary - 1);
            return Err(failed(path)(message.into()));
        }
        let (path, words) = (path.into(), Words::of(&tokenizer));
        Ok(Tokenizer::HuggingFace(Box::new(HuggingFace { path, fingerprint, tokenizer, vocabulary, words })))
    }

    /// Returns a text that identifies the tokenizer.
    pub(crate) fn fingerprint(&self) -> &str {
        match self {
            Tokenizer::Byte => "byte",
            Tokenizer::HuggingFace(this) => &this.fingerprint,
        }
    }

    /// Returns the size of the vocabulary, including added tokens.
    pub fn vocabulary(&self) -> usize {
        match self {
            Tokenizer::Byte => 256,
            Tokenizer::HuggingFace(this) => this.vocabulary,
        }
    }

    /// Returns where a text may be cut.
    pub(crate) fn cuts(&self) -> Cuts {
        match self {
            Tokenizer::Byte => Cuts::Anywhere,
            Tokenizer::HuggingFace(this) => Cuts::of(&this.tokenizer),
        }
    }

    /// Encodes a text, without adding special tokens.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Tokenizer::Byte => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::HuggingFace(this) => this.ids(text).map_err(failed(&this.path)),
        }
    }

    /// Encodes a piece of a document of the file `path`.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot encode the text, or if a token is not below `vocabulary`.
    pub(crate) fn encode_piece(&self, piece: &Document, path: &Path, vocabulary: usize) -> Result<Vec<u32>, DataError> {
        match self {
            Tokenizer::Byte => match piece.text.iter().position(|&byte| usize::from(byte) >= vocabulary) {
                None => Ok(piece.text.iter().map(|&byte| u32::from(byte)).collect()),
                Some(outside) => {
                    let (token, at) = (u32::from(piece.text[outside]), piece.at.after(outside as u64));
                    Err(DataError::Token { token: token.into(), vocabulary, path: path.into(), at })
                }
            },
            Tokenizer::HuggingFace(this) => this.encode_piece(piece, path, vocabulary),
        }
    }

    /// Encodes a text. Includes the special tokens that the tokenizer adds to each text, such as a `bos_token`.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot encode the text.
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Tokenizer::Byte => self.encode(text),
            Tokenizer::HuggingFace(this) => {
                let encoding = guarded(|| this.tokenizer.encode_fast(text, true)).map_err(failed(&this.path))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Decodes tokens into a text for display. Invalid UTF-8 becomes �, and special tokens are omitted.
    ///
    /// # Errors
    /// Fails on a token outside the vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        self.text(tokens, true)
    }

    /// Decodes tokens into a text, including special tokens. [`decode`](Self::decode) omits them.
    ///
    /// # Errors
    /// Fails on a token outside the vocabulary.
    pub fn decode_with_special(&self, tokens: &[u32]) -> Result<String, DataError> {
        self.text(tokens, false)
    }

    fn text(&self, tokens: &[u32], skip_special: bool) -> Result<String, DataError> {
        let vocabulary = self.vocabulary();
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            let path = match self {
                Tokenizer::Byte => "byte tokenizer".into(),
                Tokenizer::HuggingFace(this) => this.path.clone(),
            };
            return Err(DataError::Tokenizer {
                path,
                message: format!("token {token} is outside the vocabulary of {vocabulary} tokens"),
            });
        }
        match self {
            Tokenizer::Byte => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Tokenizer::HuggingFace(this) => {
                guarded(|| this.tokenizer.decode(tokens, skip_special)).map_err(failed(&this.path))
            }
        }
    }
}

impl HuggingFace {
    /// Returns the folder of `tokenizer.json`.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.path.parent()
    }

    /// Encodes a text with the byte offsets of its tokens. `add_special_tokens` includes the special tokens that the
    /// tokenizer adds to each text.
    pub(crate) fn encode_with_offsets(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<tokenizers::Encoding, DataError> {
        guarded(|| self.tokenizer.encode(text, add_special_tokens)).map_err(failed(&self.path))
    }

    /// Returns the token of `text`, or `None` if `text` is not exactly one token.
    pub(crate) fn single(&self, text: &str) -> Result<Option<u32>, DataError> {
        if let Some(&token) = self.tokenizer.get_added_vocabulary().get_vocab().get(text) {
            return Ok(Some(token));
        }
        let encoding = guarded(|| self.tokenizer.encode_fast(text, false)).map_err(failed(&self.path))?;
        let known = |&token: &u32| self.tokenizer.id_to_token(token).as_deref() == Some(text);
        Ok(<[u32; 1]>::try_from(encoding.get_ids()).ok().map(|[token]| token).filter(known))
    }

    /// Returns whether a token is special: not part of a text.
    pub(crate) fn is_special(&self, token: u32) -> bool {
        self.tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(&token).is_some_and(|token| token.special)
    }

    /// Returns the tokens of a text. Omits the special tokens that the tokenizer adds.
    fn ids(&self, text: &str) -> Result<Vec<u32>, tokenizers::Error> {
        match self.words.as_ref().and_then(|words| words.encode(&self.tokenizer, text)) {
            Some(tokens) => Ok(tokens),
            None => Ok(guarded(|| self.tokenizer.encode_fast(text, false))?.get_ids().to_vec()),
        }
    }

    /// Returns the tokens of a piece of a text.
    fn piece_ids(&self, piece: &str, is_continued: bool) -> Result<Vec<u32>, tokenizers::Error> {
        // Some tokenizers, such as Llama 2's, add a space to the beginning of a text. A continued piece must not get
        // this space, so it is encoded after a short text whose tokens are then removed.
        if is_continued && self.words.is_none() {
            let before = if piece.starts_with(' ') { "a" } else { "\n" };
            let (before_ids, mut ids) = (self.ids(before)?, self.ids(&format!("{before}{piece}"))?);
            if ids.starts_with(&before_ids) {
                return Ok(ids.split_off(before_ids.len()));
            }
        }
        self.ids(piece)
    }

    /// Encodes a text of the file `path`.
    fn encode_piece(&self, piece: &Document, path: &Path, vocabulary: usize) -> Result<Vec<u32>, DataError> {
        let text = std::str::from_utf8(&piece.text).map_err(|error| DataError::NotUtf8 {
            path: path.into(),
            at: piece.at.after(error.valid_up_to() as u64),
        })?;
        let tokens = self.piece_ids(text, piece.is_continued).map_err(failed(path))?;
        match tokens.iter().position(|&token| token as usize >= vocabulary) {
            None => Ok(tokens),
            Some(i) => {
                // The fast encoder does not report offsets.
                let encoding = guarded(|| self.tokenizer.encode(text, false)).map_err(failed(path))?;
                let offset = encoding.get_offsets().get(i).map_or(0, |&(start, _)| start as u64);
                Err(DataError::Token {
                    token: tokens[i].into(),
                    vocabulary,
                    path: path.into(),
                    at: piece.at.after(offset),
                })
            }
        }
    }
}

/// Runs the crate. Converts a panic, which some malformed tokenizers cause, to an error.
fn guarded<T>(run: impl FnOnce() -> Result<T, tokenizers::Error>) -> Result<T, tokenizers::Error> {
    caught(run).unwrap_or_else(|message| Err(format!("the tokenizer is malformed: {message}").into()))
}

fn failed(path: &Path) -> impl FnOnce(tokenizers::Error) -> DataError {
    let path = path.to_path_buf();
    move |error| DataError::Tokenizer { path, message: error.to_string() }
}

#[cfg(test)]
pub(in crate::data) mod tests {
    use super::*;
    use crate::data::tokens::pieces::word_start;

    /// A tokenizer with a tiny vocabulary that splits at white space.
    const WORDS: &str = r#"{
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "decoder": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [{"id": 5, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "model": {"type": "WordLevel", "unk_token": "<unk>",
                  "vocab": {"<unk>": 0, "the": 1, "cat": 2, "sat": 3, "on": 4, "mat": 7}}
    }"#;

    pub(in crate::data) fn words() -> Tokenizer {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), WORDS).unwrap();
        Tokenizer::from_file(file.path()).unwrap()
    }

    #[test]
    fn bytes_are_their_own_tokens() {
        assert_eq!(Tokenizer::Byte.encode("aé").unwrap(), [97, 195, 169]);
        assert_eq!(Tokenizer::Byte.decode(&[97, 195, 169, 255]).unwrap(), "aé\u{fffd}");
        assert_eq!(Tokenizer::Byte.vocabulary(), 256);
    }

    #[test]
    fn a_tokenizer_json_encodes_and_decodes() {
        let words = words();
        assert_eq!(words.encode("the cat\nsat on the dog").unwrap(), [1, 2, 3, 4, 1, 0]);
        assert_eq!(words.decode(&[1, 2, 5, 7]).unwrap(), "the cat mat");
        // The largest token is 7, although only seven tokens are in use.
        assert_eq!(words.vocabulary(), 8);
    }

    /// The tokenizer works like GPT-2's: a regular expression finds words, each byte is a symbol, and merges combine
    /// symbols.
    #[test]
    fn byte_level_merges_work() {
        let json = r#"{
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "added_tokens": [],
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "merges": ["a b", "Ġ ab", "Ã ©", "b Ġ"],
                      "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "Ċ": 5, "Ã": 6, "©": 7, "Ã©": 8, "bĠ": 9}}
        }"#;
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), json).unwrap();
        let tokenizer = Tokenizer::from_file(file.path()).unwrap();
        let tokens = tokenizer.encode("ab ab\nab b aé").unwrap();
        // The expression attaches a space to the word after it, so the merge of `b` and a space never applies.
        assert_eq!(tokens, [3, 4, 5, 3, 2, 1, 2, 0, 8]);
        assert_eq!(tokenizer.decode(&tokens).unwrap(), "ab ab\nab b aé");
    }

    #[test]
    fn truncation_in_the_tokenizer_file_is_ignored() {
        let cut = r#"{"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}"#;
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), WORDS.replace(r#""truncation": null"#, &format!(r#""truncation": {cut}"#))).unwrap();
        assert_eq!(Tokenizer::from_file(file.path()).unwrap().encode("the cat sat").unwrap(), [1, 2, 3]);
    }

    #[test]
    fn a_token_outside_of_the_vocabulary_is_not_decoded() {
        for (tokenizer, token) in [(Tokenizer::Byte, 256), (words(), 8)] {
            let message = tokenizer.decode(&[token]).unwrap_err().to_string();
            assert!(message.contains(&format!("token {token}")), "{message}");
        }
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_an_error_with_its_name() {
        assert!(
            matches!(Tokenizer::from_file("none.json"), Err(DataError::Io { path, .. }) if path == Path::new("none.json"))
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "{}").unwrap();
        assert!(
            matches!(Tokenizer::from_file(file.path()), Err(DataError::Tokenizer { path, .. }) if path == file.path())
        );
    }

    /// The crate panics while it reads such files, or while it encodes a text.
    #[test]
    fn a_malformed_tokenizer_is_an_error() {
        let normalizer = r#""normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}"#;
        let splitter = r#"{"type": "FixedLength", "length": 0}"#;
        for json in [
            WORDS.replace(r#""decoder": null"#, r#""decoder": nul"#),
            WORDS.replace(r#""normalizer": null"#, normalizer),
            WORDS.replace(r#""mat": 7"#, r#""mat": 4294967295"#),
            WORDS.replace(r#"{"type": "WhitespaceSplit"}"#, splitter),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), &json).unwrap();
            let result = Tokenizer::from_file(file.path()).and_then(|tokenizer| tokenizer.encode("the cat"));
            assert!(matches!(result, Err(DataError::Tokenizer { path, .. }) if path == file.path()), "{json}");
        }
    }

    /// Tests two tokenizers that the fast encoder does not support. One adds a space to each text, and the other splits
    /// at white space.
    #[test]
    fn texts_tokenized_in_pieces_have_the_same_tokens() {
        let symbols: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
        let plain = ["▁", "a", "b", "▁a", "ab", "▁ab"].map(String::from);
        let vocabulary: serde_json::Map<String, serde_json::Value> =
            symbols.into_iter().chain(plain).enumerate().map(|(id, text)| (text, id.into())).collect();
        let llama_2 = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "pre_tokenizer": null,
            "post_processor": null, "decoder": null,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "model": {"type": "BPE", "byte_fallback": true, "vocab": vocabulary, "merges": ["▁ a", "a b", "▁ ab"]},
        });
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), llama_2.to_string()).unwrap();
        for tokenizer in [Tokenizer::from_file(file.path()).unwrap(), words()] {
            for text in ["ab ab\nab b aé", "the cat\nsat\n\non the mat", "a b\n字 \n x"] {
                let Tokenizer::HuggingFace(this) = &tokenizer else { unreachable!() };
                let mut at = 0;
                while let Some(start) = word_start(text.as_bytes(), at..text.len()) {
                    let mut tokens = this.piece_ids(&text[..start], false).unwrap();
                    tokens.extend(this.piece_ids(&text[start..], true).unwrap());
                    assert_eq!(tokens, tokenizer.encode(text).unwrap(), "{text:?} at {start}");
                    at = start + 1;
                }
                assert!(at > 0, "{text:?}");
            }
        }
    }
}

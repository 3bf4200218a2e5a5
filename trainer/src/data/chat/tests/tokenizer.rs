//! Creates a folder with a byte-level tokenizer, its special tokens, a template and data.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::super::records::Samples;
use super::super::super::{DataError, DataOptions, Dataset, FileDataset, Format, Tokenizer, open};
use super::super::options::ChatOptions;
use zero_model::ops::IGNORE_INDEX;

/// Special tokens of all templates. Their IDs start at 260.
pub(super) const SPECIAL: [&str; 16] = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
];

/// Returns a tokenizer with one token per byte, as in GPT-2's tokenizer. A few merges add the tokens of two line
/// breaks, `hi`, ` hi` and `is`.
fn tokenizer(special: &[&str]) -> Value {
    let is_printed = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let byte = |byte: u32| if is_printed(byte) { byte } else { others.next().unwrap_or_default() };
    let symbols: Vec<String> = (0..256).map(byte).filter_map(char::from_u32).map(String::from).collect();
    let merges = ["Ċ Ċ", "h i", "Ġ hi", "i s"];
    let mut vocabulary: Vec<String> = symbols;
    vocabulary.extend(merges.map(|pair| pair.replace(' ', "")));
    let vocabulary: serde_json::Map<String, Value> =
        vocabulary.into_iter().enumerate().map(|(id, symbol)| (symbol, id.into())).collect();
    let added = |(i, content): (usize, &&str)| {
        json!({"id": 260 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": special.iter().enumerate().map(added).collect::<Vec<_>>(),
        "pre_tokenizer": level.clone(), "post_processor": level.clone(), "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    })
}

pub(crate) struct Folder(TempDir);

impl Folder {
    /// Creates a model's folder with a template. `bos` and `eos` are the model's first and last token.
    pub(crate) fn new(template: &str, [bos, eos]: [&str; 2]) -> Self {
        Self::with_special(template, [bos, eos], &SPECIAL)
    }

    pub(super) fn with_special(template: &str, [bos, eos]: [&str; 2], special: &[&str]) -> Self {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.write("tokenizer.json", &tokenizer(special).to_string());
        let config = json!({"bos_token": bos, "eos_token": {"__type": "AddedToken", "content": eos}, "tokenizer_class": "PreTrainedTokenizerFast"});
        folder.write("tokenizer_config.json", &config.to_string());
        folder.write("chat_template.jinja", template);
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path().join(name), text).unwrap();
    }

    pub(super) fn tokenizer(&self) -> Tokenizer {
        Tokenizer::from_file(self.path().join("tokenizer.json")).unwrap()
    }

    pub(super) fn options(&self, length: usize, chat: ChatOptions) -> DataOptions {
        let source = self.path().join("data.jsonl").display().to_string();
        DataOptions { sequence_length: length, vocabulary: 276, chat, ..DataOptions::new([source], Format::Chat) }
    }

    pub(super) fn open(&self, length: usize, chat: ChatOptions) -> Result<FileDataset, DataError> {
        open(&self.options(length, chat), &self.tokenizer())
    }

    /// Writes the records as JSON lines and opens them.
    pub(super) fn read(&self, records: &[Value], chat: ChatOptions) -> Result<FileDataset, DataError> {
        let lines: Vec<String> = records.iter().map(Value::to_string).collect();
        self.write("data.jsonl", &lines.join("\n"));
        self.open(300, chat)
    }

    /// Returns the error for the records, without the folder's name.
    pub(super) fn error(&self, records: &[Value], chat: ChatOptions) -> String {
        let message = self.read(records, chat).expect_err("bad data must not open").to_string();
        message.replace(&format!("{}/", self.path().display()), "")
    }

    /// Returns the texts of all samples, with trained parts in `[` and `]`.
    pub(super) fn shown(&self, dataset: &FileDataset) -> Vec<String> {
        (0..dataset.len()).map(|index| self.sample(dataset, index)).collect()
    }

    fn sample(&self, dataset: &FileDataset, index: usize) -> String {
        let mut samples = Samples::default();
        dataset.append(index, &mut samples).unwrap();
        assert_eq!(samples.tokens.len(), samples.labels.len());
        let length = samples.tokens.len() - dataset.padding(index).unwrap();
        assert!(samples.labels[length..].iter().all(|&label| label == IGNORE_INDEX));
        let (mut text, mut bytes, mut is_trained) = (String::new(), vec![], false);
        let tokenizer = self.tokenizer();
        let ids: Vec<(u32, bool)> = std::iter::once((samples.tokens[0], false))
            .chain((1..=length).filter_map(|i| match (samples.labels[i - 1], samples.tokens.get(i)) {
                (IGNORE_INDEX, next) => next.filter(|_| i < length).map(|&token| (token, false)),
                (label, next) => {
                    // The target is the next input token.
                    assert!(next.is_none_or(|&next| i64::from(next) == label));
                    Some((label as u32, true))
                }
            }))
            .collect();
        for (token, trained) in ids {
            if trained != is_trained {
                text += &tokenizer.decode_with_special(&std::mem::take(&mut bytes)).unwrap();
                text.push(if trained { '[' } else { ']' });
                is_trained = trained;
            }
            bytes.push(token);
        }
        text += &tokenizer.decode_with_special(&bytes).unwrap();
        text + if is_trained { "]" } else { "" }
    }
}

//! Shows samples of a configuration's data as text, for `zero-train data show`.

use candle_core::{DType, Device};
use zero_config::Config;
use zero_engine::{DataError, Error};

use crate::data::{Dataset, PairDataset, SampleShape, Tokenizer};
use crate::train::configured_data::{self, Opened};
use crate::train::output::preparing::Preparing;
use crate::train::output::progress::Output;
use zero_model::zoo::{LABELS, POSITION_IDS};

/// A sample as text.
#[derive(Debug, Clone, PartialEq)]
pub struct ShownSample {
    /// Index of the sample in the order of the files, counted from 0.
    pub index: usize,
    /// The text in parts. An empty line separates conversations, or the answers of a pair.
    pub parts: Vec<ShownPart>,
    /// Number of conversations in the sample. 1 for other data.
    pub conversations: usize,
    /// Number of tokens without padding, or number of columns.
    pub tokens: usize,
    /// Number of targets that are trained on.
    pub trained: usize,
    /// Number of padding positions at the end.
    pub padding: usize,
}

/// A part of a sample's text.
#[derive(Debug, Clone, PartialEq)]
pub struct ShownPart {
    /// The text, including special tokens.
    pub text: String,
    /// Whether the tokens of this part are trained on.
    pub is_trained: bool,
}

/// The samples of one data set as text.
#[derive(Debug, Clone, PartialEq)]
pub struct ShownData {
    /// Number of samples in the data set.
    pub samples: usize,
    /// Describes how many samples are truncated, padded or dropped. `None` if there is nothing to describe.
    pub description: Option<String>,
    /// The requested samples.
    pub shown: Vec<ShownSample>,
}

/// Reads up to `count` samples of the training data, or of `data.eval` with `of_eval`, starting at index `first`. Does
/// not build the model.
///
/// # Errors
/// Fails if the data cannot be opened, or if sample `first` does not exist.
pub fn show_data(config: &Config, of_eval: bool, first: usize, count: usize) -> Result<ShownData, Error> {
    let watch = &Preparing::new(Output::Auto, None);
    if let Some(preference) = &config.preference {
        let Opened { train, eval, tokenizer, vocabulary, .. } =
            configured_data::pairs(config, preference, config.model.is_none(), watch)?;
        let data = chosen((train, eval), of_eval)?;
        let known = vocabulary.map(|_| &tokenizer);
        let shown = samples(data.len(), first, count, |index| pair(&data, index, known))?;
        return Ok(ShownData { samples: data.len(), description: Some(data.description()), shown });
    }
    let Opened { train, eval, tokenizer, vocabulary, .. } =
        configured_data::files(config, config.model.is_none(), watch)?;
    let data = chosen((train, eval), of_eval)?;
    let known = vocabulary.map(|_| &tokenizer);
    let sample = |index| match data.shape() {
        SampleShape::Tokens(_) => tokens(&data, index, data.padding(index)?, known),
        SampleShape::Features(_) => row(&data, index),
    };
    let shown = samples(data.len(), first, count, sample)?;
    Ok(ShownData { samples: data.len(), description: data.description(), shown })
}

fn chosen<D>((train, eval): (D, Option<D>), of_eval: bool) -> Result<D, Error> {
    match (of_eval, eval) {
        (false, _) => Ok(train),
        (true, Some(eval)) => Ok(eval),
        (true, None) => {
            let help = "set `data.eval` to files, or omit `--eval`; this command then prints the samples that \
                        `data.eval_fraction` holds out last";
            Err(Error::setting("--eval", "the configuration has no `data.eval`", help))
        }
    }
}

fn samples(
    samples: usize,
    first: usize,
    count: usize,
    sample: impl Fn(usize) -> Result<ShownSample, Error>,
) -> Result<Vec<ShownSample>, Error> {
    if first >= samples {
        return Err(DataError::Index { index: first, samples }.into());
    }
    (first..samples.min(first.saturating_add(count))).map(sample).collect()
}

fn tokens(
    data: &dyn Dataset,
    index: usize,
    padding: usize,
    tokenizer: Option<&Tokenizer>,
) -> Result<ShownSample, Error> {
    let batch = data.batch(&[index]).map_err(Error::of_dataset)?;
    let inputs = batch.inputs.single()?.flatten_all()?.to_vec1::<u32>()?;
    let targets =
        batch.only_target()?.to_dtype(DType::I64)?.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<i64>()?;
    let length = inputs.len() - padding;
    let positions = batch.names().zip(batch.tensors()).find(|(name, _)| *name == POSITION_IDS);
    let positions = positions.map(|(_, positions)| positions.flatten_all()?.to_vec1::<u32>()).transpose()?;
    let begins = |token: usize| positions.as_ref().is_some_and(|positions| positions.get(token) == Some(&0));
    let parts = parts(&inputs[..length], &targets, begins, tokenizer)?;
    let trained = targets.iter().filter(|&&target| target >= 0).count();
    let conversations = (0..length).filter(|&token| begins(token)).count().max(1);
    let tokens = length + usize::from(last_target(length, &targets).is_some());
    Ok(ShownSample { index, parts, conversations, tokens, trained, padding })
}

/// Shows the prompt with each answer of a pair.
fn pair(data: &PairDataset, index: usize, tokenizer: Option<&Tokenizer>) -> Result<ShownSample, Error> {
    let batch = data.batch(&[index]).map_err(Error::of_dataset)?;
    let inputs = batch.inputs.single()?.flatten_all()?.to_vec1::<u32>()?;
    let labels = batch.get(&[LABELS])?[0].flatten_all()?.to_vec1::<i64>()?;
    let (room, lengths) = (inputs.len() / 2, data.lengths(index)?);
    let (mut all, mut tokens) = (vec![], 0);
    for (name, (side, length)) in ["chosen:\n", "\n\nrejected:\n"].into_iter().zip(lengths.into_iter().enumerate()) {
        let (start, end) = (side * room, side * room + length);
        let targets = &labels[start..start + room];
        all.push(ShownPart { text: name.into(), is_trained: false });
        all.extend(parts(&inputs[start..end], targets, |_| false, tokenizer)?);
        tokens += length + usize::from(last_target(length, targets).is_some());
    }
    let trained = labels.iter().filter(|&&label| label >= 0).count();
    let padding = inputs.len() - lengths.iter().sum::<usize>();
    Ok(ShownSample { index, parts: all, conversations: 1, tokens, trained, padding })
}

/// Returns the target of the last input. Only a text that fills its sample has this target, and the target is not
/// itself an input.
fn last_target(length: usize, targets: &[i64]) -> Option<u32> {
    targets.get(length.wrapping_sub(1)).and_then(|&target| u32::try_from(target).ok())
}

/// Decodes tokens in parts, each trained or untrained as a whole. `begins` tells whether a token is the first of its
/// conversation.
fn parts(
    inputs: &[u32],
    targets: &[i64],
    begins: impl Fn(usize) -> bool,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<ShownPart>, Error> {
    let all: Vec<u32> = inputs.iter().copied().chain(last_target(inputs.len(), targets)).collect();
    let is_trained = |token: usize| token > 0 && targets[token - 1] >= 0;
    let (mut parts, mut before, mut start): (Vec<ShownPart>, usize, usize) = (vec![], 0, 0);
    for end in 1..=all.len() {
        if end < all.len() && is_trained(end) == is_trained(start) && !begins(end) {
            continue;
        }
        if start > 0 && begins(start) {
            parts.push(ShownPart { text: "\n\n".into(), is_trained: false });
        }
        let text = match tokenizer {
            // Decodes from the beginning, because a decoder may treat the first token of a text differently.
            Some(tokenizer) => {
                let text = tokenizer.decode_with_special(&all[..end])?;
                let part = text.get(before..).map(String::from);
                before = text.len();
                part.map_or_else(|| tokenizer.decode_with_special(&all[start..end]), Ok)?
            }
            None => all[start..end].iter().map(|token| format!("{token} ")).collect(),
        };
        parts.push(ShownPart { text, is_trained: is_trained(start) });
        start = end;
    }
    Ok(parts)
}

fn row(data: &dyn Dataset, index: usize) -> Result<ShownSample, Error> {
    let batch = data.batch(&[index]).map_err(Error::of_dataset)?;
    let features = batch.inputs.single()?.flatten_all()?.to_vec1::<f32>()?;
    let class = batch.only_target()?.flatten_all()?.to_vec1::<u32>()?;
    let text = features.iter().map(|feature| format!("{feature}, ")).collect();
    let class = class.iter().map(u32::to_string).collect();
    let parts = vec![ShownPart { text, is_trained: false }, ShownPart { text: class, is_trained: true }];
    Ok(ShownSample { index, parts, conversations: 1, tokens: features.len() + 1, trained: 1, padding: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(yaml: &str, name: &str, content: &str, first: usize) -> Result<ShownData, Error> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let yaml = yaml.replace("FILE", &path.display().to_string());
        show_data(&Config::parse("ds.yaml", yaml).unwrap(), false, first, 2)
    }

    #[test]
    fn every_token_but_the_first_of_a_text_is_trained() {
        let yaml = "train_batch_size: 1\ndata: {train: FILE, sequence_length: 3}";
        let data = show(yaml, "a.txt", "abcdefgh", 1).unwrap();
        let part = |text: &str, is_trained| ShownPart { text: text.into(), is_trained };
        let parts = vec![part("d", false), part("efg", true)];
        let sample = ShownSample { index: 1, parts, conversations: 1, tokens: 4, trained: 3, padding: 0 };
        assert_eq!(data, ShownData { samples: 2, description: None, shown: vec![sample] });
        let error = show(yaml, "a.txt", "abcdefgh", 2).unwrap_err();
        assert_eq!(error.to_string(), "sample 2 is out of range: the data set has 2 samples");
    }

    #[test]
    fn conversations_are_shown_with_their_special_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let tokenizer = r#"{
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "decoder": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
            "added_tokens": [{"id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "model": {"type": "WordLevel", "unk_token": "</s>", "vocab": {"</s>": 0, "user": 1, "assistant": 2, "hi": 3}}
        }"#;
        let template = "{% for m in messages %}{{ m.role + ' ' + m.content + eos_token + ' ' }}{% endfor %}\
                        {% if add_generation_prompt %}assistant {% endif %}";
        let record = |role| {
            let user = r#"{"role": "user", "content": "hi"}"#;
            format!(r#"{{"messages": [{user}, {{"role": "{role}", "content": "hi"}}]}}"#)
        };
        for (name, text) in [
            ("tokenizer.json", tokenizer),
            ("tokenizer_config.json", r#"{"eos_token": "</s>"}"#),
            ("t.jinja", template),
            ("train.jsonl", &record("assistant")),
            ("eval.jsonl", &record("gpt")),
            ("wrong.jsonl", &record("bot")),
        ] {
            std::fs::write(path(name), text).unwrap();
        }
        let config = |eval| {
            let [train, eval] = ["train.jsonl", eval].map(path);
            let data = format!(
                "train: {train}, eval: {eval}, format: chat, sequence_length: 9, tokenizer: {}, chat: {{chat_template: {}}}",
                path("tokenizer.json"),
                path("t.jinja")
            );
            Config::parse("ds.yaml", format!("train_batch_size: 1\ndata: {{{data}}}")).unwrap()
        };
        let part = |text: &str, is_trained| ShownPart { text: text.into(), is_trained };
        let parts = vec![part("user hi </s> assistant", false), part(" hi </s>", true)];
        let sample = ShownSample { index: 0, parts, conversations: 1, tokens: 6, trained: 2, padding: 3 };
        for of_eval in [false, true] {
            assert_eq!(show_data(&config("eval.jsonl"), of_eval, 0, 9).unwrap().shown, std::slice::from_ref(&sample));
        }
        let error = show_data(&config("wrong.jsonl"), false, 0, 1).unwrap_err().to_string();
        assert!(error.contains("wrong.jsonl, line 1: message 2 has the role \"bot\""), "{error}");
    }

    #[test]
    fn rows_and_token_files_are_shown_as_numbers() {
        let mlp = "train_batch_size: 1\nmodel: {type: mlp, input_size: 2, output_size: 3}\ndata: {train: FILE}";
        let texts = |mut data: ShownData| -> Vec<String> {
            data.shown.remove(0).parts.into_iter().map(|part| part.text).collect()
        };
        assert_eq!(texts(show(mlp, "a.csv", "1,2.5,0\n3,4,2\n", 1).unwrap()), ["3, 4, ", "2"]);
        let gpt = "train_batch_size: 1\nmodel: {type: gpt2, n_positions: 2, n_embd: 8, n_head: 1, n_layer: 1, vocab_size: 256}\n\
                   data: {train: FILE}";
        assert_eq!(texts(show(gpt, "a.bin", "a\0b\0c\0", 0).unwrap()), ["97 ", "98 99 "]);
    }
}

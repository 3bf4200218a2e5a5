//! Conversations and pairs give the same samples and errors from the token cache as from memory.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use zero_config::{ChatType, ExcessLength, TrainOnEos, Untrained};

use super::super::super::records::Samples;
use super::super::super::{
    CacheOptions, DataError, DataOptions, Dataset, DocumentFacts, FileDataset, Phase, Unwatched, Watch, open_watched,
};
use super::super::options::ChatOptions;
use super::super::pairs::PairDataset;
use super::templates::{CHATML, without_marks};
use super::tokenizer::Folder;
use super::{IM, chatml, messages, said};

/// Counts how often a file is tokenized.
#[derive(Default)]
struct Tokenized(Cell<usize>);

impl Watch for Tokenized {
    fn progress(&self, phase: Phase, done: u64, total: u64) {
        assert!(done <= total, "{done} of {total}");
        self.0.set(self.0.get() + usize::from(phase == Phase::Tokenizing));
    }

    fn is_stopped(&self) -> bool {
        false
    }
}

/// Returns options that keep everything in memory, and options that keep everything in the cache.
fn both(folder: &Folder, options: &DataOptions) -> [DataOptions; 2] {
    [u64::MAX, 0].map(|least_bytes| {
        let cache = CacheOptions { folder: Some(folder.path().join("cache")), least_bytes, ..CacheOptions::default() };
        DataOptions { cache, ..options.clone() }
    })
}

fn entries(folder: &Folder) -> Vec<PathBuf> {
    let listed = fs::read_dir(folder.path().join("cache/tokens")).unwrap().map(|entry| entry.unwrap().path());
    listed.filter(|path| !path.ends_with(".lock")).collect()
}

/// Returns all samples of a data set as text, or its error.
fn of_conversations(folder: &Folder, options: &DataOptions, watch: &dyn Watch) -> Result<String, String> {
    let given = |data: FileDataset| -> Result<String, DataError> {
        let (mut samples, mut documents) = (Samples::default(), vec![]);
        (0..data.len()).try_for_each(|index| data.append(index, &mut samples))?;
        let padding = (0..data.len()).map(|index| data.padding(index)).collect::<Result<Vec<_>, _>>()?;
        data.records().each_document(&mut |document| documents.push(document))?;
        data.records().verify(&Unwatched)?;
        Ok(format!("{samples:?} {padding:?} {documents:?} {:?}", data.description()))
    };
    open_watched(options, &folder.tokenizer(), watch).and_then(given).map_err(|error| error.to_string())
}

fn of_pairs(folder: &Folder, options: &DataOptions, watch: &dyn Watch) -> Result<String, String> {
    let given = |data: PairDataset| -> Result<String, DataError> {
        let mut text = format!("{} {:?}", data.description(), data.checksum()?);
        data.each_document(&mut |document: DocumentFacts| text += &format!("{document:?}"))?;
        for index in 0..data.len() {
            let batch = data.batch(&[index]).unwrap();
            batch.tensors().for_each(|tensor| text += &tensor.to_string());
            text += &format!("{:?}", data.lengths(index)?);
        }
        data.verify(&Unwatched)?;
        Ok(text)
    };
    let opened = PairDataset::open(options, &folder.tokenizer(), true, watch);
    opened.and_then(given).map_err(|error| error.to_string())
}

type Given = fn(&Folder, &DataOptions, &dyn Watch) -> Result<String, String>;

/// Checks that the results from memory, from a new cache entry and from an existing entry are equal. Returns the
/// result.
fn compare(given: Given, folder: &Folder, options: &DataOptions) -> Result<String, String> {
    let [memory, cache] = both(folder, options).map(|options| move |watch: &dyn Watch| given(folder, &options, watch));
    let expected = memory(&Unwatched);
    assert_eq!(cache(&Unwatched), expected, "{options:?}");
    let again = Tokenized::default();
    assert_eq!(cache(&again), expected, "{options:?}");
    assert!(expected.is_err() || again.0.get() == 0, "tokenized twice: {options:?}");
    expected
}

/// Returns conversations of many lengths, some without an answer.
fn conversations() -> Vec<Value> {
    let of = |i: usize| {
        let long = "hi, this is it. ".repeat(i * i % 7);
        match i % 5 {
            0 => said(&[("user", "a"), ("assistant", &long), ("user", "b\n\n"), ("assistant", "é")]),
            1 => said(&[("system", "s"), ("user", &long), ("assistant", "yes")]),
            2 => said(&[("user", "what"), ("user", &long)]),
            3 => said(&[("user", ""), ("assistant", ""), ("user", "x")]),
            _ => said(&[("human", "hi"), ("gpt", "hi")]),
        }
    };
    (0..40).map(of).collect()
}

fn lines(records: &[Value]) -> String {
    records.iter().map(|record| format!("{record}\n")).collect()
}

#[test]
fn conversations_are_the_same_in_memory_and_in_the_cache() {
    let (mut opened, mut failed) = (0, 0);
    for (template, train_on_inputs, train_on_eos) in [
        (CHATML.to_string(), false, TrainOnEos::Turn),
        (without_marks(CHATML), false, TrainOnEos::All),
        (CHATML.to_string(), false, TrainOnEos::Last),
        (CHATML.to_string(), true, TrainOnEos::Turn),
    ] {
        let folder = Folder::new(&template, IM);
        let records = conversations();
        folder.write("data.jsonl", &lines(&records[..25]));
        folder.write("more.json", &json!(records[25..]).to_string());
        folder.write("empty.jsonl", "\n");
        let sources = ["data.jsonl", "empty.jsonl", "more.json"];
        for excess_length in [ExcessLength::Drop, ExcessLength::Truncate, ExcessLength::Raise] {
            for untrained in [Untrained::Drop, Untrained::Raise] {
                for (sequence_length, sample_packing) in [(20, false), (47, true), (300, false), (300, true)] {
                    let base = ChatOptions { train_on_inputs, train_on_eos, ..ChatOptions::default() };
                    let chat = ChatOptions { excess_length, untrained, ..base };
                    let sources = sources.map(|name| folder.path().join(name).display().to_string()).to_vec();
                    let options = DataOptions { sources, sample_packing, ..folder.options(sequence_length, chat) };
                    match compare(of_conversations, &folder, &options) {
                        Ok(_) => opened += 1,
                        Err(_) => failed += 1,
                    }
                }
            }
        }
    }
    assert!(opened > 40 && failed > 20, "{opened} {failed}");
}

fn pairs() -> Vec<Value> {
    let of = |i: usize| {
        let [long, short] = ["no, this is not it. ".repeat(i * i % 6), "yes".repeat(i % 3)];
        let user = ("user", "what is it");
        match i % 3 {
            0 => json!({"prompt": messages(&[user]), "chosen": messages(&[("assistant", &long)]),
                        "rejected": messages(&[("assistant", &short)])}),
            1 => json!({"chosen": messages(&[user, ("assistant", &short)]),
                        "rejected": messages(&[user, ("assistant", &long)])}),
            _ => json!({"prompt": "h", "chosen": "i and more", "rejected": long}),
        }
    };
    (0..30).map(of).collect()
}

#[test]
fn pairs_are_the_same_in_memory_and_in_the_cache() {
    let folder = chatml();
    folder.write("data.jsonl", &lines(&pairs()));
    let (mut opened, mut failed) = (0, 0);
    for excess_length in [ExcessLength::Drop, ExcessLength::Truncate, ExcessLength::Raise] {
        for untrained in [Untrained::Drop, Untrained::Raise] {
            for sequence_length in [4, 45, 60, 300] {
                let chat = ChatOptions { excess_length, untrained, ..ChatOptions::default() };
                match compare(of_pairs, &folder, &folder.options(sequence_length, chat)) {
                    Ok(_) => opened += 1,
                    Err(_) => failed += 1,
                }
            }
        }
    }
    assert!(opened > 8 && failed > 4, "{opened} {failed}");
    // Pairs cannot be opened as conversations, although the bytes of the file are the same.
    assert!(compare(of_conversations, &folder, &folder.options(300, ChatOptions::default())).is_err());
}

/// A cache entry contains all tokens, so the options alone decide whether a length is an error. The error names the
/// record although no file is tokenized again.
#[test]
fn errors_of_lengths_are_the_same_from_the_cache() {
    let folder = chatml();
    let record = |text: &str| said(&[("user", "a"), ("assistant", text)]);
    folder.write("data.jsonl", &format!("{}\n\n{}{}", record("b"), lines(&[record("bcdefg")]), record("bcdefgh")));
    let options =
        |length, excess_length| folder.options(length, ChatOptions { excess_length, ..ChatOptions::default() });
    assert!(compare(of_conversations, &folder, &options(300, ExcessLength::Raise)).is_ok());
    let before = entries(&folder);
    let error = |length, excess| compare(of_conversations, &folder, &options(length, excess)).unwrap_err();
    let expected = "data.jsonl, line 3: the conversation has 27 tokens, but a sample has room for 25 tokens and the next \
                    token; 2 conversations are too long, the longest with 28 tokens\n";
    assert!(error(25, ExcessLength::Raise).contains(expected), "{}", error(25, ExcessLength::Raise));
    let expected = "data.jsonl, line 1: a sample holds the first 17 of the conversation's 22 tokens, and none of these is trained on\n    | <|im_start|>user\n";
    assert!(error(16, ExcessLength::Truncate).contains(expected), "{}", error(16, ExcessLength::Truncate));
    assert!(error(9, ExcessLength::Drop).contains("no tokens or rows in"));
    assert_eq!(entries(&folder), before);

    // The file contains a token that the smaller vocabulary does not have.
    let small = DataOptions { vocabulary: 263, ..options(300, ExcessLength::Raise) };
    let error = compare(of_conversations, &folder, &small).unwrap_err();
    assert!(error.ends_with("data.jsonl, line 1: token 263 is outside the vocabulary of 263 tokens"), "{error}");

    folder.write("data.jsonl", &lines(&pairs()));
    let chat = ChatOptions { excess_length: ExcessLength::Truncate, ..ChatOptions::default() };
    let given = |length| compare(of_pairs, &folder, &folder.options(length, chat.clone()));
    assert!(given(300).is_ok());
    let before = entries(&folder);
    let error = given(10).unwrap_err();
    let expected = "data.jsonl, line 1: a sample holds only the first 11 tokens, which contain no part of the chosen answer\n    | <|im_start|>user\n";
    assert!(error.contains(expected), "{error}");
    assert_eq!(entries(&folder), before);
}

#[test]
fn everything_that_texts_depend_on_is_in_the_cache_key() {
    let folder = chatml();
    folder.write(
        "data.jsonl",
        &lines(&[said(&[("user", "a"), ("assistant", "b")]), said(&[("user", "a"), ("gpt", "b")])]),
    );
    let mut seen = 0;
    let mut is_new = |options: &DataOptions| {
        let [_, options] = both(&folder, options);
        of_conversations(&folder, &options, &Unwatched).unwrap();
        std::mem::replace(&mut seen, entries(&folder).len()) < entries(&folder).len()
    };
    let chat = ChatOptions::default;
    let options = |chat| folder.options(300, chat);
    assert!(is_new(&options(chat())));
    assert!(!is_new(&options(chat())));
    // These options change only how the texts are used.
    assert!(!is_new(&folder.options(200, ChatOptions { excess_length: ExcessLength::Drop, ..chat() })));
    assert!(!is_new(&DataOptions { sample_packing: true, ..options(chat()) }));
    // The same template, given as text instead of a file.
    assert!(!is_new(&options(ChatOptions { chat_template: Some(CHATML.into()), ..chat() })));
    for changed in [
        ChatOptions { chat_template: Some(without_marks(CHATML)), ..chat() },
        ChatOptions { chat_template: Some(format!("{CHATML}{{# {{{{ strftime_now('%Y') }}}} #}}")), ..chat() },
        ChatOptions { kind: ChatType::Messages, ..chat() },
        ChatOptions { field_messages: Some("messages".into()), ..chat() },
        ChatOptions { field_training: "other".into(), ..chat() },
        ChatOptions { roles_to_train: vec!["user".into()], ..chat() },
        ChatOptions { train_on_inputs: true, ..chat() },
        ChatOptions { train_on_eos: TrainOnEos::All, ..chat() },
        ChatOptions { untrained: Untrained::Drop, ..chat() },
    ] {
        assert!(is_new(&options(changed.clone())), "{changed:?}");
    }
    folder.write("chat_template.jinja", &format!("{CHATML}\n"));
    assert!(is_new(&options(chat())));
    folder.write("tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "<|im_end|>"}).to_string());
    assert!(is_new(&options(chat())));
}

#[test]
fn a_damaged_entry_is_an_error_and_is_built_again() {
    let folder = chatml();
    folder.write(
        "data.jsonl",
        &lines(&[
            said(&[("user", "a"), ("assistant", &"b".repeat(100_000))]),
            said(&[("user", "a"), ("assistant", "b")]),
        ]),
    );
    let chat = ChatOptions { excess_length: ExcessLength::Truncate, ..ChatOptions::default() };
    let [memory, cache] = both(&folder, &folder.options(80_000, chat));
    let given = |options| of_conversations(&folder, options, &Unwatched);
    let expected = given(&memory);
    assert_eq!(given(&cache), expected);
    let entry = entries(&folder).remove(0);
    let mut bytes = fs::read(&entry).unwrap();
    bytes[70_000] ^= 1;
    fs::write(&entry, bytes).unwrap();
    let error = given(&cache).unwrap_err();
    assert!(error.contains("byte 65536: the cached tokens are damaged"), "{error}");
    assert!(!entry.exists());
    assert_eq!(given(&cache), expected);
}

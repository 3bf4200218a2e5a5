//! Tests pairs of answers: their layouts, their trained tokens, and the error for each kind of wrong record.

use serde_json::{Value, json};
use zero_config::{ExcessLength, Untrained};
use zero_model::ops::IGNORE_INDEX;
use zero_model::zoo::{LABEL_COUNTS, LABEL_GROUPS, LABELS, POSITION_IDS, REFERENCE_LOG_PROBS};

use super::super::super::{DataError, Dataset, Unwatched};
use super::super::options::ChatOptions;
use super::super::pairs::PairDataset;
use super::tokenizer::Folder;
use super::{chatml, messages};

const LENGTH: usize = 120;

fn read(folder: &Folder, records: &[Value], chat: ChatOptions, length: usize) -> Result<PairDataset, DataError> {
    let lines: Vec<String> = records.iter().map(Value::to_string).collect();
    folder.write("data.jsonl", &lines.join("\n"));
    PairDataset::open(&folder.options(length, chat), &folder.tokenizer(), true, &Unwatched)
}

/// Returns both texts of a sample without padding. Answers are in `[` and `]`, labeled prompts in `(` and `)`.
fn shown(folder: &Folder, pairs: &PairDataset, index: usize) -> [String; 2] {
    let batch = pairs.batch(&[index]).unwrap();
    let tokens: Vec<u32> = batch.inputs.single().unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let named = batch.get(&[LABELS, LABEL_GROUPS, POSITION_IDS, LABEL_COUNTS]).unwrap();
    let labels: Vec<i64> = named[0].flatten_all().unwrap().to_vec1().unwrap();
    let groups: Vec<u8> = named[1].flatten_all().unwrap().to_vec1().unwrap();
    let positions: Vec<u32> = named[2].flatten_all().unwrap().to_vec1().unwrap();
    let counts: Vec<f32> = named[3].flatten_all().unwrap().to_vec1().unwrap();
    for (group, count) in counts.iter().enumerate() {
        let labeled = labels.iter().zip(&groups).filter(|(label, of)| **label >= 0 && usize::from(**of) == group);
        assert_eq!(labeled.count() as f32, *count, "group {group}");
    }
    let (tokenizer, length) = (folder.tokenizer(), tokens.len() / 2);
    [0, 1].map(|side| {
        let range = side * length..(side + 1) * length;
        assert_eq!(positions[range.start], 0);
        // Padding is a separate document.
        let used = (range.start + 1..range.end).find(|&at| positions[at] == 0).unwrap_or(range.end);
        assert!(labels[used..range.end].iter().all(|&label| label == IGNORE_INDEX));
        let (mut text, mut ids, mut open) = (String::new(), vec![tokens[range.start]], None);
        for at in range.start..used {
            let group = (labels[at] != IGNORE_INDEX).then_some(groups[at]);
            let Some(token) =
                group.map(|_| labels[at] as u32).or(tokens.get(at + 1).copied().filter(|_| at + 1 < used))
            else {
                break;
            };
            if group != open {
                text += &tokenizer.decode_with_special(&std::mem::take(&mut ids)).unwrap();
                text += open.map_or("", |group: u8| if group == 2 { ")" } else { "]" });
                text += group.map_or("", |group| if group == 2 { "(" } else { "[" });
                open = group;
            }
            ids.push(token);
        }
        text += &tokenizer.decode_with_special(&ids).unwrap();
        text + open.map_or("", |group| if group == 2 { ")" } else { "]" })
    })
}

#[test]
fn all_record_formats_give_the_same_pair() {
    let folder = chatml();
    let [hi, yes, no] = [("user", "hi"), ("assistant", "yes"), ("assistant", "no")];
    let prompt = "user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let expected =
        [format!("<|im_start|>({prompt})[yes<|im_end|>\n]"), format!("<|im_start|>{prompt}[no<|im_end|>\n]")];
    for record in [
        json!({"prompt": messages(&[hi]), "chosen": messages(&[yes]), "rejected": messages(&[no])}),
        json!({"chosen": messages(&[hi, yes]), "rejected": messages(&[hi, no])}),
        json!({"prompt": "hi", "chosen": messages(&[hi, yes]), "rejected": messages(&[hi, no])}),
        json!({"chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
               "rejected": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}]}),
    ] {
        let pairs = read(&folder, std::slice::from_ref(&record), ChatOptions::default(), LENGTH).unwrap();
        assert_eq!(shown(&folder, &pairs, 0), expected, "{record}");
    }
    let system =
        json!({"system": "s", "prompt": messages(&[hi]), "chosen": messages(&[yes]), "rejected": messages(&[no])});
    let pairs = read(&folder, &[system], ChatOptions::default(), LENGTH).unwrap();
    assert!(shown(&folder, &pairs, 0)[1].starts_with("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi"));
    // Texts use no template. Only the `eos_token` is added.
    let texts = json!({"prompt": "say hi", "chosen": " hi", "rejected": " is<|im_end|>"});
    let pairs = read(&folder, &[texts], ChatOptions::default(), LENGTH).unwrap();
    assert_eq!(shown(&folder, &pairs, 0), ["s(ay hi)[ hi<|im_end|>]", "say hi[ is<|im_end|>]"]);
    assert_eq!(pairs.description().split(", ").next(), Some("1 pair"));
}

#[test]
fn long_pairs_are_truncated_dropped_or_an_error() {
    let folder = chatml();
    let record = |chosen: &str| json!({"prompt": "a", "chosen": chosen, "rejected": "b"});
    let records = [record("c"), record("ccccccccc")];
    let open = |excess_length, untrained| {
        read(&folder, &records, ChatOptions { excess_length, untrained, ..ChatOptions::default() }, 4)
    };
    let error = open(ExcessLength::Raise, Untrained::Raise).unwrap_err().to_string();
    assert!(error.contains("line 2: the conversation has 11 tokens, but a sample has room for 4 tokens"), "{error}");
    let pairs = open(ExcessLength::Drop, Untrained::Raise).unwrap();
    assert_eq!((pairs.len(), pairs.description().ends_with(", 1 dropped as too long")), (1, true));
    let pairs = open(ExcessLength::Truncate, Untrained::Raise).unwrap();
    assert_eq!(shown(&folder, &pairs, 1), ["a[cccc]", "a[b<|im_end|>]"]);
    let records = [record("c"), json!({"prompt": "aaaaaaaaaa", "chosen": "c", "rejected": "b"})];
    let open = |untrained| {
        let chat = ChatOptions { excess_length: ExcessLength::Truncate, untrained, ..ChatOptions::default() };
        read(&folder, &records, chat, 4)
    };
    let error = open(Untrained::Raise).unwrap_err().to_string();
    assert!(
        error.contains("line 2: a sample holds only the first 5 tokens, which contain no part of the chosen answer\n"),
        "{error}"
    );
    assert!(
        open(Untrained::Drop).unwrap().description().ends_with(", 1 truncated, 1 dropped because an answer is missing")
    );
}

#[test]
fn wrong_records_are_errors() {
    let folder = chatml();
    let [hi, yes, no] = [("user", "hi"), ("assistant", "yes"), ("assistant", "no")];
    let of = |record: Value| read(&folder, &[record], ChatOptions::default(), LENGTH).unwrap_err().to_string();
    for (record, expected) in [
        (json!({"prompt": "a", "chosen": "b"}), "the record has no field `rejected`"),
        (json!({"chosen": "a", "rejected": "b"}), "are strings, but the record has no `prompt`"),
        (json!({"prompt": "a", "chosen": "b", "rejected": messages(&[no])}), "must both be strings or both be lists"),
        (
            json!({"prompt": "other", "chosen": messages(&[hi, yes]), "rejected": messages(&[hi, no])}),
            "must be the content of one of the messages with which both answers begin",
        ),
        (
            json!({"chosen": messages(&[yes]), "rejected": messages(&[no])}),
            "do not begin with a common message that could be the prompt",
        ),
        (
            json!({"chosen": messages(&[hi, yes]), "rejected": messages(&[hi])}),
            "the rejected answer has no messages besides the prompt",
        ),
        (
            json!({"prompt": messages(&[hi]), "chosen": messages(&[("bot", "x")]), "rejected": messages(&[no])}),
            "message 1 has the role \"bot\"",
        ),
    ] {
        let error = of(record);
        assert!(error.contains(expected), "{error}");
    }
    // Pairs cannot be trained as conversations.
    let error = folder.error(&[json!({"prompt": "a", "chosen": "b", "rejected": "c"})], ChatOptions::default());
    assert!(
        error.contains("the record is a preference pair") && error.contains("`preference: {type: dpo}`"),
        "{error}"
    );
}

#[test]
fn references_belong_to_their_pairs() {
    let folder = chatml();
    let record = |chosen: &str| json!({"prompt": "a", "chosen": chosen, "rejected": "b"});
    let open = |chosen: &str| read(&folder, &[record("c"), record(chosen)], ChatOptions::default(), LENGTH).unwrap();
    let checksum = |pairs: &PairDataset| pairs.checksum().unwrap();
    let pairs = open("d");
    assert_eq!((checksum(&pairs) == checksum(&open("d")), checksum(&pairs) == checksum(&open("e"))), (true, false));
    let of = |index| pairs.batch(&[index]).unwrap().get(&[REFERENCE_LOG_PROBS]).unwrap()[0].to_vec2::<f32>().unwrap();
    assert_eq!(of(1), [[0.0, 0.0]]);
    pairs.set_reference(vec![[-1.0, -2.0], [-3.0, -4.0]]);
    assert_eq!(of(1), [[-3.0, -4.0]]);
}

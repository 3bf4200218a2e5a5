//! Compares tokens and masks with transformers' `apply_chat_template`. The tests are skipped without Python or
//! transformers.

use serde_json::{Value, json};
use zero_config::TrainOnEos;

use super::super::super::records::Samples;
use super::super::super::{Dataset, FileDataset};
use super::super::options::ChatOptions;
use super::templates::{CHATML, GEMMA, LLAMA, MISTRAL, PHI, PHI4, without_marks};
use super::tokenizer::Folder;
use super::{messages, said};
use zero_model::ops::IGNORE_INDEX;

use crate::python;

/// Prints one list per folder. It contains `[tokens, mask]` for each record.
const SCRIPT: &str = r#"
import json, sys
from transformers import PreTrainedTokenizerFast
for folder in FOLDERS:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    out = []
    for line in open(folder + "/data.jsonl", encoding="utf-8"):
        record = json.loads(line)
        got = tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=True,
                                            return_assistant_tokens_mask=True)
        out.append([got["input_ids"], got["assistant_masks"]])
    print(json.dumps(out))
"#;

pub(super) fn conversations(has_system: bool, has_tools: bool) -> Vec<Value> {
    let mut all = vec![
        said(&[("user", "hi"), ("assistant", "hi there")]),
        said(&[
            ("user", "a b"),
            ("assistant", "b"),
            ("user", "c\nd"),
            ("assistant", "this is e"),
            ("user", "f"),
            ("assistant", "g"),
        ]),
        said(&[("user", "Grüße, 世界 🦀 e\u{301}"), ("assistant", "👩‍👩‍👧 ist „gut“\r\n\ttab")]),
        said(&[("user", ""), ("assistant", ""), ("user", " "), ("assistant", "x")]),
        said(&[("user", "space "), ("assistant", "\n\n leading and trailing \n")]),
        said(&[
            ("user", "no <|answer|>, {{ braces }} & <html>"),
            ("assistant", "{% if %} \"quoted\" \\n"),
            ("user", "without an answer"),
        ]),
    ];
    if has_system {
        all.push(said(&[
            ("system", "be brief\n"),
            ("user", "hi"),
            ("assistant", "yes"),
            ("user", "hi"),
            ("assistant", "no"),
        ]));
    }
    if has_tools {
        let call =
            json!({"type": "function", "function": {"name": "add", "arguments": {"é": [1, 2.5, true, null], "b": {}}}});
        let mut list = messages(&[("user", "1 + 2"), ("assistant", ""), ("tool", " 3 "), ("assistant", "it is 3")]);
        list[1] = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        let tool = json!({"type": "function", "function": {"name": "add", "parameters": {"z": "<a>", "a": []}}});
        all.push(json!({"messages": list, "tools": [tool]}));
    }
    all
}

/// Returns the tokens and the mask of each sample, without padding.
fn ours(folder: &Folder, records: &[Value]) -> Vec<(Vec<u32>, Vec<bool>)> {
    let dataset =
        folder.read(records, ChatOptions { train_on_eos: TrainOnEos::Turn, ..ChatOptions::default() }).unwrap();
    stored(&dataset)
}

/// Returns the tokens and the mask of each sample of a data set, without padding.
pub(super) fn stored(dataset: &FileDataset) -> Vec<(Vec<u32>, Vec<bool>)> {
    let sample = |index| {
        let mut samples = Samples::default();
        dataset.append(index, &mut samples).unwrap();
        let length = samples.tokens.len() - dataset.padding(index).unwrap();
        let mask = samples.labels[..length - 1].iter().map(|&label| label != IGNORE_INDEX);
        (samples.tokens[..length].to_vec(), std::iter::once(false).chain(mask).collect())
    };
    (0..dataset.len()).map(sample).collect()
}

#[test]
fn tokens_and_masks_are_those_of_transformers() {
    let cases = [
        ("ChatML", CHATML, ["<|endoftext|>", "<|im_end|>"], [true, true]),
        ("Llama 3", LLAMA, ["<|begin_of_text|>", "<|eot_id|>"], [true, true]),
        ("Gemma 3", GEMMA, ["<bos>", "<|endoftext|>"], [true, false]),
        ("Phi", PHI, ["<s>", "<|endoftext|>"], [true, false]),
        ("Phi-4", PHI4, ["<s>", "<|endoftext|>"], [true, false]),
        ("Mistral", MISTRAL, ["<s>", "</s>"], [true, false]),
    ];
    let folders: Vec<_> = cases
        .iter()
        .flat_map(|&(name, template, tokens, [has_system, has_tools])| {
            let records = conversations(has_system, has_tools);
            [(template.to_string(), true), (without_marks(template), false)].map(|(template, is_marked)| {
                let folder = Folder::new(&template, tokens);
                let samples = ours(&folder, &records);
                assert_eq!(samples.len(), records.len());
                (name, is_marked, folder, samples, records.clone())
            })
        })
        .collect();
    let paths: Vec<String> = folders.iter().map(|(.., folder, _, _)| folder.path().display().to_string()).collect();
    let script = SCRIPT.replace("FOLDERS", &json!(paths).to_string());
    let Some(output) = python::python(&["transformers", "jinja2"], &script) else { return };
    let theirs: Vec<Vec<(Vec<u32>, Vec<u8>)>> =
        output.lines().map(|line| serde_json::from_str(line).expect("the script prints lists")).collect();
    assert_eq!(theirs.len(), folders.len());
    for (i, (name, is_marked, _, samples, records)) in folders.iter().enumerate() {
        for (j, (tokens, mask)) in samples.iter().enumerate() {
            assert_eq!(*tokens, theirs[i][j].0, "{name}: {}", records[j]);
            // transformers computes no mask for a template without marks, so the test expects the mask of the same
            // template with marks.
            let marked = &theirs[i - usize::from(!is_marked)][j].1;
            let mut expected: Vec<bool> = marked.iter().map(|&trained| trained == 1).collect();
            if name.starts_with("Phi")
                && !is_marked
                && records[j]["messages"].as_array().unwrap().last().unwrap()["role"] == "assistant"
            {
                // The last turn extends to the end of the text. In Phi-3's template, it ends with a line break and the
                // `eos_token` after `<|end|>`.
                let rest = if *name == "Phi" { 2 } else { 1 };
                let length = expected.len();
                expected[length - rest..].fill(true);
            }
            assert_eq!(*mask, expected, "{name}, marked: {is_marked}: {}", records[j]);
        }
    }
}

//! Renders the templates of well-known models, in their original form and with TRL's `{% generation %}` marks, and
//! compares the results with transformers' `apply_chat_template`. The tests are skipped without Python, transformers or
//! TRL.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use zero_config::TrainOnEos;

use super::super::super::{DataError, open};
use super::super::options::ChatOptions;
use super::super::renderer::specials;
use super::oracle::{conversations, stored};
use super::tokenizer::Folder;

use crate::python;

/// Prints a list with the template of each model, and the variant of this template with marks.
const TEMPLATES: &str = r#"
import json, pathlib, trl
folder = pathlib.Path(trl.__file__).parent / "chat_templates"
for name in NAMES:
    print(json.dumps([(folder / f"{name}{end}.jinja").read_text() for end in ("", "_training")]))
"#;

/// Prints a list for each folder: `[tokens, mask]` of each record, or `null` if the template rejects the record. Every
/// second template has marks; the others have no mask.
const RENDERED: &str = r#"
import json
from transformers import PreTrainedTokenizerFast
for number, folder in enumerate(FOLDERS):
    is_marked = number % 2 == 1
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    out = []
    for line in open(folder + "/records.jsonl", encoding="utf-8"):
        record = json.loads(line)
        try:
            got = tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=True,
                                                return_assistant_tokens_mask=is_marked)
            out.append([got["input_ids"], got["assistant_masks"] if is_marked else []])
        except Exception:
            out.append(None)
    print(json.dumps(out))
"#;

/// The name of a template in TRL, with the first and the last token of its model.
const MODELS: [(&str, [&str; 2]); 20] = [
    ("qwen2_5", ["<|endoftext|>", "<|im_end|>"]),
    ("qwen3", ["<|endoftext|>", "<|im_end|>"]),
    ("qwen3_instruct_2507", ["<|endoftext|>", "<|im_end|>"]),
    ("qwen3_5_think", ["<|endoftext|>", "<|im_end|>"]),
    ("qwen3_5_nothink", ["<|endoftext|>", "<|im_end|>"]),
    ("llama3", ["<|begin_of_text|>", "<|eot_id|>"]),
    ("gemma", ["<bos>", "<end_of_turn>"]),
    ("gemma3", ["<bos>", "<end_of_turn>"]),
    ("phi3", ["<s>", "<|endoftext|>"]),
    ("phi3_5", ["<s>", "<|endoftext|>"]),
    ("deepseekv3", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]),
    ("deepseek_r1_distill", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]),
    ("glm4moe", ["<|endoftext|>", "<|user|>"]),
    ("cohere", ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]),
    ("cohere2", ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]),
    ("gptoss", ["<|startoftext|>", "<|return|>"]),
    ("smolvlm", ["<|im_start|>", "<end_of_utterance>"]),
    ("lfm2", ["<|startoftext|>", "<|im_end|>"]),
    ("nemotron_3_nano", ["<s>", "<|im_end|>"]),
    ("muse_glimmer", ["<s>", "</s>"]),
];

type Sample = (Vec<u32>, Vec<bool>);
type Expected = Option<(Vec<u32>, Vec<u8>)>;

fn ours(folder: &Folder, record: &Value) -> Result<Sample, DataError> {
    folder.write("data.jsonl", &record.to_string());
    let chat = ChatOptions { train_on_eos: TrainOnEos::Turn, ..ChatOptions::default() };
    let mut options = folder.options(6000, chat);
    options.vocabulary = 400;
    open(&options, &folder.tokenizer()).map(|dataset| stored(&dataset).remove(0))
}

#[test]
fn tokens_and_masks_of_real_templates_are_those_of_transformers() {
    let names = json!(MODELS.map(|(name, _)| name)).to_string();
    let script = TEMPLATES.replace("NAMES", &names);
    let Some(output) = python::python(&["trl", "transformers", "jinja2"], &script) else { return };
    let templates: Vec<[String; 2]> = output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(templates.len(), MODELS.len(), "{output}");
    let mut records = conversations(true, true);
    records.push(json!({"messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "reasoning": "is hi", "content": "a"},
        {"role": "user", "content": "b"}, {"role": "assistant", "thinking": "is b", "content": "c"}]}));
    let lines: Vec<String> = records.iter().map(Value::to_string).collect();
    let folders: Vec<Folder> = templates
        .iter()
        .zip(MODELS)
        .flat_map(|([original, marked], (_, ends))| {
            let special: BTreeSet<&str> = specials(marked).chain(ends).collect();
            let special: Vec<&str> = special.into_iter().collect();
            [original, marked].map(|template| {
                let folder = Folder::with_special(template, ends, &special);
                folder.write("records.jsonl", &lines.join("\n"));
                folder
            })
        })
        .collect();
    let paths: Vec<_> = folders.iter().map(Folder::path).collect();
    let script = RENDERED.replace("FOLDERS", &json!(paths).to_string());
    let output = python::python(&["transformers", "jinja2"], &script).expect("the first script ran");
    let expected: Vec<Vec<Expected>> = output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(expected.len(), folders.len(), "{output}");
    let (mut equal, mut unknown) = (0, 0);
    for (model, (pair, expected)) in folders.chunks_exact(2).zip(expected.chunks_exact(2)).enumerate() {
        for (r, record) in records.iter().enumerate() {
            let at = format!("{}: {record}", MODELS[model].0);
            let [original, marked] = [0, 1].map(|i| ours(&pair[i], record));
            match (&marked, &expected[1][r]) {
                (Ok((tokens, mask)), Some((their_tokens, their_mask))) => {
                    assert_eq!(tokens, their_tokens, "{at}");
                    assert_eq!(*mask, their_mask.iter().map(|&trained| trained == 1).collect::<Vec<_>>(), "{at}");
                    equal += 1;
                }
                (Err(_), None) => {}
                (ours, theirs) => panic!("{at}: {ours:?}, but transformers {theirs:?}"),
            }
            match (&original, &expected[0][r]) {
                (Ok((tokens, mask)), Some((their_tokens, _))) => {
                    assert_eq!(tokens, their_tokens, "{at}");
                    // Without marks, a turn ends with its last special token. It begins after the generation prompt,
                    // which in some templates contains the first tokens of the answer, such as `<think>`.
                    if let Ok((same, marks)) = &marked
                        && same == tokens
                    {
                        let tokenizer = pair[0].tokenizer();
                        for i in (0..tokens.len()).filter(|&i| mask[i] != marks[i]) {
                            let text = tokenizer.decode(&tokens[i..=i]).expect("a token of the tokenizer");
                            let is_left_out = |others: &mut dyn Iterator<Item = usize>| {
                                others.take_while(|&other| marks[other]).all(|other| !mask[other])
                            };
                            let is_edge = is_left_out(&mut (i..tokens.len())) || is_left_out(&mut (0..=i).rev());
                            assert!(text.trim().is_empty() || marks[i] && is_edge, "{at}: token {i}, {text:?}");
                        }
                        equal += 1;
                    }
                }
                // The template renders a turn differently when others follow it, so the tokens of the turn cannot be
                // found.
                (Err(error), Some(_)) if error.to_string().contains("cannot find the tokens of message") => {
                    unknown += 1;
                }
                (Err(_), None) => {}
                (ours, theirs) => panic!("{at}: {ours:?}, but transformers {theirs:?}"),
            }
        }
    }
    println!("{equal} samples are equal, {unknown} are refused because their template needs marks");
    assert!(equal > 250 && unknown < 40);
}

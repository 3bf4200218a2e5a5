//! Reads conversations of every layout, and checks which tokens are trained. Also checks the error for each kind of
//! wrong record or template.

mod cached;
mod oracle;
mod pairs;
mod parts;
mod real_templates;
pub(crate) mod templates;
pub(crate) mod tokenizer;

use serde_json::{Value, json};
use zero_config::{ChatType, ExcessLength, TrainOnEos, Untrained};

use super::super::records::Samples;
use super::super::{DataOptions, Dataset, open};
use super::options::ChatOptions;
use templates::{CHATML, GEMMA, PHI};
use tokenizer::Folder;
use zero_model::ops::IGNORE_INDEX;

const IM: [&str; 2] = ["<|endoftext|>", "<|im_end|>"];

fn chatml() -> Folder {
    Folder::new(CHATML, IM)
}

fn messages(texts: &[(&str, &str)]) -> Value {
    texts.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
}

fn said(texts: &[(&str, &str)]) -> Value {
    json!({"messages": messages(texts)})
}

const HELLO: &str = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[yes<|im_end|>]\n";

#[test]
fn all_record_formats_give_the_same_sample() {
    let folder = chatml();
    let hi = [("user", "hi"), ("assistant", "yes")];
    let mapped = ChatOptions {
        field_messages: Some("dialog".into()),
        field_role: Some("who".into()),
        field_content: Some("text".into()),
        roles: [("user", "me"), ("assistant", "you")].map(|(role, name)| (role.into(), vec![name.into()])).into(),
        ..ChatOptions::default()
    };
    for (record, chat) in [
        (said(&hi), ChatOptions::default()),
        (json!({"conversations": messages(&hi)}), ChatOptions::default()),
        (
            json!({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}),
            ChatOptions::default(),
        ),
        (json!({"instruction": "hi", "input": "", "output": "yes"}), ChatOptions::default()),
        (json!({"prompt": messages(&hi[..1]), "completion": messages(&hi[1..])}), ChatOptions::default()),
        (json!({"dialog": [{"who": "me", "text": "hi"}, {"who": "you", "text": "yes"}]}), mapped),
    ] {
        let dataset = folder.read(&[record.clone(), record.clone()], chat).unwrap();
        assert_eq!(folder.shown(&dataset), [HELLO, HELLO], "{record}");
    }
    folder.write("data.jsonl", &format!(" [{},\n{}]", said(&hi), said(&hi)));
    assert_eq!(folder.shown(&folder.open(300, ChatOptions::default()).unwrap()), [HELLO, HELLO]);
}

#[test]
fn optional_fields_of_a_record_are_used() {
    let folder = chatml();
    let shown = |record: Value| folder.shown(&folder.read(&[record], ChatOptions::default()).unwrap()).remove(0);
    assert_eq!(
        shown(json!({"instruction": "add", "input": "1 2", "output": "3", "history": [["hi", "yes"]], "system": "s"})),
        format!(
            "<|im_start|>system\ns<|im_end|>\n{HELLO}<|im_start|>user\nadd\n1 2<|im_end|>\n<|im_start|>assistant\n[3<|im_end|>]\n"
        )
    );
    // A record whose completion is a text uses no template. Only the `eos_token` is added.
    assert_eq!(shown(json!({"prompt": "say hi", "completion": " hi"})), "say hi[ hi<|im_end|>]");
    let mut weighted = said(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    weighted["messages"][1]["weight"] = 0.into();
    assert_eq!(
        shown(weighted),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n\
         <|im_start|>assistant\n[d<|im_end|>]\n"
    );
    let prompt = messages(&[("user", "a"), ("assistant", "b"), ("user", "c")]);
    assert!(
        shown(json!({"prompt": prompt, "completion": messages(&[("assistant", "d")])}))
            .ends_with("assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]\n")
    );
    let tools = json!([{"name": "add"}]);
    let mut with_tools = said(&[("user", "hi"), ("assistant", "yes")]);
    with_tools["tools"] = tools.clone();
    let expected = format!("<|im_start|>system\n[{{\"name\": \"add\"}}]<|im_end|>\n{HELLO}");
    assert_eq!(shown(with_tools.clone()), expected);
    with_tools["tools"] = tools.to_string().into();
    assert_eq!(shown(with_tools), expected);
}

#[test]
fn chat_keys_select_the_trained_tokens() {
    let folder = chatml();
    let record = said(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    let shown =
        |chat| folder.shown(&folder.read(std::slice::from_ref(&record), chat).unwrap()).remove(0).replace('\n', "");
    let chat = ChatOptions::default;
    let [start, end] = ["<|im_start|>", "<|im_end|>"];
    let text = |[a, b, c, d]: [&str; 4]| format!("{start}user{a}{start}assistant{b}{start}user{c}{start}assistant{d}");
    assert_eq!(shown(chat()), text(["a<|im_end|>", "[b<|im_end|>]", "c<|im_end|>", "[d<|im_end|>]"]));
    assert_eq!(
        shown(ChatOptions { train_on_eos: TrainOnEos::All, ..chat() }),
        text(["a[<|im_end|>]", "[b<|im_end|>]", "c[<|im_end|>]", "[d<|im_end|>]"])
    );
    assert_eq!(
        shown(ChatOptions { train_on_eos: TrainOnEos::Last, ..chat() }),
        text(["a<|im_end|>", "[b]<|im_end|>", "c<|im_end|>", "[d<|im_end|>]"])
    );
    // The template renders nothing for an empty list of messages, so the header of the first message begins at the
    // start of the text.
    assert_eq!(
        shown(ChatOptions { roles_to_train: vec!["assistant".into(), "human".into()], ..chat() }).matches('[').count(),
        4
    );
    assert!(shown(ChatOptions { train_on_inputs: true, ..chat() }).starts_with(&format!("{start}[usera{end}{start}")));
}

#[test]
fn templates_without_generation_tags_are_rendered_in_parts() {
    let record = said(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "\n\nd")]);
    let shown = |folder: &Folder| {
        folder.shown(&folder.read(std::slice::from_ref(&record), ChatOptions::default()).unwrap()).remove(0)
    };
    // One token consists of two line breaks: the first belongs to the header and the second to the turn.
    assert_eq!(
        shown(&Folder::new(&templates::without_marks(CHATML), IM)),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n<|im_start|>user\nc<|im_end|>\n\
         <|im_start|>assistant[\n\n\nd<|im_end|>]\n"
    );
    // This template ends every conversation with an additional token.
    assert_eq!(
        shown(&Folder::new(&templates::without_marks(PHI), ["<s>", "<|endoftext|>"])),
        "<|user|>\na<|end|>\n<|assistant|>\n[b<|end|>]\n<|user|>\nc<|end|>\n<|assistant|>[\n\n\nd<|end|>\n<|endoftext|>]"
    );
}

#[test]
fn samples_have_the_sequence_length() {
    let folder = chatml();
    let record = said(&[("user", "a"), ("assistant", "bcdefg")]);
    folder.write("data.jsonl", &format!("{record}\n{}", said(&[("user", "a"), ("assistant", "b")])));
    // <|im_start|> u s e r \n a <|im_end|> \n <|im_start|> a s s i s t a n t \n b c d e f g <|im_end|> \n
    let length = 27;
    let raw = |length, excess_length| folder.open(length, ChatOptions { excess_length, ..ChatOptions::default() });
    let all = raw(length - 1, ExcessLength::Raise).unwrap();
    let mut samples = Samples::default();
    all.append(0, &mut samples).unwrap();
    assert_eq!(
        (samples.tokens.len(), samples.labels.len(), all.padding(0).unwrap(), all.padding(1).unwrap()),
        (26, 26, 0, 4)
    );
    // The token of a byte is the value of the byte.
    assert_eq!(samples.tokens[..3], [262, u32::from(b'u'), u32::from(b's')]);
    assert_eq!(samples.labels[17..19], [IGNORE_INDEX, i64::from(b'b')]);
    assert_eq!(samples.labels[24..], [263, IGNORE_INDEX]);
    assert!(samples.targets.is_empty());
    let batch = all.batch(&[1, 0]).unwrap();
    assert_eq!(batch.only_target().unwrap().dtype(), candle_core::DType::I64);
    let rows: Vec<Vec<u32>> = batch.inputs.single().unwrap().to_vec2().unwrap();
    // The `eos_token` is the padding, because the tokenizer names no padding token.
    assert_eq!(rows[0][22..], [263; 4]);
    assert!(samples.position_ids.is_empty());
    assert_eq!(all.description().unwrap(), "2 conversations, 17.3 % of positions trained on, 7.7 % padding");

    let error = raw(length - 2, ExcessLength::Raise).unwrap_err().to_string();
    let expected = "data.jsonl, line 1: the conversation has 27 tokens, but a sample has room for 25 tokens and the next \
                    token; no other conversation is too long\n  help: increase `data.sequence_length`";
    assert!(error.contains(expected), "{error}");
    let error = raw(9, ExcessLength::Raise).unwrap_err().to_string();
    assert!(error.contains("; 2 conversations are too long, the longest with 27 tokens\n"), "{error}");
    let cut = raw(21, ExcessLength::Truncate).unwrap();
    assert_eq!(folder.shown(&cut)[0], "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[bcd]");
    assert!(cut.description().unwrap().ends_with(", 1 truncated"));
    let dropped = raw(21, ExcessLength::Drop).unwrap();
    assert_eq!((dropped.len(), dropped.description().unwrap().ends_with(", 1 dropped as too long")), (1, true));
    let error = raw(17, ExcessLength::Truncate).unwrap_err().to_string();
    let expected = "line 1: a sample holds the first 18 of the conversation's 27 tokens, and none of these is trained on\n    | <|im_start|>user\n";
    assert!(error.contains(expected), "{error}");
    folder.write("data.jsonl", &format!("{record}\n{}", said(&[("user", "a")])));
    let left = folder.open(30, ChatOptions { untrained: Untrained::Drop, ..ChatOptions::default() }).unwrap();
    assert_eq!(left.len(), 1);
    assert!(left.description().unwrap().ends_with(", 1 dropped because no token is trained on"));
}

#[test]
fn a_slice_selects_records_by_position() {
    let folder = chatml();
    let answers = ["bcdefg", "c", "d", "e"].map(|text| said(&[("user", "a"), ("assistant", text)]).to_string());
    folder.write("data.jsonl", &answers.join("\n"));
    let read = |split: &str, excess_length, sample_packing| {
        let split = zero_config::SplitPart::parse(split).unwrap().pop();
        let chat = ChatOptions { excess_length, ..ChatOptions::default() };
        open(&DataOptions { split, sample_packing, ..folder.options(24, chat) }, &folder.tokenizer())
    };
    // The first conversation is too long. A slice counts all records, including those that are later left out. Records
    // outside the slice cause no errors.
    let letters = |text: &str| ["[b", "[c", "[d", "[e"].iter().filter(|answer| text.contains(*answer)).count();
    for (split, first, count) in [("train[1:3]", "[c", 2), ("train[75%:]", "[e", 1), ("train[-3:]", "[c", 3)] {
        let text = folder.shown(&read(split, ExcessLength::Raise, false).unwrap()).concat();
        assert!(text.contains(first) && letters(&text) == count, "{split}: {text}");
    }
    let text = folder.shown(&read("train[:2]", ExcessLength::Drop, false).unwrap()).concat();
    assert!(text.contains("[c") && letters(&text) == 1, "{text}");
    assert_eq!(read("train[1:3]", ExcessLength::Raise, true).unwrap().len(), 2);
    assert!(read("train[:2]", ExcessLength::Raise, false).unwrap_err().to_string().contains("no other conversation"));
}

#[test]
fn a_sample_can_hold_several_conversations() {
    let folder = chatml();
    let answers = ["bcdefgbcdefgbcdefgb", "b", "bc", "bcd"].map(|text| said(&[("user", "a"), ("assistant", text)]));
    folder.write("data.jsonl", &answers.map(|record| record.to_string()).join("\n"));
    // The conversations have 40, 22, 23 and 24 tokens.
    let packed = |length| {
        let options = DataOptions { sample_packing: true, ..folder.options(length, ChatOptions::default()) };
        open(&options, &folder.tokenizer())
    };
    let dataset = packed(64).unwrap();
    assert_eq!(
        dataset.description().unwrap(),
        "4 conversations in 2 samples, 22.7 % of positions trained on, 14.8 % padding"
    );
    let alone = folder.open(64, ChatOptions::default()).unwrap();
    let [mut samples, mut of_alone] = [Samples::default(), Samples::default()];
    (0..2).for_each(|index| dataset.append(index, &mut samples).unwrap());
    (0..4).for_each(|index| alone.append(index, &mut of_alone).unwrap());
    // Each conversation has the same tokens packed as unpacked, and positions restart at each conversation.
    let starts = [(0, 0, 40), (3, 40, 24), (1, 64, 22), (2, 86, 23)];
    for (conversation, start, length) in starts {
        let (at, of) = (start..start + length, 64 * conversation..64 * conversation + length);
        assert_eq!(samples.tokens[at.clone()], of_alone.tokens[of.clone()]);
        assert_eq!(samples.labels[at.clone()], of_alone.labels[of]);
        assert!(samples.position_ids[at].iter().copied().eq(0..length as u32));
    }
    assert_eq!(samples.position_ids[109..], *(0..19).collect::<Vec<u32>>());
    assert_eq!(samples.labels[109..], [IGNORE_INDEX; 19]);
    let batch = dataset.batch(&[1]).unwrap();
    assert!(batch.names().eq(["input", "position_ids", "target"]));
    // The longest conversation fills a sample. Its last token is only a target.
    let dataset = packed(39).unwrap();
    assert_eq!((dataset.len(), dataset.padding(0).unwrap()), (4, 0));
}

#[test]
fn errors_name_the_record_and_a_remedy() {
    let folder = chatml();
    let error =
        |record: Value| folder.error(&[said(&[("user", "a"), ("assistant", "b")]), record], ChatOptions::default());
    let begins = |record: Value, expected: &str| {
        let error = error(record);
        assert!(
            error.starts_with(&format!("data.jsonl, line 2: {expected}")) && error.contains("\n  help: "),
            "{error}"
        );
    };
    begins(
        said(&[("system", "s"), ("user", "a")]),
        "no message in the conversation is trained on; the roles of its messages are system, user\n  help: add an assistant message",
    );
    begins(
        said(&[("user", "a"), ("bot", "b")]),
        "message 2 has the role \"bot\", which is unknown\n  help: add this role to one of the lists in `data.chat.roles`",
    );
    begins(json!({"text": "a", "id": 1}), "the record has no field `messages`; its fields are `text`, `id`");
    begins(
        json!({"messages": [{"rolle": "user", "content": "a"}]}),
        "message 1 has no field `role` or `from`; its fields are `rolle`, `content`",
    );
    begins(
        json!({"messages": [{"role": "user", "text": "a"}]}),
        "message 1 has no field `content` or `value`; its fields are `text`",
    );
    begins(json!({"messages": [{"role": "user", "content": null}]}), "the content of message 1 is null");
    begins(json!({"messages": [{"role": "user", "content": "", "weight": 2}]}), "`weight` of message 1 is 2");
    begins(json!({"messages": []}), "the conversation has no messages");
    begins(json!({"messages": "a"}), "`messages` is not a list of messages");
    begins(json!({"messages": ["a"]}), "message 1 is not an object");
    begins(
        said(&[("system", "s"), ("user", "bad\u{fdd0}"), ("assistant", "b")]),
        "chat_template.jinja: `{% generation %}` is nested, or a message contains U+FDD0",
    );

    let unknown = folder.error(&[json!({"a": 1})], ChatOptions::default());
    assert!(
        unknown.starts_with("data.jsonl, line 1: the record has no known conversation format; its fields are `a`"),
        "{unknown}"
    );
    let alpaca = ChatOptions { kind: ChatType::Alpaca, ..ChatOptions::default() };
    assert!(folder.error(&[json!({"a": 1})], alpaca).contains("no field `instruction`; its fields are `a`"));
    let role = ChatOptions { roles_to_train: vec!["bot".into()], ..ChatOptions::default() };
    assert!(
        folder
            .error(&[json!({})], role)
            .contains("roles_to_train: `bot` is not a known role\n  help: choose from user,")
    );
    for (text, expected) in [
        ("{\"a\": }", "data.jsonl, line 1: column 7: expected value"),
        ("\n{}{}", "data.jsonl, line 2: column 3: trailing characters"),
        ("[{},\n{]", "data.jsonl, line 2: column 2: key must be a string"),
        ("[{\"messages\": []}, 3]", "data.jsonl, record 2: a record must be a JSON object"),
        ("", "no tokens or rows in data.jsonl"),
    ] {
        folder.write("data.jsonl", text);
        let error = folder.open(9, ChatOptions::default()).unwrap_err().to_string();
        assert!(error.replace(&format!("{}/", folder.path().display()), "").starts_with(expected), "{error}");
    }
}

#[test]
fn errors_of_templates_name_the_template() {
    let hi = [said(&[("user", "a"), ("assistant", "b")])];
    let error = |template: &str| Folder::new(template, IM).error(&hi, ChatOptions::default());
    assert!(error("{% for %}").starts_with("chat_template.jinja: line 1: syntax error: "), "{}", error("{% for %}"));
    let unknown = error("<|im_begin|>{% generation %}{{ messages[1].content }}{% endgeneration %}");
    assert!(
        unknown.starts_with(
            "chat_template.jinja: the template writes the special token `<|im_begin|>`, but the tokenizer does not know this token and splits it into 12 tokens"
        ),
        "{unknown}"
    );
    // A message that contains the same characters is ordinary text.
    let folder = chatml();
    assert_eq!(
        folder.read(&[said(&[("user", "<|im_begin|>"), ("assistant", "b")])], ChatOptions::default()).unwrap().len(),
        1
    );
    let gemma = Folder::new(GEMMA, ["<bos>", "<s>"]);
    let error = gemma.error(&[said(&[("user", "a"), ("user", "b"), ("assistant", "c")])], ChatOptions::default());
    assert!(
        error.starts_with(
            "data.jsonl, line 1: chat_template.jinja: the template rejects the conversation: roles must alternate"
        ),
        "{error}"
    );

    // This template, like Qwen3's, renders a turn differently when it is the last one.
    let source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let turns = [said(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])];
    let error = Folder::new(source, IM).error(&turns, ChatOptions::default());
    assert!(error.starts_with("data.jsonl, line 1: cannot find the tokens of message 2 in the template's output: the template renders the message differently when other messages follow\n    | <|im_start|>user\n    | a<|im_end|>"), "{error}");
    assert!(
        error.contains(
            "\n  help: set `data.chat.chat_template` to a template that encloses the model's text in `{% generation %}`"
        ),
        "{error}"
    );

    let folder = Folder::with_special(CHATML, IM, &["<|im_start|>"]);
    assert!(
        folder
            .error(&hi, ChatOptions::default())
            .contains("the model's bos_token is `<|endoftext|>`, but tokenizer.json has no such token")
    );
    let bare = chatml();
    std::fs::remove_file(bare.path().join("chat_template.jinja")).unwrap();
    assert!(bare.error(&hi, ChatOptions::default()).starts_with("data.chat.chat_template: no chat template in "));
    let missing = ChatOptions { chat_template: Some("none.jinja".into()), ..ChatOptions::default() };
    assert!(bare.error(&hi, missing).starts_with("none.jinja: No such file or directory"));
    let inline = ChatOptions { chat_template: Some(CHATML.into()), ..ChatOptions::default() };
    assert_eq!(bare.shown(&bare.read(&[said(&[("user", "hi"), ("assistant", "yes")])], inline).unwrap()), [HELLO]);
    bare.write(
        "tokenizer_config.json",
        &json!({"eos_token": "<|im_end|>", "chat_template": [{"name": "default", "template": CHATML}]}).to_string(),
    );
    assert_eq!(
        bare.shown(&bare.read(&[said(&[("user", "hi"), ("assistant", "yes")])], ChatOptions::default()).unwrap()),
        [HELLO]
    );
    bare.write("tokenizer_config.json", "{}");
    let ends =
        ChatOptions { chat_template: Some("{{ messages[0].content + eos_token }}".into()), ..ChatOptions::default() };
    assert!(
        bare.error(&hi, ends).contains("ends turns with `eos_token`, but the tokenizer does not define this token")
    );
}

#[test]
fn fields_that_are_null_are_missing_and_reasoning_has_two_names() {
    let source = "{% for m in messages %}{{ m.role ~ (m.thinking or '') ~ (m.reasoning_content or '') ~ m.content ~ '<|im_end|>' }}{% endfor %}";
    let call = json!({"function": {"name": "f", "arguments": {}}});
    let record = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "reasoning": "why", "thinking": null, "tool_calls": [call]}]});
    let folder = Folder::new(source, IM);
    assert_eq!(
        folder.shown(&folder.read(std::slice::from_ref(&record), ChatOptions::default()).unwrap()),
        ["usera<|im_end|>[assistantwhywhy<|im_end|>]"]
    );
    let error = Folder::new("{{ messages[1].content | tojson }}", IM).error(&[record], ChatOptions::default());
    assert!(error.contains("undefined value: tojson cannot serialize a missing value"), "{error}");
}

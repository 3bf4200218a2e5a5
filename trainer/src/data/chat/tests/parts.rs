//! Tests further parts of records: those that templates cannot use, and the system text of a prompt. Also tests turns
//! whose tokens cannot be found.

use serde_json::{Value, json};

use super::super::options::ChatOptions;
use super::templates::{CHATML, without_marks};
use super::tokenizer::Folder;
use super::{HELLO, IM, chatml, messages, said};

#[test]
fn parts_of_messages_must_be_texts() {
    let folder = Folder::new("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", IM);
    let error = |part: Value| {
        let record = json!({"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a"}]});
        folder.error(&[record], ChatOptions::default())
    };
    for kind in ["image", "image_url", "input_audio"] {
        let expected = format!("message 1 contains a part of type `{kind}`, but only text is supported");
        assert!(error(json!({"type": kind})).contains(&expected));
    }
    // A list of texts is not rejected, but passed to the template.
    let folder = Folder::new(&without_marks(CHATML), IM);
    let record = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]});
    assert!(!folder.error(&[record], ChatOptions::default()).contains("only text"));
}

#[test]
fn marks_are_no_remedy_for_turns_of_other_roles() {
    // As in Qwen 2.5's template, the text before the first message depends on the message.
    let template = "{% if messages[0].role != 'system' %}<|im_start|>system\ndefault<|im_end|>\n{% endif %}";
    let folder = Folder::new(&format!("{template}{}", without_marks(CHATML)), IM);
    let chat = ChatOptions { roles_to_train: vec!["user".into()], ..ChatOptions::default() };
    let error = folder.error(&[said(&[("user", "a"), ("assistant", "b")])], chat);
    assert!(error.contains("cannot find the tokens of message 1"), "{error}");
    assert!(error.contains("help: train only on the assistant's messages"), "{error}");
}

/// To find the tokens of each turn, the template would have to render more bytes than the limit allows.
#[test]
fn conversations_with_too_many_turns_need_marks() {
    let (answer, answers) = ("yes ".repeat(25), 7000);
    let record = said(&vec![("assistant", answer.as_str()); answers]);
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let error = Folder::new(plain, IM).error(std::slice::from_ref(&record), ChatOptions::default());
    let expected =
        "the conversation has 700000 bytes and 7000 messages to train on; finding their tokens takes too long";
    assert!(
        error.contains(expected) && error.contains("help: divide the conversation into several records"),
        "{error}"
    );
    let marked = plain.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}");
    let error = Folder::new(&marked, IM).error(&[record], ChatOptions::default());
    assert!(error.contains("the conversation has 700000 tokens, but a sample has room for 300 tokens"), "{error}");
}

#[test]
fn arguments_for_the_template_are_rejected() {
    let folder = chatml();
    let mut with_arguments = said(&[("user", "hi"), ("assistant", "yes")]);
    with_arguments["chat_template_kwargs"] = json!({"enable_thinking": null});
    assert!(folder.read(std::slice::from_ref(&with_arguments), ChatOptions::default()).is_ok());
    with_arguments["chat_template_kwargs"] = json!({"enable_thinking": false});
    let told = folder.error(&[with_arguments], ChatOptions::default());
    assert!(told.contains("`chat_template_kwargs`, which are not implemented"), "{told}");
}

#[test]
fn the_system_text_of_a_prompt_is_a_message() {
    let folder = chatml();
    let [user, assistant] = [("user", "hi"), ("assistant", "yes")].map(|message| messages(&[message]));
    let record = json!({"system": "s", "prompt": user, "completion": assistant});
    let dataset = folder.read(&[record], ChatOptions::default()).unwrap();
    assert_eq!(folder.shown(&dataset), [format!("<|im_start|>system\ns<|im_end|>\n{HELLO}")]);
}

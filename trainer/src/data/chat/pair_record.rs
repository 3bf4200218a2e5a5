//! Extracts a prompt and two answers from a record, in the layouts that TRL supports.

use serde_json::{Value, json};

use super::options::ChatOptions;
use super::record::{Object, Problem, field, message, tools};

/// A prompt and two answers.
#[derive(Debug, PartialEq)]
pub(super) enum PairRecord {
    /// Texts that are concatenated unchanged.
    Texts { prompt: String, answers: [String; 2] },
    /// Messages that the template renders.
    Messages { prompt: Vec<Object>, answers: [Vec<Object>; 2], tools: Value },
}

const SIDES: [&str; 2] = ["chosen", "rejected"];

/// Extracts the pair from a record with `chosen` and `rejected`. The record must also have `prompt`, unless both
/// answers are conversations that begin with the same messages.
pub(super) fn pair(record: Object, options: &ChatOptions) -> Result<PairRecord, Problem> {
    let tools = tools(&record)?;
    let prompt = record.get("prompt").filter(|prompt| !prompt.is_null());
    let sides = [field(&record, SIDES[0])?, field(&record, SIDES[1])?];
    let [chosen, rejected] = match (prompt, sides) {
        (Some(Value::String(prompt)), [Value::String(chosen), Value::String(rejected)]) => {
            let answers = [chosen.clone(), rejected.clone()];
            return Ok(PairRecord::Texts { prompt: prompt.clone(), answers });
        }
        (_, [Value::Array(chosen), Value::Array(rejected)]) => [chosen, rejected],
        (None, [Value::String(_), Value::String(_)]) => {
            return Err(Problem::new(
                "`chosen` and `rejected` are strings, but the record has no `prompt`",
                "add `prompt`, the text before both answers",
            ));
        }
        _ => {
            return Err(Problem::new(
                "`chosen` and `rejected` must both be strings or both be lists of messages",
                "make `chosen`, `rejected` and `prompt` all strings or all lists of messages",
            ));
        }
    };
    let parsed = |messages: &[Value]| -> Result<Vec<Object>, Problem> {
        messages.iter().enumerate().map(|(i, value)| Ok(message(value.clone(), i, options)?.0)).collect()
    };
    let mut sides = [parsed(chosen)?, parsed(rejected)?];
    let mut before = match prompt {
        Some(Value::Array(prompt)) => parsed(prompt)?,
        _ => {
            let same = sides[0].iter().zip(&sides[1]).take_while(|(chosen, rejected)| chosen == rejected).count();
            let prompt = sides[0][..same].to_vec();
            sides.iter_mut().for_each(|side| drop(side.drain(..same)));
            prompt
        }
    };
    if let Some(Value::String(text)) = prompt
        && !before.iter().any(|message| message.get("content") == Some(&json!(text)))
    {
        return Err(Problem::new(
            "a string `prompt` must be the content of one of the messages with which both answers begin",
            "make `prompt` a list of messages, or remove it",
        ));
    }
    if let Some(Value::String(system)) = record.get("system")
        && !system.is_empty()
    {
        before.insert(0, message(json!({"role": "system", "content": system}), 0, options)?.0);
    }
    if before.is_empty() {
        return Err(Problem::new(
            "`chosen` and `rejected` do not begin with a common message that could be the prompt",
            "add `prompt`, a list of messages",
        ));
    }
    if let Some(side) = sides.iter().position(Vec::is_empty) {
        return Err(Problem::new(
            format!("the {} answer has no messages besides the prompt", SIDES[side]),
            "correct the record, or remove it",
        ));
    }
    Ok(PairRecord::Messages { prompt: before, answers: sides, tools })
}

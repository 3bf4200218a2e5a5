//! Converts records of several layouts to conversations.

use std::path::Path;

use serde_json::{Value, json};
use zero_config::ChatType;
use zero_engine::{At, DataError};

pub(super) use super::super::files::Object;
use super::super::files::Records;
use super::options::ChatOptions;

/// A conversation for the template, or texts that need no template.
#[derive(Debug, PartialEq)]
pub(super) enum Record {
    Conversation(Conversation),
    /// Texts that are concatenated unchanged.
    Texts {
        prompt: String,
        completion: String,
    },
}

#[derive(Debug, PartialEq)]
pub(super) struct Conversation {
    /// The messages, with the fields `role` and `content` and all their other fields.
    pub(super) messages: Vec<Object>,
    /// Whether each message is trained.
    pub(super) trained: Vec<bool>,
    /// The tools that the template describes, or null without tools.
    pub(super) tools: Value,
}

/// The reason why a record cannot become a sample, with advice.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) message: String,
    pub(super) help: String,
}

impl Problem {
    pub(super) fn new(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { message: message.into(), help: help.into() }
    }

    pub(super) fn at(self, path: &Path, at: At) -> DataError {
        DataError::Conversation { path: path.into(), at, message: self.message, help: self.help }
    }
}

/// Number of records that are rendered at a time.
const GROUP: usize = 1024;

/// Groups records for parallel rendering. Only a part of a file is in memory at a time. No group is empty.
pub(super) fn in_parallel(mut records: Records) -> impl Iterator<Item = Result<Vec<(At, Object)>, DataError>> {
    let group = move || records.by_ref().take(GROUP).collect::<Result<Vec<_>, _>>();
    std::iter::repeat_with(group).take_while(|group| group.as_ref().map_or(true, |group| !group.is_empty()))
}

/// Determines the layout of all records from the fields of the first record.
pub(super) fn recognize(first: &Object, options: &ChatOptions) -> Result<ChatType, Problem> {
    let has = |name: &str| first.contains_key(name);
    Ok(match options.kind {
        ChatType::Auto if options.field_messages.is_some() => ChatType::Messages,
        ChatType::Auto if has("messages") || has("conversations") => ChatType::Messages,
        ChatType::Auto if has("prompt") && has("completion") => ChatType::PromptCompletion,
        ChatType::Auto if has("chosen") && has("rejected") => return Err(one_answer()),
        ChatType::Auto if has("instruction") && has("output") => ChatType::Alpaca,
        ChatType::Auto => {
            return Err(Problem::new(
                format!("the record has no known conversation format; its fields are {}", names(first)),
                "set `data.chat.type`, and `data.chat.field_messages` to the field with the messages",
            ));
        }
        kind => kind,
    })
}

fn one_answer() -> Problem {
    Problem::new(
        "the record is a preference pair with the answers `chosen` and `rejected`",
        "add a `preference` section to train on pairs, for example `preference: {type: dpo}`",
    )
}

/// Converts a record to a conversation.
pub(super) fn conversation(record: Object, kind: ChatType, options: &ChatOptions) -> Result<Record, Problem> {
    let tools = tools(&record)?;
    let (messages, prompt) = match kind {
        ChatType::PromptCompletion => match [field(&record, "prompt")?, field(&record, "completion")?] {
            [Value::String(prompt), Value::String(completion)] => {
                return Ok(Record::Texts { prompt: prompt.clone(), completion: completion.clone() });
            }
            [Value::Array(prompt), Value::Array(completion)] => ([&prompt[..], completion].concat(), prompt.len()),
            _ => {
                return Err(Problem::new(
                    "`prompt` and `completion` must both be strings or both be lists of messages",
                    "give both the same type",
                ));
            }
        },
        ChatType::Alpaca => (alpaca(&record)?, 0),
        ChatType::Preference => return Err(one_answer()),
        ChatType::Messages | ChatType::Auto => {
            let name = match &options.field_messages {
                Some(name) => name,
                None if !record.contains_key("messages") && record.contains_key("conversations") => "conversations",
                None => "messages",
            };
            let Value::Array(messages) = field(&record, name)? else {
                return Err(Problem::new(format!("`{name}` is not a list of messages"), "make it a list of objects"));
            };
            (messages.clone(), 0)
        }
    };
    let mut named = Vec::with_capacity(messages.len() + 1);
    if let Some(Value::String(system)) = record.get("system")
        && !system.is_empty()
    {
        named.push((json!({"role": "system", "content": system}), false));
    }
    named.extend(messages.into_iter().enumerate().map(|(i, message)| (message, i >= prompt)));
    let mut conversation = Conversation { messages: vec![], trained: vec![], tools };
    for (i, (message, may_train)) in named.into_iter().enumerate() {
        let (message, trained) = self::message(message, i, options)?;
        conversation.messages.push(message);
        conversation.trained.push(trained && may_train);
    }
    if conversation.messages.is_empty() {
        return Err(Problem::new("the conversation has no messages", "remove the record"));
    }
    Ok(Record::Conversation(conversation))
}

/// Converts a message to the fields and the role that templates know. Also returns whether the message is trained.
pub(super) fn message(message: Value, i: usize, options: &ChatOptions) -> Result<(Object, bool), Problem> {
    let number = i + 1;
    let Value::Object(mut message) = message else {
        return Err(Problem::new(
            format!("message {number} is not an object"),
            "make it an object with a role and a content",
        ));
    };
    let mut take = |mapped: &Option<String>, [first, second]: [&str; 2], key: &str| {
        let name = mapped.as_deref().unwrap_or(if message.contains_key(first) { first } else { second });
        let value = message.shift_remove(name);
        value.ok_or_else(|| {
            let missing = mapped.as_ref().map_or(format!("`{first}` or `{second}`"), |name| format!("`{name}`"));
            Problem::new(
                format!("message {number} has no field {missing}; its fields are {}", names(&message)),
                format!("set `data.chat.message_property_mappings.{key}` to the field's name"),
            )
        })
    };
    let role = take(&options.field_role, ["role", "from"], "role")?;
    let content = match take(&options.field_content, ["content", "value"], "content") {
        Err(_) if message.contains_key("tool_calls") => Value::Null,
        content => content?,
    };
    if content.is_null() && !message.contains_key("tool_calls") {
        return Err(Problem::new(
            format!("the content of message {number} is null"),
            "make it a string; only messages with `tool_calls` may have no content",
        ));
    }
    if let Some(kind) = medium(&content) {
        return Err(Problem::new(
            format!("message {number} contains a part of type `{kind}`, but only text is supported"),
            "remove the part or the record",
        ));
    }
    let known = role.as_str().and_then(|name| options.role(name));
    let Some(role) = known else {
        return Err(Problem::new(
            format!("message {number} has the role {role}, which is unknown"),
            "add this role to one of the lists in `data.chat.roles`, for example `roles: {assistant: [assistant, gpt, bot]}`",
        ));
    };
    let trained = match message.get(&options.field_training) {
        None | Some(Value::Null) => options.trains(role),
        Some(Value::Bool(trained)) => *trained,
        Some(value) => match value.as_f64() {
            Some(weight) if weight == 0.0 || weight == 1.0 => weight == 1.0,
            _ => {
                return Err(Problem::new(
                    format!("`{}` of message {number} is {value}", options.field_training),
                    "use 0, 1, true or false, or set `data.chat.message_field_training` to another field",
                ));
            }
        },
    };
    let mut named = Object::new();
    named.insert("role".into(), role.into());
    named.insert("content".into(), content);
    named.extend(message);
    // As in transformers, fields that are null are removed, so that templates do not print "None".
    named.retain(|_, value| !value.is_null());
    if let Some(reasoning) = REASONING.iter().find_map(|&name| named.get(name).cloned()) {
        named.insert(REASONING[0].into(), reasoning.clone());
        named.entry(REASONING[1]).or_insert(reasoning);
    }
    Ok((named, trained))
}

/// Returns the type of the first part of a content that is not text, such as an image. Templates write only a
/// placeholder for such a part, so the model would learn to answer without seeing it.
fn medium(content: &Value) -> Option<&str> {
    let mut kinds = content.as_array()?.iter().filter_map(|part| part.get("type")?.as_str());
    kinds.find(|kind| ["image", "video", "audio", "file"].iter().any(|medium| kind.contains(medium)))
}

/// Names under which a record may hold an assistant's reasoning. As in transformers, templates see it under the first
/// two names.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Converts an Alpaca record. The user's message is the instruction, with the input on the next line. Earlier turns
/// come from `history`.
fn alpaca(record: &Object) -> Result<Vec<Value>, Problem> {
    let text = |value: &Value, name: &str| match value {
        Value::String(text) => Ok(text.clone()),
        _ => Err(Problem::new(format!("`{name}` is not a string"), "make it a string")),
    };
    let instruction = text(field(record, "instruction")?, "instruction")?;
    let user = match record.get("input") {
        None | Some(Value::Null) => instruction,
        Some(input) => match text(input, "input")? {
            input if input.is_empty() => instruction,
            input => format!("{instruction}\n{input}"),
        },
    };
    let output = text(field(record, "output")?, "output")?;
    let mut turns = vec![];
    for pair in record.get("history").and_then(Value::as_array).into_iter().flatten() {
        match pair.as_array().map(Vec::as_slice) {
            Some([Value::String(user), Value::String(assistant)]) => turns.push((user.clone(), assistant.clone())),
            _ => {
                return Err(Problem::new("`history` is not a list of string pairs", "write [[question, answer], …]"));
            }
        }
    }
    turns.push((user, output));
    let messages = |(user, assistant)| {
        [json!({"role": "user", "content": user}), json!({"role": "assistant", "content": assistant})]
    };
    Ok(turns.into_iter().flat_map(messages).collect())
}

/// Returns the record's tools. Data sets with typed columns store them as a JSON list in a string.
///
/// # Errors
/// Fails if the tools are not a list, or if the record has `chat_template_kwargs`, TRL's field with arguments for the
/// template.
pub(super) fn tools(record: &Object) -> Result<Value, Problem> {
    let has_arguments = |value: &Value| value.as_object().is_some_and(|of| of.values().any(|value| !value.is_null()));
    if record.get("chat_template_kwargs").is_some_and(has_arguments) {
        return Err(Problem::new(
            "the record has `chat_template_kwargs`, which are not implemented",
            "remove the field, and set `data.chat.chat_template` to a template that needs no arguments",
        ));
    }
    match record.get("tools") {
        None | Some(Value::Null) => Ok(Value::Null),
        Some(tools @ Value::Array(list)) => Ok(if list.is_empty() { Value::Null } else { tools.clone() }),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(Value::Null),
        Some(Value::String(text)) => serde_json::from_str::<Vec<Value>>(text)
            .map(Value::Array)
            .map_err(|error| Problem::new(format!("`tools` is not JSON: {error}"), "make it a list of tools")),
        Some(_) => Err(Problem::new("`tools` is not a list", "make it a list of tools")),
    }
}

pub(super) fn field<'r>(record: &'r Object, name: &str) -> Result<&'r Value, Problem> {
    record.get(name).ok_or_else(|| {
        Problem::new(
            format!("the record has no field `{name}`; its fields are {}", names(record)),
            "give all records the same fields, or set `data.chat.type` and `data.chat.field_messages`",
        )
    })
}

fn names(object: &Object) -> String {
    match object.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>() {
        names if names.is_empty() => "none".into(),
        names => names.join(", "),
    }
}

//! Tokenizes conversations, and computes a mask of the trained tokens.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use minijinja::value::Value;
use zero_config::{ExcessLength, Untrained};
use zero_engine::format::counted;
use zero_engine::{At, DataError};

use super::super::fingerprint::hash_of;
use super::mask::{Tokens, Turns, mask, ranges};
use super::model_files::ModelFiles;
use super::options::ChatOptions;
use super::pair_record::PairRecord;
use super::record::{Conversation, Object, Problem, Record};
use super::template::{Rendered, Template, is_dated, today};
use crate::data::tokens::tokenizer::{HuggingFace, Tokenizer};

/// The tokens of a conversation.
pub(super) struct Sample {
    pub(super) tokens: Vec<u32>,
    pub(super) trained: Vec<bool>,
    /// The rendered text, for error messages.
    pub(super) text: String,
}

/// The tokens of both answers to a prompt.
pub(super) struct Pair {
    /// The tokens of the prompt with the chosen answer, and of the prompt with the rejected answer.
    pub(super) tokens: [Vec<u32>; 2],
    /// Number of tokens before each answer.
    pub(super) prompt: usize,
    /// Whether the prompt ends with different tokens when it is tokenized together with an answer.
    pub(super) is_cut: bool,
    /// The rendered texts, for error messages.
    pub(super) texts: [String; 2],
}

/// Converts records to samples.
pub(super) struct Renderer<'a> {
    options: &'a ChatOptions,
    tokenizer: &'a HuggingFace,
    /// The template, or an error message if there is none. Records with a prompt and a completion need no template.
    pub(super) template: Result<Template, String>,
    eos: Option<u32>,
    pub(super) padding: u32,
    /// A hash of everything that the tokens of a record depend on, except the `tokenizer.json`.
    pub(super) key: String,
}

impl<'a> Renderer<'a> {
    pub(super) fn new(
        options: &'a ChatOptions,
        tokenizer: &'a Tokenizer,
        vocabulary: usize,
    ) -> Result<Self, DataError> {
        let failed = |origin: &str, message: String, help: &str| DataError::Template {
            origin: origin.into(),
            message,
            help: help.into(),
        };
        let Tokenizer::HuggingFace(tokenizer) = tokenizer else {
            let message = "conversations need special tokens, but the byte tokenizer has none".to_string();
            return Err(failed("byte tokenizer", message, "use the model's tokenizer.json"));
        };
        if let Some(name) = options.roles_to_train.iter().find(|name| options.role(name).is_none()) {
            let known: Vec<&str> = options.roles.iter().map(|(role, _)| role.as_str()).collect();
            let help = format!("choose from {}", known.join(", "));
            return Err(failed("data.chat.roles_to_train", format!("`{name}` is not a known role"), &help));
        }
        let folders: Vec<PathBuf> =
            tokenizer.folder().map(PathBuf::from).into_iter().chain(options.pretrained.clone()).collect();
        let mut files = ModelFiles::read(&folders)?;
        let source = match &options.chat_template {
            Some(text) if text.contains("{{") || text.contains("{%") => {
                Some((text.clone(), "data.chat.chat_template".to_string()))
            }
            Some(path) => {
                let help = "set `data.chat.chat_template` to a Jinja template, or to the path of its file";
                let text = std::fs::read_to_string(path).map_err(|error| failed(path, error.to_string(), help))?;
                Some((text, path.clone()))
            }
            None => files.template.take(),
        };
        for name in ["bos_token", "eos_token"] {
            if let Some(text) = files.special_token(name)
                && tokenizer.single(text)?.is_none()
            {
                let origin = folders.first().map_or(String::new(), |folder| folder.display().to_string());
                let message = format!("the model's {name} is `{text}`, but tokenizer.json has no such token");
                return Err(failed(
                    &origin,
                    message,
                    "use the tokenizer.json and tokenizer_config.json of the same model",
                ));
            }
        }
        let id = |name| files.special_token(name).map_or(Ok(None), |text| tokenizer.single(text));
        let (pad, eos) = (id("pad_token")?, id("eos_token")?);
        // Any token of the model can serve as padding, because padding does not affect the result.
        let padding = [pad, eos].into_iter().flatten().find(|&token| (token as usize) < vocabulary).unwrap_or(0);
        if let Some((source, origin)) = &source
            && source.contains("eos_token")
            && eos.is_none()
        {
            let message =
                "the template ends turns with `eos_token`, but the tokenizer does not define this token".to_string();
            return Err(failed(origin, message, "set `eos_token` in tokenizer_config.json beside the tokenizer.json"));
        }
        let is_dated = source.as_ref().is_some_and(|(source, _)| is_dated(source));
        let key = key(options, source.as_ref().map(|(source, _)| &**source), &files, is_dated.then(today));
        let template = match source {
            Some((source, origin)) => Ok(Template::new(&source, origin, files.special_tokens)?),
            None => {
                let mut searched: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
                searched.dedup();
                Err(format!("no chat template in {}", searched.join(", ")))
            }
        };
        Ok(Self { options, tokenizer, template, eos, padding, key })
    }

    /// Returns whether the template uses the current date.
    pub(super) fn is_dated(&self) -> bool {
        self.template.as_ref().is_ok_and(|template| template.is_dated)
    }

    pub(super) fn sample(&self, record: Record, path: &Path, at: At) -> Result<Sample, DataError> {
        match record {
            Record::Texts { prompt, completion } => self.of_texts(&prompt, &completion, path, at),
            Record::Conversation(conversation) => self.of_conversation(&conversation, path, at),
        }
    }

    /// Concatenates the texts unchanged. The completion and the `eos_token` after it are trained.
    fn of_texts(&self, prompt: &str, completion: &str, path: &Path, at: At) -> Result<Sample, DataError> {
        let Some(eos) = self.eos else {
            let help = "set `eos_token` in tokenizer_config.json beside the tokenizer.json";
            return Err(Problem::new(
                "a completion ends with `eos_token`, but the tokenizer does not define this token",
                help,
            )
            .at(path, at));
        };
        let text = format!("{prompt}{completion}");
        // `true` includes the special tokens that the tokenizer adds to each text, such as a `bos_token`.
        let encoding = self.tokenizer.encode_with_offsets(&text, true)?;
        let added = encoding.get_special_tokens_mask();
        let mut ids = encoding.get_ids().to_vec();
        let all = self.options.train_on_inputs;
        let mut trained: Vec<bool> = ranges(&encoding)
            .iter()
            .zip(added)
            .map(|(range, &added)| all || added == 0 && range.end > prompt.len())
            .collect();
        if ids.last() == Some(&eos) {
            trained.pop();
        } else {
            ids.push(eos);
        }
        trained.push(true);
        Ok(Sample { tokens: ids, trained, text })
    }

    fn of_conversation(&self, conversation: &Conversation, path: &Path, at: At) -> Result<Sample, DataError> {
        let template = self.template()?;
        if !self.options.train_on_inputs
            && self.options.untrained == Untrained::Raise
            && !conversation.trained.contains(&true)
        {
            let roles: Vec<&str> =
                conversation.messages.iter().filter_map(|message| message.get("role")?.as_str()).collect();
            let message = format!(
                "no message in the conversation is trained on; the roles of its messages are {}",
                roles.join(", ")
            );
            let help = "add an assistant message, or drop such conversations with `data.chat.untrained_strategy: drop`";
            return Err(Problem::new(message, help).at(path, at));
        }
        let (messages, tools) = values(conversation);
        let full = self.render(conversation, (&messages, &tools), false, path, at)?;
        let encoding = self.tokenizer.encode_with_offsets(&full.text, false)?;
        let is_special = |id| self.tokenizer.is_special(id);
        let tokens = Tokens::new(&encoding, &is_special);
        let trained = if self.options.train_on_inputs {
            vec![true; encoding.len()]
        } else {
            let turns =
                Turns { template, conversation, messages: &messages, tools: &tools, full: &full, tokens: &tokens };
            let turns = turns.trained().map_err(|problem| problem.at(path, at))?;
            mask(&tokens, &turns, self.options.train_on_eos, self.eos)
        };
        Ok(Sample { tokens: encoding.get_ids().to_vec(), trained, text: full.text })
    }

    /// Returns the tokens of the prompt with each of its answers.
    pub(super) fn pair(&self, record: PairRecord, path: &Path, at: At) -> Result<Pair, DataError> {
        let (prompt, texts, tokens) = match record {
            PairRecord::Texts { prompt, answers } => {
                let with = |answer: &String| self.of_texts(&prompt, answer, path, at);
                let [chosen, rejected] = answers.each_ref().map(with);
                let [chosen, rejected] = [chosen?, rejected?];
                let prompt = self.tokenizer.encode_with_offsets(&prompt, true)?.get_ids().to_vec();
                (prompt, [chosen.text, rejected.text], [chosen.tokens, rejected.tokens])
            }
            PairRecord::Messages { prompt, answers, tools } => {
                let conversation = |answer: &[Object]| Conversation {
                    messages: [&prompt, answer].concat(),
                    trained: vec![],
                    tools: tools.clone(),
                };
                let with = |answer: &Vec<Object>| self.rendered(&conversation(answer), false, path, at);
                let [chosen, rejected] = answers.each_ref().map(with);
                let [(chosen_text, chosen), (rejected_text, rejected)] = [chosen?, rejected?];
                let (_, prompt) = self.rendered(&conversation(&[]), true, path, at)?;
                (prompt, [chosen_text, rejected_text], [chosen, rejected])
            }
        };
        let same = |tokens: &Vec<u32>| prompt.iter().zip(tokens).take_while(|(prompt, token)| prompt == token).count();
        let before = same(&tokens[0]).min(same(&tokens[1]));
        Ok(Pair { is_cut: before < prompt.len(), prompt: before, tokens, texts })
    }

    /// Returns the rendered text of a conversation, and its tokens.
    fn rendered(
        &self,
        conversation: &Conversation,
        asks_for_answer: bool,
        path: &Path,
        at: At,
    ) -> Result<(String, Vec<u32>), DataError> {
        let (messages, tools) = values(conversation);
        let text = self.render(conversation, (&messages, &tools), asks_for_answer, path, at)?.text;
        let tokens = self.tokenizer.encode_with_offsets(&text, false)?.get_ids().to_vec();
        Ok((text, tokens))
    }

    /// Renders a conversation. Checks that the tokenizer has the special tokens of the template.
    fn render(
        &self,
        conversation: &Conversation,
        (messages, tools): (&[Value], &Value),
        asks_for_answer: bool,
        path: &Path,
        at: At,
    ) -> Result<Rendered, DataError> {
        let template = self.template()?;
        let rendered = template.render(messages, tools, asks_for_answer);
        let rendered = rendered.map_err(|message| refused(template, &message).at(path, at))?;
        self.has_tokens(template, &rendered.text, conversation)?;
        Ok(rendered)
    }

    /// Returns the tokens of a conversation with the generation prompt, which the model continues with an answer.
    pub(super) fn prompt(&self, conversation: &Conversation, path: &Path, at: At) -> Result<Vec<u32>, DataError> {
        Ok(self.rendered(conversation, true, path, at)?.1)
    }

    fn template(&self) -> Result<&Template, DataError> {
        self.template.as_ref().map_err(|message| DataError::Template {
            origin: "data.chat.chat_template".into(),
            message: message.clone(),
            help: "set it to a Jinja template or its file, or put chat_template.jinja beside the tokenizer.json".into(),
        })
    }

    /// Fails if the tokenizer splits a special token of the template, such as `<|im_start|>`.
    fn has_tokens(&self, template: &Template, text: &str, conversation: &Conversation) -> Result<(), DataError> {
        let mut seen = BTreeSet::new();
        for special in specials(text).filter(|special| seen.insert(*special)) {
            let is_given = || {
                let values = conversation.messages.iter().flat_map(|message| message.values());
                values.chain([&conversation.tools]).any(|value| value.to_string().contains(special))
            };
            if self.tokenizer.single(special)?.is_none() && !is_given() {
                let count = self.tokenizer.encode_with_offsets(special, false)?.len();
                return Err(DataError::Template {
                    origin: template.origin.clone(),
                    message: format!(
                        "the template writes the special token `{special}`, but the tokenizer does not know this token and splits it into {}",
                        counted(count, "token", "tokens")
                    ),
                    help: "use the template and the tokenizer of the same model, or add the token to tokenizer.json"
                        .into(),
                });
            }
        }
        Ok(())
    }
}

/// Returns a hash of everything that the tokens of a record depend on, except the `tokenizer.json`. `today` is the
/// date, if the template uses it.
fn key(options: &ChatOptions, template: Option<&str>, files: &ModelFiles, today: Option<String>) -> String {
    // The text of the template is hashed instead of its path. The reaction to excess length does not change the tokens.
    let options =
        ChatOptions { chat_template: None, pretrained: None, excess_length: ExcessLength::Raise, ..options.clone() };
    let special_tokens = files.special_tokens.iter().map(|(name, text)| format!("{name} {text}")).collect::<Vec<_>>();
    let parts = [format!("{options:?}"), format!("{template:?}"), format!("{special_tokens:?}"), format!("{today:?}")];
    hash_of(&parts.each_ref().map(|part| part.as_bytes()))
}

/// Returns the messages and the tools of a conversation as values for a template.
fn values(conversation: &Conversation) -> (Vec<Value>, Value) {
    let messages = conversation.messages.iter().map(Value::from_serialize).collect();
    (messages, Value::from_serialize(&conversation.tools))
}

fn refused(template: &Template, message: &str) -> Problem {
    let help = "correct the conversation, or set `data.chat.chat_template` to a template that accepts it";
    Problem::new(format!("{}: {message}", template.origin), help)
}

/// Returns the parts of a text that look like special tokens: `<|…|>`, `<｜…｜>` and Gemma's turn tokens.
pub(super) fn specials(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices('<').filter_map(|(start, _)| {
        let rest = &text[start..];
        let between = |[open, close]: [&str; 2]| {
            let name = rest.strip_prefix(open)?.split(close).next()?;
            let is_name = !name.contains(|c: char| c.is_whitespace() || matches!(c, '<' | '>'));
            rest.get(..open.len() + name.len() + close.len()).filter(|_| is_name)
        };
        let gemma = ["<start_of_turn>", "<end_of_turn>"].into_iter().find(|token| rest.starts_with(token));
        [["<|", "|>"], ["<｜", "｜>"]].into_iter().find_map(between).or(gemma.map(|token| &rest[..token.len()]))
    })
}

//! Translates the `config.json` of a Hugging Face transformers model into the keys of `model`.
//!
//! Every key that changes the arithmetic is either translated or rejected. Keys known to change nothing are skipped
//! silently; all other keys are returned, so that they are reported as ignored.

mod json;
mod keys;
mod llama;
mod rope;

use serde_json::{Map, Value as Json};

use crate::config::{Config, Gpt2, Llama};
use crate::path::last;
use crate::read::node::Value;
use crate::schema::TYPE;
use json::{Otherwise, node, short};
use keys::{GEMMA3, HARMLESS, OFF, TYPES};

/// A translated `config.json`.
#[derive(Debug, PartialEq)]
pub(crate) struct Translated {
    /// Keys of the section `model`, `type` first; null for a feature that the model does not use.
    pub(crate) keys: Vec<(&'static str, Value)>,
    /// Descriptions of keys that have no effect, although a user may expect one.
    pub(crate) ignored: Vec<String>,
}

/// A rejected key: its name, the reason, and advice.
#[derive(Debug, PartialEq)]
pub(crate) struct Refusal {
    pub(crate) key: String,
    pub(crate) message: String,
    pub(crate) help: Option<String>,
}

/// Maximum number of ignored keys that are listed.
const MAX_LISTED: usize = 10;

/// Translates a `config.json` into the keys of `model`.
///
/// # Errors
/// Every key that makes the model impossible to build.
pub(crate) fn translate(config: &Map<String, Json>) -> Result<Translated, Vec<Refusal>> {
    let mut reader = Reader { config, read: vec![], refusals: vec![], ignored: vec![] };
    let Some(kind) = reader.kind() else { return Err(reader.refusals) };
    let keys = match kind {
        "gpt2" => reader.gpt2(),
        kind => reader.llama(kind),
    };
    reader.reject_unsupported();
    let ignored = reader.ignored();
    if reader.refusals.is_empty() { Ok(Translated { keys, ignored }) } else { Err(reader.refusals) }
}

struct Reader<'c> {
    config: &'c Map<String, Json>,
    /// Keys that the translation has read.
    read: Vec<&'static str>,
    refusals: Vec<Refusal>,
    ignored: Vec<String>,
}

type Keys = Vec<(&'static str, Value)>;

impl<'c> Reader<'c> {
    /// Returns the value of a key; null counts as missing.
    fn get(&mut self, name: &'static str) -> Option<&'c Json> {
        self.read.push(name);
        self.config.get(name).filter(|value| !value.is_null())
    }

    /// Returns the value as written, which the schema checks later, or transformers' default.
    fn value(&mut self, name: &'static str, default: impl Into<Otherwise>) -> Value {
        self.get(name).map_or_else(|| default.into().0, node)
    }

    /// Returns a key of the section `model` that has the same name in `config.json`, and its value.
    fn same(&mut self, path: &'static str, default: impl Into<Otherwise>) -> (&'static str, Value) {
        let name = last(path);
        (name, self.value(name, default))
    }

    /// Returns a list with one entry per layer, and rejects any other value.
    fn per_layer(&mut self, name: &'static str, layers: usize) -> Option<&'c Vec<Json>> {
        let value = self.get(name)?;
        let list = value.as_array().filter(|list| list.len() == layers);
        if list.is_none() {
            self.refuse(name, format!("`{name}` should be a list with an entry for each of {layers} layers"), None);
        }
        list
    }

    fn whole(&mut self, name: &'static str, default: usize) -> usize {
        self.get(name).and_then(Json::as_u64).and_then(|n| usize::try_from(n).ok()).unwrap_or(default)
    }

    fn bool(&mut self, name: &'static str, default: bool) -> bool {
        self.get(name).and_then(Json::as_bool).unwrap_or(default)
    }

    fn refuse(&mut self, key: &str, message: String, help: Option<&str>) {
        self.refusals.push(Refusal { key: key.to_string(), message, help: help.map(String::from) });
    }

    fn not_implemented(&mut self, key: &str, value: &Json, help: Option<&str>) {
        self.refuse(key, format!("`{key}: {}` is not implemented yet", short(value)), help);
    }

    fn kind(&mut self) -> Option<&'static str> {
        let implemented = TYPES.map(|(kind, _)| kind).join(", ");
        let Some(value) = self.get("model_type") else {
            self.refuse(
                "model_type",
                "`model_type` is missing".into(),
                Some(&format!("the supported types are {implemented}")),
            );
            return None;
        };
        let Some((kind, class)) = TYPES.into_iter().find(|(kind, _)| value == kind) else {
            let help = match value.as_str() {
                Some("gemma3") => format!(
                    "this model also reads images, which is not supported; the text-only Gemma 3 type is `{GEMMA3}`, as in google/gemma-3-1b-it"
                ),
                _ => format!("the supported types are {implemented}"),
            };
            self.not_implemented("model_type", value, Some(&help));
            return None;
        };
        // The class without the head has the same weights as the class with a tied head.
        let base = class.replace("LMHeadModel", "Model").replace("ForCausalLM", "Model");
        let classes = self.get("architectures").and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
        if let Some(other) = classes.iter().find(|other| *other != class && **other != *base) {
            self.not_implemented("architectures", other, Some(&format!("the class supported for {kind} is {class}")));
        }
        Some(kind)
    }

    fn gpt2(&mut self) -> Keys {
        // Generic names that transformers treats as aliases of GPT-2's own names.
        for (alias, name) in [
            (Llama::hidden_size, Gpt2::n_embd),
            (Llama::max_position_embeddings, Gpt2::n_positions),
            (Llama::num_attention_heads, Gpt2::n_head),
            (Llama::num_hidden_layers, Gpt2::n_layer),
        ] {
            let (alias, name) = (last(alias), last(name));
            let (other, value) = (self.get(alias), self.get(name));
            if let Some(other) = other
                && value != Some(other)
            {
                let own = value.map_or("not written".to_string(), short);
                let message =
                    format!("`{alias}` is {}, and `{name}`, which has the same meaning, is {own}", short(other));
                self.refuse(alias, message, None);
            }
        }
        let width = self.whole(last(Gpt2::n_embd), 768);
        vec![
            (TYPE, Value::Text("gpt2".into())),
            self.same(Gpt2::vocab_size, 50_257),
            self.same(Gpt2::n_positions, 1024),
            self.same(Gpt2::n_embd, 768),
            self.same(Gpt2::n_layer, 12),
            self.same(Gpt2::n_head, 12),
            self.same(Gpt2::n_inner, width.saturating_mul(4)),
            (
                last(Gpt2::activation_function),
                self.activation(last(Gpt2::activation_function), "gelu_new", &["gelu_new", "gelu_pytorch_tanh"]),
            ),
            self.same(Gpt2::layer_norm_epsilon, 1e-5),
            self.same(Gpt2::initializer_range, 0.02),
            self.same(Gpt2::tie_word_embeddings, true),
            self.same(Gpt2::embd_pdrop, 0.1),
            self.same(Gpt2::resid_pdrop, 0.1),
            self.same(Gpt2::attn_pdrop, 0.1),
        ]
    }

    fn activation(&mut self, name: &'static str, default: &str, implemented: &[&str]) -> Value {
        match self.get(name) {
            None => Value::Text(default.into()),
            Some(value) if implemented.iter().any(|known| value == known) => node(value),
            Some(value) => {
                self.not_implemented(
                    name,
                    value,
                    Some(&format!("the supported value is {}", implemented.join(" or "))),
                );
                Value::Null
            }
        }
    }

    fn reject_unsupported(&mut self) {
        for (name, off) in OFF {
            if self.read.contains(name) {
                continue;
            }
            let Some(value) = self.get(name) else { continue };
            let is_empty = value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty);
            if !is_empty && !off.contains(&value.to_string().as_str()) {
                let help = (*name == Config::quantization_config).then_some(
                    "give the folder of the original weights: the `quantization_config` section of your configuration quantizes them during loading",
                );
                self.not_implemented(name, value, help);
            }
        }
    }

    /// Returns the descriptions of ignored keys, and the unknown keys whose values are neither null nor false.
    fn ignored(&mut self) -> Vec<String> {
        let is_off = |value: &Json| value.is_null() || *value == false;
        let is_unknown = |(name, value): &(&String, &Json)| {
            !is_off(value) && !self.read.contains(&name.as_str()) && !HARMLESS.contains(&name.as_str())
        };
        let unknown: Vec<String> =
            self.config.iter().filter(is_unknown).map(|(name, _)| format!("`{}`", name.escape_debug())).collect();
        let mut ignored = std::mem::take(&mut self.ignored);
        let more = unknown.len().saturating_sub(MAX_LISTED);
        ignored.extend(unknown.into_iter().take(MAX_LISTED));
        if more > 0 {
            ignored.push(format!("{more} more"));
        }
        ignored
    }
}

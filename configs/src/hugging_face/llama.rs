//! Translates Llama, Mistral and Qwen2: one architecture with different defaults, biases and windows.

use serde_json::{Map, Value as Json};

use super::json::{Otherwise, map, node, short};
use super::{Keys, Reader};
use crate::config::{Llama, ROPE_PARAMETERS, ROPE_TYPE as ROPE_TYPE_PATH};
use crate::node::Value;
use crate::schema::TYPE;
use crate::table::last;

const THETA: &str = last(Llama::rope_theta);
const SCALING: &str = last(Llama::rope_scaling);
const WINDOW: &str = last(Llama::sliding_window);
const ROPE_TYPE: &str = last(ROPE_TYPE_PATH);
/// `factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`.
const ROPE: [&str; 4] =
    [last(ROPE_PARAMETERS[0]), last(ROPE_PARAMETERS[1]), last(ROPE_PARAMETERS[2]), last(ROPE_PARAMETERS[3])];

impl Reader<'_> {
    pub(super) fn llama(&mut self, kind: &'static str) -> Keys {
        struct Defaults {
            vocabulary: usize,
            inner: usize,
            kv_heads: Option<usize>,
            positions: usize,
        }
        let defaults = match kind {
            "mistral" => Defaults { vocabulary: 32_000, inner: 14_336, kv_heads: Some(8), positions: 131_072 },
            "qwen2" => Defaults { vocabulary: 151_936, inner: 22_016, kv_heads: Some(32), positions: 32_768 },
            _ => Defaults { vocabulary: 32_000, inner: 11_008, kv_heads: None, positions: 2048 },
        };
        let (width, heads) =
            (self.whole(last(Llama::hidden_size), 4096), self.whole(last(Llama::num_attention_heads), 32));
        // Null means as many key-value heads as query heads. transformers' default applies only to a missing key.
        let is_there = self.config.contains_key(last(Llama::num_key_value_heads));
        let kv_heads = defaults.kv_heads.filter(|_| !is_there).unwrap_or(heads);
        let (rope_theta, rope_scaling) = self.rope(self.config.get(last(Llama::max_position_embeddings)).cloned());
        let mut keys = vec![
            (TYPE, Value::Text("llama".into())),
            self.same(Llama::vocab_size, defaults.vocabulary),
            self.same(Llama::hidden_size, 4096),
            self.same(Llama::intermediate_size, defaults.inner),
            self.same(Llama::num_hidden_layers, 32),
            self.same(Llama::num_attention_heads, 32),
            self.same(Llama::num_key_value_heads, kv_heads),
            self.same(Llama::max_position_embeddings, defaults.positions),
            (THETA, rope_theta),
            (SCALING, rope_scaling),
            (WINDOW, self.window(kind)),
            self.same(Llama::rms_norm_eps, 1e-6),
            self.same(Llama::tie_word_embeddings, false),
            self.same(Llama::initializer_range, 0.02),
            (last(Llama::qkv_bias), Value::Bool(kind == "qwen2")),
            self.activation(Llama::hidden_act, "silu", &["silu", "swish"]),
        ];
        // If the width is not a multiple of the heads, leave the key out. The schema's default and its check of the
        // two sizes then apply.
        let size = if heads > 0 && width.is_multiple_of(heads) { Some(width / heads) } else { None };
        if let Some(size) = self.get(last(Llama::head_dim)).map(node).or(size.map(|size| Otherwise::from(size).0)) {
            keys.push((last(Llama::head_dim), size));
        }
        for name in [Llama::attention_bias, Llama::mlp_bias].map(last) {
            let bias = self.value(name, false);
            if kind != "llama" && bias != Value::Bool(false) {
                self.refuse(
                    name,
                    format!("`{name}` is none of {kind}'s"),
                    Some("its weights would not be those of the class"),
                );
            }
            keys.push((name, bias));
        }
        keys.push(self.same(Llama::attention_dropout, 0.0));
        keys
    }

    /// Returns the sliding window; null is full attention.
    fn window(&mut self, kind: &str) -> Value {
        let window = match self.config.get(WINDOW) {
            None if kind != "llama" => Some(4096.into()),
            written => written.cloned(),
        };
        self.read.push(WINDOW);
        let window = window.filter(|window| !window.is_null());
        let layers = self.whole(last(Llama::num_hidden_layers), 32);
        let first = self.whole("max_window_layers", 28);
        let is_used = match kind {
            "qwen2" => self.bool("use_sliding_window", false),
            "llama" => self.bool("use_sliding_window", window.is_some()),
            _ => self.bool("use_sliding_window", true),
        };
        let window = window.filter(|_| is_used);
        // Number of layers with the window: all for Mistral, those after the first `max_window_layers` for Qwen2,
        // unless `layer_types` lists them.
        let windowed = match self.get("layer_types").and_then(Json::as_array) {
            Some(types) if kind != "mistral" => {
                if let Some(other) = types.iter().find(|t| *t != "full_attention" && *t != "sliding_attention") {
                    self.not_implemented("layer_types", other, None);
                }
                types.iter().filter(|t| *t == "sliding_attention").count()
            }
            _ if kind == "qwen2" => layers.saturating_sub(first),
            _ => layers,
        };
        match window {
            None => Value::Null,
            Some(_) if windowed == 0 => Value::Null,
            Some(window) if kind == "llama" => {
                self.not_implemented(WINDOW, &window, Some("the class of llama has none; of mistral it has"));
                Value::Null
            }
            Some(window) if windowed >= layers => node(&window),
            Some(window) => {
                let message = format!(
                    "`sliding_window: {}` in {windowed} of {layers} layers is not implemented yet",
                    short(&window)
                );
                self.refuse(WINDOW, message, Some("implemented is a window in all layers, or in none"));
                Value::Null
            }
        }
    }

    /// Returns base and scaling of the rotary embedding: `rope_parameters` since transformers 5, `rope_theta` and
    /// `rope_scaling` before.
    fn rope(&mut self, positions: Option<Json>) -> (Value, Value) {
        let (before, theta) = (self.get(ROPE[3]), self.get(THETA));
        let scaling = self.get(SCALING).or(self.get("rope_parameters"));
        let empty = Map::new();
        let Some(parameters) = scaling.map_or(Some(&empty), Json::as_object) else {
            self.refuse(SCALING, "it should be a section of keys".into(), None);
            return (Value::Null, Value::Null);
        };
        let theta = parameters.get(THETA).or(theta).map_or(Value::Float(10_000.0), node);
        let kind = parameters.get(ROPE_TYPE).or(parameters.get(TYPE)).and_then(Json::as_str).unwrap_or("default");
        let used: &[&str] = match kind {
            "default" => return (theta, Value::Null),
            "linear" => &ROPE[..1],
            "llama3" => &ROPE,
            _ => {
                let message = format!("`rope_type: {}` is not implemented yet", short(&kind.into()));
                self.refuse(SCALING, message, Some("implemented are default, linear and llama3"));
                return (theta, Value::Null);
            }
        };
        let mut entries = vec![(ROPE_TYPE, Value::Text(kind.into()))];
        for name in used {
            let value = match (*name, before) {
                (name, Some(before)) if name == ROPE[3] => Some(before),
                (name, None) if name == ROPE[3] => parameters.get(name).or(positions.as_ref()),
                (name, _) => parameters.get(name),
            };
            entries.extend(value.map(|value| (*name, node(value))));
        }
        let beside = [ROPE_TYPE, TYPE, THETA, "partial_rotary_factor"];
        for (name, value) in parameters {
            let is_one = name == "partial_rotary_factor" && value.as_f64() == Some(1.0);
            let is_known = used.contains(&name.as_str()) || beside.contains(&name.as_str()) && name != beside[3];
            if !value.is_null() && !is_known && !is_one {
                let message = format!("`{name}: {}` of the rotary embedding is not implemented yet", short(value));
                self.refuse(SCALING, message, None);
            }
        }
        (theta, map(entries))
    }
}

//! Translates Llama, Mistral and Qwen2: one architecture with different defaults, biases and windows.

use serde_json::{Map, Value as Json};

use super::json::{Otherwise, map, node, short};
use super::{Keys, Reader};
use crate::node::Value;

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
        let (width, heads) = (self.whole("hidden_size", 4096), self.whole("num_attention_heads", 32));
        // Null means as many key-value heads as query heads. transformers' default applies only to a missing key.
        let is_there = self.config.contains_key("num_key_value_heads");
        let kv_heads = defaults.kv_heads.filter(|_| !is_there).unwrap_or(heads);
        let (rope_theta, rope_scaling) = self.rope(self.config.get("max_position_embeddings").cloned());
        let mut keys = vec![
            ("type", Value::Text("llama".into())),
            ("vocab_size", self.value("vocab_size", defaults.vocabulary)),
            ("hidden_size", self.value("hidden_size", 4096)),
            ("intermediate_size", self.value("intermediate_size", defaults.inner)),
            ("num_hidden_layers", self.value("num_hidden_layers", 32)),
            ("num_attention_heads", self.value("num_attention_heads", 32)),
            ("num_key_value_heads", self.value("num_key_value_heads", kv_heads)),
            ("max_position_embeddings", self.value("max_position_embeddings", defaults.positions)),
            ("rope_theta", rope_theta),
            ("rope_scaling", rope_scaling),
            ("sliding_window", self.window(kind)),
            ("rms_norm_eps", self.value("rms_norm_eps", 1e-6)),
            ("tie_word_embeddings", self.value("tie_word_embeddings", false)),
            ("initializer_range", self.value("initializer_range", 0.02)),
            ("qkv_bias", Value::Bool(kind == "qwen2")),
            ("hidden_act", self.activation("hidden_act", "silu", &["silu", "swish"])),
        ];
        // If the width is not a multiple of the heads, leave the key out. The schema's default and its check of the
        // two sizes then apply.
        let size = if heads > 0 && width.is_multiple_of(heads) { Some(width / heads) } else { None };
        if let Some(size) = self.get("head_dim").map(node).or(size.map(|size| Otherwise::from(size).0)) {
            keys.push(("head_dim", size));
        }
        for name in ["attention_bias", "mlp_bias"] {
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
        let probability = self.get("attention_dropout").map_or(Some(0.0), Json::as_f64);
        self.dropout("attention_dropout", probability);
        keys
    }

    /// Returns the sliding window; null is full attention.
    fn window(&mut self, kind: &str) -> Value {
        let window = match self.config.get("sliding_window") {
            None if kind != "llama" => Some(4096.into()),
            written => written.cloned(),
        };
        self.read.push("sliding_window");
        let window = window.filter(|window| !window.is_null());
        let layers = self.whole("num_hidden_layers", 32);
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
                self.not_implemented("sliding_window", &window, Some("the class of llama has none; of mistral it has"));
                Value::Null
            }
            Some(window) if windowed >= layers => node(&window),
            Some(window) => {
                let message = format!(
                    "`sliding_window: {}` in {windowed} of {layers} layers is not implemented yet",
                    short(&window)
                );
                self.refuse("sliding_window", message, Some("implemented is a window in all layers, or in none"));
                Value::Null
            }
        }
    }

    /// Returns base and scaling of the rotary embedding: `rope_parameters` since transformers 5, `rope_theta` and
    /// `rope_scaling` before.
    fn rope(&mut self, positions: Option<Json>) -> (Value, Value) {
        let (before, theta) = (self.get("original_max_position_embeddings"), self.get("rope_theta"));
        let scaling = self.get("rope_scaling").or(self.get("rope_parameters"));
        let empty = Map::new();
        let Some(parameters) = scaling.map_or(Some(&empty), Json::as_object) else {
            self.refuse("rope_scaling", "it should be a section of keys".into(), None);
            return (Value::Null, Value::Null);
        };
        let theta = parameters.get("rope_theta").or(theta).map_or(Value::Float(10_000.0), node);
        let kind = parameters.get("rope_type").or(parameters.get("type")).and_then(Json::as_str).unwrap_or("default");
        let used: &[&str] = match kind {
            "default" => return (theta, Value::Null),
            "linear" => &["factor"],
            "llama3" => &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
            _ => {
                let message = format!("`rope_type: {}` is not implemented yet", short(&kind.into()));
                self.refuse("rope_scaling", message, Some("implemented are default, linear and llama3"));
                return (theta, Value::Null);
            }
        };
        let mut entries = vec![("rope_type", Value::Text(kind.into()))];
        for name in used {
            let value = match (*name, before) {
                ("original_max_position_embeddings", Some(before)) => Some(before),
                ("original_max_position_embeddings", None) => parameters.get(*name).or(positions.as_ref()),
                _ => parameters.get(*name),
            };
            entries.extend(value.map(|value| (*name, node(value))));
        }
        let beside = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
        for (name, value) in parameters {
            let is_one = name == "partial_rotary_factor" && value.as_f64() == Some(1.0);
            let is_known = used.contains(&name.as_str()) || beside.contains(&name.as_str()) && name != beside[3];
            if !value.is_null() && !is_known && !is_one {
                let message = format!("`{name}: {}` of the rotary embedding is not implemented yet", short(value));
                self.refuse("rope_scaling", message, None);
            }
        }
        (theta, map(entries))
    }
}

//! Translates Llama and its relatives: one architecture with different defaults, biases, norms and windows.

use super::json::{Otherwise, list, node};
use super::keys::{GEMMA3, PHI3};
use super::rope::Rope;
use super::{Keys, Reader};
use crate::config::{FULL_ATTENTION, Llama, MAX_LAYERS, SLIDING_ATTENTION};
use crate::path::last;
use crate::read::node::Value;
use crate::schema::TYPE;

const WINDOW: &str = last(Llama::sliding_window);
const LAYER_TYPES: &str = last(Llama::layer_types);
/// The gates that are implemented.
const GATES: &[&str] = &["silu", "swish", "gelu_pytorch_tanh", "gelu_new"];

/// transformers' defaults of a type.
struct Defaults {
    vocabulary: usize,
    width: usize,
    inner: usize,
    layers: usize,
    heads: usize,
    kv_heads: Option<usize>,
    /// Width ÷ heads if `None`.
    head_dim: Option<usize>,
    positions: usize,
    theta: f64,
    eps: f64,
    tied: bool,
}

impl Defaults {
    fn of(kind: &str) -> Self {
        let llama = Self {
            vocabulary: 32_000,
            width: 4096,
            inner: 11_008,
            layers: 32,
            heads: 32,
            kv_heads: None,
            head_dim: None,
            positions: 2048,
            theta: 10_000.0,
            eps: 1e-6,
            tied: false,
        };
        let qwen2 = Self { vocabulary: 151_936, inner: 22_016, kv_heads: Some(32), positions: 32_768, ..llama };
        match kind {
            "mistral" => Self { inner: 14_336, kv_heads: Some(8), positions: 131_072, ..llama },
            "qwen2" => qwen2,
            "qwen3" => Self { head_dim: Some(128), ..qwen2 },
            "smollm3" => Self {
                vocabulary: 128_256,
                width: 2048,
                layers: 36,
                heads: 16,
                kv_heads: Some(4),
                positions: 32_768,
                theta: 2e6,
                tied: true,
                ..llama
            },
            GEMMA3 => Self {
                vocabulary: 262_208,
                width: 2304,
                inner: 9216,
                layers: 26,
                heads: 8,
                kv_heads: Some(4),
                head_dim: Some(256),
                positions: 131_072,
                theta: 1e6,
                tied: true,
                ..llama
            },
            PHI3 => Self { vocabulary: 32_064, width: 3072, inner: 8192, positions: 4096, eps: 1e-5, ..llama },
            _ => llama,
        }
    }
}

impl Reader<'_> {
    pub(super) fn llama(&mut self, kind: &'static str) -> Keys {
        let defaults = Defaults::of(kind);
        let (width, heads) = (
            self.whole(last(Llama::hidden_size), defaults.width),
            self.whole(last(Llama::num_attention_heads), defaults.heads),
        );
        // The schema rejects a larger number. The limit keeps the lists with an entry per layer short until then.
        let layers = self.whole(last(Llama::num_hidden_layers), defaults.layers).min(MAX_LAYERS);
        if kind == PHI3 {
            // `auto_map` names code that transformers' own class has replaced.
            self.read.push("auto_map");
        }
        // Null means as many key-value heads as query heads. transformers' default applies only to a missing key.
        let is_there = self.config.contains_key(last(Llama::num_key_value_heads));
        let kv_heads = defaults.kv_heads.filter(|_| !is_there).unwrap_or(heads);
        let Rope { theta, scaling, partial, local_theta } = self.rope(kind, defaults.positions, defaults.theta);
        let no_rope_layers = if kind == "smollm3" { self.no_rope_layers(layers) } else { vec![] };
        let (window, layer_types) = self.window(kind, layers, &no_rope_layers);
        let mut keys = vec![
            (TYPE, Value::Text("llama".into())),
            self.same(Llama::vocab_size, defaults.vocabulary),
            self.same(Llama::hidden_size, defaults.width),
            self.same(Llama::intermediate_size, defaults.inner),
            self.same(Llama::num_hidden_layers, defaults.layers),
            self.same(Llama::num_attention_heads, defaults.heads),
            self.same(Llama::num_key_value_heads, kv_heads),
            self.same(Llama::max_position_embeddings, defaults.positions),
            (last(Llama::rope_theta), theta),
            (last(Llama::rope_scaling), scaling),
            (last(Llama::partial_rotary_factor), partial),
            // Without a sliding window, no layer uses this base.
            (last(Llama::rope_local_base_freq), if window == Value::Null { Value::Null } else { local_theta }),
            (WINDOW, window),
            (last(Llama::layer_types), layer_types),
            (last(Llama::no_rope_layers), list(no_rope_layers)),
            (last(Llama::qk_norm), Value::Bool(kind == "qwen3" || kind == GEMMA3)),
            self.same(Llama::rms_norm_eps, defaults.eps),
            self.same(Llama::tie_word_embeddings, defaults.tied),
            self.same(Llama::initializer_range, 0.02),
            (last(Llama::qkv_bias), Value::Bool(kind == "qwen2")),
            (last(Llama::fused_projections), Value::Bool(kind == PHI3)),
        ];
        keys.extend([Llama::norm_unit_offset, Llama::post_norms, Llama::scale_embeddings].map(|path| {
            let is_used = Value::Bool(kind == GEMMA3);
            (last(path), is_used)
        }));
        let hidden_act = last(Llama::hidden_act);
        match kind {
            GEMMA3 => {
                keys.push((hidden_act, self.activation("hidden_activation", "gelu_pytorch_tanh", GATES)));
                keys.push(self.same(Llama::query_pre_attn_scalar, 256));
            }
            _ => {
                keys.push((hidden_act, self.activation(hidden_act, "silu", GATES)));
                keys.push((last(Llama::query_pre_attn_scalar), Value::Null));
            }
        }
        // If the width is not a multiple of the heads, leave the key out. The schema's default and its check of the
        // two sizes then apply.
        let size = if heads > 0 && width.is_multiple_of(heads) { Some(width / heads) } else { None };
        let size = defaults.head_dim.or(size);
        if let Some(size) = self.get(last(Llama::head_dim)).map(node).or(size.map(|size| Otherwise::from(size).0)) {
            keys.push((last(Llama::head_dim), size));
        }
        for name in [Llama::attention_bias, Llama::mlp_bias].map(last) {
            let bias = self.value(name, false);
            let has = match kind {
                "llama" | "smollm3" => true,
                "qwen3" | GEMMA3 => name == last(Llama::attention_bias),
                _ => false,
            };
            if !has && bias != Value::Bool(false) {
                self.refuse(
                    name,
                    format!("`{name}` is not a key of {kind}"),
                    Some("the Transformers class has no such biases, so the weights would not match"),
                );
            }
            keys.push((name, bias));
        }
        keys.push(self.same(Llama::attention_dropout, 0.0));
        keys
    }

    /// Returns the sliding window, null for full attention, and the kind of each layer if the layers differ.
    fn window(&mut self, kind: &str, layers: usize, no_rope_layers: &[Value]) -> (Value, Value) {
        let window = match self.config.get(WINDOW) {
            None if !["llama", "smollm3", PHI3].contains(&kind) => Some(4096.into()),
            written => written.cloned(),
        };
        self.read.push(WINDOW);
        let window = window.filter(|window| !window.is_null());
        let first = self.whole("max_window_layers", 28);
        let pattern = if kind == GEMMA3 { self.whole("sliding_window_pattern", 6) } else { 1 };
        if pattern == 0 {
            self.refuse("sliding_window_pattern", "`sliding_window_pattern` should be at least 1".into(), None);
        }
        let is_used = match kind {
            "qwen2" | "qwen3" | "smollm3" => self.bool("use_sliding_window", false),
            "llama" => self.bool("use_sliding_window", window.is_some()),
            GEMMA3 | PHI3 => true,
            _ => self.bool("use_sliding_window", true),
        };
        let window = window.filter(|_| is_used);
        // Whether each layer has the window: the classes of llama, mistral and phi3 do not read `layer_types`.
        let listed = match kind {
            "llama" | "mistral" | PHI3 => None,
            _ => self.per_layer(LAYER_TYPES, layers),
        };
        let slides: Vec<bool> = match listed {
            Some(types) => {
                if let Some(other) = types.iter().find(|t| *t != FULL_ATTENTION && *t != SLIDING_ATTENTION) {
                    self.not_implemented(LAYER_TYPES, other, None);
                }
                types.iter().map(|t| t == SLIDING_ATTENTION).collect()
            }
            None => (0..layers)
                .map(|layer| match kind {
                    "qwen2" | "qwen3" => layer >= first,
                    "smollm3" => no_rope_layers.get(layer) == Some(&Value::Int(0)),
                    // Every `pattern`th layer attends to all positions.
                    GEMMA3 => (layer + 1) % pattern.max(1) != 0,
                    _ => true,
                })
                .collect(),
        };
        let (all, none) = (Value::List(vec![]), (Value::Null, Value::List(vec![])));
        match window {
            None if kind == GEMMA3 && slides.contains(&true) => {
                self.refuse(WINDOW, format!("`{SLIDING_ATTENTION}` layers need `{WINDOW}`"), None);
                none
            }
            None => none,
            Some(window) if kind == "llama" => {
                self.not_implemented(
                    WINDOW,
                    &window,
                    Some("the Transformers class `llama` has no sliding window; the class `mistral` has one"),
                );
                none
            }
            Some(_) if !slides.contains(&true) => none,
            Some(window) if !slides.contains(&false) => (node(&window), all),
            Some(window) => {
                let name = |slides: &bool| if *slides { SLIDING_ATTENTION } else { FULL_ATTENTION };
                (node(&window), list(slides.iter().map(|slides| Value::Text(name(slides).into())).collect()))
            }
        }
    }

    /// Returns 1 for each layer of SmolLM3 with rotary embedding and 0 for each without; empty if all layers have it.
    fn no_rope_layers(&mut self, layers: usize) -> Vec<Value> {
        let interval = self.whole("no_rope_layer_interval", 4);
        let rotates: Vec<Value> = match self.per_layer(last(Llama::no_rope_layers), layers) {
            Some(written) => written.iter().map(node).collect(),
            None => (1..=layers).map(|layer| Value::Int(i128::from(interval == 0 || layer % interval != 0))).collect(),
        };
        if rotates.iter().all(|rotates| *rotates == Value::Int(1)) { vec![] } else { rotates }
    }
}

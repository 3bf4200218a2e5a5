//! `model`: the architectures that a configuration can name, with Hugging Face's names and defaults.

use serde::Serialize;

use crate::choice::choice;
use crate::config::RopeScaling;
use crate::node::At;
use crate::reader::{Reader, Resolver};

/// A model that the engine builds itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Model {
    /// GPT-2 (Radford et al. 2019).
    Gpt2(Gpt2),
    /// Llama (Touvron et al. 2023), with grouped-query attention.
    Llama(Llama),
    /// Fully connected layers.
    Mlp(Mlp),
}

/// GPT-2, with the names of Hugging Face's `GPT2Config`. Dropout probabilities default to 0 instead of 0.1.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gpt2 {
    /// Hugging Face folder with the remaining keys and the initial weights; `None` draws the weights from the seed.
    pub pretrained: Option<String>,
    /// Vocabulary size; `None` is `auto`: the tokenizer's.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub vocab_size: Option<usize>,
    /// Maximum sequence length.
    pub n_positions: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Attention heads; must divide `n_embd`.
    pub n_head: usize,
    /// Hidden width of the feed-forward part; 4·`n_embd` if not given.
    pub n_inner: usize,
    /// Non-linearity of the feed-forward part.
    pub activation_function: Activation,
    /// Added to the variance in layer normalisation.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Share the weights of the embedding with the head.
    pub tie_word_embeddings: bool,
    /// Rows of a micro-batch per tile of the feed-forward part, a multiple of 64; `None` computes all rows at once.
    pub tiled_mlp_rows: Option<usize>,
    /// Dropout probability after the embedding.
    pub embd_pdrop: f64,
    /// Dropout probability before the residual additions.
    pub resid_pdrop: f64,
    /// Dropout probability of attention weights.
    pub attn_pdrop: f64,
}

/// Llama, with the names of Hugging Face's `LlamaConfig`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Llama {
    /// Hugging Face folder with the remaining keys and the initial weights; `None` draws the weights from the seed.
    pub pretrained: Option<String>,
    /// Vocabulary size; `None` is `auto`: the tokenizer's.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub vocab_size: Option<usize>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Hidden width of the feed-forward part.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Key and value heads; must divide `num_attention_heads`, which is the default.
    pub num_key_value_heads: usize,
    /// Width of a head, an even number; `hidden_size / num_attention_heads` if not given.
    pub head_dim: usize,
    /// Maximum sequence length.
    pub max_position_embeddings: usize,
    /// Base of the rotary embedding's frequencies.
    pub rope_theta: f64,
    /// Scaling of the frequencies for longer sequences; `None` does not scale them.
    pub rope_scaling: Option<RopeScaling>,
    /// Number of positions that a position attends to, including itself; `None` attends to all earlier positions.
    pub sliding_window: Option<usize>,
    /// Added to the mean square in RMS normalisation.
    pub rms_norm_eps: f64,
    /// Share the weights of the embedding with the head.
    pub tie_word_embeddings: bool,
    /// Rows of a micro-batch per tile of the feed-forward part, a multiple of 64; `None` computes all rows at once.
    pub tiled_mlp_rows: Option<usize>,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Biases in the query, key and value projections.
    pub qkv_bias: bool,
    /// Biases in all four attention projections.
    pub attention_bias: bool,
    /// Biases in the three feed-forward projections.
    pub mlp_bias: bool,
    /// Non-linearity of the gate.
    pub hidden_act: Activation,
}

/// Fully connected layers with a non-linearity between them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mlp {
    /// Width of the input.
    pub input_size: usize,
    /// Widths of the hidden layers; may be empty.
    pub hidden_sizes: Vec<usize>,
    /// Width of the output.
    pub output_size: usize,
    /// Non-linearity between layers.
    pub activation: Activation,
}

choice! {
    /// A non-linearity. Each model accepts a subset.
    pub enum Activation {
        /// max(x, 0).
        Relu = "relu",
        /// x·Φ(x), with the error function.
        Gelu = "gelu",
        /// GELU's tanh approximation, which GPT-2 was trained with.
        GeluNew = "gelu_new" | "gelu_pytorch_tanh",
        /// x·σ(x).
        Silu = "silu" | "swish",
    }
}

impl Model {
    /// Reads the section. Returns `None` if it is missing.
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Option<Self> {
        if !resolver.has_section("model") {
            return None;
        }
        let (kind, mut keys) = resolver.variant("model", "");
        match kind {
            "gpt2" => {
                let model = Gpt2::read(&mut keys);
                divides(resolver, ("n_head", model.n_head), ("n_embd", model.n_embd));
                Some(Self::Gpt2(model))
            }
            "llama" => {
                let model = Llama::read(&mut keys);
                model.check(resolver);
                Some(Self::Llama(model))
            }
            "mlp" => Some(Self::Mlp(Mlp {
                input_size: keys.int("input_size"),
                hidden_sizes: keys.ints("hidden_sizes"),
                output_size: keys.int("output_size"),
                activation: keys.choice("activation", Activation::Relu),
            })),
            // The schema's check has already reported the type.
            _ => None,
        }
    }

    /// Returns the rows per tile of the feed-forward part, if it is computed in tiles.
    pub fn tiled_mlp_rows(&self) -> Option<usize> {
        match self {
            Self::Gpt2(model) => model.tiled_mlp_rows,
            Self::Llama(model) => model.tiled_mlp_rows,
            Self::Mlp(_) => None,
        }
    }

    /// Returns the Hugging Face folder with the initial weights.
    pub fn pretrained(&self) -> Option<&str> {
        match self {
            Self::Gpt2(model) => model.pretrained.as_deref(),
            Self::Llama(model) => model.pretrained.as_deref(),
            Self::Mlp(_) => None,
        }
    }

    /// Returns the same model without its folder.
    #[must_use]
    pub fn without_pretrained(mut self) -> Self {
        match &mut self {
            Self::Gpt2(model) => model.pretrained = None,
            Self::Llama(model) => model.pretrained = None,
            Self::Mlp(_) => {}
        }
        self
    }

    /// Returns the maximum sequence length; `None` for a model that does not read sequences.
    pub fn max_sequence_length(&self) -> Option<usize> {
        match self {
            Self::Gpt2(model) => Some(model.n_positions),
            Self::Llama(model) => Some(model.max_position_embeddings),
            Self::Mlp(_) => None,
        }
    }

    /// Returns the width of the residual stream; `None` for an MLP.
    pub fn width(&self) -> Option<usize> {
        match self {
            Self::Gpt2(model) => Some(model.n_embd),
            Self::Llama(model) => Some(model.hidden_size),
            Self::Mlp(_) => None,
        }
    }
}

impl Gpt2 {
    fn read(keys: &mut Reader<'_, '_>) -> Self {
        let n_embd = keys.int("n_embd");
        Self {
            pretrained: keys.optional_text("pretrained"),
            vocab_size: keys.optional_int("vocab_size"),
            n_positions: keys.int("n_positions"),
            n_embd,
            n_layer: keys.int("n_layer"),
            n_head: keys.int("n_head"),
            n_inner: keys.optional_int("n_inner").unwrap_or(4 * n_embd),
            activation_function: keys.choice("activation_function", Activation::GeluNew),
            layer_norm_epsilon: keys.float("layer_norm_epsilon"),
            initializer_range: keys.float("initializer_range"),
            tie_word_embeddings: keys.bool("tie_word_embeddings"),
            tiled_mlp_rows: keys.optional_int("tiled_mlp_rows"),
            embd_pdrop: 0.0,
            resid_pdrop: 0.0,
            attn_pdrop: 0.0,
        }
    }
}

impl Llama {
    fn read(keys: &mut Reader<'_, '_>) -> Self {
        let hidden_size = keys.int("hidden_size");
        let num_attention_heads = keys.int("num_attention_heads");
        Self {
            pretrained: keys.optional_text("pretrained"),
            vocab_size: keys.optional_int("vocab_size"),
            hidden_size,
            intermediate_size: keys.int("intermediate_size"),
            num_hidden_layers: keys.int("num_hidden_layers"),
            num_attention_heads,
            num_key_value_heads: keys.optional_int("num_key_value_heads").unwrap_or(num_attention_heads),
            head_dim: keys.optional_int("head_dim").unwrap_or(hidden_size / num_attention_heads),
            max_position_embeddings: keys.int("max_position_embeddings"),
            rope_theta: keys.float("rope_theta"),
            rope_scaling: RopeScaling::read(keys),
            sliding_window: keys.optional_int("sliding_window"),
            rms_norm_eps: keys.float("rms_norm_eps"),
            tie_word_embeddings: keys.bool("tie_word_embeddings"),
            tiled_mlp_rows: keys.optional_int("tiled_mlp_rows"),
            initializer_range: keys.float("initializer_range"),
            qkv_bias: keys.bool("qkv_bias"),
            attention_bias: keys.bool("attention_bias"),
            mlp_bias: keys.bool("mlp_bias"),
            hidden_act: keys.choice("hidden_act", Activation::Silu),
        }
    }

    fn check(&self, resolver: &mut Resolver<'_>) {
        let heads = ("num_attention_heads", self.num_attention_heads);
        divides(resolver, ("num_key_value_heads", self.num_key_value_heads), heads);
        if resolver.at("model.head_dim") == At::Default {
            divides(resolver, heads, ("hidden_size", self.hidden_size));
        }
        if resolver.has_section("model.rope_scaling") {
            RopeScaling::check(self.rope_scaling, resolver);
        }
        if self.qkv_bias && self.attention_bias {
            let message = "`attention_bias` has the biases of `qkv_bias` among its own".to_string();
            let help = Some("keep one of the two: Llama's is attention_bias, Qwen2's is qkv_bias".to_string());
            resolver.contradiction(&["model.qkv_bias", "model.attention_bias"], message, help);
        }
        if !self.head_dim.is_multiple_of(2) {
            let message =
                format!("the width of a head is {}; rotary embedding turns pairs, so it must be even", self.head_dim);
            resolver.contradiction(
                &["model.head_dim", "model.hidden_size", "model.num_attention_heads"],
                message,
                None,
            );
        }
    }
}

fn divides(resolver: &mut Resolver<'_>, part: (&str, usize), whole: (&str, usize)) {
    if !whole.1.is_multiple_of(part.1) {
        let message = format!("{} {} does not divide {} {}", part.0, part.1, whole.0, whole.1);
        let paths = [format!("model.{}", part.0), format!("model.{}", whole.0)];
        resolver.contradiction(&paths.each_ref().map(String::as_str), message, None);
    }
}

//! `model`: the architectures that a configuration can name, with Hugging Face's names and defaults.

use serde::Serialize;

use crate::choice::choice;

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

/// GPT-2, with the names of Hugging Face's `GPT2Config`. The dropouts' default is 0 here, not 0.1.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gpt2 {
    /// Number of tokens; `None` is `auto`: the tokenizer's.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub vocab_size: Option<usize>,
    /// Longest sequence.
    pub n_positions: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Attention heads; divides `n_embd`.
    pub n_head: usize,
    /// Width inside the feed-forward part; 4·n_embd when not given.
    pub n_inner: usize,
    /// Non-linearity of the feed-forward part.
    pub activation_function: Activation,
    /// Added to the variance in layer norm.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// The head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Dropout after the embedding.
    pub embd_pdrop: f64,
    /// Dropout before the residual additions.
    pub resid_pdrop: f64,
    /// Dropout of attention weights.
    pub attn_pdrop: f64,
}

/// Llama, with the names of Hugging Face's `LlamaConfig`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Llama {
    /// Number of tokens; `None` is `auto`: the tokenizer's.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub vocab_size: Option<usize>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward part.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Heads of keys and values; divides `num_attention_heads`, and is equal to it when not given.
    pub num_key_value_heads: usize,
    /// Width of a head; hidden_size / num_attention_heads when not given. Even.
    pub head_dim: usize,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Base of the rotary embedding's frequencies.
    pub rope_theta: f64,
    /// Added to the mean square in RMS norm.
    pub rms_norm_eps: f64,
    /// The head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Biases in the attention's projections.
    pub attention_bias: bool,
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
    /// A non-linearity. Each model accepts some of them.
    pub enum Activation {
        /// max(x, 0).
        Relu = "relu",
        /// x·Φ(x), with the error function.
        Gelu = "gelu",
        /// GELU's tanh approximation, as GPT-2 was trained with.
        GeluNew = "gelu_new" | "gelu_pytorch_tanh",
        /// x·σ(x).
        Silu = "silu" | "swish",
    }
}

//! `model`: the architectures that a configuration can name, with Hugging Face's names and defaults.

pub(super) mod mup;
pub(super) mod rope;

use serde::Serialize;

use crate::config::RopeScaling;
use crate::path::{last, path};
use crate::read::node::At;
use crate::read::reader::{Find, Reader, Resolver, read_as};
use crate::schema::*;
use crate::table::section;
use crate::value::Leaf;
pub use zero_model_options::Activation;

/// A model that the engine builds itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "a configuration has one")]
pub enum Model {
    /// GPT-2 (Radford et al. 2019).
    Gpt2(Gpt2),
    /// Llama (Touvron et al. 2023), with grouped-query attention.
    Llama(Llama),
    /// Fully connected layers.
    Mlp(Mlp),
}

section! {
    /// GPT-2, with the names of Hugging Face's `GPT2Config`. Dropout probabilities default to 0 instead of 0.1.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Gpt2(keys) in "model" {
        /// Hugging Face folder with the remaining keys and the initial weights; `None` draws the weights from the seed.
        pub pretrained: Option<String> = key(Kind::Path, "null", PRETRAINED);
        /// Vocabulary size; `None` is `auto`, the size of the tokenizer's vocabulary.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub vocab_size: Option<usize> = engine(VOCABULARY, "50257", "Vocabulary size; auto: the tokenizer's");
        pub n_positions: usize = key(POSITIONS, "1024", "Maximum sequence length");
        pub n_embd: usize = key(WIDTH, "768", "Width of the residual stream");
        pub n_layer: usize = key(DEPTH, "12", "Number of blocks");
        pub n_head: usize = key(WIDTH, "12", "Number of attention heads; must divide n_embd");
        pub n_inner: usize = key(WIDTH, "= 4 · n_embd", "Width inside the feed-forward network") [else 4 * n_embd];
        pub activation_function: Activation = key(Kind::Choice { names: &["gelu_new", "gelu_pytorch_tanh"], later: &["gelu", "relu", "silu"] }, "gelu_new", "Activation function of the feed-forward network");
        pub layer_norm_epsilon: f64 = key(POSITIVE, "1.0e-5", "Added to the variance in layer norm");
        pub initializer_range: f64 = key(NON_NEGATIVE, "0.02", "Standard deviation of the initial weights");
        pub tie_word_embeddings: bool = key(Kind::Bool, "true", "The head shares the embedding's weights");
        /// Rows of a micro-batch per tile of the feed-forward part, a multiple of 64; `None` computes all rows at once.
        pub tiled_mlp_rows: Option<usize> = key(TILES, "null", TILED);
        pub embd_pdrop: f64 = key(Kind::Float(FRACTION), "0.0", "Dropout after the embeddings; a pretrained model takes its default from config.json (transformers' default is 0.1)");
        pub resid_pdrop: f64 = key(Kind::Float(FRACTION), "0.0", "Dropout at the end of each residual branch; a pretrained model takes its default from config.json (transformers' default is 0.1)");
        pub attn_pdrop: f64 = key(Kind::Float(FRACTION), "0.0", "Dropout of attention probabilities, on the CPU only; a pretrained model takes its default from config.json (transformers' default is 0.1)");
    }
}

section! {
    /// Llama, with the names of Hugging Face's `LlamaConfig`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Llama(keys) in "model" {
        /// Hugging Face folder with the remaining keys and the initial weights; `None` draws the weights from the seed.
        pub pretrained: Option<String> = key(Kind::Path, "null", PRETRAINED);
        /// Vocabulary size; `None` is `auto`, the size of the tokenizer's vocabulary.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub vocab_size: Option<usize> = engine(VOCABULARY, "32000", "Vocabulary size; auto: the tokenizer's");
        pub hidden_size: usize = key(WIDTH, "4096", "Width of the residual stream");
        pub intermediate_size: usize = key(WIDTH, "11008", "Width inside the feed-forward network");
        pub num_hidden_layers: usize = key(DEPTH, "32", "Number of blocks");
        pub num_attention_heads: usize = key(WIDTH, "32", "Number of attention heads");
        pub num_key_value_heads: usize = key(WIDTH, "= num_attention_heads", "Number of key-value heads; must divide num_attention_heads") [else num_attention_heads];
        pub head_dim: usize = key(WIDTH, "= hidden_size / num_attention_heads", "Width of a head; must be even") [else hidden_size / num_attention_heads];
        pub max_position_embeddings: usize = key(POSITIONS, "2048", "Maximum sequence length");
        pub rope_theta: f64 = key(POSITIVE, "10000.0", "Base of the rotary embedding's frequencies");
        pub rope_scaling: Option<RopeScaling> = section(&rope::Written::SECTION, "Scaling of the rotary embedding frequencies for sequences longer than those in the original training; null: no scaling");
        pub sliding_window: Option<usize> = key(POSITIONS, "null", "Number of positions that each position attends to, including itself, as in Mistral; null: itself and all earlier positions");
        pub layer_types: Vec<String> = key(Kind::Texts, "[]", "`full_attention` or `sliding_attention` for each layer, if only some layers have `sliding_window`; []: all layers have it");
        pub no_rope_layers: Vec<usize> = key(Kind::Ints { min: 0, max: 1 }, "[]", "For each layer, 1 to apply the rotary embedding or 0 to omit it, as in SmolLM3; []: 1 for all layers");
        pub qk_norm: bool = key(Kind::Bool, "false", "RMS norms of each head's queries and keys before the rotary embedding, as in Qwen3");
        pub query_pre_attn_scalar: Option<f64> = key(POSITIVE, "null", "Attention scores are divided by the square root of this number, as in Gemma 3; null: of head_dim");
        pub rope_local_base_freq: Option<f64> = key(POSITIVE, "null", "Base of the rotary frequencies in `sliding_attention` layers, which ignore rope_scaling, as in Gemma 3; null: the frequencies of the other layers");
        pub partial_rotary_factor: f64 = key(Kind::Float(Range { min: 0.0, max: 1.0, above: true, below: false }), "1.0", "Fraction of each head that the rotary embedding rotates, as in Phi-4-mini; values below 1 run on the CPU only");
        pub norm_unit_offset: bool = key(Kind::Bool, "false", "Norms multiply by 1 + weight, as in Gemma; on the CPU only");
        pub post_norms: bool = key(Kind::Bool, "false", "Norms also follow the attention and the feed-forward network of each block, as in Gemma 3");
        pub scale_embeddings: bool = key(Kind::Bool, "false", "Embeddings are multiplied by the square root of hidden_size, as in Gemma");
        pub fused_projections: bool = key(Kind::Bool, "false", "Fuse the projections of each block into the linear layers `qkv_proj` and `gate_up_proj`, as in Phi-3");
        pub attention_dropout: f64 = key(Kind::Float(FRACTION), "0.0", "Dropout of attention probabilities, on the CPU only; a pretrained model takes its default from config.json");
        pub rms_norm_eps: f64 = key(POSITIVE, "1.0e-6", "Added to the mean square in RMS norm");
        pub tie_word_embeddings: bool = key(Kind::Bool, "false", "The head shares the embedding's weights");
        /// Rows of a micro-batch per tile of the feed-forward part, a multiple of 64; `None` computes all rows at once.
        pub tiled_mlp_rows: Option<usize> = key(TILES, "null", TILED);
        pub initializer_range: f64 = key(NON_NEGATIVE, "0.02", "Standard deviation of the initial weights");
        pub qkv_bias: bool = key(Kind::Bool, "false", "Biases in the projections of queries, keys and values, as in Qwen2");
        pub attention_bias: bool = key(Kind::Bool, "false", "Biases in all four attention projections");
        pub mlp_bias: bool = key(Kind::Bool, "false", "Biases in the three feed-forward projections");
        pub hidden_act: Activation = key(Kind::Choice { names: &["silu", "swish", "gelu_pytorch_tanh", "gelu_new"], later: &["gelu", "relu"] }, "silu", "Activation function of the gate; GELU runs on the CPU only");
    }
}

section! {
    /// Fully connected layers with a non-linearity between them.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Mlp(keys) in "model" {
        pub input_size: usize = key(WIDTH, REQUIRED, "Width of the input");
        pub hidden_sizes: Vec<usize> = key(Kind::Ints { min: 1, max: 1 << 20 }, "[]", "Widths of the hidden layers");
        pub output_size: usize = key(WIDTH, REQUIRED, "Width of the output");
        pub activation: Activation = key(Kind::Choice { names: &["relu", "gelu", "silu"], later: &[] }, "relu", "Non-linearity between layers");
    }
}

read_as! {
    Activation: Leaf::Text(name) => Activation::from_name(&name)?, else Activation::Relu;
}

impl Model {
    pub(crate) const PATH: &'static str = Gpt2::PATH;
    pub(crate) const TYPE: &'static str = path!(Model::PATH, TYPE);

    pub(crate) const VARIANTS: Variants = Variants {
        params: None,
        shared: &[],
        list: &[
            variant("gpt2", "GPT-2, with Hugging Face's key names", Gpt2::SECTION.keys),
            variant("llama", "Llama, with Hugging Face's key names", Llama::SECTION.keys),
            variant("mlp", "Fully connected layers", Mlp::SECTION.keys),
        ],
    };

    /// Checks the keys against each other.
    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        match self {
            Self::Gpt2(model) => divides(resolver, (Gpt2::n_head, model.n_head), (Gpt2::n_embd, model.n_embd)),
            Self::Llama(model) => model.check(resolver),
            Self::Mlp(_) => {}
        }
    }

    /// Returns the number of rows per tile of the feed-forward part, if it is computed in tiles.
    pub fn tiled_mlp_rows(&self) -> Option<usize> {
        match self {
            Self::Gpt2(model) => model.tiled_mlp_rows,
            Self::Llama(model) => model.tiled_mlp_rows,
            Self::Mlp(_) => None,
        }
    }

    /// Returns the path of the first key whose value is supported on the CPU only.
    pub fn only_on_the_cpu(&self) -> Option<&'static str> {
        match self {
            Self::Llama(model) => model.only_on_the_cpu(),
            Self::Gpt2(_) | Self::Mlp(_) => None,
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

    /// Returns the same model without its pretrained folder.
    #[must_use]
    pub fn without_pretrained(mut self) -> Self {
        match &mut self {
            Self::Gpt2(model) => model.pretrained = None,
            Self::Llama(model) => model.pretrained = None,
            Self::Mlp(_) => {}
        }
        self
    }

    /// Returns the key of the dropout on attention probabilities and its value; `None` without attention.
    pub fn attention_dropout(&self) -> Option<(&'static str, f64)> {
        match self {
            Self::Gpt2(model) => Some((Gpt2::attn_pdrop, model.attn_pdrop)),
            Self::Llama(model) => Some((Llama::attention_dropout, model.attention_dropout)),
            Self::Mlp(_) => None,
        }
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

impl Find for Model {
    fn find(keys: &mut Reader<'_, '_>, name: &'static str) -> Option<Self> {
        keys.inner(name)?;
        let (kind, mut keys) = keys.variant(name, "");
        match kind {
            "gpt2" => Some(Self::Gpt2(Gpt2::of(&mut keys))),
            "llama" => Some(Self::Llama(Llama::of(&mut keys))),
            "mlp" => Some(Self::Mlp(Mlp::of(&mut keys))),
            // The schema's check has already reported the type.
            _ => None,
        }
    }
}

impl Llama {
    fn check(&self, resolver: &mut Resolver<'_>) {
        let heads = (Self::num_attention_heads, self.num_attention_heads);
        divides(resolver, (Self::num_key_value_heads, self.num_key_value_heads), heads);
        if resolver.at(Self::head_dim) == At::Default {
            divides(resolver, heads, (Self::hidden_size, self.hidden_size));
        }
        if resolver.has_section(Self::rope_scaling) {
            rope::check(self.rope_scaling.as_ref(), self.rotated() / 2, resolver);
        }
        self.check_layers(resolver);
        if self.qkv_bias && self.attention_bias {
            let message = "`attention_bias` and `qkv_bias` both add biases to queries, keys and values".to_string();
            let help = Some("keep one of the two: Llama has attention_bias, Qwen2 has qkv_bias".to_string());
            resolver.contradiction(&[Self::qkv_bias, Self::attention_bias], message, help);
        }
        if !self.rotated().is_multiple_of(2) || self.rotated() == 0 {
            let message = format!(
                "rotary embedding rotates {} elements of each head, in pairs: the number must be even and greater than 0",
                self.rotated()
            );
            let paths = [Self::head_dim, Self::hidden_size, Self::num_attention_heads, Self::partial_rotary_factor];
            resolver.contradiction(&paths[..if self.partial_rotary_factor < 1.0 { 4 } else { 3 }], message, None);
        }
        if self.fused_projections && self.tiled_mlp_rows.is_some() {
            let message = "`tiled_mlp_rows` is not implemented for fused projections".to_string();
            let help = Some("remove tiled_mlp_rows".to_string());
            resolver.contradiction(&[Self::fused_projections, Self::tiled_mlp_rows], message, help);
        }
        if self.rope_local_base_freq.is_some() && self.sliding_window.is_none() {
            let message = "`sliding_attention` layers need `sliding_window`".to_string();
            resolver.contradiction(&[Self::rope_local_base_freq, Self::sliding_window], message, None);
        }
    }
}

impl Llama {
    /// Returns how many elements of a head have rotary embedding.
    fn rotated(&self) -> usize {
        (self.head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// Returns the path of the first key whose value is supported on the CPU only.
    pub(super) fn only_on_the_cpu(&self) -> Option<&'static str> {
        let keys = [
            (Self::partial_rotary_factor, self.partial_rotary_factor < 1.0),
            (Self::norm_unit_offset, self.norm_unit_offset),
            (Self::hidden_act, self.hidden_act != Activation::Silu),
        ];
        keys.into_iter().find(|(_, is_used)| *is_used).map(|(path, _)| path)
    }

    /// Checks the lists with an entry for each layer.
    fn check_layers(&self, resolver: &mut Resolver<'_>) {
        for (path, count) in
            [(Self::layer_types, self.layer_types.len()), (Self::no_rope_layers, self.no_rope_layers.len())]
        {
            if count > 0 && count != self.num_hidden_layers {
                let message = format!("{} has {count} entries for {} layers", last(path), self.num_hidden_layers);
                resolver.contradiction(&[path, Self::num_hidden_layers], message, None);
            }
        }
        if let Some(other) =
            self.layer_types.iter().find(|kind| ![FULL_ATTENTION, SLIDING_ATTENTION].contains(&kind.as_str()))
        {
            let message =
                format!("a layer is `{FULL_ATTENTION}` or `{SLIDING_ATTENTION}`, not `{}`", other.escape_debug());
            resolver.contradiction(&[Self::layer_types], message, None);
        } else if self.sliding_window.is_none() && self.layer_types.iter().any(|kind| kind == SLIDING_ATTENTION) {
            let message = format!("`{SLIDING_ATTENTION}` layers need `{}`", last(Self::sliding_window));
            let help = Some("set `sliding_window`: the number of positions that these layers attend to".to_string());
            resolver.contradiction(&[Self::layer_types, Self::sliding_window], message, help);
        }
    }
}

/// Value in `layer_types` for a layer that attends to all earlier positions.
pub const FULL_ATTENTION: &str = "full_attention";
/// Value in `layer_types` for a layer that attends to `sliding_window` positions.
pub const SLIDING_ATTENTION: &str = "sliding_attention";

type Size = (&'static str, usize);

fn divides(resolver: &mut Resolver<'_>, (part_path, part): Size, (whole_path, whole): Size) {
    if !whole.is_multiple_of(part) {
        let message = format!("{} {part} does not divide {} {whole}", last(part_path), last(whole_path));
        resolver.contradiction(&[part_path, whole_path], message, None);
    }
}

/// Upper bounds on a model's sizes, low enough that no product of sizes overflows.
const WIDTH: Kind = Kind::Int { min: 1, max: 1 << 20 };
pub(crate) const MAX_LAYERS: usize = 1 << 14;
const DEPTH: Kind = Kind::Int { min: 1, max: MAX_LAYERS as u64 };
const VOCABULARY: Kind = Kind::Int { min: 1, max: 1 << 30 };
/// `zero_model::ops::TILE_UNIT`: with a multiple of this number of rows per tile, sums over rows are bit-identical to
/// the sums without tiles.
const TILES: Kind = Kind::Multiple { of: 64, max: 1 << 30 };
const TILED: &str = "Rows (samples × positions) of a micro-batch that the feed-forward network computes at a time, as in DeepSpeed's TiledMLP; its inner activations are recomputed in the backward pass. null: all rows at once, keeping their activations";
const PRETRAINED: &str = "Hugging Face folder of GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 3 (text), Phi-3, Phi-4 or SmolLM3, relative to the working directory. Its `config.json` sets the type and the sizes; sizes that are also set here must match. Training starts from its weights (`model.safetensors`, or several files with an index) unless it resumes from a checkpoint. Its `tokenizer.json` is used if `data.tokenizer` is not set. null: weights are initialised from the seed";

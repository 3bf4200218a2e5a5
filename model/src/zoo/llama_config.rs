//! The configuration of a Llama and of the families that differ from it in details.

use super::{check_sizes, times_as_wide};
use candle_core::{Result, bail};
use candle_nn::VarBuilder;
use zero_ops::{Activation, PreferenceLoss, RmsNorm, RopeScaling};

/// The positions that a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// The position itself and all earlier ones.
    FullAttention,
    /// The positions within [`LlamaConfig::sliding_window`].
    SlidingAttention,
}

/// Configuration of a Llama: the fields of Hugging Face's `LlamaConfig` that have an effect here, under the same names,
/// and fields that describe other families. The defaults describe a Llama.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP's inner layer.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads. Must divide the number of query heads.
    pub num_key_value_heads: usize,
    /// Size of a head, which must be even; `hidden_size` / `num_attention_heads` if `None`.
    pub head_dim: Option<usize>,
    /// Maximum sequence length.
    pub max_position_embeddings: usize,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Scaling of the rotary angles for longer sequences; unscaled if `None`.
    pub rope_scaling: Option<RopeScaling>,
    /// Number of positions that each position attends to: the position itself and those just before it, as in
    /// `MistralConfig`. `None` means the position itself and all earlier ones.
    pub sliding_window: Option<usize>,
    /// The kind of each layer. If empty, all layers use `sliding_window`.
    pub layer_types: Vec<LayerType>,
    /// Whether each layer has rotary embedding, as in SmolLM3. If empty, all layers have it.
    pub rotates: Vec<bool>,
    /// Whether each head's queries and keys pass an RMS norm before the rotation, as in Qwen3.
    pub qk_norm: bool,
    /// Attention scores are divided by the square root of this number; `None` uses the head size.
    pub query_pre_attn_scalar: Option<f64>,
    /// Base of the rotary angles in layers with sliding attention, whose angles are then not scaled, as in Gemma 3.
    /// `None` uses `rope_theta`, with scaling.
    pub rope_local_base_freq: Option<f64>,
    /// The fraction of each head that is rotated, as in Phi-4-mini: more than 0, and at most 1.
    pub partial_rotary_factor: f64,
    /// Non-linearity of the gate: SiLU or the tanh approximation of GELU.
    pub hidden_act: Activation,
    /// Whether the norms multiply by 1 + weight, as in Gemma. Their weights then start at 0. Unsupported on a GPU.
    pub norm_unit_offset: bool,
    /// Whether norms also follow the attention and the MLP of each block, as in Gemma 3.
    pub post_norms: bool,
    /// Whether token embeddings are multiplied by √`hidden_size`, as in Gemma.
    pub scale_embeddings: bool,
    /// Whether one linear layer computes queries, keys and values, and another the gate and up projections, as in
    /// Phi-3. Unsupported with `tiled_mlp_rows`.
    pub fused_projections: bool,
    /// Dropout probability for the attention probabilities. Must be 0 on a GPU.
    pub attention_dropout: f32,
    /// ε of the norms.
    pub rms_norm_eps: f32,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the head shares the weight of the token embedding.
    pub tie_word_embeddings: bool,
    /// Whether the query, key and value projections have biases, as in Qwen2.
    pub qkv_bias: bool,
    /// Whether all four projections of the attention have biases.
    pub attention_bias: bool,
    /// Whether the three projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Rows per tile of the MLP, a multiple of [`TILE_UNIT`](zero_ops::TILE_UNIT). A [`TiledMlp`](zero_ops::TiledMlp)
    /// saves no inner rows for the backward. If `None`, the MLP computes all rows at once and saves them.
    pub tiled_mlp_rows: Option<usize>,
    /// Whether a sample may contain several documents. The model then takes [`POSITION_IDS`](super::POSITION_IDS) in
    /// addition to tokens.
    pub packed: bool,
    /// The loss for pairs of answers, if the model is trained on pairs. A sample then consists of two documents (see
    /// `packed`), and `lm_head` returns their log-probabilities.
    pub preference: Option<PreferenceLoss>,
    /// The base model of µP: the same model with different widths (`hidden_size`, `intermediate_size`,
    /// `num_attention_heads`, `num_key_value_heads`, `head_dim`). µP divides the inputs of the head by the multiplier
    /// of `hidden_size`, and attention scores by the square root of the multiplier of the head size. It divides the
    /// initial weights of a matrix between two widths by the square root of the multiplier of its inputs.
    pub base: Option<Box<Self>>,
}

impl Default for LlamaConfig {
    /// Returns Hugging Face's defaults: the 7B Llama.
    fn default() -> Self {
        Self {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: None,
            max_position_embeddings: 2048,
            rope_theta: 10_000.0,
            rope_scaling: None,
            sliding_window: None,
            layer_types: vec![],
            rotates: vec![],
            qk_norm: false,
            query_pre_attn_scalar: None,
            rope_local_base_freq: None,
            partial_rotary_factor: 1.0,
            hidden_act: Activation::Silu,
            norm_unit_offset: false,
            post_norms: false,
            scale_embeddings: false,
            fused_projections: false,
            attention_dropout: 0.0,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: false,
            qkv_bias: false,
            attention_bias: false,
            mlp_bias: false,
            tiled_mlp_rows: None,
            packed: false,
            preference: None,
            base: None,
        }
    }
}

impl LlamaConfig {
    pub(super) fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim.unwrap_or(1)),
            ("max_position_embeddings", self.max_position_embeddings),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ];
        check_sizes("llama", &sizes)?;
        let (width, heads, kv_heads) = (self.hidden_size, self.num_attention_heads, self.num_key_value_heads);
        if self.head_dim.is_none() && width % heads != 0 {
            bail!("llama: hidden_size = {width} is not a multiple of num_attention_heads = {heads}");
        }
        if heads % kv_heads != 0 {
            bail!("llama: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}");
        }
        let lists = [("layer_types", self.layer_types.len()), ("rotates", self.rotates.len())];
        if let Some((name, count)) = lists.into_iter().find(|(_, count)| ![0, self.num_hidden_layers].contains(count)) {
            bail!("llama: {name} has {count} entries for {} layers", self.num_hidden_layers);
        }
        if self.layer_types.contains(&LayerType::SlidingAttention) && self.sliding_window.is_none() {
            bail!("llama: a sliding attention layer needs sliding_window");
        }
        if self.rotated() == 0 || !self.rotated().is_multiple_of(2) || self.rotated() > self.head_size() {
            let (rotated, size) = (self.rotated(), self.head_size());
            bail!("llama: rotary positions need an even head size, got {rotated} of {size}");
        }
        if self.fused_projections && self.tiled_mlp_rows.is_some() {
            bail!("llama: tiles of a fused projection are not implemented");
        }
        if let Some(base) = &self.base {
            let (hidden_size, intermediate_size) = (base.hidden_size, base.intermediate_size);
            let (num_attention_heads, num_key_value_heads) = (base.num_attention_heads, base.num_key_value_heads);
            let same = Self {
                hidden_size,
                intermediate_size,
                num_attention_heads,
                num_key_value_heads,
                head_dim: base.head_dim,
                base: None,
                ..self.clone()
            };
            if same != **base {
                bail!("llama: the base model differs in more than the widths of its layers");
            }
            base.check()?;
        }
        Ok(())
    }

    pub(super) fn takes_positions(&self) -> bool {
        self.packed || self.preference.is_some()
    }

    pub(super) fn head_size(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    /// Returns how many times larger one of the model's sizes is than in its base model.
    pub(super) fn times_as_wide(&self, size: impl Fn(&Self) -> usize) -> f64 {
        times_as_wide(self, self.base.as_deref(), size)
    }

    /// Returns the standard deviation of the initial weights of a matrix between two widths, given the size of its
    /// inputs.
    pub(super) fn std_from(&self, inputs: impl Fn(&Self) -> usize) -> f64 {
        self.initializer_range / self.times_as_wide(inputs).sqrt()
    }

    /// Returns the factor of the queries. It applies in addition to the attention's own 1/√size. In µP, scores scale as
    /// 1/size with the head size; otherwise they scale as 1/√size, or not at all with `query_pre_attn_scalar`.
    pub(super) fn query_scale(&self) -> f64 {
        let wider = self.times_as_wide(Self::head_size);
        match self.query_pre_attn_scalar {
            None => wider.sqrt().recip(),
            Some(scalar) => (self.head_size() as f64 / scalar).sqrt() / wider,
        }
    }

    /// Returns the factor of scaled token embeddings. In µP, returns the factor that the base model uses.
    pub(super) fn embedding_scale(&self) -> f64 {
        (self.base.as_deref().unwrap_or(self).hidden_size as f64).sqrt()
    }

    /// Returns a model with the same parameters and all widths doubled, including the head size. It drops the rotary
    /// settings, because some of them fit only one head size.
    pub(super) fn wider(&self) -> Self {
        Self {
            hidden_size: 2 * self.hidden_size,
            intermediate_size: 2 * self.intermediate_size,
            head_dim: self.head_dim.map(|size| 2 * size),
            rope_scaling: None,
            partial_rotary_factor: 1.0,
            ..self.clone()
        }
    }

    /// Returns the number of elements of each head that are rotated.
    pub(super) fn rotated(&self) -> usize {
        (self.head_size() as f64 * self.partial_rotary_factor) as usize
    }

    /// Returns a norm of `size` elements.
    pub(super) fn norm(&self, size: usize, vb: VarBuilder) -> Result<RmsNorm> {
        match self.norm_unit_offset {
            true => RmsNorm::with_unit_offset(size, self.rms_norm_eps, vb),
            false => RmsNorm::new(size, self.rms_norm_eps, vb),
        }
    }

    /// Returns whether a layer attends within the window.
    pub(super) fn slides(&self, layer: usize) -> bool {
        match self.layer_types.get(layer) {
            Some(kind) => *kind == LayerType::SlidingAttention,
            None => self.sliding_window.is_some(),
        }
    }
}

//! Llama: RMS norms, rotary positions, grouped-query attention, a gated MLP, and optional biases.
//!
//! Touvron et al., "LLaMA: open and efficient foundation language models", 2023. Names and layouts are those of
//! `LlamaForCausalLM`. A Llama with a sliding window is a Mistral (Jiang et al., "Mistral 7B", 2023). With biases of
//! queries, keys and values it is a Qwen2 (Yang et al., "Qwen2 technical report", 2024).

use super::{Alone, LanguageHead, POSITION_IDS, check_sizes, with_positions, within_documents};
use crate::layers::{Activations, Layer, Layers};
use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use std::sync::{Arc, OnceLock};
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::graph::{reshape, sum};
use zero_ops::{
    AttentionSpan, Dropout, Embedding, Linear, RmsNorm, RopeScaling, Rotary, TiledMlp, causal_attention_with_dropout,
    swiglu,
};

/// Builds a Llama that maps token ids `[batch, time]` (u32) to logits `[batch, time, vocab_size]`. Its loss is
/// [`cross_entropy`](zero_ops::cross_entropy), which [`LanguageHead`] computes without storing all logits.
///
/// The layers are `model.embed_tokens`, `model.layers.0` …, `model.norm` and `lm_head`. Weights are initialized from a
/// normal distribution with standard deviation `initializer_range`, norms start at 1, biases at 0.
pub fn llama(config: &LlamaConfig) -> Layers {
    let (embed, block, head) = (config.clone(), config.clone(), config.clone());
    let (width, eps) = (config.hidden_size, config.rms_norm_eps);
    // All blocks share one rotary table, which the first block builds, and one attention span, which is uploaded to a
    // GPU only once.
    let rotary = Arc::new(OnceLock::new());
    let span =
        config.sliding_window.map_or_else(AttentionSpan::default, |window| AttentionSpan::default().window(window));
    let layers = Layers::new()
        .layer("model.embed_tokens", move |vb| {
            embed.check()?;
            Embedding::new(embed.vocab_size, embed.hidden_size, embed.initializer_range, vb)
        })
        .layers("model.layers", config.num_hidden_layers, move |_, vb| Block::new(&block, &rotary, &span, vb))
        .with(config.packed.then_some(POSITION_IDS))
        .layer("model.norm", move |vb| RmsNorm::new(width, eps, vb).map(Alone))
        .head("lm_head", move |vb| LanguageHead::new(head.hidden_size, head.vocab_size, head.initializer_range, vb));
    if config.tie_word_embeddings { layers.tie("model.embed_tokens.weight", "lm_head.weight") } else { layers }
}

/// Configuration of a Llama: the fields of Hugging Face's `LlamaConfig` that have an effect here, under the same names.
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
    /// Number of positions that a position attends to, itself and the ones just before it, as in `MistralConfig`. All
    /// preceding positions if `None`.
    pub sliding_window: Option<usize>,
    /// Dropout probability of attention probabilities. Must be 0 on a GPU.
    pub attention_dropout: f32,
    /// ε of the norms.
    pub rms_norm_eps: f32,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the head shares the weight of the token embedding.
    pub tie_word_embeddings: bool,
    /// Whether the projections of queries, keys and values have biases, as in Qwen2.
    pub qkv_bias: bool,
    /// Whether all four projections of the attention have biases.
    pub attention_bias: bool,
    /// Whether the three projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Rows per tile of the MLP, a multiple of [`TILE_UNIT`](zero_ops::TILE_UNIT). A [`TiledMlp`] saves no inner rows
    /// for the backward. If `None`, the MLP computes all rows at once and saves them.
    pub tiled_mlp_rows: Option<usize>,
    /// Whether a sample may contain several documents. The model then takes [`POSITION_IDS`] beside its tokens.
    pub packed: bool,
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
            attention_dropout: 0.0,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: false,
            qkv_bias: false,
            attention_bias: false,
            mlp_bias: false,
            tiled_mlp_rows: None,
            packed: false,
        }
    }
}

impl LlamaConfig {
    fn check(&self) -> Result<()> {
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
        if !self.head_size().is_multiple_of(2) {
            bail!("llama: rotary positions need an even head size, got {}", self.head_size());
        }
        Ok(())
    }

    fn head_size(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }
}

fn linear(inputs: usize, outputs: usize, bias: bool, std: f64, vb: VarBuilder) -> Result<Linear> {
    if bias { Linear::new(inputs, outputs, std, vb) } else { Linear::no_bias(inputs, outputs, std, vb) }
}

enum Mlp {
    Whole { gate: Linear, up: Linear, down: Linear },
    Tiled(TiledMlp),
}

impl Mlp {
    fn new(config: &LlamaConfig, vb: &VarBuilder) -> Result<Self> {
        let (width, inner, std) = (config.hidden_size, config.intermediate_size, config.initializer_range);
        let gate = linear(width, inner, config.mlp_bias, std, vb.pp("gate_proj"))?;
        let up = linear(width, inner, config.mlp_bias, std, vb.pp("up_proj"))?;
        let down = linear(inner, width, config.mlp_bias, std, vb.pp("down_proj"))?;
        Ok(match config.tiled_mlp_rows {
            None => Self::Whole { gate, up, down },
            Some(rows) => Self::Tiled(TiledMlp::gated(gate, up, down, rows)?),
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Whole { gate, up, down } => down.forward(&swiglu(&gate.forward(x)?, &up.forward(x)?)?),
            Self::Tiled(mlp) => mlp.forward(x),
        }
    }
}

struct Block {
    input_layernorm: RmsNorm,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    rotary: Rotary,
    span: AttentionSpan,
    dropout: Dropout,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    fn new(config: &LlamaConfig, rotary: &OnceLock<Rotary>, span: &AttentionSpan, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let (width, std) = (config.hidden_size, config.initializer_range);
        let (heads, kv_heads, head_size) = (config.num_attention_heads, config.num_key_value_heads, config.head_size());
        let rotary = match rotary.get() {
            Some(rotary) => rotary.clone(),
            None => {
                let (positions, theta) = (config.max_position_embeddings, config.rope_theta);
                let table = match config.rope_scaling {
                    None => Rotary::new(head_size, positions, theta)?,
                    Some(scaling) => Rotary::scaled(head_size, positions, theta, scaling)?,
                };
                rotary.get_or_init(|| table).clone()
            }
        };
        let attn = vb.pp("self_attn");
        let (out_bias, qkv_bias) = (config.attention_bias, config.attention_bias || config.qkv_bias);
        let norm = |name| RmsNorm::new(width, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            q_proj: linear(width, heads * head_size, qkv_bias, std, attn.pp("q_proj"))?,
            k_proj: linear(width, kv_heads * head_size, qkv_bias, std, attn.pp("k_proj"))?,
            v_proj: linear(width, kv_heads * head_size, qkv_bias, std, attn.pp("v_proj"))?,
            o_proj: linear(heads * head_size, width, out_bias, std, attn.pp("o_proj"))?,
            heads,
            kv_heads,
            head_size,
            rotary,
            span: span.clone(),
            dropout: Dropout { probability: config.attention_dropout, name: "probabilities" },
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(config, &vb.pp("mlp"))?,
        })
    }

    fn attend(&self, x: &Tensor, position_ids: Option<&Tensor>, pass: &Pass) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        let split = |y: Tensor, heads| reshape(&y, (batch, time, heads, self.head_size));
        let rotate = |x: Tensor| match position_ids {
            Some(position_ids) => self.rotary.apply_at(&x, position_ids),
            None => self.rotary.apply(&x),
        };
        let q = rotate(split(self.q_proj.forward(x)?, self.heads)?)?;
        let k = rotate(split(self.k_proj.forward(x)?, self.kv_heads)?)?;
        let v = split(self.v_proj.forward(x)?, self.kv_heads)?;
        let span = within_documents(&self.span, position_ids);
        let attended = causal_attention_with_dropout(&q, &k, &v, &span, (&self.dropout, pass))?;
        self.o_proj.forward(&reshape(&attended, (batch, time, self.heads * self.head_size))?)
    }
}

impl Layer for Block {
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        let (x, position_ids) = with_positions(x)?;
        let y = fused_block(x, |x| {
            let attended = self.attend(&self.input_layernorm.forward(x)?, position_ids, pass)?;
            let (x, normal) = self.post_attention_layernorm.forward_residual(x, &attended)?;
            sum(&x, &self.mlp.forward(&normal)?)
        })?;
        Ok(y.into())
    }

    /// A tiled MLP computes its weight gradients immediately, so little would be deferred.
    fn splits(&self) -> bool {
        matches!(self.mlp, Mlp::Whole { .. })
    }
}

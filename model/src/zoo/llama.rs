//! Llama: RMS norms, rotary positions, grouped-query attention, a gated MLP, and optional biases.
//!
//! Touvron et al., "LLaMA: open and efficient foundation language models", 2023. Names and layouts are those of
//! `LlamaForCausalLM`. A Llama with a sliding window is a Mistral (Jiang et al., "Mistral 7B", 2023). With biases of
//! queries, keys and values it is a Qwen2 (Yang et al., "Qwen2 technical report", 2024). With norms of queries and keys it
//! is a Qwen3 (Yang et al., "Qwen3 technical report", 2025). Without rotation in some layers it is a SmolLM3 (Bakouch et
//! al., 2025).

use super::{Alone, LanguageHead, LlamaConfig, POSITION_IDS, with_positions, within_documents};
use crate::layers::{Activations, Layer, Layers};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use std::sync::{Arc, OnceLock};
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::graph::{reshape, sum};
use zero_ops::{
    AttentionSpan, Dropout, Embedding, Linear, RmsNorm, Rotary, TiledMlp, causal_attention_with_dropout, swiglu,
};

/// Builds a Llama that maps token ids `[batch, time]` (u32) to logits `[batch, time, vocab_size]`. Its loss is
/// [`cross_entropy`](zero_ops::cross_entropy), which [`LanguageHead`] computes without storing all logits.
///
/// The layers are `model.embed_tokens`, `model.layers.0` …, `model.norm` and `lm_head`. Weights are initialized from a
/// normal distribution with standard deviation `initializer_range`, norms start at 1, biases at 0.
pub fn llama(config: &LlamaConfig) -> Layers {
    let (embed, block, head) = (config.clone(), config.clone(), config.clone());
    let (width, eps) = (config.hidden_size, config.rms_norm_eps);
    let shared = Arc::new(Shared::new(config));
    let layers = Layers::new()
        .layer("model.embed_tokens", move |vb| {
            embed.check()?;
            Embedding::new(embed.vocab_size, embed.hidden_size, embed.initializer_range, vb)
        })
        .layers("model.layers", config.num_hidden_layers, move |layer, vb| Block::new(&block, layer, &shared, vb))
        .with(config.packed.then_some(POSITION_IDS))
        .layer("model.norm", move |vb| RmsNorm::new(width, eps, vb).map(Alone))
        .head("lm_head", move |vb| LanguageHead::new(head.hidden_size, head.vocab_size, head.initializer_range, vb));
    if config.tie_word_embeddings { layers.tie("model.embed_tokens.weight", "lm_head.weight") } else { layers }
}

/// What blocks share: a rotary table, which the first block builds, and the spans of attention, which are uploaded to a
/// GPU only once.
struct Shared {
    rotary: OnceLock<Rotary>,
    full: AttentionSpan,
    window: AttentionSpan,
}

impl Shared {
    fn new(config: &LlamaConfig) -> Self {
        let full = AttentionSpan::default();
        let window = config.sliding_window.map_or_else(AttentionSpan::default, |window| full.clone().window(window));
        Self { rotary: OnceLock::new(), full, window }
    }

    /// Returns the rotary table.
    fn rotary(&self, config: &LlamaConfig) -> Result<Rotary> {
        if let Some(rotary) = self.rotary.get() {
            return Ok(rotary.clone());
        }
        let (size, positions, theta) = (config.head_size(), config.max_position_embeddings, config.rope_theta);
        let table = match config.rope_scaling {
            None => Rotary::new(size, positions, theta)?,
            Some(scaling) => Rotary::scaled(size, positions, theta, scaling)?,
        };
        Ok(self.rotary.get_or_init(|| table).clone())
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
    /// The norms of queries and of keys.
    qk_norm: Option<[RmsNorm; 2]>,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    /// `None` if the layer does not rotate.
    rotary: Option<Rotary>,
    span: AttentionSpan,
    dropout: Dropout,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    fn new(config: &LlamaConfig, layer: usize, shared: &Shared, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let (width, std) = (config.hidden_size, config.initializer_range);
        let (heads, kv_heads, head_size) = (config.num_attention_heads, config.num_key_value_heads, config.head_size());
        let attn = vb.pp("self_attn");
        let (out_bias, qkv_bias) = (config.attention_bias, config.attention_bias || config.qkv_bias);
        let norm = |name| RmsNorm::new(width, config.rms_norm_eps, vb.pp(name));
        let of_heads = |name| RmsNorm::new(head_size, config.rms_norm_eps, attn.pp(name));
        let rotates = config.rotates.get(layer).copied().unwrap_or(true);
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            q_proj: linear(width, heads * head_size, qkv_bias, std, attn.pp("q_proj"))?,
            k_proj: linear(width, kv_heads * head_size, qkv_bias, std, attn.pp("k_proj"))?,
            v_proj: linear(width, kv_heads * head_size, qkv_bias, std, attn.pp("v_proj"))?,
            o_proj: linear(heads * head_size, width, out_bias, std, attn.pp("o_proj"))?,
            qk_norm: if config.qk_norm { Some([of_heads("q_norm")?, of_heads("k_norm")?]) } else { None },
            heads,
            kv_heads,
            head_size,
            rotary: rotates.then(|| shared.rotary(config)).transpose()?,
            span: if config.slides(layer) { shared.window.clone() } else { shared.full.clone() },
            dropout: Dropout { probability: config.attention_dropout, name: "probabilities" },
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(config, &vb.pp("mlp"))?,
        })
    }

    fn attend(&self, x: &Tensor, position_ids: Option<&Tensor>, pass: &Pass) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        let split = |y: Tensor, heads| reshape(&y, (batch, time, heads, self.head_size));
        let norm = |x: Tensor, of: usize| self.qk_norm.as_ref().map_or(Ok(x.clone()), |norms| norms[of].forward(&x));
        let rotate = |x: Tensor| match (&self.rotary, position_ids) {
            (None, _) => Ok(x),
            (Some(rotary), Some(position_ids)) => rotary.apply_at(&x, position_ids),
            (Some(rotary), None) => rotary.apply(&x),
        };
        let q = rotate(norm(split(self.q_proj.forward(x)?, self.heads)?, 0)?)?;
        let k = rotate(norm(split(self.k_proj.forward(x)?, self.kv_heads)?, 1)?)?;
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

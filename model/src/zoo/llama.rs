//! Llama: RMS norms, rotary positions, grouped-query attention, a gated MLP, and optional biases.
//!
//! Touvron et al., "LLaMA: open and efficient foundation language models", 2023. Parameters have the names and layouts
//! of `LlamaForCausalLM`. A Llama with a sliding window is a Mistral (Jiang et al., "Mistral 7B", 2023). With biases
//! for queries, keys and values it is a Qwen2 (Yang et al., "Qwen2 technical report", 2024). With norms for queries and
//! keys it is a Qwen3 (Yang et al., "Qwen3 technical report", 2025). Without rotation in some layers it is a SmolLM3
//! (Bakouch et al., 2025). With unit offsets in its norms, norms after attention and MLP, scaled embeddings, a GELU
//! gate and a separate rotary base in local layers it is a Gemma 3 (Kamath et al., "Gemma 3 technical report", 2025).
//! With fused projections it is a Phi-3 or Phi-4 (Abdin et al., "Phi-3 technical report", 2024).

use super::pair_head::with_head;
use super::{Last, LlamaConfig, POSITION_IDS, with_positions, within_documents};
use crate::activations::Activations;
use crate::base_shapes::BaseShapes;
use crate::layer::Layer;
use crate::layers::Layers;
use candle_core::{D, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use std::sync::{Arc, OnceLock};
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::graph::{reshape, sum};
use zero_ops::{
    Activation, AttentionSpan, Dropout, Embedding, Linear, RmsNorm, Rotary, RowParallel, TiledMlp,
    causal_attention_with_dropout, columns, cutting, gated, own_heads, own_slice, scaled, whole_rows, whole_sequences,
};

/// Builds a Llama that maps token ids `[batch, time]` (u32) to logits `[batch, time, vocab_size]`. Its loss is
/// [`cross_entropy`](zero_ops::cross_entropy), which [`LanguageHead`](super::LanguageHead) computes without storing all
/// logits.
///
/// The layers are `model.embed_tokens`, `model.layers.0` …, `model.norm` and `lm_head`. Weights are initialized from a
/// normal distribution with standard deviation `initializer_range`, norms start at 1, biases at 0. With a
/// [`base`](LlamaConfig::base) the model is in µP.
pub fn llama(config: &LlamaConfig) -> Layers {
    let (embed, block) = (config.clone(), config.clone());
    let (width, norm) = (config.hidden_size, config.clone());
    let shared = Arc::new(Shared::new(config));
    let readout = 1.0 / config.times_as_wide(|config| config.hidden_size);
    let layers = Layers::new()
        .layer("model.embed_tokens", move |vb| {
            embed.check()?;
            let table = Embedding::vocab_parallel(embed.vocab_size, embed.hidden_size, embed.initializer_range, vb)?;
            Ok(if embed.scale_embeddings { table.times(embed.embedding_scale()) } else { table })
        })
        .layers("model.layers", config.num_hidden_layers, move |layer, vb| {
            DecoderLayer::new(&block, layer, &shared, vb)
        })
        .with(config.takes_positions().then_some(POSITION_IDS))
        .layer("model.norm", move |vb| Ok(Last(norm.norm(width, vb)?, readout as f32)));
    let mut layers = with_head(layers, (width, config.vocab_size, config.initializer_range), config.preference);
    layers.base_shapes = config.base.as_deref().map(|base| BaseShapes::new(llama(base), llama(&base.wider())));
    if config.tie_word_embeddings { layers.tie("model.embed_tokens.weight", "lm_head.weight") } else { layers }
}

/// State that all blocks share: rotary tables, which grow with the longest row, and attention spans, which are uploaded
/// to a GPU only once.
struct Shared {
    rotary: OnceLock<Rotary>,
    /// The rotary table of layers with sliding attention, if they have a separate base.
    local: OnceLock<Rotary>,
    full: AttentionSpan,
    window: AttentionSpan,
}

impl Shared {
    fn new(config: &LlamaConfig) -> Self {
        let full = AttentionSpan::default();
        let window = config.sliding_window.map_or_else(AttentionSpan::default, |window| full.clone().window(window));
        Self { rotary: OnceLock::new(), local: OnceLock::new(), full, window }
    }

    /// Returns the rotary table of a layer.
    fn rotary(&self, config: &LlamaConfig, layer: usize) -> Result<Rotary> {
        let local = config.rope_local_base_freq.filter(|_| config.slides(layer));
        let place = if local.is_some() { &self.local } else { &self.rotary };
        if let Some(rotary) = place.get() {
            return Ok(rotary.clone());
        }
        let (size, positions) = (config.rotated(), config.max_position_embeddings);
        let table = match (local, &config.rope_scaling) {
            (Some(theta), _) => Rotary::new(size, positions, theta)?,
            (None, None) => Rotary::new(size, positions, config.rope_theta)?,
            (None, Some(scaling)) => Rotary::scaled(size, positions, config.rope_theta, scaling)?,
        };
        let table = table.of_heads(config.head_size())?;
        Ok(place.get_or_init(|| table).clone())
    }
}

enum Mlp {
    Whole { inner: Inner, activation: Activation, down: RowParallel<Linear> },
    Tiled { mlp: TiledMlp, down: RowParallel<Linear> },
}

/// The gate and up projections of the MLP.
enum Inner {
    Separate {
        gate: Linear,
        up: Linear,
    },
    /// One linear layer whose output is the gate, followed by the up projection.
    Fused(Linear),
}

impl Mlp {
    fn new(config: &LlamaConfig, vb: &VarBuilder) -> Result<Self> {
        let (width, size) = (config.hidden_size, config.intermediate_size);
        let (std, inner_std) =
            (config.std_from(|config| config.hidden_size), config.std_from(|config| config.intermediate_size));
        let project = |parts: &[usize], name| Linear::column_parallel(width, parts, config.mlp_bias, std, vb.pp(name));
        let activation = config.hidden_act;
        let inner = match config.fused_projections {
            true => Inner::Fused(project(&[size; 2], "gate_up_proj")?),
            false => Inner::Separate { gate: project(&[size], "gate_proj")?, up: project(&[size], "up_proj")? },
        };
        let down = Linear::row_parallel(size, width, config.mlp_bias, inner_std, vb.pp("down_proj"))?;
        Ok(match (inner, config.tiled_mlp_rows) {
            (Inner::Separate { gate, up }, Some(rows)) => {
                Self::Tiled { mlp: TiledMlp::gated(activation, gate, up, down.map().clone(), rows)?, down }
            }
            (inner, _) => Self::Whole { inner, activation, down },
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        whole_rows(x, |x| {
            let (inner, activation, down) = match self {
                Self::Whole { inner, activation, down } => (inner, activation, down),
                Self::Tiled { mlp, down } => return down.sum(&mlp.forward(x)?),
            };
            let (gate, up) = match inner {
                Inner::Separate { gate, up } => (gate.forward(x)?, up.forward(x)?),
                Inner::Fused(gate_up) => {
                    let both = gate_up.forward(x)?;
                    let size = both.dim(D::Minus1)? / 2;
                    (columns(&both, 0..size)?, columns(&both, size..2 * size)?)
                }
            };
            down.forward(&gated(&gate, *activation, &up)?)
        })
    }
}

/// The projections to queries, keys and values.
enum Qkv {
    Separate([Linear; 3]),
    /// One projection that returns queries, keys and values, with their sizes on this rank.
    Fused(Linear, [usize; 3]),
}

impl Qkv {
    /// `sizes` are the output sizes of queries, keys and values over the heads of all ranks.
    fn new(config: &LlamaConfig, sizes: [usize; 3], vb: &VarBuilder) -> Result<Self> {
        let bias = config.attention_bias || config.qkv_bias;
        let std = config.std_from(|config| config.hidden_size);
        let project =
            |parts: &[usize], name| Linear::column_parallel(config.hidden_size, parts, bias, std, vb.pp(name));
        let [q, k, v] = sizes;
        let ranks = cutting().map_or(1, |(_, ranks)| ranks);
        Ok(match config.fused_projections {
            true => Self::Fused(project(&sizes, "qkv_proj")?, sizes.map(|size| size / ranks)),
            false => Self::Separate([project(&[q], "q_proj")?, project(&[k], "k_proj")?, project(&[v], "v_proj")?]),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        Ok(match self {
            Self::Separate([q, k, v]) => [q.forward(x)?, k.forward(x)?, v.forward(x)?],
            Self::Fused(qkv, [q, k, v]) => {
                let all = qkv.forward(x)?;
                [columns(&all, 0..*q)?, columns(&all, *q..q + k)?, columns(&all, q + k..q + k + v)?]
            }
        })
    }
}

struct DecoderLayer {
    input_layernorm: RmsNorm,
    qkv: Qkv,
    o_proj: RowParallel<Linear>,
    /// The norms of queries and keys.
    qk_norm: Option<[RmsNorm; 2]>,
    /// Number of this rank's query heads; `kv_heads` is its number of key and value heads.
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    /// `None` if the layer has no rotary embedding.
    rotary: Option<Rotary>,
    span: AttentionSpan,
    /// Factor of the queries. It applies in addition to the attention's own 1/√`head_size`.
    query_scale: f32,
    dropout: Dropout,
    /// Norm of the attention's output, before the residual addition.
    after_attention: Option<RmsNorm>,
    before_mlp: RmsNorm,
    mlp: Mlp,
    /// Norm of the MLP's output, before the residual addition.
    after_mlp: Option<RmsNorm>,
}

impl DecoderLayer {
    fn new(config: &LlamaConfig, layer: usize, shared: &Shared, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let width = config.hidden_size;
        let std = config.std_from(|config| config.num_attention_heads * config.head_size());
        let (heads, kv_heads, head_size) = (config.num_attention_heads, config.num_key_value_heads, config.head_size());
        let attn = vb.pp("self_attn");
        let norm = |name| config.norm(width, vb.pp(name));
        let post_norm = |name| config.post_norms.then(|| norm(name)).transpose();
        let of_heads = |name| config.norm(head_size, attn.pp(name));
        let rotates = config.rotates.get(layer).copied().unwrap_or(true);
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            qkv: Qkv::new(config, [heads, kv_heads, kv_heads].map(|heads| heads * head_size), &attn)?,
            o_proj: Linear::row_parallel(heads * head_size, width, config.attention_bias, std, attn.pp("o_proj"))?,
            qk_norm: if config.qk_norm { Some([of_heads("q_norm")?, of_heads("k_norm")?]) } else { None },
            heads: own_heads("llama", heads)?,
            kv_heads: own_heads("llama", kv_heads)?,
            head_size,
            rotary: rotates.then(|| shared.rotary(config, layer)).transpose()?,
            span: if config.slides(layer) { shared.window.clone() } else { shared.full.clone() },
            query_scale: config.query_scale() as f32,
            dropout: Dropout { probability: config.attention_dropout, name: "probabilities" },
            after_attention: post_norm("post_attention_layernorm")?,
            before_mlp: norm(if config.post_norms { "pre_feedforward_layernorm" } else { "post_attention_layernorm" })?,
            mlp: Mlp::new(config, &vb.pp("mlp"))?,
            after_mlp: post_norm("post_feedforward_layernorm")?,
        })
    }

    fn attend(&self, x: &Tensor, position_ids: Option<&Tensor>, pass: &Pass) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        let split = |y: Tensor, heads| reshape(&y, (batch, time, heads, self.head_size));
        let norm = |x: Tensor, of: usize| self.qk_norm.as_ref().map_or(Ok(x.clone()), |norms| norms[of].forward(&x));
        let own_positions = position_ids.map(own_slice).transpose()?;
        let rotate = |x: Tensor| match (&self.rotary, &own_positions) {
            (None, _) => Ok(x),
            (Some(rotary), Some(position_ids)) => rotary.apply_at(&x, position_ids),
            (Some(rotary), None) => rotary.apply(&x),
        };
        let [q, k, v] = self.qkv.forward(x)?;
        let q = scaled(&rotate(norm(split(q, self.heads)?, 0)?)?, self.query_scale)?;
        let k = rotate(norm(split(k, self.kv_heads)?, 1)?)?;
        let v = split(v, self.kv_heads)?;
        let span = within_documents(&self.span, position_ids);
        let attended = causal_attention_with_dropout(&q, &k, &v, &span, (&self.dropout, pass))?;
        self.o_proj.forward(&reshape(&attended, (batch, time, self.heads * self.head_size))?)
    }
}

impl Layer for DecoderLayer {
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        let (x, position_ids) = with_positions(x)?;
        let y = fused_block(x, |x| {
            let after =
                |norm: &Option<RmsNorm>, y: Tensor| norm.as_ref().map_or(Ok(y.clone()), |norm| norm.forward(&y));
            let normal = self.input_layernorm.forward(x)?;
            let attended = whole_sequences(&normal, |x| self.attend(x, position_ids, pass))?;
            let (x, normal) = self.before_mlp.forward_residual(x, &after(&self.after_attention, attended)?)?;
            sum(&x, &after(&self.after_mlp, self.mlp.forward(&normal)?)?)
        })?;
        Ok(y.into())
    }

    /// A tiled MLP computes its weight gradients immediately, so little would be deferred.
    fn splits(&self) -> bool {
        matches!(self.mlp, Mlp::Whole { .. })
    }

    fn exchanges(&self) -> bool {
        true
    }
}

//! GPT-2: pre-norm blocks, learned positions, Conv1D weights of `[inputs, outputs]`, a head tied to the embedding.
//!
//! Radford et al., "Language models are unsupervised multitask learners", 2019. Parameters have the names and layouts
//! of `GPT2LMHeadModel`.

use super::pair_head::with_head;
use super::{
    Activation, Last, POSITION_IDS, PreferenceLoss, check_sizes, times_as_wide, with_positions, within_documents,
};
use crate::activations::Activations;
use crate::base_shapes::BaseShapes;
use crate::layer::Layer;
use crate::layers::Layers;
use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::graph::sum;
use zero_ops::{
    AttentionSpan, Conv1D, Dropout, Embedding, LayerNorm, RowParallel, TiledMlp, activate,
    causal_attention_packed_with_dropout, own_heads, own_slice, positions, scaled, whole_length, whole_rows,
    whole_sequences,
};

/// Builds a GPT-2 that maps token ids `[batch, time]` (u32) to logits `[batch, time, vocab_size]`. Its loss is
/// [`cross_entropy`](zero_ops::cross_entropy), which [`LanguageHead`](super::LanguageHead) computes without storing all
/// logits.
///
/// The layers are `transformer` (both embeddings), `transformer.h.0` …, `transformer.ln_f` and `lm_head`. Weights are
/// initialized from a normal distribution with standard deviation `initializer_range`, divided by √(2·n_layer) for the
/// last weight of each residual branch. Biases start at 0. With a [`base`](Gpt2Config::base) the model is in µP.
pub fn gpt2(config: &Gpt2Config) -> Layers {
    let (embed, block) = (config.clone(), config.clone());
    let position_ids = config.takes_positions().then_some(POSITION_IDS);
    let (width, eps) = (config.n_embd, config.layer_norm_epsilon);
    let readout = 1.0 / config.times_as_wide(|config| config.n_embd);
    let layers = Layers::new()
        .layer("transformer", move |vb| Embeddings::new(&embed, vb))
        .with(position_ids)
        .layers("transformer.h", config.n_layer, move |_, vb| Gpt2Block::new(&block, vb))
        .with(position_ids)
        .layer("transformer.ln_f", move |vb| Ok(Last(LayerNorm::new(width, eps, vb)?, readout as f32)));
    let mut layers = with_head(layers, (width, config.vocab_size, config.initializer_range), config.preference);
    layers.base_shapes = config.base.as_deref().map(|base| BaseShapes::new(gpt2(base), gpt2(&base.wider())));
    if config.tie_word_embeddings { layers.tie("transformer.wte.weight", "lm_head.weight") } else { layers }
}

/// Configuration of a GPT-2: the fields of Hugging Face's `GPT2Config` that have an effect here, under the same names.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Maximum sequence length.
    pub n_positions: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Number of attention heads. Must divide `n_embd`.
    pub n_head: usize,
    /// Width of the MLP's inner layer; 4·`n_embd` if `None`.
    pub n_inner: Option<usize>,
    /// Activation of the MLP.
    pub activation_function: Activation,
    /// Dropout probability at the end of each residual branch.
    pub resid_pdrop: f32,
    /// Dropout probability after the embeddings.
    pub embd_pdrop: f32,
    /// Dropout probability for the attention probabilities. Must be 0 on a GPU.
    pub attn_pdrop: f32,
    /// ε of the layer norms.
    pub layer_norm_epsilon: f32,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the head shares the weight of the token embedding.
    pub tie_word_embeddings: bool,
    /// Rows per tile of the MLP, a multiple of [`TILE_UNIT`](zero_ops::TILE_UNIT). A [`TiledMlp`] saves no inner rows
    /// for the backward. If `None`, the MLP computes all rows at once and saves them.
    pub tiled_mlp_rows: Option<usize>,
    /// Whether a sample may contain several documents. The model then takes [`POSITION_IDS`] in addition to tokens.
    pub packed: bool,
    /// The loss for pairs of answers, if the model is trained on pairs. A sample then consists of two documents (see
    /// `packed`), and `lm_head` returns their log-probabilities.
    pub preference: Option<PreferenceLoss>,
    /// The base model of µP: the same model with different widths (`n_embd`, `n_inner`, `n_head`). µP divides the
    /// inputs of the head by the multiplier of `n_embd`, and attention scores by the square root of the multiplier of
    /// the head size. It divides the initial weights of a matrix between two widths by the square root of the
    /// multiplier of its inputs.
    pub base: Option<Box<Self>>,
}

impl Default for Gpt2Config {
    /// Returns the smallest GPT-2 (124M parameters), without dropout.
    fn default() -> Self {
        Self {
            vocab_size: 50_257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: Activation::GeluNew,
            resid_pdrop: 0.0,
            embd_pdrop: 0.0,
            attn_pdrop: 0.0,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            tie_word_embeddings: true,
            tiled_mlp_rows: None,
            packed: false,
            preference: None,
            base: None,
        }
    }
}

impl Gpt2Config {
    fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("n_positions", self.n_positions),
            ("n_embd", self.n_embd),
            ("n_layer", self.n_layer),
            ("n_head", self.n_head),
            ("n_inner", self.inner()),
        ];
        check_sizes("gpt2", &sizes)?;
        if !self.n_embd.is_multiple_of(self.n_head) {
            bail!("gpt2: n_embd = {} is not a multiple of n_head = {}", self.n_embd, self.n_head);
        }
        if let Some(base) = &self.base {
            let (n_embd, n_inner, n_head) = (base.n_embd, base.n_inner, base.n_head);
            if (Self { n_embd, n_inner, n_head, base: None, ..self.clone() }) != **base {
                bail!("gpt2: the base model differs in more than n_embd, n_inner and n_head");
            }
            base.check()?;
        }
        Ok(())
    }

    fn takes_positions(&self) -> bool {
        self.packed || self.preference.is_some()
    }

    fn inner(&self) -> usize {
        self.n_inner.unwrap_or(4 * self.n_embd)
    }

    fn times_as_wide(&self, size: impl Fn(&Self) -> usize) -> f64 {
        times_as_wide(self, self.base.as_deref(), size)
    }

    /// Returns the same model with all widths doubled, including the head size.
    fn wider(&self) -> Self {
        Self { n_embd: 2 * self.n_embd, n_inner: Some(2 * self.inner()), ..self.clone() }
    }
}

struct Embeddings {
    wte: Embedding,
    wpe: Embedding,
    positions: usize,
    dropout: Dropout,
}

impl Embeddings {
    fn new(config: &Gpt2Config, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let std = config.initializer_range;
        Ok(Self {
            wte: Embedding::vocab_parallel(config.vocab_size, config.n_embd, std, vb.pp("wte"))?,
            wpe: Embedding::new(config.n_positions, config.n_embd, std, vb.pp("wpe"))?,
            positions: config.n_positions,
            dropout: Dropout { probability: config.embd_pdrop, name: "embd" },
        })
    }
}

impl Layer for Embeddings {
    fn run(&self, ids: &Activations, pass: &Pass) -> Result<Activations> {
        let (ids, position_ids) = with_positions(ids)?;
        let y = fused_block(self.wte.weight(), |_| {
            let tokens = self.wte.forward(ids)?;
            let (batch, time, _) = tokens.dims3()?;
            let whole = whole_length(time);
            let positions = match position_ids {
                Some(position_ids) => own_slice(position_ids)?,
                None if whole > self.positions => {
                    bail!("gpt2: a sequence of {whole} tokens is longer than n_positions = {}", self.positions);
                }
                None => positions(batch, time, ids.device())?,
            };
            self.dropout.forward(&sum(&tokens, &self.wpe.forward(&positions)?)?, pass)
        })?;
        Ok(y.into())
    }
}

enum Mlp {
    Whole { c_fc: Conv1D, activation: Activation, c_proj: RowParallel<Conv1D> },
    Tiled { mlp: Box<TiledMlp>, c_proj: RowParallel<Conv1D> },
}

impl Mlp {
    fn new(config: &Gpt2Config, [std, residual_std]: [f64; 2], vb: &VarBuilder) -> Result<Self> {
        let (width, inner, activation) = (config.n_embd, config.inner(), config.activation_function);
        let c_fc = Conv1D::column_parallel(width, &[inner], std, vb.pp("c_fc"))?;
        let c_proj = Conv1D::row_parallel(inner, width, residual_std, vb.pp("c_proj"))?;
        Ok(match config.tiled_mlp_rows {
            None => Self::Whole { c_fc, activation, c_proj },
            Some(rows) => {
                Self::Tiled { mlp: TiledMlp::new(c_fc, activation, c_proj.map().clone(), rows)?.into(), c_proj }
            }
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        whole_rows(x, |x| match self {
            Self::Whole { c_fc, activation: Activation::GeluNew, c_proj } => {
                c_proj.sum(&c_fc.forward_gelu_then(x, c_proj.map())?)
            }
            Self::Whole { c_fc, activation, c_proj } => c_proj.forward(&activate(&c_fc.forward(x)?, *activation)?),
            Self::Tiled { mlp, c_proj } => c_proj.sum(&mlp.forward(x)?),
        })
    }
}

struct Gpt2Block {
    ln_1: LayerNorm,
    c_attn: Conv1D,
    attn_proj: RowParallel<Conv1D>,
    /// Number of this rank's heads.
    heads: usize,
    /// Square root of µP's factor of attention scores. That factor applies in addition to the attention's own 1/√size.
    score_root: f32,
    ln_2: LayerNorm,
    mlp: Mlp,
    probability_dropout: Dropout,
    attn_dropout: Dropout,
    mlp_dropout: Dropout,
}

impl Gpt2Block {
    fn new(config: &Gpt2Config, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let width = config.n_embd;
        let of_residual = |std: f64| std / (2.0 * config.n_layer as f64).sqrt();
        let from_width = config.initializer_range / config.times_as_wide(|config| config.n_embd).sqrt();
        let from_inner = config.initializer_range / config.times_as_wide(Gpt2Config::inner).sqrt();
        let head = config.times_as_wide(|config| config.n_embd / config.n_head);
        let attn = vb.pp("attn");
        Ok(Self {
            ln_1: LayerNorm::new(width, config.layer_norm_epsilon, vb.pp("ln_1"))?,
            c_attn: Conv1D::column_parallel(width, &[width; 3], from_width, attn.pp("c_attn"))?,
            attn_proj: Conv1D::row_parallel(width, width, of_residual(from_width), attn.pp("c_proj"))?,
            heads: own_heads("gpt2", config.n_head)?,
            score_root: head.powf(-0.25) as f32,
            ln_2: LayerNorm::new(width, config.layer_norm_epsilon, vb.pp("ln_2"))?,
            mlp: Mlp::new(config, [from_width, of_residual(from_inner)], &vb.pp("mlp"))?,
            probability_dropout: Dropout { probability: config.attn_pdrop, name: "probabilities" },
            attn_dropout: Dropout { probability: config.resid_pdrop, name: "attn" },
            mlp_dropout: Dropout { probability: config.resid_pdrop, name: "mlp" },
        })
    }

    fn attend(&self, x: &Tensor, position_ids: Option<&Tensor>, pass: &Pass) -> Result<Tensor> {
        whole_sequences(&self.ln_1.forward(x)?, |x| {
            let qkv = self.c_attn.forward(x)?;
            let span = within_documents(&AttentionSpan::default(), position_ids);
            let dropout = (&self.probability_dropout, pass);
            // Queries, keys and values are one tensor. The factor therefore also multiplies the values, so the outputs
            // are divided by it.
            let qkv = scaled(&qkv, self.score_root)?;
            let attended = causal_attention_packed_with_dropout(&qkv, self.heads, &span, dropout)?;
            self.attn_proj.forward(&scaled(&attended, 1.0 / self.score_root)?)
        })
    }
}

impl Layer for Gpt2Block {
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        let (x, position_ids) = with_positions(x)?;
        let y = fused_block(x, |x| {
            let attended = self.attn_dropout.forward(&self.attend(x, position_ids, pass)?, pass)?;
            let (x, normal) = self.ln_2.forward_residual(x, &attended)?;
            sum(&x, &self.mlp_dropout.forward(&self.mlp.forward(&normal)?, pass)?)
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

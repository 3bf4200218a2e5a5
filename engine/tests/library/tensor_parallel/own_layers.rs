//! Layers that a program defines, and that split their parameters themselves.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};
use zero_engine::{Activations, Layer, Layers, Pass, zoo};
use zero_model::ops::graph::{fused_block, sum};
use zero_model::ops::{
    AttentionSpan, Dropout, Embedding, LayerNorm, Linear, RowParallel, causal_attention_with_dropout, cutting,
    dropout_of_columns, gelu, get_cut, own_heads, whole_rows, whole_sequences,
};

use super::{STEPS, keys};
use crate::world::{assert_near, run_of};

/// A norm and a feed-forward network with a residual connection.
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: RowParallel<Linear>,
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norm: LayerNorm::new(32, 1e-5, vb.pp("norm"))?,
            up: Linear::column_parallel(32, &[48], true, 0.1, vb.pp("up"))?,
            down: Linear::row_parallel(48, 32, true, 0.1, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        fused_block(x, |x| {
            let normal = self.norm.forward(x)?;
            sum(x, &whole_rows(&normal, |x| self.down.forward(&gelu(&self.up.forward(x)?)?))?)
        })
    }
}

fn layers() -> Layers {
    Layers::new()
        .layer("embed", |vb: VarBuilder| Embedding::vocab_parallel(61, 32, 0.1, vb))
        .layers("blocks", 2, |_, vb| Block::new(vb))
        .head("head", |vb| zoo::LanguageHead::new(32, 61, 0.1, vb))
        .tensor_parallel()
}

#[test]
fn custom_tensor_parallel_layers_match_one_rank() {
    let run = |ranks: usize, text: &str| run_of(layers, ranks, STEPS, text);
    let expected = run(1, &keys(1, 2, 2, 0, ""));
    for (ranks, tensor, accumulation, stage) in [(2, 2, 2, 0), (4, 2, 1, 3), (4, 4, 2, 2)] {
        let text = keys(tensor, 2, accumulation, stage, "");
        assert_near(&run(ranks, &text), &expected, 1e-5, &text);
    }
}

const WIDTH: usize = 32;
const HEADS: usize = 4;
const SIZE: usize = WIDTH / HEADS;

/// An attention with parameters of its own and plain candle operations.
struct Attention {
    norm: LayerNorm,
    /// The map to queries, keys and values of this rank's heads.
    qkv: Tensor,
    /// A factor for each of this rank's heads.
    gates: Tensor,
    out: RowParallel<Linear>,
    /// Number of this rank's heads.
    heads: usize,
    /// The first of this rank's columns and the number of all columns, if the ranks split them.
    columns: Option<(usize, usize)>,
}

impl Attention {
    fn new(vb: VarBuilder) -> Result<Self> {
        let normal = Init::Randn { mean: 0.0, stdev: 0.1 };
        Ok(Self {
            norm: LayerNorm::new(WIDTH, 1e-5, vb.pp("norm"))?,
            qkv: get_cut(&vb, &[3 * WIDTH, WIDTH], (0, &[WIDTH; 3]), "qkv", normal)?,
            gates: get_cut(&vb, &[HEADS, 1], (0, &[HEADS]), "gates", normal)?,
            out: Linear::row_parallel(WIDTH, WIDTH, true, 0.1, vb.pp("out"))?,
            heads: own_heads("attention", HEADS)?,
            columns: cutting().map(|(index, ranks)| (index * WIDTH / ranks, WIDTH)),
        })
    }

    fn attend(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        let own = self.heads * SIZE;
        let qkv = x.broadcast_matmul(&self.qkv.t()?)?;
        let part = |index: usize| qkv.narrow(2, index * own, own)?.contiguous();
        let values = dropout_of_columns(&part(2)?, 0.3, "values", pass, self.columns)?;
        let [q, k, v] = [part(0)?, part(1)?, values].map(|x| x.reshape((batch, time, self.heads, SIZE)));
        let dropout = Dropout { probability: 0.2, name: "probabilities" };
        let attended = causal_attention_with_dropout(&q?, &k?, &v?, &AttentionSpan::default(), (&dropout, pass))?;
        self.out.forward(&attended.broadcast_mul(&self.gates)?.reshape((batch, time, own))?)
    }
}

impl Layer for Attention {
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        let x = x.single()?;
        let attended = whole_sequences(&self.norm.forward(x)?, |x| self.attend(x, pass))?;
        Ok((x + attended)?.into())
    }

    fn exchanges(&self) -> bool {
        true
    }
}

fn attentions() -> Layers {
    Layers::new()
        .layer("embed", |vb: VarBuilder| Embedding::vocab_parallel(61, WIDTH, 0.1, vb))
        .layers("attentions", 2, |_, vb| Attention::new(vb))
        .head("head", |vb| zoo::LanguageHead::new(WIDTH, 61, 0.1, vb))
        .tensor_parallel()
        .shares_sequences::<&str>([])
}

/// Both dropouts use the same masks as on one rank.
#[test]
fn a_custom_attention_with_dropout_matches_one_rank() {
    let run = |ranks: usize, text: &str| run_of(attentions, ranks, STEPS, text);
    let expected = run(1, &keys(1, 2, 2, 0, ""));
    for (ranks, tensor, accumulation, stage, more) in [
        (2, 2, 2, 0, ""),
        (4, 2, 1, 3, ""),
        (4, 4, 2, 2, ""),
        (4, 2, 2, 2, "sequence_parallel_size: 2"),
        (4, 2, 2, 3, "mesh: {context_parallel_degree: 2, context_parallel_rotate_method: alltoall}"),
        (4, 2, 2, 1, "pipeline: {stages: 2}"),
    ] {
        let text = keys(tensor, 2, accumulation, stage, more);
        assert_near(&run(ranks, &text), &expected, 1e-5, &text);
    }
}

//! A program's own layers that cut their parameters themselves.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use zero_engine::{Layers, zoo};
use zero_model::ops::graph::{fused_block, sum};
use zero_model::ops::{Embedding, LayerNorm, Linear, RowParallel, gelu, whole_rows};

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

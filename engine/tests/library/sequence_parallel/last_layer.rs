//! Layers of a program that exchange values in the last layer, whose forward is part of its backward.

use candle_core::Result;
use candle_nn::{Module, VarBuilder};
use zero_engine::{Activations, Layer, Layers, Pass};
use zero_model::ops::{self, Embedding, Linear};

use super::{KINDS, STEPS, keys, kinds};
use crate::world::{assert_near, run_of};

const WIDTH: usize = 16;
const HEADS: usize = 4;
const VOCABULARY: usize = 61;

/// Attention and a head in one layer.
struct Last {
    qkv: Linear,
    head: Linear,
}

impl Layer for Last {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let qkv = self.qkv.forward(x.single()?)?;
        Ok(self.head.forward(&ops::causal_attention_packed(&qkv, HEADS)?)?.into())
    }

    fn exchanges(&self) -> bool {
        true
    }
}

fn attention() -> Layers {
    let last = |vb: VarBuilder<'static>| {
        let qkv = Linear::new(WIDTH, 3 * WIDTH, 0.1, vb.pp("qkv"))?;
        Ok(Last { qkv, head: Linear::new(WIDTH, VOCABULARY, 0.1, vb.pp("head"))? })
    };
    Layers::new()
        .layer("embedding", |vb: VarBuilder<'static>| Embedding::new(VOCABULARY, WIDTH, 0.1, vb))
        .layer("last", last)
        .loss(ops::cross_entropy)
        .shares_sequences::<&str>([])
}

/// A loss that depends on sums over whole sequences.
fn sums() -> Layers {
    struct Sums(Linear);
    impl Layer for Sums {
        fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
            let positions = self.0.forward(x.single()?)?;
            Ok(ops::sum_of_slices(&positions.sum(1)?)?.into())
        }

        fn exchanges(&self) -> bool {
            true
        }
    }
    Layers::new()
        .layer("embedding", |vb: VarBuilder<'static>| Embedding::new(VOCABULARY, WIDTH, 0.1, vb))
        .layer("sums", |vb: VarBuilder<'static>| Ok(Sums(Linear::new(WIDTH, 3, 0.1, vb)?)))
        .loss(|sums, _| ((sums.sqr()? + 1.0)?.log()? * 0.1)?.mean_all())
        .shares_sequences::<&str>([])
}

#[test]
fn a_last_layer_with_attention_or_sums_agrees_with_one_rank() {
    for layers in [attention, sums] {
        let expected = run_of(layers, 1, STEPS, &keys(1, 2, 2, 0, ""));
        assert_ne!(expected.losses[0], expected.losses[2]);
        for slices in [2, 4] {
            for kind in kinds(slices) {
                let text = kind(keys(slices, 2, 2, 0, ""));
                assert_near(&run_of(layers, slices, STEPS, &text), &expected, 1e-5, &text);
            }
        }
        for kind in KINDS {
            for (ranks, stage, more) in [(4, 3, ""), (4, 1, "pipeline: {stages: 2, schedule: zb_h1}")] {
                let replicas = if stage == 3 { 2 } else { 1 };
                let text = kind(keys(2, 2, 2 / replicas, stage, more));
                assert_near(&run_of(layers, ranks, STEPS, &text), &expected, 1e-5, &text);
            }
        }
    }
}

//! A failure on one stage stops all stages: the failing rank reports the cause, and the other ranks name that rank.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, embedding, linear};
use zero_engine::{Activations, Layer, Layers, Pass, ops};

use super::{SCHEDULES, engine_of, text};
use crate::world::{batch, world};

/// A layer that runs another function instead of its linear layer.
struct Middle {
    linear: Linear,
    instead: fn(&Linear, &Tensor, &Pass) -> Result<Tensor>,
}

impl Layer for Middle {
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        Ok((self.instead)(&self.linear, x.single()?, pass)?.into())
    }
}

/// Five layers; the middle one fails.
fn faulty(instead: fn(&Linear, &Tensor, &Pass) -> Result<Tensor>) -> Layers {
    Layers::new()
        .layer("embed", |vb: VarBuilder| embedding(61, 12, vb))
        .layer("before", |vb: VarBuilder| linear(12, 12, vb))
        .layer("middle", move |vb: VarBuilder| Ok(Middle { linear: linear(12, 12, vb)?, instead }))
        .layer("after", |vb: VarBuilder| linear(12, 12, vb))
        .layer("end", |vb: VarBuilder| linear(12, 61, vb))
        .loss(ops::cross_entropy)
}

#[test]
fn a_failing_layer_and_its_rank_are_named() {
    type Instead = fn(&Linear, &Tensor, &Pass) -> Result<Tensor>;
    let cases: [(Instead, &str); 5] = [
        (|_, x, _| x.matmul(x), "in layer `middle`"),
        // Fails in the third micro-batch only.
        (
            |linear, x, pass| if pass.sample == 4 { candle_core::bail!("no") } else { linear.forward(x) },
            "in layer `middle`",
        ),
        (|_, x, _| x * 2.0, "`middle.weight`"),
        (|linear, x, _| linear.forward(&x.detach()), "layer `middle` passes no gradient to the previous layer"),
        (|_, x, _| x.to_dtype(DType::F8E4M3), "a tensor of dtype F8E4M3 cannot be sent to another pipeline stage"),
    ];
    for zero_stage in [0, 3] {
        for schedule in SCHEDULES {
            // One layer per stage, or two stages of two chunks each.
            let stages = if schedule == "interleaved_1f1b" { 2 } else { 5 };
            for (instead, expected) in cases {
                let pipeline = format!("stages: {stages}, schedule: {schedule}, partition_method: uniform");
                let text = text(zero_stage, 4, &pipeline, "");
                let said = world(stages, |comm| {
                    let mut engine = engine_of(faulty(instead), comm, &text);
                    engine.train_batch(&batch(0, 8)).expect_err("a layer with a fault").to_string()
                });
                // The errors of other ranks also contain the cause, but as the reason of an abort.
                let is_own = |error: &String| error.contains(expected) && !error.contains(" aborted: ");
                let culprit = said.iter().position(is_own);
                let culprit = culprit.unwrap_or_else(|| panic!("{expected}, {schedule}: {said:#?}"));
                for (rank, error) in said.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
                    assert!(error.contains(&format!("rank {culprit}")), "rank {rank}, {schedule}: {said:#?}");
                }
            }
        }
    }
}

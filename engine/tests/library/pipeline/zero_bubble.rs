//! ZB-H1 defers the weight gradients of layers that support it, and the recorded timeline shows this.

use std::collections::BTreeMap;

use candle_nn::{Module, VarBuilder};
use zero_engine::pipeline::Instruction;
use zero_engine::{Activations, Engine, Layer, Layers, Pass, ops};

use super::{agreed, assert_same, engine_of, model, run_of, text};
use crate::world::{train, trajectory, world};

const MICRO_BATCHES: usize = 4;

fn settings(zero_stage: u8, stages: usize, schedule: &str) -> String {
    let pipeline = format!("stages: {stages}, schedule: {schedule}");
    text(zero_stage, MICRO_BATCHES, &pipeline, "wall_clock_breakdown: true")
}

fn calls(engine: &Engine) -> BTreeMap<&'static str, u64> {
    engine.timing().calls().collect()
}

/// Returns the names of the layers that ran a backward of the given kind.
fn layers_of(engine: &Engine, kind: &str) -> Vec<String> {
    let mut layers: Vec<usize> = done(engine, kind).into_iter().map(|(_, layer, _)| layer).collect();
    layers.sort_unstable();
    layers.dedup();
    layers.into_iter().map(|layer| engine.model().layers()[layer].name().to_string()).collect()
}

/// Backwards of a kind in the recorded timeline: (position, layer, micro-batch).
fn done(engine: &Engine, kind: &str) -> Vec<(usize, usize, usize)> {
    let spans = engine.timing().spans().iter().enumerate();
    let backward = |(at, span): (usize, &zero_engine::Span)| match engine.program().instructions[span.index] {
        ref other if other.kind() != kind => None,
        Instruction::Backward { layer, micro_batch }
        | Instruction::BackwardInput { layer, micro_batch }
        | Instruction::BackwardWeight { layer, micro_batch } => Some((at, layer, micro_batch)),
        _ => None,
    };
    spans.filter_map(backward).collect()
}

/// What one rank ran in a step.
struct Did {
    calls: BTreeMap<&'static str, u64>,
    split: Vec<String>,
    finished_later: Vec<String>,
    whole: Vec<String>,
    /// Number of weight gradients that were computed after the next micro-batch's input gradient.
    overtaken: usize,
}

fn did(zero_stage: u8, stages: usize, schedule: &str) -> Vec<Did> {
    let text = settings(zero_stage, stages, schedule);
    world(stages, |comm| {
        let mut engine = engine_of(model(true), comm, &text);
        train(&mut engine, 1);
        let inputs = done(&engine, "backward_input");
        let weights = done(&engine, "backward_weight");
        let is_overtaken = |&&(at, layer, micro_batch): &&(usize, usize, usize)| {
            inputs.iter().any(|&(other, l, m)| l == layer && m == micro_batch + 1 && other < at)
        };
        Did {
            calls: calls(&engine),
            split: layers_of(&engine, "backward_input"),
            finished_later: layers_of(&engine, "backward_weight"),
            whole: layers_of(&engine, "backward"),
            overtaken: weights.iter().filter(is_overtaken).count(),
        }
    })
}

#[test]
fn blocks_defer_weight_gradients_and_tied_layers_do_not() {
    for zero_stage in [0, 3] {
        for stages in [2, 3] {
            let all = did(zero_stage, stages, "zb_h1");
            let named = |pick: fn(&Did) -> &Vec<String>| all.iter().flat_map(pick).cloned().collect::<Vec<_>>();
            let blocks: Vec<String> = (0..6).map(|i| format!("transformer.h.{i}")).collect();
            assert_eq!(named(|did| &did.split), blocks);
            assert_eq!(named(|did| &did.finished_later), blocks);
            assert_eq!(named(|did| &did.whole), ["transformer", "transformer.ln_f", "lm_head"]);
            let count = |kind: &str| all.iter().filter_map(|did| did.calls.get(kind)).sum::<u64>();
            let times = MICRO_BATCHES as u64;
            let counted = ["backward_input", "backward_weight", "backward"].map(count);
            assert_eq!(counted, [6 * times, 6 * times, 3 * times]);
            // The first stage defers no weight gradient. On the other stages, each weight gradient runs after the next
            // micro-batch's input gradient, except for the last micro-batch.
            for (stage, did) in all.iter().enumerate() {
                let expected = if stage == 0 { 0 } else { did.split.len() * (MICRO_BATCHES - 1) };
                assert_eq!(did.overtaken, expected, "stage {stage} of {stages}");
            }
        }
    }
}

#[test]
fn other_schedules_do_not_split_the_backward() {
    for schedule in ["gpipe", "1f1b", "interleaved_1f1b"] {
        for did in did(0, 2, schedule) {
            assert!(did.calls["backward"] > 0);
            assert_eq!((did.calls.get("backward_input"), did.calls.get("backward_weight")), (None, None), "{schedule}");
        }
    }
}

/// A layer made of candle's own modules.
struct Plain(candle_nn::Linear, candle_nn::Linear);

impl Layer for Plain {
    fn run(&self, x: &Activations, _: &Pass) -> candle_core::Result<Activations> {
        let x = x.single()?;
        Ok((x + self.1.forward(&self.0.forward(x)?.gelu()?)?)?.into())
    }
}

fn plain() -> Layers {
    Layers::new()
        .layer("embed", |vb: VarBuilder| candle_nn::embedding(61, 16, vb))
        .layers("block", 5, |_, vb: VarBuilder| {
            Ok(Plain(candle_nn::linear(16, 24, vb.pp("up"))?, candle_nn::linear(24, 16, vb.pp("down"))?))
        })
        .layer("head", |vb: VarBuilder| candle_nn::linear(16, 61, vb))
        .loss(ops::cross_entropy)
}

#[test]
fn plain_candle_modules_run_backward_as_a_whole_with_the_same_bits() {
    for zero_stage in 0..=3 {
        let expected = run_of(plain, 1, 6, &settings(zero_stage, 1, "1f1b"));
        assert!(expected.losses[0] != expected.losses[5]);
        for stages in [2, 3] {
            let text = settings(zero_stage, stages, "zb_h1");
            let all = world(stages, |comm| {
                let mut engine = engine_of(plain(), comm, &text);
                let trained = trajectory(&mut engine, 6);
                assert!(
                    layers_of(&engine, "backward_input").is_empty() && layers_of(&engine, "backward_weight").is_empty()
                );
                assert!(!layers_of(&engine, "backward").is_empty());
                trained
            });
            assert_same(&expected, &agreed(all, &text), &text);
        }
    }
}

//! Several documents packed into one sample: each document has the same loss as in a sample of its own, and every
//! layout is bit-identical.

use crate::models::family_layouts;
use crate::world;

use candle_core::{Device, Tensor};
use world::{
    BF16, Trajectory, agreed, assert_same, engine_of, gpt2_config, llama_config, reproducible, trajectory_on, world,
};
use zero_engine::{Batch, Layers, zoo};
use zero_model::ops::IGNORE_INDEX;

pub(crate) fn gpt2(packed: bool) -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { packed, ..gpt2_config() })
}

pub(crate) fn llama(packed: bool) -> Layers {
    zoo::llama(&zoo::LlamaConfig { packed, sliding_window: Some(5), tie_word_embeddings: true, ..llama_config() })
}

pub(crate) fn gemma3(packed: bool) -> Layers {
    zoo::llama(&zoo::LlamaConfig { packed, ..family_layouts::gemma3() })
}

pub(crate) fn phi3(packed: bool) -> Layers {
    zoo::llama(&zoo::LlamaConfig { packed, ..family_layouts::phi3() })
}

pub(crate) const FAMILIES: [fn(bool) -> Layers; 4] = [gpt2, llama, gemma3, phi3];

/// Number of tokens per sample.
const TIME: usize = 16;

/// The lengths of the documents of each sample.
pub(crate) const DOCUMENTS: [&[usize]; 4] = [&[9, 4, 3], &[16], &[1, 7, 5], &[2, 2, 2, 6]];

/// Returns a batch with a sample for each list of document lengths. The padding at the end of a sample counts as a
/// document of its own.
pub(crate) fn batch(step: usize, samples: &[&[usize]], packed: bool) -> Batch {
    let (mut tokens, mut labels, mut positions): (Vec<u32>, Vec<i64>, Vec<u32>) = (vec![], vec![], vec![]);
    // A document has the same tokens in every batch of the step.
    let token = |number: usize, at: usize| (number * 17 + at * at * 3 + at + step * 5) % 61;
    let mut number = 0;
    for sample in samples {
        for &length in *sample {
            tokens.extend((0..length).map(|at| token(number, at) as u32));
            labels.extend((1..length).map(|at| if at % 3 == 0 { IGNORE_INDEX } else { token(number, at) as i64 }));
            labels.push(IGNORE_INDEX);
            positions.extend(0..length as u32);
            number += 1;
        }
        let padding = TIME - sample.iter().sum::<usize>();
        tokens.extend(vec![7; padding]);
        labels.extend(vec![IGNORE_INDEX; padding]);
        positions.extend(0..padding as u32);
    }
    let shape = (samples.len(), TIME);
    let inputs = Tensor::from_vec(tokens, shape, &Device::Cpu).unwrap();
    let batch = Batch::new(inputs, Tensor::from_vec(labels, shape, &Device::Cpu).unwrap());
    match packed {
        true => batch.input(zoo::POSITION_IDS, Tensor::from_vec(positions, shape, &Device::Cpu).unwrap()),
        false => batch,
    }
}

/// Trains four steps on packed documents. All ranks must agree.
pub(crate) fn run(layers: fn(bool) -> Layers, ranks: usize, text: &str) -> Trajectory {
    let all = world(ranks, |comm| {
        let mut engine = engine_of(layers(true), comm, text);
        trajectory_on(&mut engine, 4, |step| batch(step as usize, &DOCUMENTS, true))
    });
    agreed(all, text)
}

/// Packed documents give the losses and gradient norms of unpacked ones, up to rounding.
#[test]
fn packed_equals_unpacked() {
    let alone: Vec<[usize; 1]> = DOCUMENTS.concat().into_iter().map(|length| [length]).collect();
    let alone: Vec<&[usize]> = alone.iter().map(<[usize; 1]>::as_slice).collect();
    for layers in FAMILIES {
        let run = |samples: &[&[usize]], packed: bool| {
            let text = format!("train_batch_size: {}", samples.len());
            let mut all = world(1, |comm| {
                let mut engine = engine_of(layers(packed), comm, &text);
                let evaluated = engine.eval_batch(&batch(0, samples, packed)).unwrap();
                let step = |step| {
                    let step = engine.train_batch(&batch(step, samples, packed)).unwrap();
                    [f64::from(step.loss), step.grad_norm]
                };
                (evaluated, (0..10).map(step).collect::<Vec<_>>())
            });
            all.remove(0)
        };
        let (of_packed, of_alone) = (run(&DOCUMENTS, true), run(&alone, false));
        assert!((of_packed.0 - of_alone.0).abs() < 1e-5 * of_alone.0, "{} and {}", of_packed.0, of_alone.0);
        for (step, (packed, alone)) in of_packed.1.iter().zip(&of_alone.1).enumerate() {
            for (packed, alone) in packed.iter().zip(alone) {
                // Sums over a different number of rows round differently, and Adam amplifies these differences where
                // gradients are small.
                assert!((packed - alone).abs() < 1e-4 * alone, "step {step}: {packed} and {alone}");
            }
        }
        // Without position ids, tokens attend to other documents.
        let mixed = run(&DOCUMENTS, false).0;
        assert!((mixed - of_alone.0).abs() > 1e-4 * of_alone.0, "{mixed} and {}", of_alone.0);
    }
}

#[test]
fn every_layout_is_bit_identical() {
    for layers in [gpt2 as fn(bool) -> Layers, llama] {
        for dtype in ["", BF16] {
            let run = |ranks: usize, stage: u8, data: usize, more: &str| {
                run(layers, ranks, &reproducible(stage, data, &format!("{dtype}\n{more}")))
            };
            let expected = run(1, 0, 1, "");
            for (ranks, stage) in [(2, 2), (4, 3)] {
                assert_same(&expected, &run(ranks, stage, ranks, ""), &format!("{dtype} stage {stage}, {ranks} ranks"));
            }
            assert_same(&expected, &run(4, 3, 2, "pipeline: {stages: 2}"), "pipeline");
            let recomputes = "activation_checkpointing: {enabled: true}";
            assert_same(&expected, &run(2, 3, 2, recomputes), recomputes);
        }
    }
}

#[test]
fn wrong_positions_are_errors() {
    let with = |positions: Tensor| {
        let mut all = world(1, |comm| {
            let text = "train_batch_size: 1";
            let mut engine = engine_of(llama(true), comm, text);
            let whole = batch(0, &DOCUMENTS[1..2], false);
            engine.train_batch(&whole.input(zoo::POSITION_IDS, positions.clone())).unwrap_err().to_string()
        });
        all.remove(0)
    };
    let skips: Vec<u32> = (0..15).chain([20]).collect();
    let error = with(Tensor::from_vec(skips, (1, TIME), &Device::Cpu).unwrap());
    assert!(error.contains("index 20 at position 15 is not below 16"), "{error}");
    let backwards: Vec<u32> = (0..15).chain([3]).collect();
    let error = with(Tensor::from_vec(backwards, (1, TIME), &Device::Cpu).unwrap());
    assert!(error.contains("position_ids[0, 15] is 3, but its document has 15 tokens before it"), "{error}");
    let error = with(Tensor::zeros((1, 4), candle_core::DType::U32, &Device::Cpu).unwrap());
    assert!(error.contains("do not match"), "{error}");
}

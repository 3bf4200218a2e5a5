//! Several tied parameters of different sizes, nested and crossed, are bit-identical to one stage at every ZeRO stage.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};
use zero_engine::{Batch, Engine, Layers};

use super::SCHEDULES;
use crate::world::{config, engine_of, world};

/// A linear layer and a gain, each with a name that can be tied.
struct Map {
    weight: Tensor,
    gain: Tensor,
}

impl Module for Map {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight)?.broadcast_mul(&self.gain)?.tanh()
    }
}

/// Six layers. Layers 0 and 5 share their weight, layers 1 and 4 share theirs, and layers 0 and 4 share their gain.
fn model() -> Layers {
    let build = |_: usize, vb: VarBuilder| {
        Ok(Map {
            weight: vb.get_with_hints((48, 48), "weight", Init::Randn { mean: 0.0, stdev: 0.2 })?,
            gain: vb.get_with_hints(48, "gain", Init::Const(1.0))?,
        })
    };
    Layers::new()
        .layers("map", 6, build)
        .tie("map.0.gain", "map.4.gain")
        .tie("map.0.weight", "map.5.weight")
        .tie("map.1.weight", "map.4.weight")
        .loss(|y, targets| (y - targets)?.sqr()?.mean_all())
}

fn batch(step: usize, rows: usize) -> Batch {
    let values = |k: usize| (0..rows * 48).map(|i| ((i * k + step * 17) % 23) as f32 / 23.0 - 0.5).collect::<Vec<_>>();
    let tensor = |k| Tensor::from_vec(values(k), (rows, 48), &candle_core::Device::Cpu).expect("a tensor");
    Batch::new(tensor(7), tensor(5))
}

fn losses(ranks: usize, pipeline: &str, zero_stage: u8) -> Vec<u32> {
    let text = format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 4\npipeline: {{{pipeline}, partition_method: uniform}}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 100}}"
    );
    let mut all = world(ranks, |comm| {
        let mut engine = engine_of(model(), comm, &text);
        (0..3)
            .map(|step| {
                let rows = engine.config().train_batch_size;
                engine.train_batch(&batch(step, rows)).expect("a step").loss.to_bits()
            })
            .collect::<Vec<_>>()
    });
    all.swap_remove(ranks - 1)
}

#[test]
fn nested_and_crossed_ties_have_the_bits_of_one_stage() {
    for zero_stage in 0..=3 {
        for data in [1, 2] {
            let expected = losses(data, "stages: 1", zero_stage);
            for stages in [2, 3] {
                for schedule in SCHEDULES.into_iter().filter(|&s| s != "interleaved_1f1b") {
                    let got = losses(stages * data, &format!("stages: {stages}, schedule: {schedule}"), zero_stage);
                    assert_eq!(expected, got, "{schedule}, {stages} × {data}, ZeRO {zero_stage}");
                }
            }
        }
    }
}

#[test]
fn a_tie_between_two_chunks_of_a_stage_is_refused() {
    let text = "train_micro_batch_size_per_gpu: 2\npipeline: {stages: 2, schedule: interleaved_1f1b, virtual_stages: 3, partition_method: uniform}";
    let errors =
        world(2, |comm| Engine::with_communicator(config(2, text), model(), comm).err().map(|e| e.to_string()));
    // Layers 0 and 4 are in chunks 0 and 4, both on stage 0.
    assert!(errors.iter().flatten().all(|e| e.contains("in two of its chunks")) && errors[0].is_some(), "{errors:?}");
}

//! `partition_method: time` splits the model by measured layer times, between the same layers on all ranks.

use std::time::Duration;

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use zero_engine::{Activations, Batch, Engine, Layer, Layers, Pass};

use crate::world::{config, world};

struct Slow(Duration);

impl Layer for Slow {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        std::thread::sleep(self.0);
        Ok(x.single()?.affine(1.0, 0.0)?.into())
    }
}

/// Six layers. The fourth and the fifth take almost all of the time.
fn model() -> Layers {
    let linear = |vb: VarBuilder| candle_nn::linear(4, 4, vb);
    Layers::new()
        .layers("fast", 3, move |_, vb| linear(vb))
        .layers("slow", 2, |_, _: VarBuilder| Ok(Slow(Duration::from_millis(30))))
        .layer("last", linear)
        .loss(|y, targets| (y - targets)?.sqr()?.mean_all())
}

fn batch(rows: usize) -> Batch {
    let tensor =
        |scale: f64| Tensor::ones((rows, 4), candle_core::DType::F32, &candle_core::Device::Cpu)?.affine(scale, 0.0);
    Batch::new(tensor(1.0).expect("inputs"), tensor(0.5).expect("targets"))
}

#[test]
fn slow_layers_are_balanced() {
    let text = |method: &str| {
        format!(
            "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 2\npipeline: {{stages: 2, partition_method: {method}}}"
        )
    };
    let chunks = |method: &str| {
        world(2, |comm| {
            let mut engine = Engine::measured(config(2, &text(method)), model(), comm, &batch(2)).expect("an engine");
            let loss = engine.train_batch(&batch(4)).expect("a step").loss;
            (engine.zero().stages().chunks().to_vec(), loss.to_bits())
        })
    };
    let by_time = chunks("time");
    assert_eq!(by_time[0].0, [0..4, 4..6]);
    let even = chunks("uniform");
    assert_eq!(even[0].0, [0..3, 3..6]);
    assert!(by_time.iter().chain(&even).all(|(_, loss)| *loss == even[0].1));
}

#[test]
fn partition_by_time_needs_a_batch() {
    let text = "train_micro_batch_size_per_gpu: 2\npipeline: {stages: 2, partition_method: time}";
    let errors =
        world(2, |comm| Engine::with_communicator(config(2, text), model(), comm).err().map(|e| e.to_string()));
    assert!(errors.iter().flatten().all(|e| e.contains("`Engine::measured`")) && errors.len() == 2, "{errors:?}");
}

//! Trains a plain candle model with ZeRO-2; three lines set up the training.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin mlp
//! ```
//!
//! `Mlp` uses only candle. Training on any number of ranks needs only the lines marked 1, 2 and 3.

use candle_core::{D, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear, loss::cross_entropy};
use zero_train::{Batch, Config, Engine, Layers, process};

/// Maps a point in the plane to scores of three classes.
struct Mlp {
    first: Linear,
    second: Linear,
    last: Linear,
}

impl Mlp {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            first: linear(2, 64, vb.pp("first"))?,
            second: linear(64, 64, vb.pp("second"))?,
            last: linear(64, 3, vb.pp("last"))?,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.first.forward(x)?.relu()?;
        let x = self.second.forward(&x)?.relu()?;
        self.last.forward(&x)
    }
}

const SAMPLES: usize = 240;

const CONFIG: &str = "
train_batch_size: 240                 # over all ranks, however many there are
optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0}}
zero_optimization: {stage: 2}         # gradients and optimizer state are sharded over the ranks
";

/// Returns points on three spirals around the origin, and the index of each point's spiral.
fn spirals() -> Result<(Tensor, Tensor)> {
    let point = |i: usize| {
        let (class, along) = (i % 3, (i / 3) as f32 / (SAMPLES / 3) as f32);
        let angle = 4.0 * along + 2.1 * class as f32;
        [along * angle.cos(), along * angle.sin()]
    };
    let points: Vec<f32> = (0..SAMPLES).flat_map(point).collect();
    let classes: Vec<u32> = (0..SAMPLES).map(|i| i as u32 % 3).collect();
    let cpu = &Device::Cpu;
    Ok((Tensor::from_vec(points, (SAMPLES, 2), cpu)?, Tensor::from_vec(classes, SAMPLES, cpu)?))
}

fn main() -> anyhow::Result<()> {
    let config = Config::parse("ds.yaml", CONFIG)?; //                              1. what to do, often `from_path`
    process::set_up(&config)?; //                                                   before anything computes

    let (points, classes) = spirals()?;
    let batch = Batch::new(points.clone(), classes.clone());
    let model = Layers::new().layer("mlp", Mlp::new).loss(cross_entropy); //        2. the model and its loss
    let mut engine = Engine::new(config, model)?; //                                3. in place of VarMap and optimizer

    let first = engine.train_batch(&batch)?.loss;
    let mut last = first;
    for _ in 1..150 {
        last = engine.train_batch(&batch)?.loss;
    }

    let scores = engine.forward(points)?;
    let right = scores.single()?.argmax(D::Minus1)?.eq(&classes)?.to_dtype(classes.dtype())?;
    let right = right.sum_all()?.to_scalar::<u32>()?;
    if engine.communicator().rank() == 0 {
        println!("loss {first:.4} -> {last:.4}, {right} of {SAMPLES} points classified right");
    }
    assert!(last < 0.1 * first && right as usize > SAMPLES * 95 / 100, "it did not learn");
    Ok(())
}

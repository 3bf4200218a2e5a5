//! Trains a plain candle model with ZeRO-2 on any number of ranks. Only the lines marked 1, 2 and 3 set up the training.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin mlp
//! ```

#[path = "../spirals.rs"]
mod spirals;

use candle_core::{D, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear, loss::cross_entropy};
use zero_train::{Batch, Config, Engine, Layers, process};

const CONFIG: &str = "
train_batch_size: 240                 # over all ranks, however many there are
optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0}}
zero_optimization: {stage: 2}         # gradients and optimizer state are sharded over the ranks
";

/// Maps a point in the plane to scores of three classes. It uses only candle.
struct Mlp([Linear; 3]);

impl Mlp {
    fn new(vb: VarBuilder) -> Result<Self> {
        let [first, second, last] = [vb.pp("first"), vb.pp("second"), vb.pp("last")];
        Ok(Self([linear(2, 64, first)?, linear(64, 64, second)?, linear(64, 3, last)?]))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0[2].forward(&self.0[1].forward(&self.0[0].forward(x)?.relu()?)?.relu()?)
    }
}

fn main() -> anyhow::Result<()> {
    let config = Config::parse("ds.yaml", CONFIG)?; //                              1. what to do, often `from_path`
    process::set_up(&config)?; //                                                   before anything computes

    let (points, classes) = spirals::spirals(240, |i| (i / 3) as f32 / 80.0)?;
    let batch = Batch::new(points.clone(), classes.clone());
    let model = Layers::new().layer("mlp", Mlp::new).loss(cross_entropy); //        2. the model and its loss
    let mut engine = Engine::new(config, model)?; //                                3. in place of VarMap and optimizer

    let first = engine.train_batch(&batch)?.loss;
    let mut last = first;
    for _ in 1..150 {
        last = engine.train_batch(&batch)?.loss;
    }

    let right = engine.forward(points)?.single()?.argmax(D::Minus1)?.eq(&classes)?.to_dtype(classes.dtype())?;
    let right = right.sum_all()?.to_scalar::<u32>()?;
    if engine.communicator().rank() == 0 {
        println!("loss {first:.4} -> {last:.4}, {right} of 240 points classified right");
    }
    assert!(last < 0.1 * first && right > 240 * 95 / 100, "it did not learn");
    Ok(())
}

//! `Trainer` with the program's own model and data: evaluation, a metric, a monitor, checkpoints and resume.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin trainer -- --max-steps 60
//! cargo run --release -p zero-examples --bin trainer -- --resume auto
//! target/release/trainer -n 2
//! ```

#[path = "../spirals.rs"]
mod spirals;

use candle_core::{Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear, loss::cross_entropy};
use zero_train::data::{InMemory, split};
use zero_train::metrics::accuracy;
use zero_train::{Layers, Trainer};

const CONFIG: &str = "
train_batch_size: 32                  # over all ranks, however many there are
train_micro_batch_size_per_gpu: 8     # of each rank at a time: the same bits on 1, 2 and 4 ranks
optimizer: {type: AdamW, params: {lr: 0.02, weight_decay: 0}}
zero_optimization: {stage: 2}
training: {max_steps: 120, eval_every: 20, save_every: 60, reproducible: true}
csv_monitor: {enabled: true}
";

/// Maps a point in the plane to scores of three classes.
struct Mlp([Linear; 3]);

impl Mlp {
    fn new(vb: VarBuilder) -> Result<Self> {
        let [first, second, last] = [vb.pp("first"), vb.pp("second"), vb.pp("last")];
        Ok(Self([linear(2, 48, first)?, linear(48, 48, second)?, linear(48, 3, last)?]))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0[2].forward(&self.0[1].forward(&self.0[0].forward(x)?.relu()?)?.relu()?)
    }
}

/// Returns points on three spirals around the origin, and the index of each point's spiral.
fn spirals(samples: usize) -> anyhow::Result<InMemory> {
    let (points, classes) = spirals::spirals(samples, |i| i as f32 * 0.618 % 1.0)?;
    Ok(InMemory::new(points, classes)?)
}

fn main() -> anyhow::Result<()> {
    let trainer = Trainer::from_args_over("trainer.yaml", CONFIG)?;
    let (train, valid) = split(spirals(600)?, 0.2)?;
    let model = Layers::new().layer("mlp", Mlp::new).loss(cross_entropy);
    trainer.model(model).data(train, valid).metric("accuracy", accuracy).fit()?;
    Ok(())
}

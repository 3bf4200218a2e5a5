//! A small ResNet that learns to classify drawn shapes. It uses candle's convolutions, and batch norms whose running
//! statistics are equal on all ranks and part of every checkpoint.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin resnet
//! ```

#[path = "../models/resnet.rs"]
mod resnet;
#[path = "../shapes.rs"]
mod shapes;

use candle_nn::{linear, loss::cross_entropy};
use resnet::{Block, Convolution, Head, WIDTHS};
use shapes::{CLASSES, Shapes};
use zero_train::metrics::accuracy;
use zero_train::{Layers, Trainer};

const CONFIG: &str = "
train_batch_size: 16
optimizer: {type: AdamW, params: {lr: 0.003, weight_decay: 0}}
zero_optimization: {stage: 3}
training: {epochs: 6, eval_every: 50}
";

fn main() -> anyhow::Result<()> {
    let trainer = Trainer::from_args_over("resnet.yaml", CONFIG)?;
    let shapes = Shapes::draw("resnet")?;
    let (train, valid) = (shapes.images("train")?, shapes.images("valid")?);
    let model = Layers::new()
        .layer("stem", |vb| Convolution::new([3, WIDTHS[0]], 3, 1, vb))
        .layers("block", WIDTHS.len(), |index, vb| Block::new(index, vb))
        .layer("head", |vb| Ok(Head(linear(WIDTHS[2], CLASSES.len(), vb)?)))
        .loss(cross_entropy);
    let summary = trainer.model(model).data(train, valid).metric("accuracy", accuracy).fit()?;
    // An evaluation uses the running statistics.
    let reached = summary.evaluation.and_then(|evaluation| evaluation.metric("accuracy"));
    assert!(reached.is_some_and(|accuracy| accuracy > 0.9), "it did not learn: {reached:?}");
    Ok(())
}

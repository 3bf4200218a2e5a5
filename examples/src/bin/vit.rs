//! A vision transformer that learns to classify drawn shapes. It uses a data set of images in folders, `Trainer`, and
//! layers from the library's operations.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin vit
//! ```

#[path = "../shapes.rs"]
mod shapes;
#[path = "../models/vit.rs"]
mod vit;

use candle_nn::loss::cross_entropy;
use shapes::{CLASSES, Shapes};
use vit::{Block, Head, Patches, STD, WIDTH};
use zero_train::metrics::accuracy;
use zero_train::ops::{LayerNorm, Linear};
use zero_train::{Layers, Trainer};

const CONFIG: &str = "
train_batch_size: 16
optimizer: {type: AdamW, params: {lr: 0.003, weight_decay: 0}}
zero_optimization: {stage: 3}
training: {epochs: 16, eval_every: 100}
";

fn main() -> anyhow::Result<()> {
    let trainer = Trainer::from_args_over("vit.yaml", CONFIG)?;
    let shapes = Shapes::draw("vit")?;
    let (train, valid) = (shapes.images("train")?, shapes.images("valid")?);
    let model = Layers::new()
        .layer("patches", Patches::new)
        .layers("block", 2, |_, vb| Block::new(vb))
        .layer("norm", |vb| LayerNorm::new(WIDTH, 1e-5, vb))
        .layer("head", |vb| Ok(Head(Linear::new(WIDTH, CLASSES.len(), STD, vb)?)))
        .loss(cross_entropy);
    let summary = trainer.model(model).data(train, valid).metric("accuracy", accuracy).fit()?;
    let reached = summary.evaluation.and_then(|evaluation| evaluation.metric("accuracy"));
    assert!(reached.is_some_and(|accuracy| accuracy > 0.9), "it did not learn: {reached:?}");
    Ok(())
}

//! A model with two named inputs and two tasks: which half of a text has the larger numbers, and by how much.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin tasks
//! zero-train launch --nproc-per-node 2 target/release/tasks --set pipeline.stages=2
//! ```

use candle_core::{Device, Result, Tensor};
use candle_nn::loss::{cross_entropy, mse};
use candle_nn::{Embedding, Module, VarBuilder, embedding, linear};
use zero_train::data::{BoxError, from_fn};
use zero_train::metrics::accuracy;
use zero_train::{Activations, Batch, Layer, Layers, Pass, Trainer};

const CONFIG: &str = "
train_batch_size: 32
train_micro_batch_size_per_gpu: 8
optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0}}
zero_optimization: {stage: 3}
training: {max_steps: 150, reproducible: true}
";

/// Multiplies each token by an embedding of its segment, and averages over the tokens.
struct Segments(Embedding);

impl Layer for Segments {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let [tokens, segment] = x.array()?;
        Ok((tokens * self.0.forward(segment)?)?.mean(1)?.into())
    }
}

/// Returns sample `i`: eight tokens below 10 in two segments.
fn sample(i: usize) -> std::result::Result<Batch, BoxError> {
    let text: Vec<u32> = (0..8).map(|t| (i * 7919 + t * (i % 13 + 104_729) + t * t * 31) as u32 / 3 % 10).collect();
    let difference = text.iter().zip(0..).map(|(&x, t)| if t < 4 { f64::from(x) } else { -f64::from(x) }).sum::<f64>();
    let new = |values: &[u32]| Tensor::new(values, &Device::Cpu);
    Ok(Batch::named([("text", new(&text)?), ("segment", new(&[0, 0, 0, 0, 1, 1, 1, 1])?)])
        .target("first", Tensor::new(u32::from(difference > 0.0), &Device::Cpu)?)
        .target("difference", Tensor::new(&[difference as f32 / 10.0], &Device::Cpu)?))
}

fn main() -> anyhow::Result<()> {
    let trainer = Trainer::from_args_over("tasks.yaml", CONFIG)?;
    let model = Layers::new()
        .layer("tokens", |vb: VarBuilder| embedding(10, 16, vb))
        .inputs(["text"])
        .layer("segments", |vb: VarBuilder| Ok(Segments(embedding(2, 16, vb)?)))
        .with(["segment"])
        .layer("first", |vb: VarBuilder| linear(16, 2, vb))
        .layer("difference", |vb: VarBuilder| linear(16, 1, vb))
        .inputs(["segments"])
        .loss_of(["first", "difference"], ["first", "difference"], |[class, number], [first, difference]| {
            cross_entropy(class, first)? + mse(number, difference)?
        });
    let trainer = trainer.model(model).data(from_fn(1000, sample), from_fn(100, |i| sample(i + 1000)));
    trainer.metric_of("accuracy", ["first"], ["first"], |[class], [first]| accuracy(class, first)).fit()?;
    Ok(())
}

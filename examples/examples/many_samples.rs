//! Trains on 10⁸ samples that a function computes. The number of samples costs neither time nor memory: the order of
//! the samples is also computed by a function, so a run resumes in the middle of an epoch without delay, on any number
//! of ranks.
//!
//! ```sh
//! cargo build --release -p zero-examples --example many_samples
//! target/release/examples/many_samples                     # half an epoch: 50 steps of 10⁶ samples
//! zero-train launch --nproc-per-node 2 target/release/examples/many_samples --resume auto --max-steps 60 \
//!     --set train_batch_size=64 --set train_micro_batch_size_per_gpu=8
//! grep seconds_to_first_step runs/many_samples/report.json
//! ```

use candle_core::{Device, Tensor};
use candle_nn::linear;
use candle_nn::loss::mse;
use zero_train::data::from_fn;
use zero_train::{Layers, Trainer};

const SAMPLES: usize = 100_000_000;

const CONFIG: &str = "
train_batch_size: 1000000
train_micro_batch_size_per_gpu: 20000
optimizer: {type: SGD, params: {lr: 0.1}}
training: {max_steps: 50}
";

fn main() -> anyhow::Result<()> {
    let trainer = Trainer::from_args_over("many_samples.yaml", CONFIG)?;
    let lines = from_fn(SAMPLES, |i| {
        let x = (i as f32 * 0.618) % 1.0;
        Ok((Tensor::new(&[x], &Device::Cpu)?, Tensor::new(&[3.0 * x - 1.0], &Device::Cpu)?))
    });
    let model = Layers::new().layer("line", |vb| linear(1, 1, vb)).loss(mse);
    trainer.model(model).train_data(lines).fit()?;
    Ok(())
}
